"""Renders what differs between preflight reports as one table that names the odd ones.

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
# How many discrepancies of a group, processes of a value, and characters of a value are
# shown.
MAX_ROWS, MAX_NAMES, MAX_CHARS = 8, 6, 120

REMEDIES = {
    "devices": "Give every process the same number and kind of devices: look for a "
    "device that is broken or in use, and check the flags that select devices.",
    "versions": "Install the same versions on every host, preferably from one lock "
    "file or image.",
    "config": "Start every process with the same command and the same config files.",
    "code": "Install the same Meshloom, and the same modules of your own, on every "
    "host.",
    "XLA_FLAGS": "Set XLA_FLAGS to the same value in every process.",
    "LIBTPU_INIT_ARGS": "Set LIBTPU_INIT_ARGS to the same value in every process.",
    "jax": "Set jax's variables (JAX_...) to the same values in every process.",
    "data": "Make every host read the same data: copy it again, or share the folder.",
    "step": "Every process must compile the same program: if nothing else differs, "
    "something in the model depends on the host (an environment variable, the time, "
    "the order of a set).",
    "folder": "Put the run folder and checkpoint_folder on a file system that all "
    "hosts share, and give their absolute paths.",
    "clock": "Synchronize the clocks of the hosts, for instance with NTP.",
    "address": "On the CPU, processes reach each other by the address that a host's "
    "name resolves to: make it one that other hosts can reach (in /etc/hosts, not "
    "127.x).",
}


@dataclasses.dataclass(frozen=True)
class Discrepancy:
    """A fact that processes disagree on: each value, and the processes that have it."""

    group: str
    name: str
    values: Mapping[str, Sequence[int]]

    @property
    def odd(self) -> list[int]:
        """The processes in the minority; none if no value has a majority."""
        most = max(map(len, self.values.values()))
        total = sum(map(len, self.values.values()))
        if 2 * most <= total:
            return []
        minorities = (who for who in self.values.values() if len(who) < most)
        return [process for who in minorities for process in who]


def render(reports: Sequence[Mapping[str, Any]]) -> str:
    """Returns a message about everything that differs; "" if nothing does."""
    differing = discrepancies(reports)
    if not differing:
        return ""
    hosts = [report["host"] for report in reports]
    groups = list(dict.fromkeys(each.group for each in differing))
    table = Table(box=box.MARKDOWN, pad_edge=True)
    for title in ("differs", "value", "in"):
        table.add_column(title, no_wrap=True)
    for group in groups:
        of_group = [each for each in differing if each.group == group]
        for each in of_group[:MAX_ROWS]:
            _add(table, each, hosts)
        if len(of_group) > MAX_ROWS:
            table.add_row(f"{group}: {len(of_group) - MAX_ROWS} more", "", "")
    remedies = "\n".join(f"{group}: {REMEDIES[group]}" for group in groups)
    return f"{_headline(differing, hosts)}\n{_text(table)}\n{remedies}"


def discrepancies(reports: Sequence[Mapping[str, Any]]) -> list[Discrepancy]:
    """Returns everything that the reports disagree on."""
    differing = []
    for group in reports[0]["facts"]:
        each = [report["facts"][group] for report in reports]
        for name in dict.fromkeys(name for facts in each for name in facts):
            differing += _compare(group, name, [_value(facts, name) for facts in each])
    differing += _clocks(reports)
    differing += _folders(reports)
    differing += _addresses(reports)
    return differing


def _headline(differing: Sequence[Discrepancy], hosts: Sequence[str]) -> str:
    odd = sorted({process for each in differing for process in each.odd})
    text = f"the {len(hosts)} processes of this job differ; no step was trained."
    return f"{text} Odd: {_names(odd, hosts)}." if odd else text


def _add(table: Table, discrepancy: Discrepancy, hosts: Sequence[str]) -> None:
    name, odd = discrepancy.name, set(discrepancy.odd)
    label = f"{discrepancy.group}: {name}" if name else discrepancy.group
    by_count = sorted(discrepancy.values.items(), key=lambda item: -len(item[1]))
    for value, who in by_count:
        names = _names(who, hosts)
        if odd and not odd & set(who) and len(who) > 2:
            names = f"the other {len(who)}"
        table.add_row(label, _shorten(value), names)
        label = ""


def _names(who: Sequence[int], hosts: Sequence[str]) -> str:
    names = [f"process {p} on {hosts[p]}" for p in who[:MAX_NAMES]]
    more = len(who) - MAX_NAMES
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


def _shorten(value: str) -> str:
    """Returns the beginning of a digest, and both ends of another long value."""
    if re.fullmatch(r"[0-9a-f]{64}", value):
        return value[:16]
    if len(value) <= MAX_CHARS:
        return value
    half = MAX_CHARS // 2 - 2
    return f"{value[:half]}....{value[-half:]}"


def _text(table: Table) -> str:
    """Returns plain lines as wide as they need to be, since they go into log files."""
    file = io.StringIO()
    Console(file=file, width=10_000, color_system=None).print(table, markup=False)
    lines = (line.rstrip() for line in file.getvalue().splitlines())
    return "\n".join(line for line in lines if line)


def _compare(group: str, name: str, values: Sequence[str]) -> list[Discrepancy]:
    """Returns one discrepancy, or none if all values are equal."""
    processes: dict[str, list[int]] = {}
    for process, value in enumerate(values):
        processes.setdefault(value, []).append(process)
    return [Discrepancy(group, name, processes)] if len(processes) > 1 else []


def _value(facts: Mapping[str, Any], name: str) -> str:
    if name not in facts:
        return ABSENT
    value = facts[name]
    return value if isinstance(value, str) else json.dumps(value)


def _clocks(reports: Sequence[Mapping[str, Any]]) -> list[Discrepancy]:
    clocks = [report["clock"] for report in reports if "clock" in report]
    if not clocks or max(clocks) - min(clocks) <= CLOCK_SECONDS:
        return []
    middle = statistics.median_low(clocks)
    offsets = [clock - middle for clock in clocks]
    # Clocks that are close to the median count as equal, unless all of them are.
    rounded = [f"{x:+.0f} s" if abs(x) > CLOCK_SECONDS else "+0 s" for x in offsets]
    exact = [f"{x:+.0f} s" for x in offsets]
    return _compare("clock", "", rounded) or _compare("clock", "", exact)


def _folders(reports: Sequence[Mapping[str, Any]]) -> list[Discrepancy]:
    differing = []
    for what in reports[0].get("probes", {}):
        probes = [report["probes"][what] for report in reports]
        values = []
        for process, probe in enumerate(probes):
            problem = probe["problem"]
            if problem is None and process in probes[0]["unseen"]:
                problem = "process 0 does not see the file of this process"
            path = probe["path"]
            values.append(f"{path}: {problem}" if problem else "process 0's folder")
        differing += _compare("folder", what, values)
    return differing


def _addresses(reports: Sequence[Mapping[str, Any]]) -> list[Discrepancy]:
    """Returns whose name resolves to loopback, which matters only between hosts."""
    if len({report["host"] for report in reports}) == 1:
        return []
    reachable, unreachable = [], {}
    for process, address in enumerate(report["address"] for report in reports):
        if address is not None and ipaddress.ip_address(address).is_loopback:
            value = f"{address}, reachable from its own host only"
            unreachable.setdefault(value, []).append(process)
        else:
            reachable.append(process)
    if not unreachable:
        return []
    values = unreachable | ({"reachable": reachable} if reachable else {})
    return [Discrepancy("address", "of the host's name", values)]
