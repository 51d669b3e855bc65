"""The ids that truncation left, the most probable ids, and scoring over given ids: arguments and results."""

import math
from dataclasses import replace

import pytest
import torch

from corelm import Backend, Ragged, TokenSets, get_backend, hookimpl
from corelm.errors import CapabilityError, EngineError, InvalidRequestError
from helpers.capable_plugins import Reshaping
from helpers.each import each
from helpers.refusals import refused

PROMPTS = [[72, 101], [108]]
CUT = {"temperature": 0.7, "top_k": 5, "max_new_tokens": 6, "seed": 1, "ignore_eos": True}
SEQUENCES = [[1, 2, 3], [4, 5, 6]]


class ResultChanger:
    """A hook wrapper that passes every result of the two hooks through `change`."""

    def __init__(self, change):
        self.change = change

    @hookimpl(wrapper=True)
    def generate(self, request):
        return self.change((yield))

    @hookimpl(wrapper=True)
    def score_logprobs(self, request):
        return self.change((yield))


@pytest.fixture(scope="module")
def backend():
    with get_backend("toy") as backend:
        yield backend


@pytest.fixture(scope="module")
def answers(backend):
    return backend.generate(PROMPTS, CUT, logprobs="processed", return_support=True, top_logprobs=8)


def test_the_most_probable_id_may_be_outside_the_support(backend):
    best = backend.score_logprobs(SEQUENCES, return_argmax=True)
    alone = [[[token] for token in row[1:]] for row in SEQUENCES]
    scores = backend.score_logprobs(SEQUENCES, support=alone, return_argmax=True)
    assert scores.logprobs.values.tolist() == [0.0] * 6 and scores.argmax.tolist() == best.argmax.tolist()
    assert any(token not in row for token, row in zip(best.argmax.values[1:3].tolist(), alone[0], strict=True))


def test_an_empty_set_is_the_whole_vocabulary(backend):
    empty = TokenSets.empty(torch.tensor([3, 3]))
    scores, plain = (backend.score_logprobs(SEQUENCES, support=given) for given in (empty, None))
    torch.testing.assert_close(scores.logprobs.values, plain.logprobs.values)
    assert (plain.support, scores.support) == ("full", "truncated")


def test_ids_may_be_named_at_the_scored_positions_only(backend):
    named = backend.score_logprobs(SEQUENCES, score_from=2, top_ids=[torch.tensor([[9, -1]]), torch.tensor([[8, 7]])])
    assert named.top_ids.tolist()[0] == [[-1, -1], [-1, -1], [9, -1]]
    assert named.top_logprobs.values[2, 1] == -math.inf


ALL_OF_IDS = ("ids", "logprobs", "kept_ids", "kept_log_mass", "top_ids", "top_logprobs", "tail_log_mass")
ASKED = {"logprobs": "processed", "return_support": True, "top_logprobs": 8}


def lists(batch, names=ALL_OF_IDS):
    return [getattr(batch, name).tolist() for name in names]


def test_a_stream_has_the_sets_and_the_most_probable_ids_in_its_result(backend, answers):
    stream = backend.stream(PROMPTS, CUT, **ASKED)
    read = [[], []]
    for chunk in stream:
        read[chunk.row] += chunk.ids
    assert read == answers.ids.tolist() and lists(stream.result) == lists(answers)


@each("sampling", [CUT, {**CUT, "temperature": 0.0, "top_k": None}, {**CUT, "top_k": None}])
def test_skipped_prompts_have_no_sets_and_move_no_others(backend, sampling):
    whole = backend.generate(PROMPTS, {**sampling, "num_samples": 2}, **ASKED)
    stream = backend.stream([PROMPTS[0], [9999], PROMPTS[1]], {**sampling, "num_samples": 2}, on_error="skip", **ASKED)
    assert len(list(stream)) > 4
    found = stream.result
    assert found.finish_reasons[2:4] == ("error", "error")
    for name in ALL_OF_IDS:
        rows = getattr(found, name).tolist()
        assert rows[2:4] == [[], []] and [len(row) for row in rows] == [6, 6, 0, 0, 6, 6]
        # Rows have the seeds of their own numbers, so only the first prompt's answers are the same.
        assert rows[:2] == getattr(whole, name).tolist()[:2], name
    kept = found.kept_ids
    assert bool((kept.contains(found.ids.values) | (kept.ids.lengths == 0)).all())


