"""`meshloom rounds compare`: every mode with real numerics."""

import argparse
import dataclasses
import json
import xml.etree.ElementTree as ElementTree

import jax
import numpy as np
import pytest

from meshloom.service.learner.compression import packed_share
from meshloom.service.rounds.cluster import Cluster
from meshloom.service.rounds.policy import PRESETS, Outer, Policy, make_policy
from meshloom.service.rounds.simulate import simulate
from meshloom.trainer.commands import rounds
from meshloom.trainer.config import files
from meshloom.trainer.program import optimizers
from meshloom.trainer.run import exchange
from meshloom.trainer.run.train import Config
from meshloom.trainer.verify import compare as compare_lib
from meshloom.trainer.verify.compare import Training, compare

SMALL = [
    *("model.num_layers=1", "model.unroll=1", "model.d_model=16", "model.d_ff=32"),
    "batch_size=8",
]
CLUSTER = Cluster(step_seconds=(4.0, 1.0))
NUM_STEPS = 12
Task = compare_lib.Task


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch):
    monkeypatch.setattr(compare_lib, "Task", task_of)


def load(num_steps: int = NUM_STEPS, *more: str) -> Config:
    bindings = [*SMALL, f"num_steps={num_steps}", *more]
    return files.load(["drill"], bindings, root=Config).config


def task_of(config: Config, num_learners: int) -> Task:
    """Returns the task, whose programs are compiled once for all tests."""
    config = dataclasses.replace(config, exchange=exchange.Config())
    key = repr(config), num_learners
    if key not in TASKS:
        TASKS[key] = Task(config, num_learners)
    return TASKS[key]


TASKS: dict[tuple[str, int], Task] = {}


def train_alone(config: Config) -> list[np.ndarray]:
    """Returns the parameters after ordinary training on whole batches."""
    task = task_of(config, 1)
    state = task.initial
    for step in range(config.num_steps):
        state, _ = task.program.step(state, task.batch(step))
    return [np.asarray(x) for x in jax.tree.leaves(state.params)]


def train_in(config: Config, policy: Policy, cluster: Cluster = CLUSTER):
    training = Training(task_of(config, len(cluster.step_seconds)), policy, 4)
    num_rounds = policy.num_rounds(config.num_steps)
    simulate(policy, cluster, num_rounds, work=training)
    return training.shared()


def assert_equal(found, expected, rtol):
    assert len(found) == len(expected)
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=rtol, atol=rtol)


def test_sync_is_ordinary_training():
    config = load()
    expected = train_alone(config)
    # AdamW with clipping; only the order of additions differs.
    assert_equal(train_in(config, make_policy("sync")), expected, 1e-5)
    start = jax.tree.leaves(task_of(config, 1).initial.params)
    moved = [np.abs(a - b).max() for a, b in zip(start, expected, strict=True)]
    assert max(moved) > 1e-2


def test_averaging_after_each_step_of_sgd_is_ordinary_training():
    config = dataclasses.replace(load(4), optimizer=Sgd(), max_grad_norm=None)
    policy = Policy(outer=Outer(learning_rate=1.0))
    assert_equal(train_in(config, policy), train_alone(config), 1e-5)


def test_compressed_contributions():
    """The losses of sync, in the bytes that the arithmetic says."""
    packing = ('exchange.push="topk:0.1+int8"', 'exchange.pull="int8"')
    config = load(NUM_STEPS, *packing)
    cluster = dataclasses.replace(CLUSTER, param_bytes=1000)
    policies = {"sync": make_policy("sync")}
    (dense,) = compare(load(), policies, cluster, num_points=2)
    (packed,) = compare(config, policies, cluster, num_points=2)
    assert 0 < packed.distance < 1 and dense.distance == 0
    assert packed.points[-1].loss < packed.points[0].loss
    layout = task_of(config, 2).make_layout(policies["sync"])
    share = packed_share(layout, config.exchange.push_codec)
    assert 0.075 < share < 0.08
    up = [learner.bytes_up for learner in packed.outcome.learners]
    np.testing.assert_allclose(up, 12 * 1000 * share)
    assert dense.outcome.learners[0].bytes_up == 12 * 1000
    share = packed_share(layout, config.exchange.pull_codec)
    assert 0.25 < share < 0.3
    down = [learner.bytes_down for learner in packed.outcome.learners]
    np.testing.assert_allclose(down, 1000 + 11 * 1000 * share)


