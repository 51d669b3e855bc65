"""The example for llama.cpp on a trained model, against the plain float32 forward of the same weights.

With weights in float32, llama.cpp gives the plain numbers. A file in 4 bits has the same weights, but llama.cpp rounds
what they are multiplied by.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import corelm
from corelm import Backend
from corelm_testing import PlainOracle
from helpers.real_checks import CHATS, TEXTS, Rows, rows_of
from helpers.real_model import float32_gguf, gguf_file, real_model

CONTEXT = 1024


@pytest.fixture(scope="module")
def exact() -> Iterator[Backend]:
    with corelm.get_backend("llamacpp", float32_gguf(), max_context=CONTEXT, precision=2e-5) as opened:
        yield opened


@pytest.fixture(scope="module")
def quantized() -> Iterator[Backend]:
    with corelm.get_backend("llamacpp", gguf_file(), max_context=CONTEXT) as opened:
        yield opened


@pytest.fixture(params=["exact", "quantized"])
def backend(request: pytest.FixtureRequest) -> Backend:
    opened: Backend = request.getfixturevalue(request.param)
    return opened


@pytest.fixture(scope="module")
def plain() -> PlainOracle:
    return PlainOracle.load(real_model("float32"))


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(real_model("float32"))


@pytest.fixture(scope="module")
def rows(reference: Any) -> Rows:
    return rows_of(reference)


def assert_within_precision(backend: Backend, found: list[Tensor], expected: list[Tensor]) -> None:
    precision = backend.capabilities.precision
    assert precision is not None
    off = (torch.cat(found) - torch.cat(expected)).abs()
    told = f"{float(off.mean()):.3g} nats a token, at most {float(off.max()):.3g}"
    assert float(off.mean()) <= precision and float(off.max()) <= 20 * precision, told


def test_texts_and_chats_are_the_ids_of_the_reference(quantized: Backend, reference: Any, rows: Rows) -> None:
    own: Any = quantized.tokenizer
    chats = [own.apply_chat_template(chat, tokenize=True, add_generation_prompt=True) for chat in CHATS]
    assert own(list(TEXTS))["input_ids"] + chats == rows
    assert own.batch_decode(rows) == reference.batch_decode(rows)
    assert (len(own), own.eos_token_id) == (len(reference), reference.eos_token_id)
    assert set(own.all_special_ids) >= quantized.eos_token_ids >= {reference.eos_token_id}


def test_scores_are_those_of_the_plain_forward(backend: Backend, plain: PlainOracle, rows: Rows) -> None:
    found = backend.score_logprobs(rows).logprobs.split()
    expected = [plain.logprobs(row, 1.0) for row in rows]
    assert_within_precision(backend, [row[1:] for row in found], [row[1:] for row in expected])


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9, "seed": 1}])
def test_log_probs_of_answers_are_those_of_the_plain_forward(
    backend: Backend, plain: PlainOracle, rows: Rows, sampling: dict[str, Any]
) -> None:
    batch = backend.generate(rows, {"max_new_tokens": 6, **sampling})
    assert batch.logprobs is not None
    answers = zip(rows, batch.ids.tolist(), strict=True)
    expected = [plain.logprobs([*prompt, *answer], 1.0)[len(prompt) :] for prompt, answer in answers]
    assert_within_precision(backend, list(batch.logprobs.split()), expected)


def test_what_was_read_before_changes_nothing(exact: Backend) -> None:
    text, other = exact.tokenizer([TEXTS[3], TEXTS[8]])["input_ids"]
    fresh = exact.score_logprobs([text]).logprobs.values
    for row in (text[:5], [*text[:5], *other], other, [*text, *other]):
        exact.score_logprobs([row])
        assert_within_precision(exact, [exact.score_logprobs([text]).logprobs.values], [fresh])
