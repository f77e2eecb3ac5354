"""The commands `meshloom` and `python` in processes forked from a warm one.

It has imported what the trainer needs, a second or two of CPU time, and initialized no
device, as that of a job has (trainer/warm.py). What a shell runs with its folder of
commands in PATH is warm_client.py, which hands over its arguments, folder, environment
and open files, and ends as the forked process does.
"""

import array
import contextlib
import gc
import importlib
import json
import os
import pathlib
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from meshloom.launch import guard
from meshloom.trainer import cli, warm
from meshloom.trainer.commands.devices import without_collection

CLIENT = pathlib.Path(__file__).with_name("warm_client.py")
BIN = pathlib.Path(sys.executable).parent
# Besides what training needs.
MODULES = ("meshloom.trainer.report.writing", "meshloom.trainer.verify.certify")
# Read when Python or jax starts, so a command that changes them is started anew.
EARLY = ("PYTHON", "JAX_")
REQUEST_BYTES = 1 << 18  # one packet; it holds an environment
# How long the processes it has forked may take to end with it.
END_SECONDS = 10


@contextlib.contextmanager
def started(folder: pathlib.Path, env: Mapping[str, str]) -> Iterator[pathlib.Path]:
    """Starts the warm process, gives a folder of commands, and ends both."""
    address = str(folder / "socket")
    commands = folder / "bin"
    commands.mkdir()
    for name in ("meshloom", "python"):
        client = [sys.executable, "-I", "-S", str(CLIENT), address, name]
        (commands / name).write_text(f'#!/bin/sh\nexec {shlex.join(client)} "$@"\n')
        (commands / name).chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-P", __file__, address],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        try:
            assert process.stdout.readline() == b"ready\n", "it has failed, see stderr"
            yield commands
            process.stdin.close()  # so it ends
            process.wait(timeout=END_SECONDS)
        finally:
            process.kill()
            process.wait()


def serve(address: str) -> int:
    """Forks a process for each client, until standard input ends."""
    with without_collection():
        for name in (*warm.MODULES, *MODULES):
            importlib.import_module(name)
    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()  # so that the garbage collection of a fork does not copy shared pages
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        watching: set[int] = set()
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            client, _ = listener.accept()
            parent = os.getpid()
            watching.add(pid := os.fork())
            if not pid:
                listener.close()
                guard.die_with(parent)
                return watch(client)
            client.close()
            watching -= {p for p in watching if os.waitpid(p, os.WNOHANG)[0]}
    for pid in watching:
        os.kill(pid, signal.SIGTERM)  # what it has forked dies with it
        os.waitpid(pid, 0)
    return 0


def watch(client: socket.socket) -> int:
    """Forks the process that a client asks for, and tells it how that has ended.

    Returns in the forked process only, with its exit status.
    """
    text, ancillary, _, _ = client.recvmsg(REQUEST_BYTES, socket.CMSG_SPACE(3 * 4))
    (_, _, handles) = ancillary[0]
    files = array.array("i", handles)
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        client.close()
        return become(parent, files, json.loads(text))
    for file in files:
        os.close(file)
    ended = os.pidfd_open(pid)
    if ended not in select.select([ended, client], [], [])[0]:  # the client is gone
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):
        client.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def become(parent: int, files: array.array, request: dict[str, Any]) -> int:
    """Runs the command in this process, with what the client has handed over."""
    os.setsid()
    guard.die_with(parent)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    program, *argv = request["argv"]
    env = request["env"]
    is_known = program == "meshloom" or argv[0].endswith(".py")
    if not is_known or early(env) != early(os.environ):
        os.execve(BIN / program, [str(BIN / program), *argv], env)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [program, *argv]
    if program == "meshloom":
        return cli.main()
    sys.argv = argv
    sys.path.insert(0, os.path.dirname(os.path.realpath(argv[0])))
    runpy.run_path(argv[0], run_name="__main__")
    return 0


def early(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(EARLY)}


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1]))
