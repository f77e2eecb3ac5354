"""The wire and the hosts of a drill of learners."""

import contextlib
import subprocess
import sys

import pytest

from meshloom.service.wire.calls import Channel, Server
from meshloom.service.wire.errors import Unavailable
from meshloom.trainer.verify import cut_network, fleet_wire


def test_a_wire_flips_one_bit_of_what_is_asked_for(monkeypatch):
    with fleet_wire.wire() as wire, contextlib.closing(echo()) as server:
        for name, value in wire.variables.items():
            monkeypatch.setenv(name, value)
        channel = Channel(f"127.0.0.1:{server.port}")
        with contextlib.closing(channel):
            small, large = {"a": "x" * 500}, {"a": "x" * 9000}
            assert channel.call("Echo", small, 20) == small
            wire.flip("message")
            assert channel.call("Echo", large, 20) == large
            assert wire.flipped == 0
            with pytest.raises(Unavailable, match="is damaged: CRC32C"):
                channel.call("Echo", small, 20)
            wire.flip("tensor")
            assert channel.call("Echo", small, 20) == small
            with pytest.raises(Unavailable, match="is damaged: CRC32C"):
                channel.call("Echo", large, 20)
            assert wire.flipped == 2
            assert channel.call("Echo", large, 20) == large
            wire.flip("pulled tensor")
            assert channel.call("Echo", small, 20) == small
            with pytest.raises(Unavailable, match="is damaged: CRC32C"):
                channel.call("Echo", large, 20)
            assert wire.flipped == 3


def echo() -> Server:
    return Server("127.0.0.1:0", {"Echo": lambda message: message})


@pytest.mark.fleets
def test_two_hosts_reach_each_other_until_the_network_is_cut(tmp_path):
    def reach() -> int:
        ping = [sys.executable, "-c", CONNECT, cut_network.ADDRESSES[0]]
        return subprocess.run([*hosts.on(1), *ping], timeout=60).returncode

    listening = [sys.executable, "-c", LISTEN, cut_network.ADDRESSES[0]]
    with cut_network.two_hosts(tmp_path) as hosts:
        with subprocess.Popen([*hosts.on(0), *listening]) as server:
            try:
                assert reach() == 0
                ssh = [*hosts.ssh.split(), "-o", "X=1", cut_network.NAMES[1]]
                found = subprocess.check_output([*ssh, "hostname"], timeout=60)
                assert found.decode().strip() == cut_network.NAMES[1]
                hosts.cut()
                assert reach() == 1
                hosts.restore()
                assert reach() == 0
            finally:
                server.kill()


LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 7000))
while True:
    server.accept()[0].close()
"""
CONNECT = """
import socket, sys, time
for _ in range(50):
    try:
        socket.create_connection((sys.argv[1], 7000), 1.0)
        sys.exit(0)
    except ConnectionRefusedError:
        time.sleep(0.1)
    except OSError:
        break
sys.exit(1)
"""
