"""Run a server until standard input closes. Uses the standard library only.

    python plugins/sglang_backend/src/sglang_backend/supervisor.py COMMAND ...

The process that starts the supervisor keeps the other end of its standard input open. When that end closes, on purpose
or because its holder was killed, the supervisor ends the server's whole process group: first with SIGTERM, then with
SIGKILL. If the server ends by itself, the supervisor kills the children that it left behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

#: Seconds between SIGTERM and SIGKILL. SGLang would take more than five to end, and then kills its processes too.
GRACE = 2.0


def main(command: list[str]) -> int:
    """Return the server's exit status, or minus the signal that ended it."""
    stop, ended = threading.Event(), threading.Event()
    # Set before the server starts, so that a signal never ends the supervisor alone.
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    # In a new session, so that a Ctrl-C in the terminal reaches only the holder, which then closes its end.
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def watch_holder() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        stop.set()

    def end_server() -> None:
        stop.wait()
        # SIGCONT: a stopped process handles SIGTERM only once it runs again.
        _signal_all(server, signal.SIGTERM, signal.SIGCONT)
        if not ended.wait(GRACE):
            _signal_all(server, signal.SIGKILL)

    for task in (watch_holder, end_server):
        threading.Thread(target=task, daemon=True).start()
    # WNOWAIT: until the server is reaped, no other process gets its id, so the group can be killed safely.
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
