"""The ids that truncation left, the most probable ids, and scoring over given ids: arguments and results."""

import asyncio
import math
from dataclasses import fields, replace

import pytest
import torch

from corelm import Backend, Ragged, TokenSets, get_backend, hookimpl
from corelm.backend.prepared_call import prepare_generation, prepare_scoring
from corelm.batching.merging import ask_together, sharing_key
from corelm.errors import CapabilityError, EngineError, InvalidRequestError
from corelm.tensors.modes import CallerModes
from corelm.testing.bad_results import ResultChanger
from helpers.capable_plugins import Reshaping

PROMPTS = [[72, 101], [108]]
STARTS = [2, 1]
CUT = {"temperature": 0.7, "top_k": 5, "max_new_tokens": 6, "seed": 1, "ignore_eos": True}
SEQUENCES = [[1, 2, 3], [4, 5, 6]]


@pytest.fixture(scope="module")
def backend():
    with get_backend("toy") as backend:
        yield backend


@pytest.fixture(scope="module")
def answers(backend):
    return backend.generate(PROMPTS, CUT, logprobs="processed", return_support=True, top_logprobs=8)


def joined(answers) -> Ragged:
    return Ragged.from_list(PROMPTS).join(answers.ids)


def scored_values(scores) -> torch.Tensor:
    return scores.logprobs.values[scores.scored.values]


def test_scores_over_the_support_are_the_samplers_own_numbers(backend, answers):
    scores = backend.score_logprobs(joined(answers), temperature=0.7, score_from=STARTS, support=answers.kept_ids)
    assert (scores.mode, scores.temperature, scores.support) == ("processed", 0.7, "truncated")
    torch.testing.assert_close(scored_values(scores), answers.logprobs.values, atol=1e-5, rtol=0)


def test_the_kept_mass_is_what_truncation_took_from_the_whole_distribution(backend, answers):
    scores = backend.score_logprobs(joined(answers), temperature=0.7, score_from=STARTS)
    whole = answers.logprobs.values + answers.kept_log_mass.values
    torch.testing.assert_close(scored_values(scores), whole, atol=1e-5, rtol=0)


def test_sets_may_be_as_long_as_the_sequences_and_in_any_order(backend, answers):
    sets = [
        [[] for _ in prompt] + [ids[::-1] for ids in row]
        for prompt, row in zip(PROMPTS, answers.kept_ids.tolist(), strict=True)
    ]
    scores = backend.score_logprobs(joined(answers), temperature=0.7, score_from=STARTS, support=sets)
    torch.testing.assert_close(scored_values(scores), answers.logprobs.values, atol=1e-5, rtol=0)


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


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [({"temperature": 0.0}, lambda ids: [[[token] for token in row] for row in ids]), ({}, lambda ids: [[[]] * 3])],
)
def test_core_knows_the_support_of_greedy_and_of_untruncated_answers(backend, sampling, kept):
    batch = backend.generate([[72]], {"max_new_tokens": 3, "ignore_eos": True, **sampling}, return_support=True)
    assert batch.kept_ids.tolist() == kept(batch.ids.tolist())
    assert batch.kept_log_mass.tolist() == [[0.0] * 3]


def test_the_most_probable_ids_and_the_tail_are_the_whole_distribution(backend):
    every = backend.score_logprobs(SEQUENCES, temperature=0.5, return_logits=True).logits.values / 0.5
    scores = backend.score_logprobs(SEQUENCES, temperature=0.5, top_k=4)
    expected = every.log_softmax(-1).topk(4)
    scored = scores.scored.values
    torch.testing.assert_close(scores.top_logprobs.values[scored], expected.values[scored])
    total = torch.cat([scores.top_logprobs.values, scores.tail_log_mass.values[:, None]], -1).logsumexp(-1)
    torch.testing.assert_close(total[scored], torch.zeros(int(scored.sum())), atol=1e-5, rtol=0)
    assert scores.top_ids.values[~scored].unique().tolist() == [-1]


