"""Runs a server for as long as somebody holds the other end of its standard input. Needs the standard library alone.

    python supervisor.py COMMAND ...

The one who started it holds that end. When it closes, on purpose or because its holder was killed, the server's whole
process group is ended: asked first, killed if that does not help. A server that ends by itself leaves no child behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

#: Seconds a server has to end by itself. SGLang would take more than five, and then kills its processes too.
GRACE = 2.0


def main(command: list[str]) -> int:
    """The server's exit status, or minus the signal that ended it."""
    stop, ended = threading.Event(), threading.Event()
    # Before there is a server that this could leave behind.
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    # A session of its own: a Ctrl-C in the terminal is for the holder, who then closes this end.
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def watch_holder() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        stop.set()

    def end() -> None:
        stop.wait()
        # One that was stopped must run to hear that it should end.
        _signal_all(server, signal.SIGTERM, signal.SIGCONT)
        if not ended.wait(GRACE):
            _signal_all(server, signal.SIGKILL)

    for task in (watch_holder, end):
        threading.Thread(target=task, daemon=True).start()
    # Not reaped yet, so that no other process can have its number while the rest of its group is killed.
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
    ended.set()
    _signal_all(server, signal.SIGKILL)
    return server.wait()


def _signal_all(server: subprocess.Popen[bytes], *signals: int) -> None:
    for number in signals:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
