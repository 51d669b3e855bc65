"""Answers that are completed later keep the sets and the most probable ids of both parts, and say what they are of."""

from dataclasses import replace

import pytest
import torch

from corelm import Backend, Ragged, SamplingParams, TokenSets, get_backend
from corelm.errors import InvalidRequestError, ProvenanceMismatchError
from helpers.broken_plugins import Reshaping
from helpers.each import each
from helpers.refusals import refused

PROMPTS = [[72, 101], [108], [97]]
CUT = {"temperature": 0.7, "top_k": 5, "seed": 1, "ignore_eos": True}
ASKED = {"logprobs": "processed", "return_support": True, "top_logprobs": 3}


@pytest.fixture(scope="module")
def backend():
    with get_backend("toy") as backend:
        yield backend


def begun(backend, sampling, asked):
    """Return partial answers: the second one had ended."""
    whole = backend.generate(PROMPTS, {**sampling, "max_new_tokens": 3}, **asked)
    return replace(whole, finish_reasons=("abort", "stop", "abort"))


def test_both_parts_keep_their_sets_next_to_their_numbers(backend):
    old = begun(backend, CUT, ASKED)
    found = backend.generate(PROMPTS, {**CUT, "max_new_tokens": 7}, **ASKED, continue_from=old)
    assert found.ids.lengths.tolist() == [7, 3, 7] and found.finish_reasons == ("length", "stop", "length")
    joined, starts = Ragged.from_list(PROMPTS).join(found.ids), [2, 1, 1]
    over = backend.score_logprobs(joined, temperature=0.7, score_from=starts, support=found.kept_ids)
    torch.testing.assert_close(over.logprobs.values[over.scored.values], found.logprobs.values, atol=1e-5, rtol=0)
    whole = backend.score_logprobs(joined, temperature=0.7, score_from=starts)
    before = found.logprobs.values + found.kept_log_mass.values
    torch.testing.assert_close(whole.logprobs.values[whole.scored.values], before, atol=1e-5, rtol=0)
    for name in ("kept_ids", "top_ids", "top_logprobs", "tail_log_mass"):
        rows = getattr(found, name).tolist()
        assert [row[:3] for row in rows] == getattr(old, name).tolist(), name
        assert [len(row) for row in rows] == [7, 3, 7]


def test_the_rest_of_an_answer_does_not_depend_on_which_others_have_ended(backend):
    old, asked = begun(backend, CUT, {}), {**CUT, "max_new_tokens": 7}
    found = backend.generate(PROMPTS, asked, continue_from=old).ids.tolist()
    all_go_on = replace(old, finish_reasons=("abort",) * 3)
    expected = backend.generate(PROMPTS, asked, continue_from=all_go_on).ids.tolist()
    assert [found[0], found[2]] == [expected[0], expected[2]]


@each("old_penalty, penalty", [(1.3, 1.0), (1.0, 1.3), (1.3, 1.1)])
def test_one_label_never_names_the_penalties_of_half_an_answer(old_penalty, penalty):
    backend = Backend.from_plugin(Reshaping.open(), "toy")
    asked = {"temperature": 0.7, "seed": 1, "repetition_penalty": old_penalty}
    old = begun(backend, asked, {"logprobs": "processed"})
    going = {**asked, "repetition_penalty": penalty, "max_new_tokens": 7}
    with pytest.raises(ProvenanceMismatchError, match=rf"penalties.*{max(old_penalty, penalty)}"):
        backend.generate(PROMPTS, going, logprobs="processed", continue_from=old)
    found = backend.generate(PROMPTS, {**asked, "max_new_tokens": 7}, logprobs="processed", continue_from=old)
    assert backend.provenance(found).penalties == found.sampling.penalties == SamplingParams.make(asked).penalties
    assert found.sampling.max_new_tokens == 7
    # Raw log-probs are the model's own under any penalty.
    raw = begun(backend, asked, {"logprobs": "raw"})
    assert backend.provenance(backend.generate(PROMPTS, going, logprobs="raw", continue_from=raw)).penalties == ()


def test_a_part_of_truncated_support_is_not_called_full(backend):
    # Forbidden ids make the first tokens' distribution a truncated one, and what follows has none.
    sampling = {"temperature": 0.7, "seed": 1, "min_new_tokens": 3}
    old = begun(backend, sampling, {"logprobs": "processed"})
    found = backend.generate(PROMPTS, {**sampling, "max_new_tokens": 7}, logprobs="processed", continue_from=old)
    assert (old.support, found.support) == ("truncated", "truncated")
    assert backend.provenance(found).support == "truncated"


def with_set(old, row, position, ids):
    """Return the partial answers with another set at one position."""
    sets = old.kept_ids.tolist()
    sets[row][position] = ids
    return {"kept_ids": TokenSets.from_list(sets)}


def shortened(rows, row):
    """Return the rows, with the last position of one of them left out."""
    keep = rows.lengths.clone()
    keep[row] -= 1
    return rows.slice(torch.zeros_like(keep), keep)


WRONG_PARTS = {
    "another id": (lambda old: with_set(old, 2, 1, [258]), 2),
    "twice": (lambda old: with_set(old, 0, 2, [old.ids.tolist()[0][2]] * 2), 0),
    "outside": (lambda old: with_set(old, 1, 0, [old.ids.tolist()[1][0], 10**6]), 1),
    "of other rows": (lambda old: {"kept_ids": old.kept_ids.select([2, 0, 1])}, 0),
    "sets": (lambda old: {"kept_ids": shortened(old.kept_ids, 1)}, 1),
    **{
        name: (lambda old, name=name: {name: shortened(getattr(old, name), 2)}, 2)
        for name in ("logprobs", "kept_log_mass", "top_ids", "top_logprobs", "tail_log_mass")
    },
}


@each("name", WRONG_PARTS)
def test_parts_that_are_not_those_of_their_tokens_are_refused(backend, name):
    change, row = WRONG_PARTS[name]
    old = begun(backend, CUT, ASKED)
    with refused(InvalidRequestError, field="continue_from") as caught:
        backend.generate(PROMPTS, {**CUT, "max_new_tokens": 7}, **ASKED, continue_from=replace(old, **change(old)))
    assert row in caught.value.rows


@each(
    "changes",
    [
        {"kept_log_mass": None},
        {"tail_log_mass": None},
        {"finish_reasons": ("abort", "abort")},
        {"weight_versions": ("0",)},
        {"logprobs": Ragged.from_list([[-1.0]], torch.float32)},
    ],
)
def test_results_that_lack_a_field_or_a_row_are_refused(backend, changes):
    old = replace(begun(backend, CUT, ASKED), **changes)
    with refused(InvalidRequestError, field="continue_from"):
        backend.generate(PROMPTS, {**CUT, "max_new_tokens": 7}, **ASKED, continue_from=old)


def test_answers_do_not_go_on_with_older_weights():
    with get_backend("toy") as backend:
        old = replace(begun(backend, CUT, {}), weight_versions=("0", "9", "4"))
        asked = {**CUT, "max_new_tokens": 7}
        with refused(InvalidRequestError, field="continue_from", rows=(2,)):
            backend.generate(PROMPTS, asked, continue_from=old)
        # The second answer had ended.
        backend.weights_changed(version="5")
        found = backend.generate(PROMPTS, asked, continue_from=old)
        assert found.version_runs == ((("0", 0), ("5", 3)), (("9", 0),), (("4", 0), ("5", 3)))