def test_named_ids_get_the_log_probs_that_the_most_probable_ones_have(backend):
    top = backend.score_logprobs(SEQUENCES, top_k=4)
    named = backend.score_logprobs(SEQUENCES, top_ids=top.top_ids, grad=True)
    assert named.top_ids.tolist() == top.top_ids.tolist() and named.top_logprobs.values.requires_grad
    torch.testing.assert_close(named.top_logprobs.values.detach(), top.top_logprobs.values)
    torch.testing.assert_close(named.tail_log_mass.values.detach(), top.tail_log_mass.values)


def test_ids_may_be_named_at_the_scored_positions_only(backend):
    named = backend.score_logprobs(SEQUENCES, score_from=2, top_ids=[torch.tensor([[9, -1]]), torch.tensor([[8, 7]])])
    assert named.top_ids.tolist()[0] == [[-1, -1], [-1, -1], [9, -1]]
    assert named.top_logprobs.values[2, 1] == -math.inf


@pytest.mark.parametrize(
    ("support", "rows", "says"),
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


def test_each_row_with_a_wrong_set_is_told_its_first(backend):
    support = [[[2], [1, 3, 3]], [[7], [6, 6]], [[8], [9]], [[11, -5], [1]]]
    with pytest.raises(InvalidRequestError) as error:
        backend.score_logprobs([*SEQUENCES, [7, 8, 9], [10, 11, 12]], support=support)
    assert error.value.problems == {
        0: "support, position 2: the set has an id twice",
        1: "support, position 1: the set lacks the token 5 that is at this position",
        3: "support, position 1: the set has an id outside the vocabulary of 260",
    }


def test_later_changes_of_the_callers_ids_do_not_reach_the_request(backend):
    sets, named = TokenSets.from_list([[[], [2], [3]], [[], [5], [6]]]), torch.ones(2, 3, 1, dtype=torch.int64)
    requests = [
        prepare_scoring(backend.engine, SEQUENCES, **given).request for given in ({"support": sets}, {"top_ids": named})
    ]
    sets.ids.values.zero_()
    named.zero_()
    assert requests[0].support.tolist() == [[[], [2], [3]], [[], [5], [6]]]
    assert requests[1].top_ids.values.flatten().tolist() == [-1, 1, 1, -1, 1, 1]


def test_a_row_with_a_wrong_support_is_skipped(backend):
    scores = backend.score_logprobs(SEQUENCES, support=[[[2], [3]], [[7], [6]]], on_error="skip")
    assert scores.scored.tolist() == [[False, True, True], [False] * 3]
    assert "lacks the token 5" in scores.errors[1] and not scores.errors[0]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"top_k": 10**6}, "top_k"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2, "top_ids": torch.zeros(2, 3, 1, dtype=torch.int64)}, "top_k"),
        ({"top_k": 2, "support": [[[2], [3]], [[5], [6]]]}, "top_k"),
        ({"top_ids": torch.zeros(2, 3)}, "top_ids"),
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


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([[[1], [2], [3]]] * 2, "or for each row a tensor [time, k], of ids in int64; row 0 is [[1], [2], [3]]"),
        (torch.zeros(2, 3, 1, dtype=torch.int32), "of ids in int64; row 0 is torch.int32[3, 1]"),
        ("ids", "row 0 is 'ids', which is not a tensor"),
    ],
)
def test_ids_that_are_no_tensors_are_refused_with_what_to_give(backend, given, says):
    with pytest.raises(InvalidRequestError) as error:
        backend.score_logprobs(SEQUENCES, top_ids=given)
    assert error.value.field == "top_ids" and says in str(error.value)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"top_logprobs": 2, "logprobs": "none"}, InvalidRequestError, "give logprobs="),
        ({"top_logprobs": 10**6}, InvalidRequestError, "at most"),
        ({"return_support": "yes"}, InvalidRequestError, "return_support"),
        (
            {"sampling": {"min_new_tokens": 2}, "return_support": True},
            InvalidRequestError,
            "give top_k, top_p or min_p",
        ),
    ],
)
def test_wrong_requests_for_ids_of_answers_are_refused(backend, given, error, says):
    with pytest.raises(error, match=says):
        backend.generate(PROMPTS, **{"sampling": CUT, **given})


