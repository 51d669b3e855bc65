"""Whether processes have ended, for tests about what outlives whom; and a port for one that listens."""

from __future__ import annotations

import errno
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

#: Seconds after which a test that waits has failed.
PATIENCE = 60.0


def wait_until(condition: Callable[[], bool], patience: float = PATIENCE) -> bool:
    """Whether `condition` came true within `patience` seconds."""
    end, pause = time.monotonic() + patience, threading.Event()
    while not condition():
        if time.monotonic() > end:
            return False
        pause.wait(0.02)
    return True


def runs(pid: int) -> bool:
    """Whether there is such a process. One that has ended and whose parent has not looked does not run."""
    return pid in _running()


def group(pid: int) -> set[int]:
    """The running processes of the process group `pid`."""
    return {found for found, (_, _, leader) in _running().items() if leader == pid}


def children(pid: int) -> set[int]:
    """The running processes that `pid` has started."""
    return {found for found, (_, parent, _) in _running().items() if parent == pid}


def _running() -> dict[int, tuple[str, int, int]]:
    """State, parent and process group of every process that runs."""
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
    """Whether all of them have ended, or do so soon."""
    pids = set(pids)
    return wait_until(lambda: not any(runs(pid) for pid in pids))


def free_port() -> int:
    """One below those that the system gives to outgoing connections: it could give one away before a server is up."""
    while True:
        port = secrets.choice(range(15000, 32000))
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError as error:
                # Another one may be free; whatever else it is would be so again.
                if error.errno != errno.EADDRINUSE:
                    raise
