"""What the tests of cassettes share: engines that are recorded and replayed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import corelm
from corelm import Backend
from corelm_testing.cassette import CassetteRecorder
from corelm_testing.toy import ByteTokenizer


def recorded(path: Path, name: str = "toy", model: Any = None, **options: Any) -> Backend:
    """Open an engine whose calls are recorded; `mode` is the recorder's `record_mode`."""
    recorder = CassetteRecorder(path, record_mode=options.pop("mode", "once"))
    return corelm.get_backend(name, model, wrappers=[*options.pop("wrappers", ()), recorder], **options)


def replayed(path: Path, **options: Any) -> Backend:
    """Open a replay of a recording of the toy engine, whose tokenizer cannot be saved."""
    return corelm.get_backend("cassette", path, **{"tokenizer": ByteTokenizer(), **options})


def both(path: Path, run: Callable[[Backend], Any], **options: Any) -> tuple[Any, Any]:
    """Return what a run gives with the recorded engine, and what it gives with the replay."""
    with recorded(path) as backend:
        first = run(backend)
    with replayed(path, **options) as backend:
        return first, run(backend)


def calls_of(path: Path) -> list[dict[str, Any]]:
    """Return the calls of a cassette as a program without core reads them."""
    lines = [json.loads(line) for line in (path / "calls.jsonl").read_text().splitlines()]
    return [line for line in lines if "call" in line]