@each(
    "support, rows, says",
    [
        ([[[2], [3]], [[7], [6]]], (1,), "row 1: support, position 1: the set lacks the token 5 that is at this"),
        ([[[2], [3]], [[5], [6, 6]]], (1,), "row 1: support, position 2: the set has an id twice"),
        ([[[2], [3, 999]], [[5], [6]]], (0,), "row 0: support, position 2: the set has an id outside the vocabulary"),
        ([[[2, -1], [3]], [[5], [6]]], (0,), "row 0: support, position 1: the set has an id outside the vocabulary"),
        ([[[2]], [[5], [6]]], (0,), "row 0: support: has sets for 1 positions; expected one for each of its 3 ids"),
        ([[[2], [3]]], (), "support: expected sets for 2 rows, got 1"),
        ([[[2.5], [3]], [[5], [6]]], (), "support: expected TokenSets"),
        ([[[2], [True]], [[5], [6]]], (), "row 0, set 1 holds bools instead of ids"),
        ([[[2], [3]], [[5], torch.ones(260, dtype=torch.bool)]], (), "row 1, set 1 holds bools instead of ids"),
        ("ids", (), "support: expected TokenSets"),
    ],
)
def test_a_wrong_support_is_refused_by_row_and_position(backend, support, rows, says):
    with pytest.raises(InvalidRequestError) as error:
        backend.score_logprobs(SEQUENCES, support=support)
    assert says in str(error.value) and error.value.rows == rows


def test_a_row_with_a_wrong_support_is_skipped(backend):
    scores = backend.score_logprobs(SEQUENCES, support=[[[2], [3]], [[7], [6]]], on_error="skip")
    assert scores.scored.tolist() == [[False, True, True], [False] * 3]
    assert "lacks the token 5" in scores.errors[1] and not scores.errors[0]


@each(
    "given, field",
    [
        ({"top_k": 10**6}, "top_k"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2, "top_ids": torch.zeros(2, 3, 1, dtype=torch.int64)}, "top_k"),
        ({"top_k": 2, "support": [[[2], [3]], [[5], [6]]]}, "top_k"),
        ({"top_ids": torch.zeros(2, 3)}, "top_ids"),
        ({"top_ids": torch.zeros(2, 3, 1, dtype=torch.int32)}, "top_ids"),
        ({"top_ids": [[[1], [2], [3]]] * 2}, "top_ids"),
        ({"top_ids": "ids"}, "top_ids"),
        ({"top_ids": torch.zeros(1, 3, 1, dtype=torch.int64)}, "top_ids"),
        ({"top_ids": torch.zeros(2, 3, 2, dtype=torch.int64)}, "sequences"),
        ({"top_ids": torch.full((2, 3, 1), 999)}, "sequences"),
        ({"top_ids": [torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 2, dtype=torch.int64)]}, "sequences"),
    ],
)
def test_wrong_numbers_and_names_of_ids_are_refused(backend, given, field):
    with pytest.raises(InvalidRequestError) as error:
        backend.score_logprobs(SEQUENCES, **given)
    assert error.value.field == field


@each(
    "given, error, field",
    [
        ({"top_logprobs": 2, "logprobs": "none"}, InvalidRequestError, "top_logprobs"),
        ({"top_logprobs": 10**6}, InvalidRequestError, "top_logprobs"),
        ({"return_support": "yes"}, InvalidRequestError, "return_support"),
        ({"sampling": {"min_new_tokens": 2}, "return_support": True}, InvalidRequestError, "return_support"),
    ],
)
def test_wrong_requests_for_ids_of_answers_are_refused(backend, given, error, field):
    with refused(error, field=field):
        backend.generate(PROMPTS, **{"sampling": CUT, **given})


def test_kept_ids_are_refused_where_core_does_not_know_the_distribution():
    sampling = {**CUT, "engine_kwargs": {"logit_bias": {"7": 5.0}}}
    with Backend.from_plugin(Reshaping.open(), "toy") as backend:
        with refused(InvalidRequestError, field="return_support"):
            backend.generate(PROMPTS, sampling, return_support=True)
        greedy = backend.generate(PROMPTS, {**sampling, "temperature": 0.0}, return_support=True)
    assert greedy.kept_ids.flat.tolist() == greedy.ids.tolist()


