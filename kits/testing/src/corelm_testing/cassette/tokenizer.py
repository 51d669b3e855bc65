"""The tokenizer of a replay: what a cassette says of the recorded one, and the tokenizer itself when it is needed."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corelm.errors import BackendNotInstalledError, described, how_to_install
from corelm.validate import invalid
from corelm_testing.cassette.file import TOKENIZER, CassetteError

#: What core reads of a tokenizer for ids alone.
_COPIED = (
    *("eos_token_id", "pad_token_id", "bos_token_id", "unk_token_id"),
    *("eos_token", "pad_token", "bos_token", "unk_token"),
    *("all_special_tokens", "all_special_ids"),
)


def tokenizer_facts(tokenizer: Any) -> dict[str, Any]:
    """Return what a cassette says of a tokenizer: what it is, its size, and its special tokens."""
    source = getattr(tokenizer, "name_or_path", None)
    return {
        "class": type(tokenizer).__name__,
        "name_or_path": source if isinstance(source, str) and source else None,
        "size": len(tokenizer) if hasattr(tokenizer, "__len__") else None,
        "attributes": {name: _plain(getattr(tokenizer, name)) for name in _COPIED if hasattr(tokenizer, name)},
    }


def save_tokenizer(tokenizer: Any, path: Path) -> None:
    """Save the files of a tokenizer in the folder of a cassette.

    Raises:
        InvalidRequestError: it cannot save itself.
    """
    save = getattr(tokenizer, "save_pretrained", None)
    if not callable(save):
        raise invalid(
            "save_tokenizer",
            f"a {type(tokenizer).__name__} has no save_pretrained; leave it out, and pass tokenizer= when you replay",
        )
    save(path / TOKENIZER)


class ReplayTokenizer:
    """The tokenizer of a recorded engine. It is loaded when a text is encoded, decoded or rendered, and not before.

    Args:
        path: the folder of the cassette.
        facts: what the cassette says of it, see `tokenizer_facts`.
        source: what to load: a path or a name. None takes the files in the cassette, or else the recorded name.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any], source: str | None = None) -> None:
        self._path, self._facts = path, facts
        self._source = source or (str(path / TOKENIZER) if (path / TOKENIZER).is_dir() else facts.get("name_or_path"))
        self._loaded: Any = None
        self._mutex = threading.Lock()
        self.__dict__.update(facts.get("attributes", {}))

    def __call__(self, *texts: Any, **options: Any) -> Any:
        """Return what the tokenizer returns."""
        return self._load()(*texts, **options)

    def decode(self, *ids: Any, **options: Any) -> Any:
        """Return what the tokenizer returns."""
        return self._load().decode(*ids, **options)

    def __len__(self) -> int:
        size = self._facts.get("size")
        return size if isinstance(size, int) else len(self._load())

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        # Called for what is not here. Private names are asked for by `copy`, `pickle` and the like; public ones also to
        # find out what a tokenizer can do.
        if name.startswith("_") or self._source is None:
            raise AttributeError(
                f"the tokenizer of the cassette {self.__dict__.get('_path')} has no {name!r}", name=name
            )
        return getattr(self._load(), name)

    def __repr__(self) -> str:
        return f"ReplayTokenizer({self._source!r})"

    def _load(self) -> Any:
        with self._mutex:
            if self._loaded is None:
                self._loaded = self._from_files()
            return self._loaded

    def _from_files(self) -> Any:
        remedy = (
            "pass tokenizer= with a path or an object, or record again with CassetteRecorder(…, save_tokenizer=True)"
        )
        what = f"cassette {self._path}: its tokenizer ({self._facts.get('class')})"
        if self._source is None:
            raise CassetteError(f"{what} was neither saved in the cassette nor loaded by a name; {remedy}")
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise BackendNotInstalledError(
                f"{what} is needed for texts and loads with transformers: {how_to_install('transformers')}; or {remedy}"
            ) from error
        try:
            return AutoTokenizer.from_pretrained(self._source)
        except Exception as error:
            raise CassetteError(f"{what} cannot be loaded from {self._source}: {described(error)}; {remedy}") from error


def _plain(value: Any) -> Any:
    """Return a special token, its id, or a list of either, as JSON. A class of the tokenizer's library may be a str."""
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if value is None:
        return None
    return str(value) if isinstance(value, str) else int(value)