@dataclasses.dataclass(frozen=True)
class Sgd:
    """Plain gradient descent."""

    def make(self, learning_rate, axes):
        import optax

        del axes
        return optax.sgd(learning_rate)


def test_fragments_without_delay_are_exchanged_one_by_one():
    config = load()
    policy = Policy(local_steps=4, fragments=2, outer=Outer(learning_rate=1.0))
    whole = Policy(local_steps=4, outer=Outer(learning_rate=1.0))
    found, other = train_in(config, policy), train_in(config, whole)
    assert all(np.isfinite(leaf).all() for leaf in found)
    assert any(not np.allclose(a, b) for a, b in zip(found, other, strict=True))


def test_every_mode_trains_and_is_deterministic():
    config = load(96)
    policies = {mode: PRESETS[mode] for mode in PRESETS}
    cluster = Cluster(step_seconds=(4.0, 1.0), jitter=0.1)
    results = compare(config, policies, cluster, num_points=3)
    assert [r.mode for r in results] == list(PRESETS)
    for result in results:
        # The loss begins at ln(64) = 4.16.
        assert result.points[-1].loss < 0.9 * result.points[0].loss, result.mode
        assert result.points[0].loss == results[0].points[0].loss
        # Three quarters of two learners are both of them.
        is_sync = result.mode in ("sync", "backup-workers")
        assert (result.distance == 0) == is_sync
    names = ("sync", "async", "decoupled-diloco")
    again = compare(config, {n: PRESETS[n] for n in names}, cluster, num_points=3)
    before = {r.mode: r.points for r in results}
    assert {r.mode: r.points for r in again} == {n: before[n] for n in names}


def test_compensation_needs_the_versions_that_gradients_came_from():
    config = load()
    plain = train_in(config, make_policy("async"))
    found = train_in(config, make_policy("async", compensation=0.5))
    assert any((a != b).any() for a, b in zip(found, plain, strict=True))


def test_a_learner_that_fails_starts_from_the_shared_parameters():
    cluster = Cluster(step_seconds=(1.0, 1.0), mean_uptime=5.0, restart_seconds=2.0)
    policy = make_policy("local-sgd", local_steps=4)
    training = Training(task_of(load(), 2), policy, 4)
    assert simulate(policy, cluster, 3, work=training).num_failures
    assert all(np.isfinite(leaf).all() for leaf in training.shared())


def run(*words: str) -> None:
    parser = argparse.ArgumentParser()
    rounds.add(parser.add_subparsers())
    args = parser.parse_args(["rounds", "compare", *words])
    args.run(args)


def test_the_command_prints_a_table_and_plots(tmp_path, capsys):
    path = tmp_path / "plot.svg"
    bindings = [word for binding in SMALL for word in ("--set", binding)]
    words = ["--modes", "sync", "local-sgd", "--learners", "2", "--steps", "8"]
    run(*words, *bindings, "--svg", str(path))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["mode", "sync", "local-sgd"]
    root = ElementTree.parse(path).getroot()
    titles = [e.text for e in root.iter() if e.tag.endswith("title")]
    assert titles == ["sync", "local-sgd"] * 2
    run(*words, *bindings, "--json")
    found = json.loads(capsys.readouterr().out)
    assert [row["samples"] for row in found] == [64, 64]


def test_wrong_comparisons_are_refused():
    with pytest.raises(ValueError, match="--steps, mode 'diloco': num_steps=8 is not"):
        run("--modes", "diloco", "--steps", "8")
    with pytest.raises(ValueError, match="mode 'sink' is unknown"):
        run("--modes", "sink")
    with pytest.raises(ValueError, match="batch_size 8 is not divisible by 3 learners"):
        Task(load(), 3)
    assert optimizers.AdamW.granularity == "element"
