"""Partial answers go on from their ids: the same answer as in one call, and right if the weights changed between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from corelm import Backend, DynamicBatcher, Ragged
from corelm.errors import InvalidRequestError, ProvenanceMismatchError
from corelm.spec import GenerateResult
from helpers import oracle
from helpers.mid_answer import MidAnswer
from helpers.plain_forward import Open
from helpers.tiny_models import random_rows, tiny_model

PROMPTS = random_rows(7, 12, 7)
GREEDY = {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True}
SAMPLED = {"max_new_tokens": 16, "ignore_eos": True, "seed": 3}


def cut(whole: GenerateResult, lengths: list[int]) -> GenerateResult:
    """Return the beginnings of answers, as an abort leaves them."""
    start, stop = torch.zeros(len(lengths), dtype=torch.int64), torch.tensor(lengths)
    cuts: dict[str, Any] = {
        name: value.slice(start, stop)
        for name in ("ids", "logprobs", "kept_ids", "kept_log_mass", "top_ids", "top_logprobs", "tail_log_mass")
        if (value := getattr(whole, name)) is not None
    }
    return replace(whole, **cuts, finish_reasons=("abort",) * len(lengths))


def test_a_greedy_answer_in_two_calls_is_that_of_one(open_model: Open) -> None:
    backend = open_model(tiny_model())
    options: dict[str, Any] = {"top_logprobs": 4, "return_support": True}
    whole = backend.generate(PROMPTS, GREEDY, **options)
    for lengths in ([5, 5, 5], [0, 9, 16], [1, 2, 3]):
        _check_continued(backend, whole, lengths, options)


def _check_continued(backend: Backend, whole: GenerateResult, lengths: list[int], options: dict[str, Any]) -> None:
    made = backend.generate(PROMPTS, GREEDY, continue_from=cut(whole, lengths), **options)
    assert made.ids.tolist() == whole.ids.tolist() and made.finish_reasons == whole.finish_reasons
    for name in ("logprobs", "top_logprobs", "tail_log_mass", "kept_log_mass"):
        torch.testing.assert_close(getattr(made, name).values, getattr(whole, name).values, rtol=0, atol=1e-4)
    assert torch.equal(made.top_ids.values, whole.top_ids.values)  # type: ignore[union-attr]
    assert made.kept_ids.tolist() == whole.kept_ids.tolist()  # type: ignore[union-attr]
    assert made.weight_versions == whole.weight_versions and made.version_runs is None


def test_samples_and_sets_of_ids_go_on(open_model: Open) -> None:
    """Sampled, the tokens after the seam are others, but each is in its set, and its number is the oracle's."""
    model = tiny_model()
    backend = open_model(model)
    sampling = SAMPLED | {"top_k": 6, "num_samples": 2}
    whole = backend.generate(PROMPTS, sampling, return_support=True)
    part = cut(whole, [3, 0, 16, 4, 4, 4])
    made = backend.generate(PROMPTS, sampling, return_support=True, continue_from=part)
    assert made.ids.lengths.tolist() == [16] * 6 and made.finish_reasons == ("length",) * 6
    assert made.ids.tolist()[1] == whole.ids.tolist()[1], "an answer without tokens is sampled as in the first call"
    assert made.ids.tolist()[2] == whole.ids.tolist()[2]
    rows = zip(made.ids.tolist(), made.logprobs.split(), made.kept_ids.tolist(), strict=True)  # type: ignore[union-attr]
    for row, (answer, found, sets) in enumerate(rows):
        before = part.ids.tolist()[row]
        assert answer[: len(before)] == before
        assert all(token in kept and len(kept) == 6 for token, kept in zip(answer, sets, strict=True))
        torch.testing.assert_close(found, oracle.answer_logprobs(model, PROMPTS[row // 2], answer), rtol=0, atol=1e-4)


@pytest.mark.parametrize("batched", [False, True])
def test_what_an_update_has_aborted_goes_on_with_the_new_weights(open_model: Open, batched: bool) -> None:
    old, new, own = tiny_model(), tiny_model(seed=1), tiny_model()
    middle, sampling = MidAnswer(own), SAMPLED | {"max_new_tokens": 60}
    backend = open_model(own)
    backend = DynamicBatcher(backend) if batched else backend
    # The model is tried before its first answer.
    backend.generate(PROMPTS, {"max_new_tokens": 2})
    part = middle.run(
        lambda: backend.update_weights(new.state_dict(), "new", when="abort"),
        lambda: backend.generate(PROMPTS, sampling),
    )
    assert part.finish_reasons == ("abort",) * 3 and part.weight_versions == ("0",) * 3
    lengths = part.ids.lengths.tolist()
    assert all(0 < length < 60 for length in lengths)
    made = backend.generate(PROMPTS, sampling, continue_from=part)
    assert made.finish_reasons == ("length",) * 3
    assert made.version_runs == tuple((("0", 0), ("new", length)) for length in lengths)
    rows = zip(PROMPTS, made.ids.tolist(), made.logprobs.split(), lengths, strict=True)  # type: ignore[union-attr]
    for prompt, answer, found, length in rows:
        by_old, by_new = (oracle.answer_logprobs(model, prompt, answer) for model in (old, new))
        expected = torch.cat([by_old[:length], by_new[length:]])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    whole = backend.generate(PROMPTS, sampling, continue_from=made)
    assert whole.ids.tolist() == made.ids.tolist() and whole.version_runs == made.version_runs


def test_a_stop_string_across_the_seam_ends_the_answer(open_model: Open) -> None:
    backend = open_model(tiny_model())
    whole = backend.generate(PROMPTS, GREEDY)
    texts = [backend.detokenize([ids[4:6]])[0] for ids in whole.ids.tolist()]
    part = cut(whole, [5, 5, 5])
    # A string that begins in the last old token and ends in the first new one of row 0.
    row = whole.ids.tolist()[0]
    stop = texts[0]
    first = len(backend.detokenize([row[:4]])[0])
    assert backend.detokenize([row[:6]])[0][first:] == stop, "the tokens of this model would not do for the test"
    sampling = GREEDY | {"stop": [stop]}
    expected, made = backend.generate(PROMPTS, sampling), backend.generate(PROMPTS, sampling, continue_from=part)
    assert made.ids.tolist() == expected.ids.tolist() and made.finish_reasons == expected.finish_reasons
    assert made.finish_reasons[0] == "stop" and len(made.ids.tolist()[0]) <= 6


def test_a_stop_string_beyond_the_limit_of_a_row_does_not_count(open_model: Open) -> None:
    """Row 0 may get one more token, and the engine returns it eight: the string is complete in one of the others."""
    backend = open_model(tiny_model())
    row, limited = backend.generate(PROMPTS, GREEDY).ids.tolist()[0], GREEDY | {"max_new_tokens": 8}
    sampling = limited | {"stop": backend.detokenize([row[9:11]])}
    in_time = backend.generate(PROMPTS, sampling | {"max_new_tokens": 16})
    assert in_time.finish_reasons[0] == "stop" and in_time.ids.lengths[0] > 8, "this model would not do for the test"
    part = cut(backend.generate(PROMPTS, limited), [7, 0, 0])
    made, expected = backend.generate(PROMPTS, sampling, continue_from=part), backend.generate(PROMPTS, sampling)
    assert made.ids.tolist() == expected.ids.tolist() and made.finish_reasons == expected.finish_reasons


def test_other_distributions_do_not_join(open_model: Open) -> None:
    backend = open_model(tiny_model())
    part = backend.generate(PROMPTS, SAMPLED | {"max_new_tokens": 4, "temperature": 0.7}, logprobs="processed")
    with pytest.raises(ProvenanceMismatchError, match=r"'temperature': 0\.7"):
        backend.generate(PROMPTS, SAMPLED, logprobs="processed", continue_from=part)
    with pytest.raises(ProvenanceMismatchError, match="'support': 'truncated'"):
        backend.generate(PROMPTS, SAMPLED | {"temperature": 0.7, "top_k": 3}, logprobs="processed", continue_from=part)
    with pytest.raises(ProvenanceMismatchError, match="'mode': 'processed'"):
        backend.generate(PROMPTS, SAMPLED, continue_from=part)


def test_what_cannot_go_on_is_refused(open_model: Open) -> None:
    backend = open_model(tiny_model())
    part = backend.generate(PROMPTS, SAMPLED | {"max_new_tokens": 4})
    cases: list[tuple[Any, Any, str]] = [
        ({}, {"presence_penalty": 0.5}, "counts the tokens of an answer"),
        ({}, {"min_new_tokens": 6}, "row 0: has fewer than min_new_tokens=6 tokens.* sample this row"),
        ({}, {"max_new_tokens": 3}, "row 0: has 4 tokens, but max_new_tokens is 3"),
        ({"version_runs": ((("3", 0), ("2", 1)),) * 3}, {}, "row 0: version_runs: the weights go back from 3 to 2 at"),
        ({"version_runs": ((("3", 0), ("4", 0)),) * 3}, {}, "row 0: version_runs: run 1 begins at position 0"),
        ({"ids": Ragged.from_list([[5]])}, {}, "has 1 answers, but the call is for 3"),
        ({"adapter": "one"}, {}, "adapter='one'"),
        ({"logprobs": None}, {}, "has no log-probs"),
    ]
    for change, sampling, says in cases:
        with pytest.raises(InvalidRequestError, match=says):
            backend.generate(PROMPTS, SAMPLED | sampling, continue_from=replace(part, **change))
    with pytest.raises(InvalidRequestError, match="expected a GenerateResult, got a list"):
        backend.generate(PROMPTS, SAMPLED, continue_from=[[1]])  # type: ignore[arg-type]


def test_rows_near_the_end_of_the_context_go_on_with_others(open_model: Open) -> None:
    """Row 1 needs 30 tokens and row 0 only one: together they would not fit the context of 112."""
    backend = open_model(tiny_model(max_position_embeddings=112))
    prompts, sampling = random_rows(80, 20), GREEDY | {"max_new_tokens": 30}
    whole = backend.generate(prompts, sampling)
    made = backend.generate(prompts, sampling, continue_from=cut(whole, [29, 0]))
    assert made.ids.tolist() == whole.ids.tolist() and made.finish_reasons == whole.finish_reasons


def test_one_bad_prompt_is_named_by_its_own_row(open_model: Open) -> None:
    backend = open_model(tiny_model())
    part = cut(backend.generate(PROMPTS, GREEDY), [16, 5, 5])
    bad = [*PROMPTS[:2], [*PROMPTS[2], 10**6]]
    with pytest.raises(InvalidRequestError, match="row 2") as caught:
        backend.generate(bad, GREEDY, continue_from=part)
    assert [*caught.value.problems] == [2]
    made = backend.generate(bad, GREEDY, continue_from=part, on_error="skip")
    assert made.finish_reasons == ("length", "length", "error") and made.ids.lengths.tolist() == [16, 16, 5]
