"""Logits that are NaN or infinite: an error for the rows that have them, answers for the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from corelm.errors import EngineError, InvalidRequestError
from helpers.plain_forward import Open, assert_answers
from helpers.tiny_models import tiny_model

BAD = 7
ROWS = [[5, BAD, 9], [20, 21, 22, 23], [BAD]]
SAMPLING = {"max_new_tokens": 4, "ignore_eos": True, "seed": 3}


@pytest.fixture(params=[float("nan"), float("inf")], ids=str)
def model(request: pytest.FixtureRequest) -> Any:
    """A model that does not know what to make of one id."""
    model = tiny_model("llama", tie_word_embeddings=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = request.param
    return model


@pytest.mark.parametrize("logprobs", ["none", "raw", "processed"])
@pytest.mark.parametrize("how", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 5, "temperature": 0.5}], ids=str)
def test_only_the_rows_whose_logits_are_no_numbers_fail(
    open_model: Open, model: Any, how: dict[str, Any], logprobs: str
) -> None:
    backend = open_model(model)
    with pytest.raises(EngineError, match="NaN in the weights") as caught:
        backend.generate(ROWS, SAMPLING | how, logprobs=logprobs)
    assert caught.value.rows == (0, 2) and caught.value.usable
    found = backend.generate(ROWS, SAMPLING | how, logprobs=logprobs, on_error="skip")
    assert found.finish_reasons == ("error", "length", "error")
    alone = backend.generate([ROWS[1]] * 2, SAMPLING | how)
    assert found.ids.tolist() == [[], alone.ids.tolist()[1], []]
    assert_answers(alone, model, [ROWS[1]] * 2)


@pytest.mark.parametrize(
    "asked", [{}, {"return_argmax": True}, {"return_logits": True}, {"top_k": 3}, {"support": True}], ids=str
)
def test_only_the_rows_whose_scores_are_no_numbers_fail(open_model: Open, model: Any, asked: dict[str, Any]) -> None:
    backend = open_model(model)
    rows = [*ROWS, [3, 4, BAD]]
    if "support" in asked:
        asked = {"support": [[sorted({0, 1, *range(20, 30), *row})] * len(row) for row in rows]}
    with pytest.raises(EngineError, match="NaN in the weights") as caught:
        backend.score_logprobs(rows, **asked)
    # Of the last row and of the third no logits that follow the id are asked for.
    assert caught.value.rows == (0,) and caught.value.usable
    found = backend.score_logprobs(rows, **asked, on_error="skip")
    assert [bool(error) for error in found.errors or ()] == [True, False, False, False]
    assert not found.scored.split()[0].any() and not found.logprobs.split()[0].any()
    alone = backend.score_logprobs(
        [rows[1]], **{**asked, **({"support": asked["support"][1:2]} if "support" in asked else {})}
    )
    torch.testing.assert_close(found.logprobs.split()[1], alone.logprobs.split()[0], rtol=0, atol=1e-5)
    if not asked:
        with torch.no_grad():
            plain = model(torch.tensor([rows[1]])).logits[0, :-1].double().log_softmax(-1)
        expected = plain.gather(-1, torch.tensor(rows[1])[1:, None])[:, 0]
        torch.testing.assert_close(found.logprobs.split()[1][1:].double(), expected, rtol=0, atol=1e-5)


def test_an_id_that_the_model_excludes_fails_its_row(open_model: Open) -> None:
    model = tiny_model("llama", tie_word_embeddings=False)
    model.lm_head.register_forward_hook(lambda _, args, out: out.index_fill(-1, torch.tensor([BAD]), -torch.inf))
    found = open_model(model).score_logprobs(ROWS, on_error="skip")
    assert "position 1" in (found.errors or ("",))[0] and (found.errors or ("", "x"))[1:] == ("", "")


def test_streams_and_beams_fail(open_model: Open, model: Any) -> None:
    backend = open_model(model)
    with pytest.raises(EngineError, match="NaN in the weights"), backend.stream(ROWS[:1], SAMPLING) as stream:
        list(stream)
    beams = {"max_new_tokens": 4, "num_beams": 2, "ignore_eos": True}
    found = backend.generate(ROWS, beams, logprobs="none", on_error="skip")
    assert found.finish_reasons == ("error", "length", "error") and found.ids.lengths.tolist() == [0, 4, 0]


def test_the_smallest_temperature_is_greedy(open_model: Open) -> None:
    backend = open_model(tiny_model())
    greedy = backend.generate(ROWS, SAMPLING | {"temperature": 0.0}, logprobs="none")
    assert (
        backend.generate(ROWS, SAMPLING | {"temperature": 1e-30}, logprobs="none").ids.tolist() == greedy.ids.tolist()
    )
    backend.score_logprobs(ROWS, temperature=1e-30)
    with pytest.raises(InvalidRequestError, match="1e-30"):
        backend.score_logprobs(ROWS, temperature=1e-31)
