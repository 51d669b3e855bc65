"""The `corelm` command. It needs the extra `cli`, and says what to install if that is missing."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import NoReturn

from corelm.errors import how_to_install


def main() -> None:
    """Run the command, and end the process if torch was loaded; the entry point of the console script."""
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        sys.exit(f"the corelm command needs {' and '.join(missing)}: {how_to_install(*missing)}")
    if sys.stderr is None or not sys.stderr.isatty():
        # Engines load with progress bars, whose frames fill a log. Their libraries read these variables.
        for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")
    with interrupt_ends_process():
        from corelm_cli.app import app
        from corelm_cli.streams import drop_unwritten

    try:
        app()
    except SystemExit as end:
        if not isinstance(end.code, int | None) or "torch" not in sys.modules:
            raise
        drop_unwritten()
        _end_process(end.code or 0)
    finally:
        drop_unwritten()


def _end_process(status: int) -> NoReturn:
    """End as Python does, but without taking its modules down, which takes seconds after torch and transformers."""
    from corelm.application import flush_files

    for module, ending in ((threading, "_shutdown"), (atexit, "_run_exitfuncs")):
        with suppress(KeyboardInterrupt):
            getattr(module, ending)()
    flush_files()
    # The buffers of engines' C libraries.
    ctypes.CDLL(None).fflush(None)
    os._exit(status)


@contextmanager
def interrupt_ends_process() -> Iterator[None]:
    """Let Ctrl-C end the process at once, while libraries are imported and nothing needs to be put in order.

    Some libraries catch KeyboardInterrupt while they are imported, and fail later for another reason.
    """
    python = signal.default_int_handler
    # A process that ignores Ctrl-C, for example under nohup, goes on to do so.
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not python:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, python)
