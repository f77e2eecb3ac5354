"""Two hosts on one machine: network namespaces with names and addresses of their own.

They are joined by a veth pair, and share the file system but for /etc/hosts. Nothing
leaves the machine. At the end every process in the namespaces is killed and they are
removed, whatever the test did. Needs root and iproute2.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ADDRESSES = ("10.77.13.1", "10.77.13.2")


class Host:
    """One of the two."""

    def __init__(self, name: str, address: str, names: Path):
        self.name, self.address, self._names = name, address, names
        self._started: list[subprocess.Popen] = []

    def argv(self, command: Sequence[str]) -> list[str]:
        """Runs a command as if on this host."""
        enter = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
        return [
            *(
                "nsenter",
                f"--net=/run/netns/{self.name}",
                "unshare",
                "--uts",
                "--mount",
            ),
            *("sh", "-c", enter, str(self._names), self.name, *command),
        ]

    def run(self, command: Sequence[str], timeout: float, **kwargs):
        return subprocess.run(
            self.argv(command),
            timeout=timeout,
            capture_output=True,
            text=True,
            **kwargs,
        )

    def start(self, command: Sequence[str], output: Path, env: Mapping | None = None):
        with open(output, "wb") as file:
            process = subprocess.Popen(
                self.argv(command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def pids(self) -> list[int]:
        found = _run("ip", "netns", "pids", self.name)
        return [int(line) for line in found.stdout.split()]

    def end(self) -> None:
        """Kills everything that runs here."""
        deadline = time.monotonic() + 20
        while pids := self.pids():
            assert time.monotonic() < deadline, f"{pids} do not end"
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self._started:
                process.poll()
            time.sleep(0.1)
        for process in self._started:
            process.wait()

    def cut_off(self) -> None:
        _run("ip", "-n", self.name, "link", "set", "wire", "down")

    def join(self) -> None:
        _run("ip", "-n", self.name, "link", "set", "wire", "up")


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Args:
    folder: for the file with their names.
    """
    tag, names = f"loom{os.getpid() % 10_000}x", folder / "hosts"
    a, b = (Host(f"{tag}{n}", ip, names) for n, ip in enumerate(ADDRESSES))
    known = "".join(f"{host.address} {host.name}\n" for host in (a, b))
    names.write_text(f"127.0.0.1 localhost\n{known}")
    try:
        for host in (a, b):
            _run("ip", "netns", "add", host.name)
        _run(
            *("ip", "link", "add", "wire", "netns", a.name, "type", "veth"),
            *("peer", "name", "wire", "netns", b.name),
        )
        for host in (a, b):
            address = f"{host.address}/24"
            _run("ip", "-n", host.name, "addr", "add", address, "dev", "wire")
            _run("ip", "-n", host.name, "link", "set", "lo", "up")
            _run("ip", "-n", host.name, "link", "set", "wire", "up")
        yield a, b
    finally:
        for host in (a, b):
            if Path("/run/netns", host.name).exists():
                host.end()
                _run("ip", "netns", "del", host.name)


def ssh_daemon(host: Host, folder: Path) -> list[str]:
    """A real sshd of its own, which ends with its host; the command that it lets in."""
    folder.mkdir(parents=True, exist_ok=True)
    key, host_key, config = folder / "key", folder / "host_key", folder / "sshd_config"
    for path in (key, host_key):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path))
    config.write_text(
        f"Port 2222\nListenAddress {host.address}\nHostKey {host_key}\n"
        f"AuthorizedKeysFile {key}.pub\nPidFile {folder / 'sshd.pid'}\n"
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\n"
        "PermitRootLogin prohibit-password\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    host.start(["/usr/sbin/sshd", "-D", "-e", "-f", str(config)], folder / "sshd.log")
    return [
        *("ssh", "-p", "2222", "-i", str(key), "-o", "StrictHostKeyChecking=no"),
        *("-o", f"UserKnownHostsFile={folder / 'known'}", "-o", "LogLevel=ERROR"),
    ]


def _run(*argv: str) -> subprocess.CompletedProcess:
    found = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, f"{' '.join(argv)}: {found.stderr}"
    return found
