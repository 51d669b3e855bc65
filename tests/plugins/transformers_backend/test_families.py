"""Every family computes its logits differently (scaled, capped, projected, tied, biased). All must be right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from corelm import Backend
from helpers import oracle
from helpers.scoring_path import PACKED, scoring_path
from helpers.tiny_models import DEVICE, FAMILIES, random_rows, tiny_model
from transformers_backend.scoring import ScoringPath

Open = Callable[..., Backend]
PROMPTS = random_rows(1, 40, 3, 17, 3)
TEXTS = random_rows(30, 2, 1, 64, 9, seed=1)
#: These have their own kind of attention, or none, so rows are padded.
PADDED = {"bloom", "mamba"}


@pytest.mark.parametrize("family", FAMILIES)
def test_generated_logprobs_are_the_models_own(family: str, open_model: Open) -> None:
    model = tiny_model(family)
    out = open_model(model).generate(PROMPTS, {"max_new_tokens": 12, "seed": 5}, logprobs="raw")
    for prompt, answer, found in zip(PROMPTS, out.ids.tolist(), out.logprobs.split(), strict=True):
        # These models' logits are so large that the oracle itself is up to 1.4e-5 off (Granite, compared with float64).
        torch.testing.assert_close(found, oracle.answer_logprobs(model, prompt, answer), rtol=1e-7, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_logits_are_the_models_own(family: str, open_model: Open) -> None:
    model = tiny_model(family)
    out = open_model(model).score_logprobs(TEXTS, temperature=0.7, return_logits=True)
    for ids, found, logits in zip(TEXTS, out.logprobs.split(), out.logits.split(), strict=True):
        torch.testing.assert_close(found, oracle.logprobs(model, ids, temperature=0.7), rtol=0, atol=1e-5)
        assert not logits[0].any()
        torch.testing.assert_close(logits[1:], oracle.next_logits(model, ids)[:-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_take_the_fast_path_and_are_the_models_own(family: str, temperature: float, open_model: Open) -> None:
    model = tiny_model(family)
    backend = open_model(model)
    (prompt,) = random_rows(40, seed=2)
    rows = [*TEXTS, *(prompt + answer for answer in random_rows(5, 9, 1, 20, seed=3))]
    out = backend.score_logprobs(rows, temperature=temperature)
    for ids, found in zip(rows, out.logprobs.split(), strict=True):
        expected = oracle.logprobs(model, ids, temperature)
        # Float32 has steps of 8e-6 where a log-probability is below -64.
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-5)
    path = scoring_path(backend)
    # Some releases of transformers use SDPA for Gemma 2, and some do not.
    padded = family in PADDED or (family == "gemma2" and model.config._attn_implementation != "sdpa")
    layout, shared = ("padded", 0) if padded else (PACKED, 3 * 40)
    assert path == ScoringPath("tiled", layout, shared)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_the_models_own(family: str, open_model: Open) -> None:
    model = tiny_model(family)
    ids = TEXTS[0]
    open_model(model).score_logprobs([ids], grad=True).logprobs.values.sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    table = oracle.own_logits(model, ids)[:-1].log_softmax(-1)
    table[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-4, atol=1e-4 * float(gradient.abs().max() + 1), msg=name
        )


@pytest.mark.parametrize("family", ["granite", "cohere", "gemma2"])
def test_these_heads_differ_from_a_matrix_product(family: str) -> None:
    """If they did not, the tests above would pass without the scale or cap."""
    model = tiny_model(family)
    with torch.no_grad():
        hidden = model.get_decoder()(input_ids=torch.tensor([TEXTS[0]], device=DEVICE)).last_hidden_state[0]
        naive = model.get_output_embeddings()(hidden).log_softmax(-1).cpu()
    assert float((naive - oracle.next_logits(model, TEXTS[0]).log_softmax(-1)).abs().max()) > 0.1


def with_logits_that_depend_on_the_column(model: Any) -> Any:
    """Return the model with a head that cannot run on slices: its logits depend on the column of a position."""
    plain = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        slope = torch.linspace(0, 3, model.config.vocab_size, device=DEVICE)
        out.logits = out.logits + torch.arange(out.logits.shape[1])[None, :, None] * slope
        return out

    model.forward = forward
    return model


def test_a_head_that_cannot_be_sliced_is_run_whole(open_model: Open) -> None:
    model = with_logits_that_depend_on_the_column(tiny_model())
    out = open_model(model).score_logprobs(TEXTS, score_from=[3, 1, 1, 60, 2])
    for ids, start, found in zip(TEXTS, [3, 1, 1, 60, 2], out.logprobs.split(), strict=True):
        torch.testing.assert_close(found[start:], oracle.logprobs(model, ids)[start:], rtol=0, atol=1e-4)
