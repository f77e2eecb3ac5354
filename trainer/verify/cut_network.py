"""Two hosts on this machine, with a network between them that a drill can cut.

Each is a namespace for network, host name and mounts that one process holds: it is gone
once that process and all that run there are. Nothing leaves the machine. Needs root.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from ...launch.workers import GUARD
from .drill_job import POLL_SECONDS, Failed

NAMES, ADDRESSES = ("drill-a", "drill-b"), ("10.77.21.1", "10.77.21.2")
START_SECONDS = 20.0
HOLD = 'mount --bind "$0" /etc/hosts && hostname "$1" && exec sleep infinity'
# What `launch ssh` starts instead of ssh: it runs a command on one of the hosts.
SSH = """\
while [ "$1" = -o ]; do shift 2; done
case "$1" in {cases} esac
exec nsenter -t "$host" --net --uts --mount sh -c "$2"
"""


class Hosts:
    """Both hosts.

    Attributes:
      ssh: a command that runs another one on a host, like ssh.
    """

    def __init__(self, folder: Path, holders: list[int]):
        self._holders = holders
        script = folder / "ssh.sh"
        pairs = zip(NAMES, holders, strict=True)
        cases = " ".join(f"{name}) host={pid};;" for name, pid in pairs)
        script.write_text(SSH.format(cases=cases))
        self.ssh = f"sh {script}"

    def on(self, host: int) -> list[str]:
        """Returns a command that runs the one after it on a host."""
        return ["nsenter", "-t", str(self._holders[host]), "--net", "--uts", "--mount"]

    def connect(self) -> None:
        a, b = map(str, self._holders)
        _run("ip", "link", "add", "wire", "netns", a, *PEER, "wire", "netns", b)
        for host, address in enumerate(ADDRESSES):
            here = self.on(host)
            _run(*here, "ip", "addr", "add", f"{address}/24", "dev", "wire")
            for name in ("lo", "wire"):
                _run(*here, "ip", "link", "set", name, "up")

    def cut(self) -> None:
        _run(*self.on(1), "ip", "link", "set", "wire", "down")

    def restore(self) -> None:
        _run(*self.on(1), "ip", "link", "set", "wire", "up")


PEER = ("type", "veth", "peer", "name")


def problem() -> str:
    """Returns why there cannot be two hosts here; "" if there can."""
    if os.geteuid() != 0:
        return "a network can be cut by root only"
    for program in ("ip", "nsenter", "unshare"):
        if shutil.which(program) is None:
            return f"there is no program {program}; install iproute2 and util-linux"
    return ""


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Args:
    folder: for two small files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = folder / "hosts"
    pairs = zip(ADDRESSES, NAMES, strict=True)
    lines = ("127.0.0.1 localhost", *(f"{address} {name}" for address, name in pairs))
    known.write_text("".join(f"{line}\n" for line in lines))
    holders: list[subprocess.Popen] = []
    with contextlib.ExitStack() as stack:
        for name in NAMES:
            guard = [*GUARD, "worker", str(os.getpid()), "unshare"]
            hold = ["sh", "-c", HOLD, str(known), name]
            holder = subprocess.Popen(
                [*guard, "--net", "--uts", "--mount", *hold], start_new_session=True
            )
            stack.callback(holder.wait)
            stack.callback(holder.kill)
            holders.append(holder)
        deadline = time.monotonic() + START_SECONDS
        while not all(_is_ready(holder.pid) for holder in holders):
            has_failed = any(holder.poll() is not None for holder in holders)
            if has_failed or time.monotonic() > deadline:
                raise Failed("cannot make namespaces for two hosts")
            time.sleep(POLL_SECONDS)
        hosts = Hosts(folder, [holder.pid for holder in holders])
        hosts.connect()
        yield hosts


def _is_ready(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep\0")
    except OSError:
        return False


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise Failed(f"{' '.join(argv)}: {done.stderr.strip()}")
