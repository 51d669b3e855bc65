"""Fixtures: a real `transformers serve`, on a model that writes letters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.letters import letter_model, letter_tokenizer
from helpers.transformers_server import TransformersServer


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Folders of the models that the server loads, by whether the model ends its answers."""
    found = {}
    for ends in (False, True):
        found[ends] = tmp_path_factory.mktemp("letters") / ("ending" if ends else "endless")
        letter_model(ends=ends).save_pretrained(found[ends])
        letter_tokenizer().save_pretrained(found[ends])
    return found


@pytest.fixture(scope="session")
def transformers_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransformersServer]:
    with TransformersServer(tmp_path_factory.mktemp("log") / "server.log") as server:
        yield server
