"""Rules: which mesh axes may shard which logical axis, for parameters and activations.

A row of the table lists the candidates to try, in order, for one logical axis in one
role. A candidate is a tuple of mesh axes; the empty tuple means "replicate". Roles:

  param       the parameter as it is stored between steps
  compute     the parameter or activation as the model computes with it
  optimizer   what the optimizer keeps for the parameter, and its gradient

A row without a role applies to all three. In `a + b`, a row of b replaces the rows of a
for the same name and role; replaced rows are recorded for `lint`. A row of b with
`also` extends the row of a instead: it tries each candidate of a with its own mesh axes
appended, then without them.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, Literal, get_args

Role = Literal["param", "compute", "optimizer"]
ROLES: tuple[Role, ...] = get_args(Role)

Candidate = tuple[str, ...]
# How users write the candidates of a logical axis: None, "tensor", ("data", "fsdp") for
# one candidate of two mesh axes, or a list of candidates.
CandidatesLike = None | str | tuple[str, ...] | list[Any]


def check_role(role: Any, whose: str = "") -> None:
    """Raises ValueError for an unknown role, with a suggestion."""
    if role in ROLES:
        return
    close = difflib.get_close_matches(str(role), ROLES, n=1)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"role {role!r}{whose} is unknown.{meant} Roles: {', '.join(ROLES)}."
    )


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of the table `Rules`. `plan` is the plan it came from."""

    name: str
    candidates: tuple[Candidate, ...]
    role: Role | None = None
    plan: str = "rules"
    also: bool = False

    def __post_init__(self):
        if self.role is not None:
            check_role(self.role, f" of the rule for {self.name!r} [{self.plan}]")

    def __str__(self) -> str:
        tried = " | ".join("+".join(c) if c else "replicated" for c in self.candidates)
        role = f" ({self.role})" if self.role else ""
        also = "also " if self.also else ""
        return f"{self.name}{role} -> {also}{tried}  [{self.plan}]"


