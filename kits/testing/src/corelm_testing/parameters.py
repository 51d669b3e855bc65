"""A sampling parameter has its effect or is refused, and an answer ends where the request says."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

import corelm
from corelm import Backend, LLMPolicy
from corelm.spec import FIELDS, GenerateResult
from corelm.spec.sampling import EVERY_ENGINE
from corelm_testing.base import ConformanceBase, needs, not_applicable
from corelm_testing.reference import LONGEST, MIN_P_VALUE, OPENINGS, repeatable, seeded
from corelm_testing.usage import in_range, legal

#: The most tokens of an answer.
NEW = 10


class ParameterPromises(ConformanceBase, theme="parameters"):
    """A declared sampling parameter has its effect; an undeclared one is refused, never ignored silently."""

    # Declarations ----------------------------------------------------------------------------------------------------

    def test_only_known_parameters_are_declared(self, backend: Backend) -> None:
        assert set(backend.capabilities.sampling) <= set(FIELDS) - EVERY_ENGINE

    def test_every_declared_parameter_is_taken(self, backend: Backend) -> None:
        # `test_engine_kwargs_change_answers` is the test of engine_kwargs.
        for name in sorted(set(backend.capabilities.sampling) - {"engine_kwargs"}):
            sampling = {"max_new_tokens": 4, **self.sampling_of(backend, name)}
            # Whole characters, because vLLM looks for stop strings in a prompt that ends in half of one.
            prompts = backend.tokenize(OPENINGS[:1]).ids
            assert len(backend.generate(prompts, sampling, logprobs="none").ids) == 1, name

    # Effects ---------------------------------------------------------------------------------------------------------

    @needs("sampling:engine_kwargs")
    def test_engine_kwargs_change_answers(self, backend: Backend) -> None:
        sampling = self.sampling_of(backend, "engine_kwargs")
        plain = {name: value for name, value in sampling.items() if name != "engine_kwargs"}
        answers = []
        for given in (plain, sampling):
            given = {"max_new_tokens": NEW, "ignore_eos": True, **given}
            # Greedy or with a seed, so that nothing but engine_kwargs can change the answers.
            given = given if "temperature" in given else repeatable(backend, given)
            answers.append(backend.generate(self._penalty_prompts(backend), given, logprobs="none").ids.tolist())
        assert answers[0] != answers[1], "engine_kwargs changed no answer"

    @needs("sampling:presence_penalty")
    def test_a_presence_penalty_is_subtracted_once_per_id(self, backend: Backend) -> None:
        self._assert_penalised(backend, "presence_penalty", lambda count, penalty: penalty * (count > 0))

    @needs("sampling:frequency_penalty")
    def test_a_frequency_penalty_is_subtracted_per_occurrence(self, backend: Backend) -> None:
        self._assert_penalised(backend, "frequency_penalty", lambda count, penalty: penalty * count)

    @needs("sampling:repetition_penalty")
    def test_a_repetition_penalty_disfavours_the_ids_of_prompt_and_answer(self, backend: Backend) -> None:
        (penalty,) = self._penalties(backend, "repetition_penalty", 1.5)[:1]
        prompts = self._penalty_prompts(backend)
        moved = 0
        for prompt, answer in zip(prompts, self._penalised_answers(backend, prompts, penalty, NEW), strict=True):
            for step, token in enumerate(answer):
                moved += self._assert_order_is_kept([*prompt, *answer[:step]], token, penalty)
        assert moved, "the penalty never changed the likeliest id"

    @needs("sampling:repetition_penalty")
    def test_a_repetition_penalty_counts_the_whole_prompt(self, backend: Backend) -> None:
        # Below 1 the penalty favours repeated ids, and the likeliest of them most. Where that one is the first id of
        # the prompt, an engine that does not count it takes another repeated id. Above 1, that is so where the first
        # id is the second likeliest.
        penalties = self._penalties(backend, "repetition_penalty", 0.05, 20.0)
        first, last = 0, -1
        limit = backend.capabilities.max_context or 512
        rows = self.rows(backend, *(length for length in (4, 24, 150) if length < limit))
        for penalty, row, place in product(penalties, rows, (first, last)):
            ranked = self.next_logprobs(row, 1.0).argsort(descending=True).tolist()
            best, second = [token for token in ranked if token not in row][:2]
            prompt = list(row)
            prompt[place] = best if penalty < 1 else second
            prompt[1] = row[1] if penalty < 1 else best
            (answer,) = self._penalised_answers(backend, [prompt], penalty, 1)
            self._assert_order_is_kept(prompt, answer[0], penalty)

    @needs("sampling:num_beams")
    def test_beams_find_answers_at_least_as_likely_as_greedy_ones(self, backend: Backend) -> None:
        prompts = self._penalty_prompts(backend)
        sampling = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}
        totals = []
        for num_beams in (1, 4):
            batch = backend.generate(prompts, {**sampling, "num_beams": num_beams}, logprobs="none")
            answers = zip(prompts, batch.ids.tolist(), strict=True)
            totals.append(sum(float(self.oracle([*p, *answer], 1.0)[len(p) :].sum()) for p, answer in answers))
        assert totals[1] > totals[0]

    @needs("sampling:num_beams")
    def test_beams_search_and_do_not_sample(self, backend: Backend) -> None:
        prompts = self._penalty_prompts(backend)
        sampling = {"num_beams": 4, "max_new_tokens": NEW, "ignore_eos": True}
        greedy = {"temperature": 0.0} if legal(backend, "temperature", 0.0) else {}
        # At the default temperature, an engine that samples finds other answers.
        first, second, third = (
            backend.generate(prompts, {**sampling, **more}, logprobs="none").ids.tolist() for more in ({}, {}, greedy)
        )
        assert first == second == third, "searches of the same prompts found different answers"

    @needs("sampling:length_penalty")
    def test_a_larger_length_penalty_favours_longer_answers(self, backend: Backend) -> None:
        short, long = (self._beam_length(backend, length_penalty=penalty) for penalty in (-8.0, 8.0))
        assert short < long

    @needs("sampling:early_stopping")
    def test_early_stopping_ends_a_search_that_would_go_on(self, backend: Backend) -> None:
        if "length_penalty" not in backend.capabilities.sampling:
            self.declared_and_not_shown("early_stopping", "declare length_penalty as well")
        # With a penalty that favours length, a search that goes on finds longer answers.
        early, late = (self._beam_length(backend, length_penalty=8.0, early_stopping=stop) for stop in (True, False))
        assert early < late

    # Helpers ---------------------------------------------------------------------------------------------------------

    def _penalties(self, backend: Backend, name: str, *preferred: float) -> list[float]:
        """Return values of a penalty for greedy decoding, which shows its effect without chance."""
        found = in_range(backend, name, *preferred)
        if not found or not legal(backend, "temperature", 0.0):
            self.declared_and_not_shown(name, "declare temperature 0, so that its effect can be told from chance")
        return found

    def _penalised_answers(
        self, backend: Backend, prompts: list[list[int]], penalty: float, length: int
    ) -> list[list[int]]:
        """Return greedy answers under a repetition penalty."""
        sampling = {"temperature": 0.0, "max_new_tokens": length, "repetition_penalty": penalty, "ignore_eos": True}
        return backend.generate(prompts, sampling, logprobs="none").ids.tolist()

    def _assert_order_is_kept(self, context: list[int], token: int, penalty: float) -> bool:
        """Assert that a repetition penalty allows this greedy token, and return whether it changed the choice.

        By how much it changes a logit depends on the logit's sign, which log-probs do not show. But the order among
        repeated ids and the order among new ids stay the same. Above 1 no repeated id gains on a new one, and below 1
        no new id on a repeated one.
        """
        logprobs = self.next_logprobs(context, 1.0)
        seen = torch.zeros(self.vocab_size, dtype=torch.bool).index_fill(0, torch.tensor(context), True)
        best_seen, best_new = logprobs[seen].max(), logprobs[~seen].max()
        own, other = (best_seen, best_new) if seen[token] else (best_new, best_seen)
        favoured = bool(seen[token]) == (penalty < 1)
        rival = own if favoured else torch.maximum(own, other)
        assert float(rival - logprobs[token]) <= 2 * self.tolerance, (
            f"under a repetition penalty of {penalty:g}, id {token} was taken after {len(context)} tokens that end in "
            f"{context[-4:]}; its log-prob is {float(logprobs[token]):.4g}, that of another id {float(rival):.4g}"
        )
        return favoured and bool(other > own + 2 * self.tolerance)

    def _beam_length(self, backend: Backend, **options: Any) -> int:
        """Return the total length of the answers if every second id ends an answer."""
        stops = {"ignore_eos": True, "stop_token_ids": list(range(0, self.vocab_size, 2))}
        sampling = {"num_beams": 4, "temperature": 0.0, "max_new_tokens": NEW, **stops, **options}
        batch = backend.generate(self._penalty_prompts(backend), sampling, logprobs="none")
        return int(batch.ids.lengths.sum())

    def _penalty_prompts(self, backend: Backend) -> list[list[int]]:
        return [*self.rows(backend, 5, 24), *backend.tokenize(OPENINGS[:4]).ids.tolist()]

    def _assert_penalised(self, backend: Backend, name: str, amount: Callable[[Tensor, float], Tensor]) -> None:
        """Assert that greedy answers take the likeliest id after `amount` is subtracted, and that some ids change."""
        penalties = self._penalties(backend, name, -1.5, 1.5)
        prompts, changed = self._penalty_prompts(backend), 0
        for penalty in penalties:
            sampling = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True, name: penalty}
            answers = backend.generate(prompts, sampling, logprobs="none").ids.tolist()
            for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
                for step, token in enumerate(answer):
                    logprobs = self.next_logprobs([*prompt, *answer[:step]], 1.0)
                    count = torch.bincount(torch.tensor(answer[:step], dtype=torch.int64), minlength=self.vocab_size)
                    penalised = logprobs - amount(count, penalty)
                    assert float(penalised.max() - penalised[token]) <= 2 * self.tolerance, (
                        f"{name}={penalty}, row {row}, token {step}: id {token}, but id {int(penalised.argmax())} leads"
                    )
                    changed += bool(logprobs.max() - logprobs[token] > 2 * self.tolerance)
        assert changed, f"{name} changed no answer"


#: The most tokens of an answer that something may end before.
_STOPPED = 16
#: The largest number of answers to sample in order to see one that ends with EOS.
MAX_DRAWS = 2000
#: How often two answers are sampled in order to abort one of them in time.
_ABORTS_TRIED = 5


class StoppingPromises(ConformanceBase, theme="stopping"):
    """An answer ends where the request says, reports why, and keeps the token that ended it."""

    @needs("empty_prompt")
    def test_an_empty_prompt_gets_an_answer(self, backend: Backend) -> None:
        prompts = [[], *self.rows(backend, 5), []]
        some = bool(backend.capabilities.generation_modes)
        sampling = seeded(backend, {"max_new_tokens": 4, "ignore_eos": True})
        batch = backend.generate(prompts, sampling, logprobs="raw" if some else "none")
        assert batch.ids.lengths.tolist() == [4, 4, 4] and set(batch.finish_reasons) == {"length"}
        if batch.logprobs is not None:
            for prompt, answer, found in zip(prompts, batch.ids.tolist(), batch.logprobs.split(), strict=True):
                # The oracle gives no log-prob to the first id of a sequence.
                skip = 0 if prompt else 1
                expected = self.oracle([*prompt, *answer], 1.0)[len(prompt) + skip :]
                self.assert_close(found[skip:], expected, f"after a prompt of {len(prompt)} tokens")

    # By length -------------------------------------------------------------------------------------------------------

    def test_an_answer_that_nothing_ends_is_as_long_as_its_limit(self, backend: Backend) -> None:
        for limit in (1, 2, 7):
            batch = _generate(backend, max_new_tokens=limit, ignore_eos=True)
            assert set(batch.ids.lengths.tolist()) == {limit} and set(batch.finish_reasons) == {"length"}

    @needs("max_context")
    def test_an_answer_without_a_limit_fills_the_context(self, backend: Backend) -> None:
        context = backend.capabilities.max_context
        assert context is not None
        if context > LONGEST:
            self.declared_and_not_shown("max_context", f"open the backend with a context of at most {LONGEST} tokens")
        prompts = self.rows(backend, context - 1, context - 5)
        batch = backend.generate(prompts, {"max_new_tokens": None, "ignore_eos": True}, logprobs="none")
        assert batch.ids.lengths.tolist() == [1, 5] and batch.finish_reasons == ("length", "length")

    # By id -----------------------------------------------------------------------------------------------------------

    def test_an_answer_ends_with_its_eos_and_keeps_it(self, backend: Backend) -> None:
        prompt, draws = self._near_eos(backend)
        sampling = seeded(backend, {"num_samples": draws, "max_new_tokens": 4})
        some = bool(backend.capabilities.generation_modes)
        batch = backend.generate([prompt], sampling, logprobs="raw" if some else "none")
        _assert_ended_by(batch, backend.eos_token_ids, 4)
        if batch.logprobs is not None:
            ended = batch.finish_reasons.index("stop")
            answer = batch.ids.tolist()[ended]
            expected = self.oracle([*prompt, *answer], 1.0)[len(prompt) :]
            self.assert_close(batch.logprobs.split()[ended], expected, "an answer and its EOS")

    def test_an_ignored_eos_is_an_ordinary_token(self, backend: Backend) -> None:
        prompt, draws = self._near_eos(backend)
        sampling = seeded(backend, {"num_samples": draws, "max_new_tokens": 3, "ignore_eos": True})
        batch = backend.generate([prompt], sampling, logprobs="none")
        assert set(batch.ids.lengths.tolist()) == {3} and set(batch.finish_reasons) == {"length"}
        assert any(answer[0] in backend.eos_token_ids for answer in batch.ids.tolist())

    def test_an_answer_ends_with_its_stop_id_and_keeps_it(self, backend: Backend) -> None:
        stop_ids = _common_ids(backend)
        batch = _generate(backend, stop_token_ids=stop_ids, ignore_eos=True)
        _assert_ended_by(batch, stop_ids, _STOPPED)

    @needs("sampling:min_new_tokens")
    def test_no_stop_id_ends_an_answer_before_min_new_tokens(self, backend: Backend) -> None:
        stop_ids = _common_ids(backend)
        free = _generate(backend, stop_token_ids=stop_ids)
        assert int(free.ids.lengths.min()) < 5, "the stop ids end no answer early, so this test proves nothing"
        held = _generate(backend, stop_token_ids=stop_ids, min_new_tokens=5)
        assert int(held.ids.lengths.min()) >= 5

    # By string -------------------------------------------------------------------------------------------------------

    @needs("sampling:stop")
    def test_a_stop_string_ends_text_and_ids_together(self, backend: Backend) -> None:
        stop = self._common_strings(backend)
        stopped = 0
        for ids, text, reason in _answers(backend, stop=stop):
            before, whole = backend.detokenize([ids[:-1], ids])
            assert not any(string in before for string in stop), "the answer continues after its stop string"
            starts = [whole.index(string) for string in stop if string in whole]
            assert (reason == "stop") == bool(starts)
            # The token that completes the stop string stays in the ids; the text ends before the string.
            assert text == (whole[: min(starts)] if starts else whole)
            stopped += bool(starts)
        assert stopped, f"no answer contains any of {stop}, so this test proves nothing"

    @needs("sampling:stop", "sampling:min_new_tokens")
    def test_no_stop_string_ends_an_answer_before_min_new_tokens(self, backend: Backend) -> None:
        stop = self._common_strings(backend)
        free = _answers(backend, stop=stop)
        # ignore_eos=False: some engines suppress EOS before min_new_tokens, even if EOS is an ordinary token.
        held = _answers(backend, stop=stop, min_new_tokens=12, ignore_eos=False)
        assert any(len(ids) < 12 for ids, _, _ in free), (
            "no stop string ends an answer early, so this test proves nothing"
        )
        assert all(len(ids) >= 12 for ids, _, _ in held)

    # By abort --------------------------------------------------------------------------------------------------------

    @needs("abort")
    def test_abort_ends_only_the_named_request(self, backend: Backend) -> None:
        limit = min(backend.capabilities.max_context or 512, 512) - 8
        # On a busy machine all of an answer may come before this thread gets to abort it.
        for _ in range(_ABORTS_TRIED):
            batch = self._with_the_first_aborted(backend, limit)
            if batch.finish_reasons != ("length", "length"):
                break
        assert batch.finish_reasons == ("abort", "length")
        assert int(batch.ids.lengths[0]) < limit == int(batch.ids.lengths[1])

    # Helpers ---------------------------------------------------------------------------------------------------------

    def _with_the_first_aborted(self, backend: Backend, limit: int) -> GenerateResult:
        """Return two answers of `limit` tokens, the first of which is aborted while they are sampled."""
        prompts, sampling = self.rows(backend, 4, 4), {"max_new_tokens": limit, "ignore_eos": True}
        ask = partial(backend.generate, prompts, sampling, logprobs="none", request_ids=["one", "other"])
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(ask)
            # Abort repeatedly: a request that has not reached the engine yet cannot be aborted.
            while not wait([call], 0.01).done:
                backend.abort(["one"])
        return call.result()

    def _near_eos(self, backend: Backend) -> tuple[list[int], int]:
        """Return the prompt after which EOS is likeliest, and how many answers surely include one that ends."""
        texts = [*OPENINGS, *(opening + " end." for opening in OPENINGS)]
        prompts = [*backend.tokenize(texts).ids.tolist(), *self.rows(backend, *[3] * 24)]
        eos = sorted(backend.eos_token_ids)
        if not eos:
            not_applicable("no id ends an answer by itself")
        chances = [sum(math.exp(self.oracle([*prompt, end], 1.0)[-1]) for end in eos) for prompt in prompts]
        best = max(chances)
        draws = 1 if best > 0.99999 else math.ceil(math.log(MIN_P_VALUE) / math.log1p(-best))
        if draws > MAX_DRAWS:
            self.declared_and_not_shown(
                "eos_token_ids", f"test with a model that ends some of {MAX_DRAWS} answers with EOS after some prompt"
            )
        return prompts[chances.index(best)], draws

    def _common_strings(self, backend: Backend) -> list[str]:
        """Return four strings of two characters that answers often contain; with short tokens they span two tokens."""
        texts = [text for _, text, _ in _answers(backend)]
        pairs = (pair for text in texts for pair in {a + b for a, b in pairwise(text[1:])})
        common = Counter(pair for pair in pairs if pair.isascii() and pair.isprintable())
        if not common:
            self.declared_and_not_shown("stop", "test with a model whose answers contain printable characters")
        return [pair for pair, _ in common.most_common(4)]


def _generate(backend: Backend, **sampling: object) -> GenerateResult:
    prompts = backend.tokenize(OPENINGS).ids.repeat(3)
    return backend.generate(prompts, repeatable(backend, {"max_new_tokens": _STOPPED, **sampling}), logprobs="none")


def _answers(backend: Backend, **sampling: object) -> list[tuple[list[int], str, str]]:
    """Return ids, text and finish reason of answers; EOS is ignored unless `sampling` says otherwise."""
    sampling = repeatable(backend, {"max_new_tokens": _STOPPED, "ignore_eos": True, **sampling})
    policy = LLMPolicy(backend, input_mode="text", sampling_params=sampling, return_log_probs=False)
    out = policy(TensorDict(text=list(OPENINGS) * 3))
    ids = corelm.ragged(out, ("tokens", "response")).tolist()
    return list(zip(ids, out["text"].response, out["finish_reason"], strict=True))


def _assert_ended_by(batch: GenerateResult, stop_ids: Collection[int], limit: int) -> None:
    for answer, reason in zip(batch.ids.tolist(), batch.finish_reasons, strict=True):
        assert not set(stop_ids).intersection(answer[:-1]), "an answer continues after a stop id"
        assert bool(answer) and (answer[-1] in stop_ids) == (reason == "stop")
        assert reason == "stop" or (reason == "length" and len(answer) == limit)
    assert "stop" in batch.finish_reasons


def _common_ids(backend: Backend) -> list[int]:
    """Return four ids that answers often contain."""
    free = _generate(backend, ignore_eos=True).ids.tolist()
    seen = Counter(token for answer in free for token in set(answer[1:4]) - backend.eos_token_ids)
    return [token for token, _ in seen.most_common(4)]
