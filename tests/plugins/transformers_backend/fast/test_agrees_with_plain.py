"""With ``fast=False`` nothing of `transformers_backend.fast` runs, and the numbers are the same for every family."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from corelm import Backend
from corelm.backend.seeds import answer_seeds
from helpers.scoring_path import scoring_path
from helpers.tiny_models import FAMILIES, random_rows, tiny_model
from transformers_backend.scoring import ScoringPath

Open = Callable[..., Backend]
PROMPTS = random_rows(1, 40, 3, 17, 3)
#: Ragged rows, some of them with a common start.
ROWS = [
    *random_rows(30, 2, 1, 64, 9, seed=1),
    *(random_rows(40, seed=2)[0] + answer for answer in random_rows(5, 9, 1, 20, seed=3)),
]
PLAIN = ScoringPath("whole", "padded", 0)


def both(open_model: Open, model: Any) -> tuple[Backend, Backend]:
    """Return the same model behind the fast backend and behind the plain one."""
    return open_model(model, fast=True), open_model(model, fast=False)


def close(found: Tensor, expected: Tensor) -> None:
    # Float32 has steps of 8e-6 if a log-probability is below -64.
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_agree(family: str, temperature: float, open_model: Open) -> None:
    fast, plain = both(open_model, tiny_model(family))
    found, expected = (backend.score_logprobs(ROWS, temperature=temperature) for backend in (fast, plain))
    assert scoring_path(fast).head == "tiled" and scoring_path(plain) == PLAIN
    close(found.logprobs.values, expected.logprobs.values)
    assert torch.equal(found.scored.values, expected.scored.values)


@pytest.mark.parametrize(
    ("options", "head"), [({}, "tiled"), ({"return_logits": True}, "sliced"), ({"grad": True}, "tiled")]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_most_probable_ids_are_those_of_the_logits(
    family: str, options: dict[str, Any], head: str, open_model: Open
) -> None:
    fast, plain = both(open_model, tiny_model(family))
    found, own = (backend.score_logprobs(ROWS, return_argmax=True, **options) for backend in (fast, plain))
    assert scoring_path(fast).head == head and scoring_path(plain) == PLAIN
    logits = plain.score_logprobs(ROWS, return_logits=True)
    expected = torch.where(logits.scored.values, logits.logits.values.argmax(-1), -1)
    assert torch.equal(found.argmax.values, expected) and torch.equal(own.argmax.values, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree(family: str, open_model: Open) -> None:
    fast, plain = both(open_model, tiny_model(family))
    found, expected = (
        backend.score_logprobs(ROWS, score_from=[3] * len(ROWS), return_logits=True) for backend in (fast, plain)
    )
    assert scoring_path(fast).head == "sliced" and scoring_path(plain) == PLAIN
    close(found.logprobs.values, expected.logprobs.values)
    torch.testing.assert_close(found.logits.values, expected.logits.values, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_agree(family: str, open_model: Open) -> None:
    model = tiny_model(family)
    gradients = []
    for backend in both(open_model, model):
        model.zero_grad()
        backend.score_logprobs(ROWS, grad=True).logprobs.values.sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    found, expected = gradients
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max()) + 1
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4 * scale, msg=name)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"top_p": 0.95}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_agree(family: str, sampling: dict[str, float], open_model: Open) -> None:
    seeds = answer_seeds(5, range(len(PROMPTS)))
    # Many stop ids make rows leave the batch early.
    limits = {"max_new_tokens": 24, "stop_token_ids": range(10, 14)}
    found, expected = (
        backend.generate(PROMPTS, sampling | limits, seeds=seeds, logprobs="raw")
        for backend in both(open_model, tiny_model(family))
    )
    assert found.ids.tolist() == expected.ids.tolist() and found.finish_reasons == expected.finish_reasons
    close(found.logprobs.values, expected.logprobs.values)


def test_answers_of_a_head_that_onednn_computes_agree(open_model: Open) -> None:
    prompts, seeds = random_rows(5, 30, 1, vocab=33_000), answer_seeds(4, range(3))
    found, expected = (
        backend.generate(prompts, {"max_new_tokens": 12, "ignore_eos": True}, seeds=seeds)
        for backend in both(open_model, tiny_model(vocab_size=33_000))
    )
    assert found.ids.tolist() == expected.ids.tolist()
    close(found.logprobs.values, expected.logprobs.values)


def test_the_plain_backend_does_not_import_the_folder(open_model: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("transformers_backend.fast")]:
        monkeypatch.delitem(sys.modules, name)
    # None in sys.modules makes every import of it fail.
    monkeypatch.setitem(sys.modules, "transformers_backend.fast", None)
    with pytest.raises(ImportError, match="fast"):
        open_model(tiny_model())
    model, other = tiny_model(), tiny_model(seed=1)
    backend = open_model(model, fast=False)
    backend.generate(PROMPTS, {"max_new_tokens": 3})
    backend.score_logprobs(ROWS)
    backend.update_weights(other.state_dict())
    assert not any(name.startswith("transformers_backend.fast.") for name in sys.modules)
