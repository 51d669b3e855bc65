"""The example of a backend on `LogitsEngine` keeps the promises of the kit, in 80 lines; `make nightly` checks all."""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from corelm import Backend
from corelm_testing.tiny import DIALOGUES
from examples import ngram_backend
from helpers.pages import Page
from helpers.selected_kit import SelectedKit

DOCUMENTS = DIALOGUES.read_text(encoding="utf-8").split("\n\n")


def test_the_example_is_short_and_on_its_page() -> None:
    source = Path(ngram_backend.__file__).read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 80
    page = Path(ngram_backend.__file__).parents[1] / "docs" / "local-engines.md"
    assert Page(page).blocks("py") == [source]


class TestTrigram(SelectedKit):
    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(cls) -> Callable[[], Backend]:
        def open_one() -> Backend:
            return Backend.from_plugin(ngram_backend.TrigramBackend.open(str(DIALOGUES)), name="ngram", model_name="-")

        return open_one

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def counted(cls) -> None:
        ids = [token for text in DOCUMENTS for token in (256, *text.encode(), 258)]
        cls.counts = [Counter(zip(*(ids[at:] for at in range(n)), strict=False)) for n in (1, 2, 3)]
        cls.contexts = [Counter(zip(*(ids[at:-1] for at in range(n)), strict=False)) for n in (1, 2)]

    def next_logprobs(self, ids: list[int], temperature: float) -> Tensor:
        logits = [math.log(self._chance(ids[-2:], token)) for token in range(259)]
        return (torch.tensor(logits, dtype=torch.float64) / temperature).log_softmax(-1).float()

    def _chance(self, context: list[int], token: int) -> float:
        shorter = self._chance(context[1:], token) if context else 1 / 259
        seen = self.contexts[len(context) - 1][tuple(context)] if context else sum(self.counts[0].values())
        return (self.counts[len(context)][(*context, token)] + 4 * shorter) / (seen + 4)