@each(
    "capability, call",
    [
        ("return_support", lambda b: b.generate(PROMPTS, CUT, return_support=True)),
        ("top_logprobs", lambda b: b.generate(PROMPTS, CUT, top_logprobs=1)),
        ("score_support", lambda b: b.score_logprobs(SEQUENCES, support=[[[2], [3]], [[5], [6]]])),
        ("argmax", lambda b: b.score_logprobs(SEQUENCES, return_argmax=True)),
        ("score_top_k", lambda b: b.score_logprobs(SEQUENCES, top_k=1)),
        ("score_top_ids", lambda b: b.score_logprobs(SEQUENCES, top_ids=torch.zeros(2, 3, 1, dtype=torch.int64))),
    ],
)
def test_an_engine_that_cannot_is_not_asked(backend, capability, call):
    plugin = backend.engine.plugin.__class__.open()
    plugin.capabilities = replace(plugin.capabilities, **{capability: type(getattr(plugin.capabilities, capability))()})
    with Backend.from_plugin(plugin, "toy") as modest, refused(CapabilityError, capability=capability):
        call(modest)


def other(rows: Ragged, index: int, value: float) -> Ragged:
    values = rows.values.clone()
    values[index] = value
    return rows.with_values(values)


def first_set(ids):
    return lambda b: replace(b, kept_ids=TokenSets.from_list([[ids(r), *r[1:]] for r in b.kept_ids.tolist()]))


@each(
    "bend, says",
    [
        (lambda b: replace(b, kept_ids=None), "returned no kept_ids, but return_support was asked for"),
        (first_set(lambda row: []), "row 0, position 0: the set is empty"),
        (first_set(lambda row: row[0][::-1]), "row 0, position 0: the ids of the set are not in ascending order"),
        (first_set(lambda row: [*row[0], 9999]), "row 0, position 0: the set has an id outside the vocabulary"),
        (lambda b: replace(b, kept_ids=b.kept_ids.select([1, 0])), "the set lacks the token"),
        (lambda b: replace(b, kept_ids=b.kept_ids.select([0])), "kept_ids and ids differ in length"),
        (lambda b: replace(b, kept_log_mass=other(b.kept_log_mass, 0, 0.5)), "row 0, position 0: the log-prob is 0.5"),
        (lambda b: replace(b, top_ids=None), "returned no top_ids"),
        (
            lambda b: replace(b, top_ids=b.top_ids.with_values(b.top_ids.values[:, :3])),
            "expected torch.int64[total, 8]",
        ),
        (lambda b: replace(b, top_logprobs=other(b.top_logprobs, 0, math.nan)), "nan or above 0"),
        (lambda b: replace(b, top_ids=other(b.top_ids, 3, 9999)), "outside the vocabulary"),
    ],
)
def test_a_wrong_result_of_generate_is_refused(bend, says):
    with get_backend("toy", wrappers=[ResultChanger(bend)]) as bent, pytest.raises(EngineError) as error:
        bent.generate(PROMPTS, CUT, logprobs="processed", return_support=True, top_logprobs=8)
    assert says in str(error.value)


@each(
    "bend, says",
    [
        (lambda b: replace(b, support="truncated"), "reports support"),
        (lambda b: replace(b, top_ids=None), "returned no top_ids"),
        (lambda b: replace(b, top_ids=other(b.top_ids, 0, 5)), "row 0, position 0: nothing was scored here"),
        (lambda b: replace(b, top_ids=b.top_ids.with_values(b.top_ids.values.roll(1, 0))), "nothing was scored here"),
    ],
)
def test_a_wrong_result_of_scoring_is_refused(bend, says):
    with get_backend("toy", wrappers=[ResultChanger(bend)]) as bent, pytest.raises(EngineError) as error:
        bent.score_logprobs(SEQUENCES, top_k=2)
    assert says in str(error.value)


def test_scores_of_other_ids_than_the_named_ones_are_refused_by_row():
    named = torch.tensor([[[-1], [4], [4]], [[-1], [4], [4]]])
    bend = lambda b: replace(b, top_ids=other(b.top_ids, 4, 5))  # noqa: E731
    worse = lambda b: replace(bend(b), top_logprobs=other(b.top_logprobs, 5, math.nan))  # noqa: E731
    for change, says in ((bend, "row 1, position 1: returned other top_ids"), (worse, "row 1, position 2: .* is nan")):
        with get_backend("toy", wrappers=[ResultChanger(change)]) as bent, pytest.raises(EngineError, match=says):
            bent.score_logprobs([[1, 2, 3], [1, 2, 3]], top_ids=named)


def test_what_was_not_asked_for_is_refused():
    more = {"top_ids": Ragged(torch.zeros(6, 1, dtype=torch.int64), torch.tensor([3, 3]))}
    with (
        get_backend("toy", wrappers=[ResultChanger(lambda b: replace(b, **more))]) as bent,
        pytest.raises(EngineError, match="not asked for"),
    ):
        bent.score_logprobs(SEQUENCES)
