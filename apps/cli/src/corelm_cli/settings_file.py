"""`SettingsFile`: what all answers of one file were made with, saved once, next to them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from corelm._version import __version__
from corelm_cli.line_file import INSTEAD, OutputError

KEYS = {"corelm", "fingerprint", "settings", "provenance"}


class SettingsFile:
    """``answers.settings.json``: the settings of the answers in ``answers.jsonl``, and where their log-probs came from.

    Every answer names the fingerprint of its settings, so answers of other settings are recognised even if the file is
    of other answers.

    Attributes:
        path: where the file is.
        settings: the settings of this run.
        fingerprint: 16 hex digits of the sha256 of `settings`, as JSON.
        saved: the object in the file; None if there is no file yet.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))
        self.fingerprint = fingerprint(self.settings)
        self.saved = self._read()

    def refuse_answers_of(self, made: Any, where: str) -> None:
        """Raise the error that says how the settings of an answer differ from those of this run.

        Args:
            made: the fingerprint that the answer names.
            where: where the answer is, for the message.
        """
        if isinstance(made, dict):
            raise OutputError(f"{where} was written by an earlier version of corelm; {INSTEAD}")
        if self.saved is None:
            raise OutputError(
                f"{self.path}, which says how the answers were made, is missing; restore it, or {INSTEAD}"
            )
        then = self.saved["settings"]
        if made == self.saved["fingerprint"] == fingerprint(then):
            for name in sorted({*then, *self.settings}):
                was, now = then.get(name), self.settings.get(name)
                if was != now:
                    raise OutputError(f"{where} was made with {name} {was!r}, but {name} is now {now!r}; {INSTEAD}")
        raise OutputError(f"{where} was made with other settings than those in {self.path}; {INSTEAD}")

    def holds_for(self, made: Any) -> bool:
        """Return whether an answer that names this fingerprint has the settings of this run and of the file."""
        return made == self.fingerprint and self.saved is not None and self.saved["fingerprint"] == made

    @property
    def provenance(self) -> dict[str, Any] | None:
        """Where the log-probs of the answers came from; an answer with another provenance holds its own."""
        return None if self.saved is None else self.saved["provenance"]

    def save(self, provenance: dict[str, Any] | None) -> None:
        """Write the file. It is complete, or the old one is kept."""
        made = {
            "corelm": __version__,
            "fingerprint": self.fingerprint,
            "settings": self.settings,
            "provenance": provenance,
        }
        unfinished = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            # A lone surrogate, as in a path that is not UTF-8, cannot be encoded. backslashreplace writes it as JSON
            # does.
            text = json.dumps(made, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
            unfinished.write_bytes(text.encode(errors="backslashreplace"))
            os.replace(unfinished, self.path)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink()
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.saved = made

    def _read(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or set(found) != KEYS or not isinstance(found["settings"], dict):
            raise OutputError(
                f"{self.path} is not a settings file of corelm, but the settings of the answers are written to this "
                "file; move it, or use another --output"
            )
        return found


def fingerprint(settings: Mapping[str, Any]) -> str:
    """Return 16 hex digits that identify the settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
