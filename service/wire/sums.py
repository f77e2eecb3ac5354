"""Sums: what a merger passes on instead of the contributions of the learners below it.

A sum is staged on the servers like a contribution, under a key of its own. Its *tree*
says what was added up: {"key": its key, "of": keys of contributions, and trees}. Both
are in order of their keys, which is the order in which they are added.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .errors import Refused

Key = tuple[int, int, int]  # learner, incarnation, round
Tree = Mapping[str, Any]

# In the key of a sum, instead of the learner: this, and the lowest learner in it.
FIRST = 1 << 32
_MAX_DEPTH = 32


def is_sum(learner: int) -> bool:
    """Returns whether a number stands for a sum, in the place of a learner."""
    return learner >= FIRST


def key_of(item: Any) -> Key:
    """Returns the key of a contribution or of a tree; refuses anything else."""
    found = item.get("key") if isinstance(item, Mapping) else item
    if (
        not isinstance(found, list | tuple)
        or len(found) != 3
        or not all(type(number) is int and number >= 0 for number in found)
    ):
        raise Refused(
            f"{found!r} is not the key of a contribution: expected [learner, "
            "incarnation, round]"
        )
    return found[0], found[1], found[2]


def tree_of(key: Key, items: Iterable[Any]) -> dict[str, Any]:
    """Returns the tree of a sum of contributions (keys) and of other sums (trees)."""
    plain = [item if isinstance(item, Mapping) else list(item) for item in items]
    return {"key": list(key), "of": sorted(plain, key=key_of)}


def contributions_of(tree: Tree, depth: int = 0) -> list[Key]:
    """Returns the keys of all contributions in a sum; refuses what is not a tree."""
    items = tree.get("of")
    if not isinstance(items, Sequence) or not items or depth > _MAX_DEPTH:
        raise Refused(f"sum {tree.get('key')!r}: expected what it consists of")
    found: list[Key] = []
    for item in items:
        if isinstance(item, Mapping):
            found += contributions_of(item, depth + 1)
        else:
            found.append(key_of(item))
    return found


def sums_in(tree: Tree) -> list[Tree]:
    """Returns the sums in a tree, each after those that it consists of."""
    inner = (item for item in tree["of"] if isinstance(item, Mapping))
    return [*(part for item in inner for part in sums_in(item)), tree]


def check_counts_all(job: str, policy: Any) -> None:
    """Refuses a policy under which a contribution of a round may not count."""
    if not policy.counts_all:
        raise Refused(
            f"job {job!r}: a merger adds up the contributions of a round before it is "
            f"decided which of them count, and with staleness={policy.staleness} and "
            f"late={policy.late!r} some may not. Let the learners use the service "
            "itself, or choose sync, half-sync, local-sgd, diloco or streaming-diloco"
        )


def staged_parts(
    contributions: Sequence[Mapping[str, Any]], trees: Sequence[Tree]
) -> list[Mapping[str, Any]]:
    """Returns what servers merge for a commit: sums stand for their contributions.

    Args:
      contributions: each with learner, incarnation, round, base, weight, coefficient.
    """
    if not trees:
        return list(contributions)
    inside = {key for tree in trees for key in contributions_of(tree)}
    by_key = {(c["learner"], c["incarnation"], c["round"]): c for c in contributions}
    if lost := sorted(inside - by_key.keys()):
        raise ValueError(
            f"contribution {list(lost[0])} is part of a sum, but not of its commit"
        )
    found = [c for key, c in by_key.items() if key not in inside]
    for tree in trees:
        learner, incarnation, round = key_of(tree)
        first = by_key[contributions_of(tree)[0]]
        # Coefficients are in the sum already; all of it has the same base.
        about = {"base": first["base"], "weight": 1.0, "coefficient": 1.0}
        key = {"learner": learner, "incarnation": incarnation, "round": round}
        found.append({**key, **about})
    return found
