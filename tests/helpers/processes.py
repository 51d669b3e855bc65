"""Check whether processes have ended; find a free port for a server."""

import errno
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

#: Seconds after which a wait fails the test.
PATIENCE = 60.0


def wait_until(condition: Callable[[], bool], patience: float = PATIENCE) -> bool:
    """Wait for `condition`; return whether it became true within `patience` seconds."""
    end, pause = time.monotonic() + patience, threading.Event()
    while not condition():
        if time.monotonic() > end:
            return False
        pause.wait(0.02)
    return True


def heed_interrupts() -> None:
    """Undo for a child what a shell does to background processes: they ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def read_line(process: subprocess.Popen[str]) -> str:
    """Return the next line that a process writes, and read no further.

    ``process.stdout.readline()`` may read more lines and keep them, and ``communicate`` then returns without them.
    """
    assert process.stdout is not None
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(process.stdout.fileno(), 1)):
        line += byte
    return line.decode()


def sleeps(pid: int) -> bool:
    """Return whether the main thread of the process waits, for input for example."""
    return _running().get(pid, ("", 0, 0))[0] == "S"


def stopped(pid: int) -> bool:
    """Return whether the process was stopped, with SIGSTOP for example."""
    return _running().get(pid, ("", 0, 0))[0] == "T"


def runs(pid: int) -> bool:
    """Return whether the process is running. A zombie is not."""
    return pid in _running()


def group(pid: int) -> set[int]:
    """Return the running processes of the process group `pid`."""
    return {found for found, (_, _, leader) in _running().items() if leader == pid}


def children(pid: int) -> set[int]:
    """Return the running child processes of `pid`."""
    return {found for found, (_, parent, _) in _running().items() if parent == pid}


def _running() -> dict[int, tuple[str, int, int]]:
    """Return state, parent and process group of every running process."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, leader = entry.read_text(errors="replace").rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "ZX":
            found[int(entry.parent.name)] = (state, int(parent), int(leader))
    return found


def all_end(pids: Iterable[int]) -> bool:
    """Return whether all of them end within `PATIENCE` seconds."""
    pids = set(pids)
    return wait_until(lambda: not any(runs(pid) for pid in pids))


def free_port() -> int:
    """Return a free port below the range of outgoing connections, which could take it before the server is up."""
    while True:
        port = secrets.choice(range(15000, 32000))
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError as error:
                # If the port is taken, try another one; any other error would occur again.
                if error.errno != errno.EADDRINUSE:
                    raise
