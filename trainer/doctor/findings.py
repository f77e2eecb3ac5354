"""`meshloom doctor`: checks whether this machine is ready to train.

Everything here but probe.py uses the standard library only. The probe runs in a
subprocess, so that a broken jax or a hanging driver cannot take down the doctor.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence

LEVELS = ("ok", "warning", "problem")


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of a check; `remedy` says what to do about it, if anything."""

    subject: str
    found: str
    level: str = "ok"
    remedy: str = ""

    def __post_init__(self):
        assert self.level in LEVELS, self.level


Check = Callable[[], Iterable[Finding]]


@dataclasses.dataclass(frozen=True)
class Report:
    """All findings, in the order of the checks."""

    findings: Sequence[Finding]

    def count(self, level: str) -> int:
        return sum(finding.level == level for finding in self.findings)

    def to_json(self) -> str:
        document = {
            "problems": self.count("problem"),
            "warnings": self.count("warning"),
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
        }
        return json.dumps(document, indent=1)

    def __str__(self) -> str:
        width = max((len(finding.subject) for finding in self.findings), default=0)
        lines = []
        for finding in self.findings:
            lines.append(
                f"{finding.level:8} {finding.subject:{width}}  {finding.found}"
            )
            if finding.remedy:
                lines.append(f"{'':8} {'':{width}}  -> {finding.remedy}")
        problems, warnings = self.count("problem"), self.count("warning")
        lines.append(
            f"{_counted(problems, 'problem')}, {_counted(warnings, 'warning')}"
        )
        return "\n".join(lines)


def examine(checks: Sequence[tuple[str, Check]]) -> Report:
    """Runs named checks; a check that raises becomes a finding, the rest still run."""
    findings: list[Finding] = []
    for name, check in checks:
        findings += _guarded(name, check)
    return Report(findings)


def _guarded(name: str, check: Check) -> Iterator[Finding]:
    """Turns an unexpected exception of a check into a finding."""
    try:
        yield from check()
    except Exception as error:
        found = f"the check failed: {type(error).__name__}: {error}"
        remedy = "Check it by hand, and report this as a bug in the doctor."
        yield Finding(name, found.splitlines()[0], "problem", remedy)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
