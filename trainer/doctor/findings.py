"""`meshloom doctor`: is this machine fit to train, and if not, what is to be done?

Standard library only, like all of this folder but probe.py, which runs in a process
of its own: a broken jax or a driver that hangs must not take the doctor along.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence

LEVELS = ("ok", "warning", "problem")


@dataclasses.dataclass(frozen=True)
class Finding:
    """What was found about one subject; `remedy` where something is to be done."""

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
    """Runs named checks; one that fails is a finding, and the next ones still run."""
    findings: list[Finding] = []
    for name, check in checks:
        findings += _guarded(name, check)
    return Report(findings)


def _guarded(name: str, check: Check) -> Iterator[Finding]:
    """On a machine that is broken in a way nobody thought of, say so and go on."""
    try:
        yield from check()
    except Exception as error:
        words = f"could not be looked at: {type(error).__name__}: {error}"
        remedy = "Look into it by hand, and report it: the doctor should know it."
        yield Finding(name, words.splitlines()[0], "problem", remedy)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
