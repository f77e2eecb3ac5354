"""Policies: presets, what is refused, and the arithmetic of rounds."""

import json

import pytest

from meshloom.service.rounds.policy import PRESETS, Outer, Policy, make_policy

SGD = Outer(learning_rate=1.0)
MODES = [
    "sync",
    "backup-workers",
    "stale-sync",
    "half-sync",
    "async",
    "local-sgd",
    "diloco",
    "streaming-diloco",
    "decoupled-diloco",
]


def test_every_mode_is_a_preset():
    assert list(PRESETS) == MODES
    independent = {mode for mode in MODES if not PRESETS[mode].is_lockstep}
    assert independent == {"stale-sync", "async", "decoupled-diloco"}


@pytest.mark.parametrize("mode", MODES)
def test_policies_survive_json(mode):
    policy = PRESETS[mode]
    found = Policy.from_json(json.loads(json.dumps(policy.to_json())))
    assert found == policy
    # A quorum of 1 is one learner, and of 1.0 all of them.
    assert type(found.quorum) is type(policy.quorum)


def test_settings_of_a_mode_can_be_overridden():
    policy = make_policy("diloco", local_steps=100, outer=SGD)
    assert (policy.local_steps, policy.outer, policy.quorum) == (100, SGD, 1.0)
    with pytest.raises(ValueError, match="mode 'dilco' is unknown; expected sync, ba"):
        make_policy("dilco")
    with pytest.raises(ValueError, match="'steps' is not a setting; expected local_s"):
        make_policy("diloco", steps=3)
    with pytest.raises(ValueError, match="policy.outer: 'lr' is not a setting"):
        Policy.from_json({"outer": {"lr": 1.0}})


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"local_steps": 0}, "local_steps must be an integer >= 1, got 0"),
        ({"quorum": 0}, "quorum must be a number of learners .* got 0"),
        ({"quorum": 1.5}, "quorum must be a number of learners .* got 1.5"),
        ({"quorum": True}, "quorum must be a number of learners .* got True"),
        ({"grace": "long"}, "grace must be a number of seconds .* got 'long'"),
        ({"grace": float("nan")}, "grace must be a number of seconds"),
        ({"staleness": -1}, "staleness must be an integer >= 0, or None"),
        ({"late": "never"}, "late='never': expected one of wait, drop, merge, reuse"),
        ({"mix": 0.0, "outer": SGD}, r"mix must be in \(0, 1\]"),
        ({"wait": -1.0}, "wait must be a number >= 0"),
        ({"start_with": 0}, "start_with must be an integer >= 1, or None"),
        ({"outer": {"learning_rate": 1}}, "outer must be an Outer or None"),
        ({"local_steps": 2}, "need an outer optimizer; set outer=Outer"),
        ({"weights": "equal"}, "weights='equal' needs an outer optimizer"),
        ({"mix": 0.5}, "mix=0.5 needs an outer optimizer"),
        ({"compensation": 0.1, "outer": SGD}, "compensation corrects gradients"),
        ({"compensation": 0.1}, "staleness=0 has none"),
        ({"late": "drop", "staleness": 1}, 'set staleness=0, or late="merge"'),
        ({"late": "drop", "staleness": None}, 'set staleness=0, or late="merge"'),
        ({"late": "merge"}, "set staleness to 1 or more"),
        ({"late": "reuse", "quorum": 1}, "set staleness to 1 or more, got 0"),
        ({"late": "reuse", "quorum": 1, "staleness": None}, "1 or more, got None"),
        ({"late": "reuse", "staleness": 1}, "no effect with quorum=1.0"),
        ({"quorum": 0.5}, 'quorum=0.5 with staleness=0 and late="wait" would lose'),
        ({"update": "share"}, 'in lockstep set update="full"'),
        ({"grace": 1.0}, "grace=1.0 has no effect: quorum=1.0 waits for everyone"),
        ({"grace": 1.0, "quorum": 1, "staleness": 2}, "commits do not wait"),
        ({"fragments": 2}, "fragments=2 with local_steps=1"),
        (
            {"delay": 2, "fragments": 2, "local_steps": 4, "outer": SGD},
            "2 local steps lie between two exchanges; set delay < 2",
        ),
        (
            {"fragments": 2, "local_steps": 2, "outer": SGD, "quorum": 2}
            | {"staleness": 1, "late": "merge"},
            "set quorum=1 or fragments=1",
        ),
    ],
)
def test_contradictions_are_refused_with_a_remedy(settings, message):
    with pytest.raises(ValueError, match=message):
        Policy(**settings)


def test_outer_optimizers_are_checked():
    with pytest.raises(ValueError, match="learning_rate must be a number > 0"):
        Outer(learning_rate=0.0)
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\), got 1.0"):
        Outer(learning_rate=1.0, momentum=1.0)
    with pytest.raises(ValueError, match="nesterov needs outer.momentum > 0"):
        Outer(learning_rate=1.0, nesterov=True)


def test_quorum_must_fit_the_learners():
    Policy(quorum=3, late="drop").check_learners(3)
    with pytest.raises(ValueError, match="quorum=3 is larger than .* learners, 2"):
        Policy(quorum=3, late="drop").check_learners(2)
    with pytest.raises(ValueError, match="start_with=3 is larger than .* learners, 2"):
        Policy(start_with=3).check_learners(2)
    with pytest.raises(ValueError, match='quorum=3 with staleness=0 and late="wait"'):
        Policy(quorum=3).check_learners(4)


def test_fragments_take_turns_within_local_steps():
    policy = Policy(local_steps=10, fragments=4, outer=SGD)
    assert [policy.fragment_of(r) for r in range(1, 7)] == [0, 1, 2, 3, 0, 1]
    assert [policy.steps_of(r) for r in range(1, 9)] == [2, 3, 2, 3] * 2
    assert policy.steps_before(5) == 10
    assert policy.num_rounds(30) == 12
    with pytest.raises(ValueError, match="num_steps=25 is not a positive multiple"):
        policy.num_rounds(25)


def test_random_waits_are_a_function_of_learner_and_round():
    policy = Policy(wait=2.0)
    waits = [policy.wait_seconds(0, i, r) for i in range(8) for r in range(1, 9)]
    assert waits == [
        policy.wait_seconds(0, i, r) for i in range(8) for r in range(1, 9)
    ]
    assert len(set(waits)) == 64 and all(0 <= wait < 2 for wait in waits)
    assert 0.7 < sum(waits) / 64 < 1.3
    assert policy.wait_seconds(1, 0, 1) != policy.wait_seconds(0, 0, 1)
    assert Policy().wait_seconds(0, 0, 1) == 0
