"""The files of a cassette: a header, and a line for every call. `docs/cassette-format.md` describes them.

A call is written when it has ended, in one line and at once. So a program that dies leaves every call that has ended,
and a reader passes over a line that was cut off.
"""

from __future__ import annotations

import io
import json
import os
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows has no fcntl
    fcntl = None  # type: ignore[assignment]

from corelm.errors import CoreLMError, described
from corelm.validate import shown

FORMAT, VERSION = "corelm-cassette", 1
HEADER, CALLS, TOKENIZER = "cassette.json", "calls.jsonl", "tokenizer"
#: What a line ends with: the CRC-32 of all that is before the comma.
_CHECK = b',"crc32":"%08x"}'
_CHECK_LENGTH = len(_CHECK % 0)


class CassetteError(CoreLMError, ValueError):
    """A cassette cannot be written or read: damaged, made by something else, in use, or there already."""


class NotRecordedError(CoreLMError, LookupError):
    """A cassette does not hold the answer to a call. No engine was asked.

    Attributes:
        problems: the flat indices of the rows that are not recorded, ascending, each with what is wrong with it.
    """

    def __init__(self, message: str, *, problems: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.problems = dict(sorted((problems or {}).items()))

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(self.problems)


class CassetteWriter:
    """Appends calls to a cassette. Any number of threads may; a second writer is refused, also in another process.

    Args:
        path: the folder of the cassette. It is made if it is missing.
        replace: whether to remove what an earlier recording has left.

    Raises:
        CassetteError: the folder holds something else, cannot be written, or another recorder writes to it.
    """

    def __init__(self, path: Path, *, replace: bool) -> None:
        self.path = path
        self._mutex = threading.Lock()
        try:
            _refuse_other_folders(path)
            path.mkdir(parents=True, exist_ok=True)
            self._file = (path / CALLS).open("ab+")
            _lock(self._file, path)
            if replace:
                (path / HEADER).unlink(missing_ok=True)
                self._file.truncate(0)
            else:
                _drop_torn_line(self._file)
        except OSError as error:
            raise CassetteError(f"cassette {path}: it cannot be written: {described(error)}") from error

    def header(self, values: Mapping[str, Any]) -> None:
        """Write the header, all of it or nothing."""
        text = json.dumps({"format": FORMAT, "version": VERSION, **values}, indent=1)
        part = self.path / (HEADER + ".part")
        part.write_text(text + "\n", encoding="utf-8")
        os.replace(part, self.path / HEADER)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a line. A record that comes after `close` is dropped: its engine has ended it.

        Raises:
            CassetteError: it cannot be written.
        """
        line = _line(record)
        with self._mutex:
            if self._file.closed:
                return
            try:
                self._file.write(line)
                self._file.flush()
            except OSError as error:
                raise CassetteError(f"cassette {self.path}: a call cannot be written: {described(error)}") from error

    def close(self, *, complete: bool = True) -> None:
        """Say that the recording is complete if it is, and let others write."""
        if complete:
            self.append(_LAST)
        with self._mutex:
            if fcntl is not None and not self._file.closed:
                # Closing the file does not release it as long as a fork of this process has it open, too.
                with suppress(OSError):
                    fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()


class CassetteReader:
    """Reads a cassette, one call at a time: it may be larger than the memory.

    Args:
        path: the folder of the cassette.

    Attributes:
        header: the header.

    Raises:
        CassetteError: there is no cassette, or its format is not known.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = read_header(path)
        # The program may change its folder.
        self._calls = (path / CALLS).absolute()
        self._offsets: list[int] = []

    def records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the number of each line, from 1 on, and its record. A line that was cut off is passed over.

        Raises:
            CassetteError: a line is damaged, and the message names it; or there are none.
        """
        offset = 0
        with self._opened() as file:
            for number, text in enumerate(file, 1):
                if text.endswith(b"\n"):
                    self._offsets.append(offset)
                    offset += len(text)
                    yield number, self._parsed(text[:-1], number)

    def read(self, number: int) -> dict[str, Any]:
        """Return the record of a line, which `records` has yielded."""
        with self._opened() as file:
            file.seek(self._offsets[number - 1])
            return self._parsed(file.readline()[:-1], number)

    @contextmanager
    def _opened(self) -> Iterator[io.BufferedReader]:
        try:
            with self._calls.open("rb") as file:
                yield file
        except OSError as error:
            raise CassetteError(f"cassette {self.path}: {CALLS} cannot be read: {described(error)}") from error

    def _parsed(self, text: bytes, number: int) -> dict[str, Any]:
        damaged = f"cassette {self.path}: line {number} of {CALLS} is damaged"
        try:
            record = json.loads(text)
            if not isinstance(record, dict):
                raise ValueError(f"expected an object, got {shown(record)}")
        except (ValueError, RecursionError) as error:
            raise CassetteError(f"{damaged}: {described(error)}; record again") from error
        if "crc32" in record and text[-_CHECK_LENGTH:] != _CHECK % zlib.crc32(text[:-_CHECK_LENGTH]):
            raise CassetteError(
                f"{damaged}: it is not what its crc32 was made of. If it was edited on purpose, remove its crc32; "
                "otherwise record again"
            )
        return record


def _line(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(record, separators=(",", ":"), allow_nan=False).encode()[:-1]
    return text + _CHECK % zlib.crc32(text) + b"\n"


#: The record with which a complete recording ends, and its line.
_LAST = {"end": True}
_END = _line(_LAST)


def read_header(path: Path) -> dict[str, Any]:
    """Return the header of a cassette.

    Raises:
        CassetteError: see `CassetteReader`.
    """
    try:
        header = json.loads((path / HEADER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = "holds no cassette" if path.exists() else "does not exist"
        raise CassetteError(
            f"{path} {what}; record one with get_backend(…, wrappers=[CassetteRecorder({os.fspath(path)!r})])"
        ) from None
    except (OSError, ValueError) as error:
        raise CassetteError(f"cassette {path}: {HEADER} cannot be read: {described(error)}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise CassetteError(f'cassette {path}: {HEADER} does not say "format": "{FORMAT}"; something else made it')
    if header.get("version") != VERSION:
        raise CassetteError(
            f"cassette {path}: it has version {shown(header.get('version'))} of the format, and this core reads "
            f"version {VERSION}; use the core that recorded it ({shown(header.get('core'))}), or record again"
        )
    return header


def is_cassette(path: Path) -> bool:
    """Return whether the folder holds a header: a recording was begun there."""
    return (path / HEADER).exists()


def is_complete(path: Path) -> bool:
    """Return whether a cassette was recorded to its end: the engine was closed."""
    try:
        with (path / CALLS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - len(_END)))
            return file.read() == _END and is_cassette(path)
    except OSError:
        return False


def _refuse_other_folders(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise CassetteError(f"cassette {path}: it is a file; a cassette is a folder")
    own = {HEADER, HEADER + ".part", CALLS, TOKENIZER}
    if path.exists() and (others := sorted({each.name for each in path.iterdir()} - own)):
        raise CassetteError(f"cassette {path}: the folder holds something else ({others[0]}); name a new one")


def _drop_torn_line(file: io.BufferedRandom) -> None:
    """Remove what a recorder that died has left of its last line."""
    file.seek(0)
    file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))


def _lock(file: io.BufferedRandom, path: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise CassetteError(
            f"cassette {path}: another recorder writes to it; wait until its engine is closed, or name another folder"
        ) from None
    except OSError:
        # Some network file systems do not support locks.
        return
