"""The most probable ids: what vLLM is asked for, and what becomes of candidates that cannot be right."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from corelm.spec import GenerateRequest
from corelm_engine_kit import RowError, checked_top_ids
from helpers.each import case
from helpers.fake_vllm import PROMPTS, VOCAB, Connect, FakeVLLM, next_logprobs
from helpers.requests import generation, scoring
from vllm_backend.top_ids import flat_candidates, limit, named_candidates, wanted


def request(k: int, logprobs: Any = "raw", **sampling: Any) -> GenerateRequest:
    return generation(
        PROMPTS,
        logprobs,
        **{"max_new_tokens": 4, **sampling},
        seeds=torch.tensor([1, 2, 3]),
        timeout=20.0,
        top_logprobs=k,
    )


# What is asked for ----------------------------------------------------------------------------------------------------


def test_one_candidate_more_shows_whether_there_are_others() -> None:
    for given, expected in [
        (request(0), 0),
        (request(5), 6),
        (request(5, top_k=5), 6),
        (request(5, "processed"), 6),
        (request(5, "processed", top_k=5), 6),
        (request(20, "processed", top_p=0.5), 20),
        (request(5, "processed", min_new_tokens=2), 6),
        (request(5, "processed", temperature=0.0), 0),
        (request(5, temperature=0.0), 6),
    ]:
        with case(given, expected):
            assert wanted(given, 20) == expected


def test_the_limit_of_an_engine_is_at_most_its_vocabulary() -> None:
    assert [limit(most, 500) for most in (-1, 0, 20, 1000)] == [500, 0, 20, 500]


# What is returned -----------------------------------------------------------------------------------------------------

INF = math.inf


def of(ids: list[list[int]], logprobs: list[list[float]], k: int, vocab_size: int = 9) -> Any:
    return checked_top_ids(torch.tensor(ids), torch.tensor(logprobs, dtype=torch.float64), k, vocab_size)


def test_ids_without_a_probability_are_left_out_and_the_tail_is_exact() -> None:
    logs = [math.log(0.75), math.log(0.25)]
    top = of([[4, 2, 0], [8, 7, 6]], [[*logs, -INF], [math.log(0.5), math.log(0.2), math.log(0.1)]], 2)
    assert top.ids.tolist() == [[4, 2], [8, 7]]
    assert top.tail.tolist() == [-INF, pytest.approx(math.log(0.3))]
    assert of([[4, 2, 0]], [[0.0, -INF, -INF]], 3).ids.tolist() == [[4, -1, -1]]
    assert of([[1, 0]], [[math.log(0.6), math.log(0.4 - 1e-9)]], 2, vocab_size=2).tail.tolist() == [-INF]


def test_candidates_that_are_no_log_probs_in_order_are_refused() -> None:
    for logprobs in [[-0.5, math.nan], [math.nan, -1.0], [-1.0, -0.5], [0.5, -1.0], [-INF, -INF], [-INF, -1.0]]:
        with case(logprobs), pytest.raises(RowError):
            of([[4, 2]], [logprobs], 2)


def test_a_candidate_outside_the_vocabulary_is_refused() -> None:
    for token in [-1, 9]:
        with case(token), pytest.raises(RowError, match="outside the vocabulary of 9"):
            of([[4, token]], [[-0.5, -1.0]], 2)


def flat(*positions: list[tuple[int, float]]) -> Any:
    ids = [token for position in positions for token, _ in position]
    values = [value for position in positions for _, value in position]
    ends = [sum(map(len, positions[: place + 1])) for place in range(len(positions))]
    return SimpleNamespace(token_ids=ids, logprobs=values, start_indices=[0, *ends[:-1]], end_indices=ends)


def test_a_position_without_its_candidates_is_refused() -> None:
    """The first is what vLLM's V1 runner returns in a step with a request that names ids."""
    for position in [[(3, -0.5), (0, -INF)], [(3, -0.5)], [(3, -0.5), (7, -0.9), (8, -1.0)]]:
        with case(position):
            good = [(3, -0.5), (3, -0.5)]
            assert flat_candidates(flat(good, good), 0, 2, 1)[0].tolist() == [[3], [3]]
            with pytest.raises(RowError):
                flat_candidates(flat(good, position), 0, 2, 1)


def test_named_candidates_are_sorted_and_the_token_that_is_one_too_many_is_left_out() -> None:
    ids, logprobs = named_candidates([{5: -3.0, 7: -0.5, 2: -1.0}, {2: -9999.0, 7: 0.0}], 2)
    assert ids[0].tolist() == [7, 2] and logprobs.tolist() == [[-0.5, -1.0], [0.0, -INF]]
    # The second is what vLLM's V1 runner returns in a step with a request that names ids.
    for position in [{5: -3.0}, {5: -3.0, 0: -9999.0}, {5: -3.0, 0: -INF}]:
        with case(position), pytest.raises(RowError, match="did not return the 2 most probable ids"):
            named_candidates([position], 2)


