"""Finds rules that have no effect, or not the effect they appear to have."""

import difflib
from collections.abc import Iterable, Mapping

from .plans import PLANS
from .rules import ROLES, Role, Rule, Rules


def lint(
    rules: Rules,
    used: Iterable[tuple[str, Role]],
    mesh: Mapping[str, int] | None = None,
) -> list[str]:
    """Returns one line for each row without effect and each mesh axis without a row.

    No model uses every logical axis of the built-in plans, so only your own rows are
    reported as never used. Rows for a role that was never resolved are skipped.

    Args:
      used: the (name, role) of every lookup, from `Resolved.used`. It lacks names that
        occur only inside jit; add ("name", "compute") for those.
      mesh: sizes of the mesh axes. With it, axes that no row names are reported too.
    """
    used = set(used)
    # Plans are meant to shard what an earlier plan replicated; that is not reported.
    notes = [
        f"replaced: {old}  by  {new}"
        for old, new in rules.replaced
        if old.candidates != ((),)
    ]
    for row in rules.rows:
        if not _is_standard(row) and not _is_used(row, rules, used):
            notes.append(f"never used: {row}{_suggestion(row, used)}")
        if () in row.candidates[:-1]:
            notes.append(f"unreachable: the candidates after 'replicated' in {row}")
    for axis, size in (mesh or {}).items():
        if size > 1 and axis not in rules.mesh_axes:
            notes.append(
                f"idle: no row names mesh axis {axis!r}, so its {size} ways duplicate "
                "work"
            )
    return notes


def _is_standard(row: Rule) -> bool:
    """Returns whether the row is from built-in plans; `also` joins two plan names."""
    return all(plan in PLANS for plan in row.plan.split("+"))


def _is_used(row: Rule, rules: Rules, used: set[tuple[str, Role]]) -> bool:
    """Returns whether a lookup reached the row, or could in an unresolved role."""
    roles = ROLES if row.role is None else (row.role,)
    reached = [role for role in roles if rules.find(row.name, role) is row]
    if any((row.name, role) in used for role in reached):
        return True
    resolved = {role for _, role in used}
    unresolved = [role for role in reached if role not in resolved]
    named = any(name == row.name for name, _ in used)
    return bool(unresolved) and (named or row.role is not None)


def _suggestion(row: Rule, used: set[tuple[str, Role]]) -> str:
    names = {name for name, _ in used} - {row.name}
    close = difflib.get_close_matches(row.name, sorted(names), n=1)
    return f"  (did you mean {close[0]!r}?)" if close else ""
