"""Files of lines that one run at a time may write: locked, appended to, and repaired after a crash."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from corelm.errors import CoreLMError

try:
    import fcntl
except ImportError:  # Windows has no fcntl
    fcntl = None  # type: ignore[assignment]

#: A line number, or an id; and the beginning of one that was cut off.
_VALUE = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+|null')
_CUT_VALUE = re.compile(rb'"(?:[^"\\]|\\.)*\\?|-?|n|nu|nul')
#: What to do about answers that a run must not add to.
INSTEAD = "give --overwrite to replace them, or another --output"


class OutputError(CoreLMError, ValueError):
    """A file must not be written: another job or another program made it, or another run is writing it."""


class LineFile:
    """A file that lines are appended to, and that no other run writes.

    Attributes:
        path: where the file is.
    """

    def __init__(self, raw: io.FileIO, path: Path) -> None:
        self.path = path
        self._raw = raw

    def read(self, start: Sequence[bytes]) -> Iterator[bytes]:
        """Yield the lines in the file. Repair the end of the file when the caller asks for the line after the last.

        A last line that was cut off is removed, and so are NULs, which a power failure can leave. A last line that only
        lacks its newline gets one.

        Args:
            start: how every line starts: these texts, with a JSON value after each but the last. A line that starts
                differently was written by another program and is not removed, even if it lacks its newline.
        """
        end, line = 0, b"\n"
        with open(self._raw.fileno(), "rb", closefd=False) as reader:
            reader.seek(0)
            for line in reader:
                if not line.endswith(b"\n") and (_is_torn(line, start) or (end and not line.strip(b"\0"))):
                    self._raw.truncate(end)
                    return
                yield line
                end += len(line)
        if not line.endswith(b"\n"):
            self.append([b"\n"])

    def append(self, lines: Iterable[bytes]) -> None:
        """Append all of the lines, or, if that fails, none of them.

        Raises:
            OSError: the lines cannot be written, for example because the disk is full.
        """
        rest, end = memoryview(b"".join(lines)), os.fstat(self._raw.fileno()).st_size
        try:
            while rest:
                rest = rest[self._raw.write(rest) :]
        except BaseException as error:
            with suppress(OSError):
                self._raw.truncate(end)
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            raise

    def clear(self) -> None:
        """Remove all lines."""
        self._raw.truncate(0)


@contextmanager
def locked(path: Path, *, keep_empty: bool) -> Iterator[LineFile]:
    """Open a file that no other run may open until this one ends. Remove it then if it is empty."""
    while True:
        with path.open("a+b", buffering=0) as file:
            _lock(file, path)
            # Another run may have removed the file after it was opened here; what is written to it would be lost.
            if not _is_at(file, path):
                continue
            try:
                yield LineFile(file, path)
            finally:
                # Other runs check as above, so the file may be removed while it is locked.
                if not keep_empty and not os.fstat(file.fileno()).st_size and _is_at(file, path):
                    with suppress(OSError):
                        path.resolve().unlink()
            return


def _is_at(file: io.FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _lock(file: io.FileIO, path: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(f"another run is writing {path}; wait until it ends, or use another --output") from None
    except OSError:
        # Some network file systems do not support locks.
        pass


def _is_torn(line: bytes, start: Sequence[bytes]) -> bool:
    """Return whether a line without a newline is the beginning of one that starts like this."""
    with suppress(ValueError, RecursionError):
        json.loads(line)
        return False
    *texts, last = start
    for text in texts:
        if not line.startswith(text):
            return text.startswith(line)
        line = line.removeprefix(text)
        value = _VALUE.match(line)
        if not value:
            return _CUT_VALUE.fullmatch(line) is not None
        line = line[value.end() :]
    return line.startswith(last) or last.startswith(line)
