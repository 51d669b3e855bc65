"""Every family computes its logits differently (scaled, capped, projected, tied, biased). All must be right.

Each number of a backend is compared with the plain forward of its model: answers, scores, logits, sets of ids,
gradients. With ``fast=False`` nothing of `transformers_backend.fast` runs, and the numbers are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from corelm import Backend, Ragged, TokenSets
from corelm.backend.arguments import answer_seeds
from helpers import oracle
from helpers.plain_forward import (
    Open,
    assert_answers,
    assert_same_gradients,
    assert_scores,
    gradients,
    own_loss,
)
from helpers.scoring_path import PACKED, scoring_path
from helpers.several_ids import check_top, over_set
from helpers.tiny_models import DEVICE, FAMILIES, random_rows, tiny_model, tiny_tokenizer
from transformers_backend import TransformersBackend
from transformers_backend.scoring import ScoringPath

PROMPTS = random_rows(1, 40, 3, 17, 3)
#: Ragged rows, four of them with a common start.
ROWS = [
    *random_rows(30, 2, 1, 64, 9, seed=1),
    *(random_rows(40, seed=2)[0] + answer for answer in random_rows(5, 9, 1, 20, seed=3)),
]
#: These have their own kind of attention, or none, so rows are padded.
PADDED = {"bloom", "mamba"}
#: Each of these has something that the others have not: a cap and windows, a scale, a projection, a bias, experts.
FIRST = {"qwen2-tied", "opt-projected", "mixtral", "granite", "gemma2", "bloom", "mamba", "phi-biased"}
FIRST_PLAIN = {"gemma2", "mamba"}


@dataclass
class Opened:
    family: str
    fast: bool
    model: Any
    backend: Backend


def _cases() -> Iterator[Any]:
    for family in FAMILIES:
        for fast, first in ((True, FIRST), (False, FIRST_PLAIN)):
            marks = [] if family in first else [pytest.mark.nightly]
            yield pytest.param((family, fast), id=f"{family}-{'fast' if fast else 'plain'}", marks=marks)


@pytest.fixture(scope="module", params=_cases())
def opened(request: pytest.FixtureRequest) -> Iterator[Opened]:
    family, fast = request.param
    model = tiny_model(family)
    plugin = TransformersBackend.open(model, tokenizer=tiny_tokenizer(), fast=fast)
    with Backend.from_plugin(plugin, "transformers") as backend:
        yield Opened(family, fast, model, backend)


def test_answers_are_those_of_the_model(opened: Opened) -> None:
    # Many stop ids make rows leave the batch early.
    limits = {"max_new_tokens": 24, "stop_token_ids": range(10, 14)}
    # These models' logits are so large that the oracle itself is up to 1.4e-5 off (Granite, compared with float64).
    out = opened.backend.generate(PROMPTS, {"top_p": 0.95, "seed": 5} | limits, logprobs="raw")
    assert_answers(out, opened.model, PROMPTS, atol=4e-5)
    assert opened.backend.engine.plugin.decoder.way == "cached and padded"
    greedy = opened.backend.generate(PROMPTS, {"temperature": 0} | limits, logprobs="raw")
    assert_answers(greedy, opened.model, PROMPTS, atol=2e-5)
    for prompt, answer in zip(PROMPTS, greedy.ids.tolist(), strict=True):
        logits = oracle.next_logits(opened.model, prompt + answer[:-1])[len(prompt) - 1 :]
        lost = logits.amax(-1) - logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]
        assert float(lost.max()) < 2e-5


def test_scores_logits_and_the_likeliest_ids_are_those_of_the_model(opened: Opened) -> None:
    model, backend = opened.model, opened.backend
    plain = ScoringPath("whole", "padded", 0)
    # Some releases of transformers use SDPA for Gemma 2, and some do not.
    other = opened.family == "gemma2" and model.config._attn_implementation != "sdpa"
    tiled = ScoringPath("tiled", "padded", 0) if opened.family in PADDED or other else ScoringPath("tiled", PACKED, 120)
    for temperature in (1.0, 0.7):
        out = assert_scores(backend, model, ROWS, temperature=temperature, return_argmax=True)
        assert scoring_path(backend) == (tiled if opened.fast else plain)
        assert (out.mode, out.temperature) == ("raw" if temperature == 1.0 else "processed", temperature)
    logits = assert_scores(backend, model, ROWS, score_from=3, return_logits=True, return_argmax=True)
    assert scoring_path(backend).head == ("sliced" if opened.fast else "whole")
    rows = zip(ROWS, logits.logits.split(), logits.argmax.split(), out.argmax.split(), strict=True)
    for row, found, argmax, tiled_argmax in rows:
        expected = oracle.next_logits(model, row)[:-1]
        assert not found[:3].any()
        torch.testing.assert_close(found[3:], expected[2:], rtol=0, atol=1e-4)
        assert torch.equal(argmax[3:], expected[2:].argmax(-1)) and torch.equal(tiled_argmax[1:], expected.argmax(-1))


def test_scores_over_sets_and_of_several_ids_are_those_of_the_model(opened: Opened) -> None:
    model, backend, temperature = opened.model, opened.backend, 0.7
    # A plain forward of padded rows is off by up to 1.3e-5 here, and by 3e-5 where the logits are scaled up.
    atol = 4e-5 if opened.family == "granite" else 2e-5
    generator = torch.Generator().manual_seed(7)
    others = [[torch.randint(512, (t % 20,), generator=generator).tolist() for t in range(len(row))] for row in ROWS]
    # Every fifth set is empty, which is the whole vocabulary.
    sets = TokenSets.from_list(
        [
            [[] if t % 5 == 3 else sorted({token, *some}) for t, (token, some) in enumerate(zip(row, own, strict=True))]
            for row, own in zip(ROWS, others, strict=True)
        ]
    )
    total = sum(map(len, ROWS))
    ids = torch.rand(total, 512, generator=generator).argsort(1)[:, :4]
    ids[::3, 1] = -1
    given = Ragged(ids, torch.tensor([len(row) for row in ROWS]))
    over = backend.score_logprobs(ROWS, temperature=temperature, support=sets)
    assert (over.mode, over.support) == ("processed", "truncated")
    top = backend.score_logprobs(ROWS, temperature=temperature, top_k=6)
    named = backend.score_logprobs(ROWS, temperature=temperature, top_ids=given)
    for number, (row, own) in enumerate(zip(ROWS, sets.tolist(), strict=True)):
        logits = oracle.next_logits(model, row)
        wanted = [over_set(logits[t - 1], row[t], own[t], temperature) if t else 0.0 for t in range(len(row))]
        torch.testing.assert_close(over.logprobs.split()[number], torch.tensor(wanted), rtol=1e-7, atol=atol)
        for scores in (top, named):
            check_top(scores, number, logits, temperature, atol=atol)
            own_scores = scores.logprobs.split()[number]
            torch.testing.assert_close(own_scores, oracle.logprobs(model, row, temperature), rtol=1e-7, atol=atol)
        assert torch.equal(top.top_ids.split()[number][1:], logits[:-1].topk(6).indices)
        assert torch.equal(named.top_ids.split()[number][1:], given.split()[number][1:])


def test_gradients_are_those_of_the_model(opened: Opened) -> None:
    # Rows that share their start are read together.
    rows = [ROWS[0], ROWS[4], *ROWS[5:7]]
    out = opened.backend.score_logprobs(rows, temperature=0.8, grad=True)
    found = gradients(opened.model, out.logprobs.values.sum())
    assert_same_gradients(found, gradients(opened.model, own_loss(opened.model, rows, 0.8)))


def test_these_heads_differ_from_a_matrix_product() -> None:
    """If they did not, the tests above would pass without the scale or cap."""
    for family in ("granite", "cohere", "gemma2"):
        model = tiny_model(family)
        with torch.no_grad():
            hidden = model.get_decoder()(input_ids=torch.tensor([ROWS[0]], device=DEVICE)).last_hidden_state[0]
            naive = model.get_output_embeddings()(hidden).log_softmax(-1).cpu()
        apart = (naive - oracle.next_logits(model, ROWS[0]).log_softmax(-1)).abs().max()
        assert float(apart) > 0.1, family


def test_a_head_that_cannot_be_sliced_is_run_whole(open_model: Open) -> None:
    model = tiny_model()
    plain = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        slope = torch.linspace(0, 3, model.config.vocab_size, device=DEVICE)
        # The logits depend on the column of a position.
        out.logits = out.logits + torch.arange(out.logits.shape[1])[None, :, None] * slope
        return out

    model.forward = forward
    rows, start = random_rows(30, 2, 1, 64, 9, seed=1), [3, 1, 1, 60, 2]
    assert_scores(open_model(model), model, rows, score_from=start, atol=1e-4)


def test_fast_and_plain_sample_the_same_ids(open_model: Open) -> None:
    seeds = answer_seeds(5, range(len(PROMPTS)))
    for family in ("qwen2", "gemma2"):
        model, sampling = tiny_model(family), {"top_p": 0.95, "max_new_tokens": 24, "stop_token_ids": range(10, 14)}
        found, expected = (
            open_model(model, fast=fast).generate(PROMPTS, sampling, seeds=seeds) for fast in (True, False)
        )
        assert found.ids.tolist() == expected.ids.tolist() and found.finish_reasons == expected.finish_reasons


def test_the_plain_backend_does_not_import_the_accelerations(open_model: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("transformers_backend.fast")]:
        monkeypatch.delitem(sys.modules, name)
    # None in sys.modules makes every import of it fail.
    monkeypatch.setitem(sys.modules, "transformers_backend.fast", None)
    with pytest.raises(ImportError, match="fast"):
        open_model(tiny_model())
    backend = open_model(tiny_model(), fast=False)
    backend.generate(PROMPTS, {"max_new_tokens": 3})
    backend.score_logprobs(ROWS)
    backend.update_weights(tiny_model(seed=1).state_dict())
    assert not any(name.startswith("transformers_backend.fast.") for name in sys.modules)