def test_kept_ids_are_refused_where_core_does_not_know_the_distribution():
    sampling = {**CUT, "engine_kwargs": {"logit_bias": {"7": 5.0}}}
    with Backend.from_plugin(Reshaping.open(), "toy") as backend:
        with pytest.raises(InvalidRequestError, match="leave out engine_kwargs") as error:
            backend.generate(PROMPTS, sampling, return_support=True)
        assert error.value.field == "return_support"
        greedy = backend.generate(PROMPTS, {**sampling, "temperature": 0.0}, return_support=True)
    assert greedy.kept_ids.flat.tolist() == greedy.ids.tolist()


@pytest.mark.parametrize(
    ("capability", "call"),
    [
        ("return_support", lambda b: b.generate(PROMPTS, CUT, return_support=True)),
        ("top_logprobs", lambda b: b.generate(PROMPTS, CUT, top_logprobs=1)),
        ("score_support", lambda b: b.score_logprobs(SEQUENCES, support=[[[2], [3]], [[5], [6]]])),
        ("score_top_k", lambda b: b.score_logprobs(SEQUENCES, top_k=1)),
        ("score_top_ids", lambda b: b.score_logprobs(SEQUENCES, top_ids=torch.zeros(2, 3, 1, dtype=torch.int64))),
    ],
)
def test_an_engine_that_cannot_is_not_asked(backend, capability, call):
    plugin = backend.engine.plugin.__class__.open()
    plugin.capabilities = replace(plugin.capabilities, **{capability: type(getattr(plugin.capabilities, capability))()})
    with Backend.from_plugin(plugin, "toy") as modest, pytest.raises(CapabilityError, match="leave out") as error:
        call(modest)
    assert error.value.capability == capability


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


def test_an_asynchronous_stream_has_them_as_well(backend, answers):
    async def read():
        async with backend.astream(PROMPTS, CUT, **ASKED) as stream:
            assert sum([len(chunk.ids) async for chunk in stream]) == 12
        return stream.result

    assert lists(asyncio.run(read())) == lists(answers)


@pytest.mark.parametrize("sampling", [CUT, {**CUT, "temperature": 0.0, "top_k": None}, {**CUT, "top_k": None}])
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


def test_a_call_that_is_repeated_and_wrapped_keeps_everything(answers):
    class Flaky:
        """Fails the first call of each hook, and hands the others on as they are."""

        def __init__(self):
            self.failed = set()

        @hookimpl(wrapper=True)
        def generate(self, request):
            return (yield from self.passed("generate"))

        @hookimpl(wrapper=True)
        def score_logprobs(self, request):
            assert request.support is not None
            return (yield from self.passed("score_logprobs"))

        def passed(self, hook):
            result = yield
            if hook not in self.failed:
                self.failed.add(hook)
                raise ConnectionError("the network is gone")
            return result

    flaky = Flaky()
    with get_backend("toy", wrappers=[flaky], retry=2) as backend:
        found = backend.generate(PROMPTS, CUT, **ASKED)
        assert lists(found) == lists(answers) and flaky.failed == {"generate"}
        scores = backend.score_logprobs(joined(found), temperature=0.7, score_from=STARTS, support=found.kept_ids)
        torch.testing.assert_close(scored_values(scores), found.logprobs.values, atol=1e-5, rtol=0)
        assert flaky.failed == {"generate", "score_logprobs"}


@pytest.mark.parametrize(
    "prepare",
    [
        lambda engine, row: prepare_generation(
            engine, [PROMPTS[row]], CUT, logprobs="processed", return_support=True, top_logprobs=3
        ),
        lambda engine, row: prepare_scoring(
            engine, [SEQUENCES[row]], support=[[[[2, 9], [3]]], [[[5], [6, 7, 8]]]][row]
        ),
        lambda engine, row: prepare_scoring(engine, [SEQUENCES[row]], top_k=3),
        lambda engine, row: prepare_scoring(engine, [SEQUENCES[row]], top_ids=[torch.tensor([[row, 7], [8, 9]])]),
    ],
)
def test_calls_that_share_a_batch_keep_their_own_ids(backend, prepare):
    calls = [prepare(backend.engine, row) for row in range(2)]
    modes = CallerModes()
    assert sharing_key(calls[0], modes) == sharing_key(calls[1], modes) is not None
    for row, together in enumerate(ask_together(calls, None)):
        alone = prepare(backend.engine, row).run()
        for each in fields(alone):
            one, other = getattr(together, each.name), getattr(alone, each.name)
            assert getattr(one, "tolist", lambda one=one: one)() == getattr(other, "tolist", lambda o=other: o)()


