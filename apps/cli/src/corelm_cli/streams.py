"""The standard streams of a command: input and answers as bytes, messages to the person who typed it."""

from __future__ import annotations

import codecs
import errno
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from corelm.errors import InvalidRequestError, printable


class Stream:
    """The standard output as a file of bytes.

    Python's own `sys.stdout` keeps what it could not write, and fails once more when the interpreter ends.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw

    def write(self, data: bytes) -> None:
        """Write all of the bytes.

        Raises:
            OSError: they cannot be written, for example because nothing reads the pipe any more.
        """
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._raw.write(rest) :]
            self._raw.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, "the standard output") from error


@contextmanager
def standard_output() -> Iterator[Stream]:
    """Yield the standard output. Unless it is a terminal, all else that is printed goes to the standard error.

    Engines print to the standard output, and so do the processes that they start. A program that reads our answers must
    not get this.
    """
    if sys.stdout is None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), "the standard output")
    sys.stdout.flush()
    try:
        number = sys.stdout.fileno()
    except io.UnsupportedOperation:  # a stream in memory
        yield Stream(sys.stdout.buffer)
        return
    with os.fdopen(os.dup(number), "wb", buffering=0) as ours:
        if not os.isatty(number):
            _redirect(number)
        try:
            yield Stream(ours)
        finally:
            with suppress(OSError):
                sys.stdout.flush()
            os.dup2(ours.fileno(), number)


def _redirect(number: int) -> None:
    """Let file `number` be the standard error; nothing, if that is closed."""
    try:
        os.dup2(sys.stderr.fileno(), number)
    except (AttributeError, OSError, io.UnsupportedOperation):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, number)
        os.close(nothing)


def drop_unwritten() -> None:
    """Drop what the standard streams hold and cannot write.

    At exit, Python would flush them again, and end with status 120 instead of the command's own.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)


@contextmanager
def opened_input(path: Path | None, *, whole: bool = False) -> Iterator[tuple[IO[bytes], os.stat_result | None]]:
    """Open a file, or the standard input for None, and yield it with what the system knows about it.

    That is None for a stream in memory.

    Args:
        path: the file.
        whole: the file is a text: yield one line of JSON that holds it.
    """
    if path is not None:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if whole:
                try:
                    text = file.read().decode("utf-8-sig")
                except UnicodeDecodeError as error:
                    raise InvalidRequestError(
                        f"{path} is not UTF-8 text: {error}; convert it, with iconv perhaps"
                    ) from error
                yield io.BytesIO(json.dumps({"text": text}).encode()), found
            else:
                yield file, found
        return
    if sys.stdin is None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), "the standard input")
    stdin = sys.stdin.buffer
    try:
        known = os.fstat(stdin.fileno())
    except io.UnsupportedOperation:
        known = None
    yield stdin, known


def without_bom(file: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file without the byte order mark that some editors write before the first."""
    lines = iter(file)
    for first in lines:
        yield first.removeprefix(codecs.BOM_UTF8)
        yield from lines


class Messages:
    """The standard error at the time of construction, as a file that can always be written to.

    Messages that cannot be shown are dropped: a run goes on when the program or the terminal that shows them is gone.
    """

    def __init__(self) -> None:
        # While a progress bar is shown, rich replaces sys.stderr with a file that writes to the bar's console, and thus
        # to this object.
        self._file = sys.stderr

    def __getattr__(self, name: str) -> Any:
        if name == "rich_proxied_file":
            # A console writes to the file of this name and not to this object, where failures are dropped.
            raise AttributeError(name)
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        if self._file is not None:
            with suppress(OSError):
                self._file.write(text)
        return len(text)

    def flush(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.flush()


def is_terminal(stream: Any) -> bool:
    """Return whether a person watches this stream. Variables such as FORCE_COLOR do not change the answer."""
    return stream is not None and bool(stream.isatty())


def tell(message: str) -> None:
    """Print a message to the standard error."""
    # A message may repeat foreign text. Its further lines are indented, so that none passes for a message of ours.
    print(printable(message, keep="\n").replace("\n", "\n  "), file=Messages())
