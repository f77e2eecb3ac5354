"""What in a table of rules does nothing, or not what it seems to do."""

import difflib
from collections.abc import Iterable, Mapping

from .plans import PLANS
from .rules import ROLES, Role, Row, Rules


def lint(
    rules: Rules,
    used: Iterable[tuple[str, Role]],
    mesh: Mapping[str, int] | None = None,
) -> list[str]:
    """Returns one line for each row that does nothing and each mesh axis left out.

    Rows of the plans that come with the library are a vocabulary, and no model uses all
    of it: only rows of your own are reported as never used. A row for a role that
    nothing was resolved for is not judged.

    Args:
      used: (name, role) of every lookup, as `Resolved.used` has them. Names that occur
        inside jit only are not among them; add ("name", "compute") for those.
      mesh: sizes of the mesh axes; with them, axes that no row names are reported too.
    """
    used = set(used)
    # To shard what an earlier plan left replicated is what a plan is added for.
    notes = [
        f"replaced: {old}  by  {new}"
        for old, new in rules.replaced
        if old.candidates != ((),)
    ]
    for row in rules.rows:
        if not _is_standard(row) and not _is_used(row, rules, used):
            notes.append(f"never used: {row}{_meant(row, used)}")
        if () in row.candidates[:-1]:
            notes.append(f"unreachable: what stands after 'replicated' in {row}")
    for axis, size in (mesh or {}).items():
        if size > 1 and axis not in rules.mesh_axes:
            notes.append(
                f"idle: no row names mesh axis {axis!r}, so its {size} ways all do the "
                "same work"
            )
    return notes


def _is_standard(row: Row) -> bool:
    """Whether the row is of a plan of ours; rows joined by `also` name two plans."""
    return all(plan in PLANS for plan in row.plan.split("+"))


def _is_used(row: Row, rules: Rules, used: set[tuple[str, Role]]) -> bool:
    """Whether a lookup found the row, or may find it in a role not resolved here."""
    roles = ROLES if row.role is None else (row.role,)
    reached = [role for role in roles if rules.find(row.name, role) is row]
    if any((row.name, role) in used for role in reached):
        return True
    resolved = {role for _, role in used}
    open_roles = [role for role in reached if role not in resolved]
    named = any(name == row.name for name, _ in used)
    return bool(open_roles) and (named or row.role is not None)


def _meant(row: Row, used: set[tuple[str, Role]]) -> str:
    names = {name for name, _ in used} - {row.name}
    close = difflib.get_close_matches(row.name, sorted(names), n=1)
    return f"  (did you mean {close[0]!r}?)" if close else ""
