"""What differs between the reports of a roll-call, as one table that names who is odd.

A report has `host`, `address` and `facts` (group -> name -> value), and may have a
`clock` and `probes` of folders. Only what differs is shown.
"""

import dataclasses
import io
import ipaddress
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

CLOCK_SECONDS = 60.0
ABSENT = "(none)"
# Rows of one group, and processes of one row, that are shown; the rest is counted.
MAX_ROWS, MAX_NAMES, MAX_CHARS = 8, 6, 120

REMEDIES = {
    "devices": "Give every process as many devices of the same kind: look for a device "
    "that is broken or taken, and at the flags that choose devices.",
    "versions": "Install the same versions on every host, best from one lock file or "
    "image.",
    "config": "Start every process with the same command and the same config files.",
    "code": "Install the same Meshloom, and the same modules of your own, on every "
    "host.",
    "XLA_FLAGS": "Set the variable XLA_FLAGS alike for every process.",
    "LIBTPU_INIT_ARGS": "Set the variable LIBTPU_INIT_ARGS alike for every process.",
    "jax": "Set jax's own variables (JAX_...) alike for every process.",
    "data": "Let every host read the same data: copy it again, or share the folder.",
    "step": "Every process must compile the same program: if nothing else differs, "
    "something in the model depends on the host (an environment variable, the time, "
    "the order of a set).",
    "folder": "Put the run folder and checkpoint_folder on a file system that all "
    "hosts share, and name them with their whole path.",
    "clock": "Set the clocks of the hosts, for instance by NTP.",
    "address": "On the CPU, processes reach one another by the address of a host's own "
    "name: make it one that other hosts can reach (in /etc/hosts, not 127.x).",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One thing that differs: each value with the processes that have it."""

    group: str
    name: str
    values: Mapping[str, Sequence[int]]

    @property
    def odd(self) -> list[int]:
        """The minority; nobody where no value has most of the processes."""
        most = max(map(len, self.values.values()))
        total = sum(map(len, self.values.values()))
        if 2 * most <= total:
            return []
        return [p for who in self.values.values() if len(who) < most for p in who]


def render(reports: Sequence[Mapping[str, Any]]) -> str:
    """The words for all that differs; "" if nothing does."""
    rows = differences(reports)
    if not rows:
        return ""
    hosts = [report["host"] for report in reports]
    groups = list(dict.fromkeys(row.group for row in rows))
    table = Table(box=box.MARKDOWN, pad_edge=True)
    for title in ("differs", "value", "in"):
        table.add_column(title, no_wrap=True)
    for group in groups:
        mine = [row for row in rows if row.group == group]
        for row in mine[:MAX_ROWS]:
            _add(table, row, hosts)
        if len(mine) > MAX_ROWS:
            table.add_row(f"{group}: {len(mine) - MAX_ROWS} more", "", "")
    remedies = "\n".join(f"{group}: {REMEDIES[group]}" for group in groups)
    return f"{_headline(rows, hosts)}\n{_text(table)}\n{remedies}"


def _headline(rows: Sequence[Row], hosts: Sequence[str]) -> str:
    odd = sorted({process for row in rows for process in row.odd})
    words = f"the {len(hosts)} processes of this job differ; no step was trained."
    return f"{words} Odd: {_names(odd, hosts)}." if odd else words


def _add(table: Table, row: Row, hosts: Sequence[str]) -> None:
    label = f"{row.group}: {row.name}" if row.name else row.group
    odd = set(row.odd)
    for value, who in sorted(row.values.items(), key=lambda item: -len(item[1])):
        names = _names(who, hosts)
        if odd and not odd & set(who) and len(who) > 2:
            names = f"the other {len(who)}"
        table.add_row(label, _cut(value), names)
        label = ""


def _names(who: Sequence[int], hosts: Sequence[str]) -> str:
    names = [f"process {p} on {hosts[p]}" for p in who[:MAX_NAMES]]
    more = len(who) - MAX_NAMES
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


def _cut(value: str) -> str:
    """A digest by its beginning, another long value by both ends."""
    if re.fullmatch(r"[0-9a-f]{64}", value):
        return value[:16]
    if len(value) <= MAX_CHARS:
        return value
    half = MAX_CHARS // 2 - 2
    return f"{value[:half]}....{value[-half:]}"


def _text(table: Table) -> str:
    """Plain lines as wide as they must be: this goes into log files."""
    file = io.StringIO()
    Console(file=file, width=10_000, color_system=None).print(table, markup=False)
    lines = (line.rstrip() for line in file.getvalue().splitlines())
    return "\n".join(line for line in lines if line)


def differences(reports: Sequence[Mapping[str, Any]]) -> list[Row]:
    rows = []
    for group in reports[0]["facts"]:
        each = [report["facts"][group] for report in reports]
        for name in dict.fromkeys(name for facts in each for name in facts):
            rows += _row(group, name, [_word(facts, name) for facts in each])
    rows += _clock(reports)
    rows += _folders(reports)
    rows += _addresses(reports)
    return rows


def _row(group: str, name: str, values: Sequence[str]) -> list[Row]:
    """One row, or none if all values are equal."""
    found: dict[str, list[int]] = {}
    for process, value in enumerate(values):
        found.setdefault(value, []).append(process)
    return [Row(group, name, found)] if len(found) > 1 else []


def _word(facts: Mapping[str, Any], name: str) -> str:
    if name not in facts:
        return ABSENT
    value = facts[name]
    return value if isinstance(value, str) else json.dumps(value)


def _clock(reports: Sequence[Mapping[str, Any]]) -> list[Row]:
    clocks = [report["clock"] for report in reports if "clock" in report]
    if not clocks or max(clocks) - min(clocks) <= CLOCK_SECONDS:
        return []
    middle = statistics.median_low(clocks)
    offsets = [clock - middle for clock in clocks]
    # Those that are near one another are alike.
    words = [f"{x:+.0f} s" if abs(x) > CLOCK_SECONDS else "+0 s" for x in offsets]
    return _row("clock", "", words) or _row(
        "clock", "", [f"{x:+.0f} s" for x in offsets]
    )


def _folders(reports: Sequence[Mapping[str, Any]]) -> list[Row]:
    rows = []
    for what in reports[0].get("probes", {}):
        found = [report["probes"][what] for report in reports]
        words = []
        for process, facts in enumerate(found):
            problem = facts["problem"]
            if problem is None and process in found[0]["unseen"]:
                problem = "process 0 does not see this one's file"
            path = facts["path"]
            words.append(f"{path}: {problem}" if problem else "process 0's folder")
        rows += _row("folder", what, words)
    return rows


def _addresses(reports: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Only between hosts does it matter what a host's own name means to itself."""
    if len({report["host"] for report in reports}) == 1:
        return []
    bad = [
        address is not None and ipaddress.ip_address(address).is_loopback
        for address in (report["address"] for report in reports)
    ]
    if not any(bad):
        return []
    words = [
        f"{report['address']}, this host only" if is_bad else "reached by others"
        for report, is_bad in zip(reports, bad, strict=True)
    ]
    found: dict[str, list[int]] = {}
    for process, word in enumerate(words):
        found.setdefault(word, []).append(process)
    return [Row("address", "of the host's own name", found)]