def other(rows: Ragged, index: int, value: float) -> Ragged:
    values = rows.values.clone()
    values[index] = value
    return rows.with_values(values)


def first_set(ids):
    return lambda b: replace(b, kept_ids=TokenSets.from_list([[ids(r), *r[1:]] for r in b.kept_ids.tolist()]))


@pytest.mark.parametrize(
    ("bend", "says"),
    [
        (lambda b: replace(b, kept_ids=None), "no kept_ids"),
        (first_set(lambda row: []), "row 0, position 0: the set is empty"),
        (first_set(lambda row: row[0][::-1]), "row 0, position 0: the ids of the set are not in ascending order"),
        (first_set(lambda row: [*row[0], 9999]), "row 0, position 0: the set has an id outside the vocabulary"),
        (lambda b: replace(b, kept_ids=b.kept_ids.select([1, 0])), "the set lacks the token"),
        (lambda b: replace(b, kept_ids=b.kept_ids.select([0])), "kept_ids and ids differ in length"),
        (lambda b: replace(b, kept_log_mass=other(b.kept_log_mass, 0, 0.5)), "row 0, position 0: the log-prob is 0.5"),
        (lambda b: replace(b, top_ids=None), "returned not all of top_ids"),
        (lambda b: replace(b, top_ids=b.top_ids.with_values(b.top_ids.values[:, :3])), "expected torch.int64[12, 8]"),
        (lambda b: replace(b, top_logprobs=b.top_logprobs.with_values(b.top_logprobs.values.flip(-1))), "must have"),
        (lambda b: replace(b, top_logprobs=other(b.top_logprobs, 0, math.nan)), "nan or above 0"),
        (lambda b: replace(b, tail_log_mass=other(b.tail_log_mass, 0, -0.5)), "do not add up to 1"),
        (lambda b: replace(b, top_ids=other(b.top_ids, 3, 7)), "row 0, position 3: "),
        (
            lambda b: replace(b, top_ids=b.top_ids.with_values(b.top_ids.values.roll(1, 0))),
            "is not the one that top_logprobs has",
        ),
    ],
)
def test_a_wrong_result_of_generate_is_refused(bend, says):
    with get_backend("toy", wrappers=[ResultChanger(bend)]) as bent, pytest.raises(EngineError) as error:
        bent.generate(PROMPTS, CUT, logprobs="processed", return_support=True, top_logprobs=8)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("bend", "says"),
    [
        (lambda b: replace(b, support="truncated"), "reports support"),
        (lambda b: replace(b, top_ids=None), "returned not all of top_ids"),
        (lambda b: replace(b, top_ids=other(b.top_ids, 0, 5)), "row 0, position 0: nothing was scored here"),
        (lambda b: replace(b, top_ids=b.top_ids.with_values(b.top_ids.values.roll(1, 0))), "nothing was scored here"),
        (lambda b: replace(b, top_logprobs=b.top_logprobs.with_values(b.top_logprobs.values / 2)), "add up to 1"),
        (
            lambda b: replace(b, logprobs=b.logprobs.with_values(torch.where(b.scored.values, -0.01, 0.0))),
            "but not among them",
        ),
    ],
)
def test_a_wrong_result_of_scoring_is_refused(bend, says):
    with get_backend("toy", wrappers=[ResultChanger(bend)]) as bent, pytest.raises(EngineError) as error:
        bent.score_logprobs(SEQUENCES, top_k=2)
    assert says in str(error.value)


def test_what_was_not_asked_for_is_refused():
    more = {"top_ids": Ragged(torch.zeros(6, 1, dtype=torch.int64), torch.tensor([3, 3]))}
    with (
        get_backend("toy", wrappers=[ResultChanger(lambda b: replace(b, **more))]) as bent,
        pytest.raises(EngineError, match="not asked for"),
    ):
        bent.score_logprobs(SEQUENCES)
