"""Runs a command in a process that warm_commands.py forks, as if it were run here.

`warm_client.py ADDRESS PROGRAM ARGUMENTS...`, with `python -I -S`: it starts fast.
"""

import array
import json
import os
import socket
import sys


def main(address: str, argv: list[str]) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(address)
        request = {"argv": argv, "folder": os.getcwd(), "env": dict(os.environ)}
        files = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))
        server.sendmsg([json.dumps(request).encode()], [files])
        answer = server.recv(100)
    # A process that a signal ends is reported as shells do.
    status = int(answer) if answer else -9
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
