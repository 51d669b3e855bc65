"""An answer ends where the request says, reports why, and keeps the token that ended it."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Collection
from itertools import pairwise

from tensordict import TensorDict

import corelm
from corelm import Backend, LLMPolicy
from corelm.spec import GenerateResult
from corelm_testing.base import ConformanceBase, needs, not_applicable
from corelm_testing.reference import LONGEST, MIN_P_VALUE, OPENINGS, repeatable, seeded

NEW = 16
#: The largest number of answers to sample in order to see one that ends with EOS.
MAX_DRAWS = 2000
#: How often two answers are sampled in order to abort one of them in time.
_ABORTS_TRIED = 5


class StoppingPromises(ConformanceBase):
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
        _assert_ended_by(batch, stop_ids, NEW)

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
        prompts, done = self.rows(backend, 4, 4), threading.Event()
        batches: list[GenerateResult] = []

        def answer() -> None:
            try:
                sampling = {"max_new_tokens": limit, "ignore_eos": True}
                batches.append(backend.generate(prompts, sampling, logprobs="none", request_ids=["one", "other"]))
            finally:
                done.set()

        thread = threading.Thread(target=answer)
        thread.start()
        # Abort repeatedly: a request that has not reached the engine yet cannot be aborted.
        while not done.wait(0.01):
            backend.abort(["one"])
        thread.join()
        (batch,) = batches
        return batch

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
    return backend.generate(prompts, repeatable(backend, {"max_new_tokens": NEW, **sampling}), logprobs="none")


def _answers(backend: Backend, **sampling: object) -> list[tuple[list[int], str, str]]:
    """Return ids, text and finish reason of answers; EOS is ignored unless `sampling` says otherwise."""
    sampling = repeatable(backend, {"max_new_tokens": NEW, "ignore_eos": True, **sampling})
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
