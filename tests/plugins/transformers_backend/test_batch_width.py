"""How many rows are decoded at a time when answers have no limit, and what happens if they grow too wide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from corelm import Backend
from helpers.oracle import close
from helpers.plain_forward import Open, assert_answers
from helpers.tiny_models import VOCAB, random_rows, tiny_model, tiny_tokenizer

#: The limit of every forward pass in most tests here, and prompts that fill it when they have grown a little.
TOKENS, PROMPTS = 120, random_rows(5, 9, 5, 12, 3, 7)
FILLING = {"max_new_tokens": None, "ignore_eos": True, "seed": 3}


Narrow = Callable[[Any], Backend]


class Passes(list[tuple[int, int]]):
    """The rows and new columns of each forward pass; `act` is called in the pass with that number."""

    number, act = 0, staticmethod(lambda: None)


@contextmanager
def passes(model: Any) -> Iterator[Passes]:
    """Yield the forward passes inside."""
    seen, forward = Passes(), model.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(tuple(kwargs["input_ids"].shape))
        if len(seen) == seen.number:
            seen.act()
        return forward(*args, **kwargs)

    model.forward = noted
    yield seen
    del model.forward


def widths(seen: Passes) -> Iterator[int]:
    """Yield how many tokens, padding included, the model held after each forward pass."""
    columns = 0
    for rows, new in seen:
        columns = columns + 1 if new == 1 else new
        yield rows * columns


@pytest.fixture
def narrow(open_model: Open, short_answers_expected: None) -> Narrow:
    """Return how to open a model whose batches grow too wide."""
    return lambda model: open_model(model, max_batch_tokens=TOKENS)


def test_rows_without_a_limit_share_a_batch_in_a_long_context(open_model: Open) -> None:
    model = tiny_model(max_position_embeddings=32768)
    prompts = random_rows(*range(5, 21))
    sampling = {"max_new_tokens": None, "stop_token_ids": list(range(3, VOCAB, 12)), "seed": 1}
    backend = open_model(model)
    with passes(model) as seen:
        backend.generate(prompts, sampling)
        seen.clear()
        out = backend.generate(prompts, sampling)
    # One prefill of all rows; then one column at a time.
    assert seen[0] == (16, 20) and all(new == 1 for _, new in seen[1:])
    assert set(out.finish_reasons) == {"stop"}
    assert_answers(out, model, prompts)


def test_a_batch_that_grows_too_wide_lets_rows_wait(narrow: Narrow) -> None:
    model = tiny_model(max_position_embeddings=60)
    backend = narrow(model)
    backend.generate(PROMPTS, FILLING)
    with passes(model) as seen:
        backend.generate(PROMPTS, FILLING)
        seen.clear()
        out = backend.generate(PROMPTS, FILLING)
    assert seen[0][0] == 6
    # More than one row stays until two fill the limit, and no pass is wider than it.
    assert max(widths(seen)) <= TOKENS and sum(new > 1 for _, new in seen) < 6
    assert out.ids.lengths.tolist() == [60 - len(prompt) for prompt in PROMPTS]
    assert_answers(out, model, PROMPTS)


def test_an_answer_that_waited_is_the_one_it_would_have_been(open_model: Open, narrow: Narrow) -> None:
    model = tiny_model(max_position_embeddings=60)
    wide, small = open_model(model), narrow(model)
    for extra in ({"repetition_penalty": 1.3, "frequency_penalty": 0.3}, {"temperature": 0.0}, {"top_p": 0.8}):
        expected = wide.generate(PROMPTS, FILLING | extra, logprobs="processed")
        found = small.generate(PROMPTS, FILLING | extra, logprobs="processed")
        assert found.ids.tolist() == expected.ids.tolist() and found.finish_reasons == expected.finish_reasons, extra
        close(found.logprobs.values, expected.logprobs.values)


def test_a_stop_string_may_begin_before_the_row_waits(open_model: Open, narrow: Narrow) -> None:
    model = tiny_model(max_position_embeddings=60)
    wide = open_model(model)
    text = [tiny_tokenizer().decode(ids) for ids in wide.generate(PROMPTS, FILLING).ids.tolist()]
    # Every two characters of the answers that begin in the middle, where rows wait.
    stop = tuple({answer[at : at + 2] for answer in text for at in range(12, 40, 9)} - {""})[:6]
    expected = wide.generate(PROMPTS, FILLING | {"stop": stop})
    assert "stop" in expected.finish_reasons
    found = narrow(model).generate(PROMPTS, FILLING | {"stop": stop})
    assert found.ids.tolist() == expected.ids.tolist() and found.finish_reasons == expected.finish_reasons


def test_rows_that_wait_are_streamed_without_gaps(narrow: Narrow) -> None:
    backend = narrow(tiny_model(max_position_embeddings=60))
    expected = backend.generate(PROMPTS, FILLING).ids.tolist()
    chunks = list(backend.stream(PROMPTS, FILLING))
    for row, ids in enumerate(expected):
        own = [chunk for chunk in chunks if chunk.row == row]
        assert [i for chunk in own for i in chunk.ids] == ids
        assert [chunk.finish_reason for chunk in own] == [None] * (len(ids) - 1) + ["length"]


def test_rows_that_are_aborted_while_they_wait_keep_their_tokens(narrow: Narrow) -> None:
    model = tiny_model(max_position_embeddings=60)
    backend, names = narrow(model), tuple("abcdef")
    expected = backend.generate(PROMPTS, FILLING).ids.tolist()
    with passes(model) as seen:
        backend.generate(PROMPTS, FILLING)
        seen.clear()
        seen.number, seen.act = 15, lambda: backend.abort(["a", "c"])
        out = backend.generate(PROMPTS, FILLING, request_ids=names)
    # Six rows of 20 columns fill the limit. The longest prompt has 12, and the shortest three wait.
    assert out.finish_reasons == ("abort", "length", "abort", "length", "length", "length")
    for row, ids in enumerate(out.ids.tolist()):
        assert ids == (expected[row][:9] if row in (0, 2) else expected[row])
    # Read again are the third of them, and two of the other three, which waited for the longest.
    assert sum(rows for rows, new in seen[1:] if new > 1) == 3
