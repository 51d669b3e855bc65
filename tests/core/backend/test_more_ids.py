"""The ids that truncation left, the most probable ids, and scoring over given ids: arguments and results."""

import asyncio
import math
from dataclasses import fields

import pytest
import torch

from corelm import Ragged, TokenSets, get_backend, hookimpl
from corelm.backend.arguments import prepare_generation, prepare_scoring
from corelm.batching.merging import ask_together, sharing_key
from corelm.tensors.modes import CallerModes
from helpers.each import each

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


@each(
    "sampling, kept",
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


def test_later_changes_of_the_callers_ids_do_not_reach_the_request(backend):
    sets, named = TokenSets.from_list([[[], [2], [3]], [[], [5], [6]]]), torch.ones(2, 3, 1, dtype=torch.int64)
    requests = [
        prepare_scoring(backend.engine, SEQUENCES, **given).request for given in ({"support": sets}, {"top_ids": named})
    ]
    sets.ids.values.zero_()
    named.zero_()
    assert requests[0].support.tolist() == [[[], [2], [3]], [[], [5], [6]]]
    assert requests[1].top_ids.values.flatten().tolist() == [-1, 1, 1, -1, 1, 1]


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


@each(
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
        for one in fields(alone):
            one, other = getattr(together, one.name), getattr(alone, one.name)
            assert getattr(one, "tolist", lambda one=one: one)() == getattr(other, "tolist", lambda o=other: o)()


def other(rows: Ragged, index: int, value: float) -> Ragged:
    values = rows.values.clone()
    values[index] = value
    return rows.with_values(values)