# Over HTTP ------------------------------------------------------------------------------------------------------------


def expected(row: list[int], k: int) -> tuple[list[int], list[float]]:
    logprobs = next_logprobs(row)
    best = sorted(range(VOCAB), key=logprobs.__getitem__, reverse=True)[:k]
    return best, [logprobs[token] for token in best]


def test_how_many_candidates_a_server_returns_is_found_out(connect: Connect, fake: FakeVLLM) -> None:
    for most, declared in [(0, 0), (1, 1), (5, 5), (20, 20), (333, 333), (10_000, VOCAB)]:
        with case(most, declared):
            fake.max_logprobs = most
            capabilities = connect(logprobs_mode="raw").capabilities
            assert (capabilities.top_logprobs, capabilities.score_top_k, capabilities.argmax) == (
                *(declared, declared),
                declared > 0,
            )


def test_answers_come_with_their_most_probable_ids(connect: Connect) -> None:
    result = connect().engine.plugin.generate(request(3))
    assert result.errors is None
    for prompt, answer, ids, logprobs in zip(
        PROMPTS, result.ids.tolist(), result.top_ids.tolist(), result.top_logprobs.tolist(), strict=True
    ):
        for place in range(len(answer)):
            best, values = expected([*prompt, *answer[:place]], 3)
            assert ids[place] == best and logprobs[place] == pytest.approx(values, abs=1e-5)
    mass = result.top_logprobs.values.double().exp().sum(-1) + result.tail_log_mass.values.double().exp()
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=1e-6)


def test_scores_come_with_the_most_probable_ids(connect: Connect) -> None:
    rows = [[5, 17, 300, 2], [8, 9]]
    result = connect().engine.plugin.score_logprobs(scoring(rows, timeout=20.0, return_argmax=True, top_k=4))
    assert result.errors is None and result.scored.tolist() == [[False, True, True, True], [False, True]]
    for row, own, ids, argmax in zip(
        rows, result.logprobs.tolist(), result.top_ids.tolist(), result.argmax.tolist(), strict=True
    ):
        assert ids[0] == [-1] * 4 and argmax[0] == -1
        for place in range(1, len(row)):
            best, _ = expected(row[:place], 4)
            assert ids[place] == best and argmax[place] == best[0]
            assert own[place] == pytest.approx(next_logprobs(row[:place])[row[place]], abs=1e-5)


@pytest.mark.parametrize("spoil", ["missing", "short", "fewer"])
def test_a_reply_without_its_candidates_fails_its_row_alone(connect: Connect, fake: FakeVLLM, spoil: str) -> None:
    backend = connect()

    def change(choice: dict[str, Any]) -> None:
        if choice["prompt_token_ids"] == PROMPTS[1]:
            if spoil == "missing":
                choice["logprobs"]["top_logprobs"] = None
            elif spoil == "short":
                choice["logprobs"]["top_logprobs"].pop()
            else:
                choice["logprobs"]["top_logprobs"][1].popitem()
                choice["logprobs"]["top_logprobs"][1].popitem()

    fake.spoil = change
    result = backend.engine.plugin.generate(request(3))
    assert [bool(error) for error in result.errors] == [False, True, False]
    assert "most probable ids" in result.errors[1] and result.top_ids.lengths.tolist() == [4, 0, 4]


@pytest.mark.parametrize("tokens", [0, 2])
def test_an_aborted_row_of_a_stream_keeps_its_tokens_with_their_most_probable_ids(
    connect: Connect, fake: FakeVLLM, tokens: int
) -> None:
    """Without a route for aborts its connection is closed, and there is no reply: neither of it, nor, if it had no
    token yet, of any id. The other rows must not suffer.
    """
    backend, here, gone = connect(), threading.local(), threading.Event()
    plain = backend.engine.plugin.generate(request(3))

    def pause(step: int) -> None:
        if here.prompt == PROMPTS[1] and step == tokens:
            gone.wait(20)

    fake.spoil, fake.pause = lambda choice: setattr(here, "prompt", choice["prompt_token_ids"]), pause
    told, all_told = [0], threading.Event()

    def on_tokens(chunk: Any) -> None:
        told[0] += len(chunk.ids)
        if told[0] == 8 + tokens:
            all_told.set()

    asked = replace(request(3), on_tokens=on_tokens)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(backend.engine.plugin.generate, asked)
        assert all_told.wait(20)
        backend.abort(["1"])
        gone.set()
        found = future.result(20)
    assert found.finish_reasons == ("length", "abort", "length") and found.errors is None
    assert found.ids.lengths.tolist() == [4, tokens, 4] == found.top_ids.lengths.tolist()
    for name in ("ids", "logprobs", "top_ids", "top_logprobs", "tail_log_mass"):
        for row, other in zip(getattr(found, name).split(), getattr(plain, name).split(), strict=True):
            torch.testing.assert_close(row, other[: len(row)])
