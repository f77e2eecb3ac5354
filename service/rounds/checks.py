"""Which settings of a policy go together; the others are refused with a remedy."""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .policy import Policy

LATE = ("wait", "drop", "merge", "reuse")
WEIGHTS = ("tokens", "equal", "tokens_squared_per_step")
UPDATES = ("full", "share")
ADAPTIVE = "adaptive"


def is_number(value: Any) -> bool:
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and math.isfinite(value)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_values(policy: "Policy") -> None:
    for name, least in {"local_steps": 1, "fragments": 1, "delay": 0}.items():
        value = getattr(policy, name)
        if not _is_count(value, least):
            raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    for name in ("wait", "compensation"):
        value = getattr(policy, name)
        if not is_number(value) or value < 0:
            raise ValueError(f"{name} must be a number >= 0, got {value!r}")
    choices = {"late": LATE, "weights": WEIGHTS, "update": UPDATES}
    for name, allowed in choices.items():
        value = getattr(policy, name)
        if value not in allowed:
            raise ValueError(f"{name}={value!r}: expected one of {', '.join(allowed)}")
    quorum, grace, mix = policy.quorum, policy.grace, policy.mix
    is_share = isinstance(quorum, float) and 0 < quorum <= 1
    if not is_share and not _is_count(quorum, 1):
        raise ValueError(
            f"quorum must be a number of learners (an integer >= 1) or a share of "
            f"them (a float in (0, 1]), got {quorum!r}"
        )
    if grace != ADAPTIVE and (not is_number(grace) or float(grace) < 0):
        raise ValueError(
            f'grace must be a number of seconds >= 0 or "{ADAPTIVE}", got {grace!r}'
        )
    if policy.staleness is not None and not _is_count(policy.staleness, 0):
        raise ValueError(
            f"staleness must be an integer >= 0, or None for no bound, got "
            f"{policy.staleness!r}"
        )
    if policy.start_with is not None and not _is_count(policy.start_with, 1):
        raise ValueError(
            f"start_with must be an integer >= 1, or None to wait for all learners, "
            f"got {policy.start_with!r}"
        )
    if not is_number(mix) or not 0 < mix <= 1:
        raise ValueError(f"mix must be in (0, 1], got {mix!r}")


def check_payload(policy: "Policy") -> None:
    """Checks what goes with gradients, and what with changes of the parameters."""
    if policy.outer is not None:
        if policy.compensation:
            raise ValueError(
                "compensation corrects gradients, but with an outer optimizer "
                "learners send changes of the parameters; set compensation=0 or "
                "outer=None"
            )
        return
    if policy.local_steps > 1:
        raise ValueError(
            f"local_steps={policy.local_steps} sends changes of the parameters, which "
            "need an outer optimizer; set outer=Outer(learning_rate=1.0), or "
            "local_steps=1"
        )
    if policy.weights != "tokens":
        raise ValueError(
            f"weights={policy.weights!r} needs an outer optimizer: gradients are sums "
            'over tokens; set weights="tokens" or outer'
        )
    if policy.mix < 1:
        raise ValueError(
            f"mix={policy.mix} needs an outer optimizer: learners that send gradients "
            "have no parameters of their own to mix; set mix=1.0 or outer"
        )


def quorum_needs_late(quorum: int | float) -> str:
    return (
        f'quorum={quorum} with staleness=0 and late="wait" would lose the '
        'contributions that come after the quorum; set late="drop" or late="reuse" to '
        "say what becomes of them, or quorum=1.0"
    )


def check_lateness(policy: "Policy") -> None:
    staleness, late, quorum = policy.staleness, policy.late, policy.quorum
    is_all = isinstance(quorum, float) and quorum == 1.0
    if late == "drop" and staleness != 0:
        raise ValueError(
            f'late="drop" drops everything that is not fresh, but staleness={staleness}'
            ' allows it; set staleness=0, or late="merge" to drop only what is older'
        )
    if late == "merge" and staleness == 0:
        raise ValueError(
            'late="merge" merges old contributions, but staleness=0 allows none; set '
            'staleness to 1 or more, or late="drop"'
        )
    if late == "reuse" and not staleness:
        raise ValueError(
            'late="reuse" needs a bound on the age of what is reused; set staleness to '
            f"1 or more, got {staleness}"
        )
    if late == "reuse" and is_all:
        raise ValueError(
            'late="reuse" has no effect with quorum=1.0, which waits for everyone; '
            "set a smaller quorum"
        )
    if late == "wait" and staleness == 0 and isinstance(quorum, float) and not is_all:
        raise ValueError(quorum_needs_late(quorum))
    if policy.update == "share" and policy.is_lockstep:
        raise ValueError(
            'update="share" is for learners that do not wait for each other; in '
            'lockstep set update="full"'
        )
    if policy.compensation and staleness == 0:
        raise ValueError(
            "compensation corrects stale gradients, and staleness=0 has none; set "
            "compensation=0, or allow staleness"
        )
    if policy.grace and (is_all or (late == "wait" and staleness != 0)):
        raise ValueError(
            f"grace={policy.grace!r} has no effect: "
            + ("quorum=1.0 waits for everyone" if is_all else "commits do not wait")
            + "; set grace=0"
        )


def check_fragments(policy: "Policy") -> None:
    if policy.fragments > policy.local_steps:
        raise ValueError(
            f"fragments={policy.fragments} with local_steps={policy.local_steps}: at "
            "least one local step must lie between two exchanges; lower fragments or "
            "raise local_steps"
        )
    shortest = policy.local_steps // policy.fragments
    if policy.delay >= shortest and policy.delay:
        raise ValueError(
            f"delay={policy.delay}: a merged fragment must be applied before the next "
            f"is sent, and {shortest} local steps lie between two exchanges; set "
            f"delay < {shortest}"
        )
    if policy.fragments == 1:
        return
    if policy.late == "reuse":
        raise ValueError(
            'late="reuse" cannot stand in for another fragment; set fragments=1'
        )
    is_one = isinstance(policy.quorum, int) and policy.quorum == 1
    if not policy.is_lockstep and not is_one:
        raise ValueError(
            f"fragments={policy.fragments} with quorum={policy.quorum} and "
            f"staleness={policy.staleness}: learners in different rounds send "
            "different fragments, and might wait for each other forever; set quorum=1 "
            "or fragments=1"
        )
