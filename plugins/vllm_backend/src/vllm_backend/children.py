"""vLLM's own processes: each ends with the process that opened the engine, and tells it the errors that it logs.

vLLM calls `attach` in every process that it starts, as ``pyproject.toml`` declares, unless ``VLLM_PLUGINS`` leaves it
out. Where vLLM forks, it does not, and `os.register_at_fork` does. Processes of engines that were not opened here, such
as a server's, are left alone.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from corelm.errors import described, printable

#: The environment variable that names the process that opens an engine, and the file for errors, while vLLM starts.
_VARIABLE = "CORELM_VLLM_OWNER"
#: Seconds between two looks whether that process runs, and those from SIGTERM to SIGKILL.
_PAUSE, _GRACE = 1.0, 3.0
#: How many errors a message repeats, and how many characters of each.
_ERRORS, _CHARACTERS = 3, 1000

_starting = 0
_counting = threading.Lock()


def attach() -> None:
    """Have this process end with the one that opened the engine, and write its errors to the file of that one."""
    owner, _, path = os.environ.get(_VARIABLE, "").partition(":")
    if owner and int(owner) != os.getpid():
        logging.getLogger("vllm").addHandler(_ErrorFile(path))
        threading.Thread(target=_end_with, args=(int(owner), Path(path)), name="corelm-owner", daemon=True).start()


# Windows has none, and may use a server.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=attach)


@contextmanager
def attached() -> Iterator[None]:
    """Attach the processes that vLLM starts in the ``with`` block.

    Raises:
        RuntimeError: vLLM did not start. The message has what its processes said.
    """
    global _starting
    errors = Errors()
    with _counting:
        _starting += 1
        os.environ[_VARIABLE] = f"{os.getpid()}:{_file()}"
    try:
        yield
    except Exception as error:
        if not (said := errors.said()):
            raise
        raise RuntimeError(f"{error}{said}") from error
    finally:
        with _counting:
            _starting -= 1
            if not _starting:
                del os.environ[_VARIABLE]


class Errors:
    """What vLLM's processes have logged since this was made. All engines of this process share one file."""

    def __init__(self) -> None:
        self._start = len(_logged())

    def said(self) -> str:
        """Return the last errors, to be appended to a message; "" if there are none."""
        lines = _logged()[self._start :].decode(errors="replace").splitlines()
        return f"; vLLM's last errors: {'; '.join(list(dict.fromkeys(lines))[-_ERRORS:])}" if lines else ""


@functools.cache
def _file() -> Path:
    """Return the path of this process's file. The first error makes it."""
    path = Path(tempfile.gettempdir(), f"corelm-vllm-{secrets.token_hex(16)}.log")
    atexit.register(_remove, path, os.getpid())
    return path


def _remove(path: Path, owner: int) -> None:
    # Not in a fork.
    if os.getpid() == owner:
        path.unlink(missing_ok=True)


def _logged() -> bytes:
    return _file().read_bytes() if _file().exists() else b""


class _ErrorFile(logging.Handler):
    """Appends each exception that is logged as an error, in one line."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        # Other records repeat whole requests.
        if record.exc_info and (error := record.exc_info[1]) is not None:
            line = printable(described(error))[:_CHARACTERS]
            with suppress(OSError):
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
                with open(os.open(self._path, flags, 0o600), "w", encoding="utf-8") as file:
                    file.write(f"{line}\n")


def _end_with(owner: int, path: Path) -> None:
    parent = os.getppid()
    while os.getppid() == parent and _runs(owner):
        time.sleep(_PAUSE)
    with suppress(OSError):
        path.unlink()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os.kill(os.getpid(), signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # It runs, as another user.
        pass
    return True