@dataclasses.dataclass(frozen=True)
class Rules:
    """An ordered table of rows. Build it from plans, or from a mapping with `of`.

    Attributes:
      replaced: pairs of a replaced row and its replacement, for `lint`.
      strict: whether a dimension that the rules cannot shard is an error, in `resolve`
        and in `Sharder`.
    """

    rows: tuple[Rule, ...] = ()
    replaced: tuple[tuple[Rule, Rule], ...] = ()
    strict: bool = True

    def __post_init__(self):
        seen: dict[tuple[str, Role | None], Rule] = {}
        for row in self.rows:
            if other := seen.get((row.name, row.role)):
                raise ValueError(
                    f"rules name {row.name!r} twice for the same role: {other} and "
                    f"{row}. Remove one, or add tables with +, where the later wins."
                )
            seen[row.name, row.role] = row

    @classmethod
    def of(
        cls,
        table: Mapping[str, CandidatesLike],
        *,
        role: Role | None = None,
        plan: str = "rules",
        also: bool = False,
    ) -> "Rules":
        """Returns rules from a mapping such as {"mlp": "tensor", "embed": None}.

        A list gives several candidates in order: {"heads": ["tensor", None]} replicates
        heads if tensor does not divide them. A tuple is one candidate of several mesh
        axes: {"batch": ("data", "fsdp")}.

        Args:
          also: shard over these mesh axes in addition to those of the table this one is
            added to. Requires a role, and one candidate for each name.
        """
        if role is not None:
            check_role(role, f" of plan {plan!r}")
        if also and (role is None or any(isinstance(v, list) for v in table.values())):
            raise ValueError(
                f"plan {plan!r}: also=True needs a role and one candidate for each "
                f"name, got role {role} and {dict(table)}"
            )
        return cls(
            tuple(
                Rule(name, _candidates(name, value), role, plan, also)
                for name, value in table.items()
            )
        )

    def __add__(self, other: "Rules") -> "Rules":
        new = tuple(self._joined(row) if row.also else row for row in other.rows)
        other = dataclasses.replace(other, rows=new)
        kept, replaced = [], [*self.replaced, *other.replaced]
        for row in self.rows:
            by = next((new for new in other.rows if _replaces(new, row)), None)
            if by is None:
                kept.append(row)
            elif by.candidates != row.candidates and not _keeps(by, row):
                replaced.append((row, by))
        strict = self.strict and other.strict
        return Rules((*kept, *other.rows), tuple(replaced), strict)

    def _joined(self, row: Rule) -> Rule:
        """Returns a row with `also`, merged into this table's row for the same name."""
        assert row.role is not None
        base = self.find(row.name, row.role)
        if base is None:
            return row
        candidates = []
        for given in base.candidates:
            more = tuple(axis for axis in row.candidates[0] if axis not in given)
            candidates += [(*given, *more), given] if more else [given]
        plan = f"{base.plan}+{row.plan}"
        return Rule(row.name, tuple(candidates), row.role, plan)

    def find(self, name: str, role: Role) -> Rule | None:
        """Returns the row for a name and role; a row for the role takes precedence."""
        general = None
        for row in self.rows:
            if row.name == name and row.role == role:
                return row
            if row.name == name and row.role is None:
                general = row
        return general

    def without(self, *names: str) -> "Rules":
        """Returns the table with these names replicated."""
        return self + Rules.of(dict.fromkeys(names), plan="without")

    def lenient(self) -> "Rules":
        """Returns the table with `strict` off.

        It replicates what it cannot shard instead of raising: a dimension that its mesh
        axes do not divide, a name without a row, a row with an unknown mesh axis. The
        resolved layout records the reason.
        """
        return dataclasses.replace(self, strict=False)

    def rename_axes(self, names: Mapping[str, str]) -> "Rules":
        """Returns the table with mesh axes renamed to those of an existing mesh.

        `rules.rename_axes({"tensor": "model"})` fits a mesh with an axis `model`.
        Several axes may map to one: {"fsdp": "data"} shards parameters over the axis
        of the batch.
        """
        if unknown := [name for name in names if name not in self.mesh_axes]:
            raise ValueError(
                f"rename_axes: no rule names mesh axis {unknown[0]!r}. The rules name "
                f"{', '.join(self.mesh_axes) or 'none'}."
            )

        def renamed(row: Rule) -> Rule:
            candidates = tuple(
                tuple(dict.fromkeys(names.get(axis, axis) for axis in candidate))
                for candidate in row.candidates
            )
            return dataclasses.replace(row, candidates=candidates)

        replaced = tuple((renamed(old), renamed(new)) for old, new in self.replaced)
        return Rules(tuple(map(renamed, self.rows)), replaced, self.strict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.name for row in self.rows))

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The mesh axes that the rows name."""
        axes = (axis for row in self.rows for c in row.candidates for axis in c)
        return tuple(dict.fromkeys(axes))

    def __str__(self) -> str:
        return "\n".join(str(row) for row in self.rows)


def _replaces(new: Rule, old: Rule) -> bool:
    return new.name == old.name and (new.role is None or new.role == old.role)


def _keeps(new: Rule, old: Rule) -> bool:
    """Returns whether the new row still tries every candidate of the old one."""
    return set(old.candidates) <= set(new.candidates)


def _candidates(name: str, value: CandidatesLike) -> tuple[Candidate, ...]:
    result: list[Candidate] = []
    for one in value if isinstance(value, list) else [value]:
        candidate = () if one is None else (one,) if isinstance(one, str) else one
        if not isinstance(candidate, tuple) or not all(
            isinstance(axis, str) for axis in candidate
        ):
            raise ValueError(
                f"rule for {name!r}: a candidate must be a mesh axis, a tuple of mesh "
                f"axes, or None, got {one!r}. Write several candidates as a list."
            )
        if len(set(candidate)) < len(candidate):
            raise ValueError(
                f"rule for {name!r}: candidate {one!r} names a mesh axis twice"
            )
        result.append(candidate)
    if not result:
        raise ValueError(
            f"rule for {name!r} has no candidate; write None to replicate it"
        )
    return tuple(result)
