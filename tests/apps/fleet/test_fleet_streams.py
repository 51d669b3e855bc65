"""Streams of a fleet: a row that is sampled again after a death is not handed over twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from apps.fleet.conftest import SAMPLING
from corelm.backend.arguments import prepare_generation
from corelm.errors import EngineError
from corelm.spec import GenerateRequest, TokenChunk
from helpers.mortal_toys import MortalToy, Toys, one_engine, user_rows

PROMPTS = [[72, n] for n in range(40, 48)]
EXPECTED = one_engine().generate(PROMPTS, SAMPLING)


def dies_at(chunk_number: int, deaths: list[str]) -> Any:
    """Return what lets the first engine that streams die at its chunk of this number."""

    def before(engine: MortalToy, hook: str, request: Any) -> None:
        if hook != "generate" or not user_rows(request) or deaths or request.on_tokens is None:
            return
        seen = 0

        def tell(chunk: TokenChunk) -> None:
            nonlocal seen
            seen += 1
            if seen == chunk_number and not deaths:
                deaths.append(engine.name)
                engine.die()
            request.on_tokens(chunk)

        engine.serve_instead = replace(request, on_tokens=tell)  # type: ignore[attr-defined]

    return before


@pytest.fixture(autouse=True)
def serves_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an engine serve the request that a test has put in front of its own."""
    plain = MortalToy._answer

    def answer(self: MortalToy, row: int, prompt: list[int], seed: int, request: GenerateRequest) -> Any:
        return plain(self, row, prompt, seed, self.__dict__.pop("serve_instead", None) or request)

    monkeypatch.setattr(MortalToy, "_answer", answer)


def test_a_row_that_is_sampled_again_goes_on_where_it_was() -> None:
    for chunk in (1, 2, 5):
        deaths: list[str] = []
        with Toys("a", "b", before=dies_at(chunk, deaths)) as toys:
            ids: list[list[int]] = [[] for _ in PROMPTS]
            stream = toys.backend.stream(PROMPTS, SAMPLING)
            for each in stream:
                ids[each.row] += each.ids
            assert deaths and ids == EXPECTED.ids.tolist() == stream.result.ids.tolist(), chunk


def test_a_row_without_a_seed_is_not_sampled_again_once_it_has_streamed() -> None:
    deaths: list[str] = []
    with Toys("a", "b", before=dies_at(3, deaths), per_answer_seeds=False) as toys:
        told: list[TokenChunk] = []
        unseeded = {**SAMPLING, "seed": None}
        call = prepare_generation(toys.backend.engine, PROMPTS, unseeded, on_tokens=told.append, on_error="skip")
        found = toys.backend.engine.call(call)
        assert deaths and found.errors is not None
        failed = [row for row, error in enumerate(found.errors) if error]
        assert len(failed) == 1 and "without a seed" in found.errors[failed[0]]
        with pytest.raises(EngineError):
            deaths.clear()
            engine = toys.backend.engine
            engine.call(prepare_generation(engine, PROMPTS, unseeded, on_tokens=told.append))


def test_a_greedy_row_is_sampled_again_without_a_seed() -> None:
    deaths: list[str] = []
    greedy = {"max_new_tokens": 8, "temperature": 0.0}
    with Toys("a", "b", before=dies_at(3, deaths), per_answer_seeds=False) as toys:
        assert [chunk.ids for chunk in toys.backend.stream(PROMPTS, greedy)]
        stream = toys.backend.stream(PROMPTS, greedy)
        list(stream)
        assert deaths and stream.result.ids.tolist() == one_engine().generate(PROMPTS, greedy).ids.tolist()
