"""Token ids survive every way through the backend: tokenizing, sampling with seeds, and streaming."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

import corelm
from corelm import AnswerChunk, Backend, LLMPolicy, Tokens
from corelm.backend.arguments import answer_seeds
from corelm_testing.base import ConformanceBase, needs, not_applicable
from corelm_testing.reference import OPENINGS, repeatable, seeded

TEXTS = ["Where is the cat?", "a", "two\nlines, and  two spaces", "naïve café, 猫 🐈", "{'x': [1, 2.5]}"]


class TokenPromises(ConformanceBase, theme="tokens"):
    """Text survives tokenizing, and token ids come back unchanged."""

    def test_text_survives_tokenizing(self, backend: Backend) -> None:
        ids = backend.tokenize(TEXTS, add_special_tokens=False).ids
        assert backend.detokenize(ids) == TEXTS, (
            "the tokenizer changes a text; if its vocabulary cannot write every character, override this test with an "
            "xfail that says so"
        )

    def test_tokenize_gives_a_row_of_legal_ids_for_every_text(self, backend: Backend) -> None:
        ids = backend.tokenize(["", *TEXTS], add_special_tokens=False).ids
        assert ids.values.dtype == torch.int64 and len(ids) == 1 + len(TEXTS)
        assert ids.lengths[0] == 0 and bool((ids.lengths[1:] > 0).all())
        assert bool(((ids.values >= 0) & (ids.values < self.vocab_size)).all())

    def test_a_text_tokenizes_the_same_alone_and_in_a_batch(self, backend: Backend) -> None:
        together = backend.tokenize(TEXTS).ids.tolist()
        assert together == [backend.tokenize(text).ids.tolist()[0] for text in TEXTS]

    def test_special_tokens_are_added_only_if_asked_for(self, backend: Backend) -> None:
        special = set(backend.tokenizer.all_special_ids)
        bare = backend.tokenize(TEXTS, add_special_tokens=False).ids.tolist()
        assert not special.intersection(token for row in bare for token in row)
        added = backend.tokenize(TEXTS, add_special_tokens=True).ids.tolist()
        assert [[token for token in row if token not in special] for row in added] == bare

    def test_a_special_token_in_plain_text_is_not_parsed(self, backend: Backend) -> None:
        special = set(backend.tokenizer.all_special_ids)
        text = f"a{backend.detokenize([sorted(backend.eos_token_ids)[:1]], skip_special_tokens=False)[0]}b"
        parsed = backend.tokenize(text, add_special_tokens=False, parse_special=True).ids.tolist()[0]
        plain = backend.tokenize(text, add_special_tokens=False, parse_special=False).ids
        assert special.intersection(parsed) and not special.intersection(plain.tolist()[0])
        assert backend.detokenize(plain) == [text]

    def test_offsets_say_which_characters_a_token_stands_for(self, backend: Backend) -> None:
        batch = backend.tokenize(TEXTS, add_special_tokens=False, offsets=True)
        assert batch.offsets is not None and batch.offsets.shape == (batch.ids.values.shape[0], 2)
        for text, spans in zip(TEXTS, batch.offsets.split(batch.ids.lengths.tolist()), strict=True):
            # Several tokens of one character may share its span, and a tokenizer may leave out spaces.
            assert bool((spans[:, 0] <= spans[:, 1]).all()) and bool((spans[1:] >= spans[:-1]).all())
            covered = {at for start, stop in spans.tolist() for at in range(start, stop)}
            assert {at for at, letter in enumerate(text) if not letter.isspace()} <= covered <= set(range(len(text)))

    def test_prompt_ids_come_back_unchanged(self, backend: Backend) -> None:
        prompts = self._odd_prompts(backend)
        for pad_output in (False, True):
            policy = LLMPolicy(
                backend,
                input_mode="tokens",
                sampling_params={"max_new_tokens": 3},
                pad_output=pad_output,
                return_log_probs=False,
            )
            given = torch.tensor(prompts)
            out = policy(TensorDict(tokens=given, attention_mask=torch.ones_like(given), batch_size=[len(prompts)]))
            assert corelm.ragged(out, ("tokens", "prompt")).tolist() == prompts
            assert [row[:6] for row in corelm.ragged(out, ("tokens", "full")).tolist()] == prompts

    @needs("score")
    def test_scored_ids_come_back_unchanged(self, backend: Backend) -> None:
        rows = self._odd_prompts(backend)
        policy = LLMPolicy(backend, input_mode="tokens", generate=False)
        out = policy(TensorDict(tokens=Tokens.from_rows(full=rows), batch_size=[len(rows)]))
        assert corelm.ragged(out, ("tokens", "full")).tolist() == rows

    @needs("per_answer_seeds")
    def test_a_text_and_its_ids_are_the_same_prompt(self, backend: Backend) -> None:
        ids = backend.tokenize(TEXTS).ids
        sampling = {"max_new_tokens": 4, "seed": 3}
        policy = LLMPolicy(backend, input_mode="text", sampling_params=sampling, return_log_probs=False)
        from_text = policy(TensorDict(text=TEXTS, batch_size=[len(TEXTS)]))
        from_ids = backend.generate(ids, sampling, logprobs="none").ids
        assert corelm.ragged(from_text, ("tokens", "prompt")).tolist() == ids.tolist()
        assert corelm.ragged(from_text, ("tokens", "response")).tolist() == from_ids.tolist()

    def _odd_prompts(self, backend: Backend) -> list[list[int]]:
        """Return rows of 6 ids with pads and EOS anywhere: masks and lengths must not be inferred from ids."""
        plain, first, middle, last = self.rows(backend, 6, 6, 6, 6)
        first[0] = last[-1] = middle[2] = backend.pad_id
        middle[3] = min(backend.eos_token_ids, default=backend.pad_id)
        return [plain, first, middle, last, [backend.pad_id] * 6]


#: The most tokens of an answer with a seed.
_SEEDED = 8


class SeedPromises(ConformanceBase, theme="seeds"):
    """The same seed gives the same answer, regardless of the other rows and samples of the call."""

    @needs("per_answer_seeds")
    def test_the_same_seed_gives_the_same_answers(self, backend: Backend) -> None:
        assert self._seeded_answers(backend, seed=7) == self._seeded_answers(backend, seed=7)

    @needs("per_answer_seeds")
    def test_another_seed_gives_other_answers(self, backend: Backend) -> None:
        assert self._seeded_answers(backend, seed=7) != self._seeded_answers(backend, seed=8)

    @needs("per_answer_seeds")
    def test_without_a_seed_torchs_generator_decides(self, backend: Backend) -> None:
        if backend.capabilities.seeds_are_costly:
            not_applicable("seeds_are_costly is declared")
        answers = []
        for seed in (1, 1, 2):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                answers.append(self._seeded_answers(backend))
        assert answers[0] == answers[1] != answers[2]

    def test_answers_without_a_seed_differ(self, backend: Backend) -> None:
        first, second = (self._seeded_answers(backend, self._seed_prompts(backend)) for _ in range(2))
        assert first != second, "two calls without a seed gave the same answers"

    @needs("per_answer_seeds")
    def test_an_answer_does_not_depend_on_the_other_rows(self, backend: Backend) -> None:
        prompts = self._seed_prompts(backend)
        seeds = answer_seeds(5, range(len(prompts)))
        together = self._seeded_answers(backend, prompts, seeds=seeds)
        backwards = self._seeded_answers(backend, prompts[::-1], seeds=seeds.flip(0))
        assert backwards[::-1] == together
        for row in (0, len(prompts) - 1):
            alone = self._seeded_answers(backend, [prompts[row]], seeds=seeds[row : row + 1])
            assert alone == [together[row]]

    @needs("per_answer_seeds")
    def test_an_answer_does_not_depend_on_the_number_of_samples(self, backend: Backend) -> None:
        few = self._seeded_answers(backend, seed=7, num_samples=2)
        many = self._seeded_answers(backend, seed=7, num_samples=5)
        assert few == [answer for row, answer in enumerate(many) if row % 5 < 2]

    @needs("per_answer_seeds")
    def test_the_samples_of_a_prompt_differ(self, backend: Backend) -> None:
        answers = self._seeded_answers(backend, [self._seed_prompts(backend)[0]], seed=7, num_samples=6)
        assert len(set(map(tuple, answers))) > 1

    @needs("per_answer_seeds")
    def test_asking_for_log_probs_changes_no_answer(self, backend: Backend) -> None:
        answers = self._seeded_answers(backend, seed=7)
        # At temperature 1, raw and processed log-probs are the same, so an engine with one mode serves both.
        for mode in ("raw", "processed") if backend.capabilities.generation_modes else ():
            batch = backend.generate(self._seed_prompts(backend), {"max_new_tokens": _SEEDED, "seed": 7}, logprobs=mode)
            assert batch.ids.tolist() == answers

    def _seed_prompts(self, backend: Backend) -> list[list[int]]:
        return [*self.rows(backend, 3, 30, 1, 11), *backend.tokenize(OPENINGS[:2]).ids.tolist()]

    def _seeded_answers(
        self, backend: Backend, prompts: list[list[int]] | None = None, *, seeds: Any = None, **sampling: Any
    ) -> list[list[int]]:
        prompts = self._seed_prompts(backend) if prompts is None else prompts
        sampling = {"max_new_tokens": _SEEDED, **sampling}
        return backend.generate(prompts, sampling, logprobs="none", seeds=seeds).ids.tolist()


#: The most tokens of an answer that is streamed.
_STREAMED = 12


class StreamingPromises(ConformanceBase, theme="streaming"):
    """Tokens that are streamed are those of the result, and come before it."""

    def test_the_chunks_of_a_stream_are_its_result(self, backend: Backend) -> None:
        logprobs = bool(backend.capabilities.generation_modes)
        sampling = seeded(backend, {"max_new_tokens": _STREAMED, "num_samples": 2})
        policy = LLMPolicy(backend, input_mode="text", sampling_params=sampling, return_log_probs=logprobs)
        with policy.stream(TensorDict(text=list(OPENINGS))) as stream:
            rows = _by_row(list(stream), 2 * len(OPENINGS))
        out = stream.result.reshape(-1)
        for row, chunks in enumerate(rows):
            assert [token for chunk in chunks for token in chunk.ids] == out["tokens"].response[row].tolist()
            assert "".join(chunk.text for chunk in chunks) == out["text"].response[row]
            assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [out["finish_reason"][row]]
            assert chunks[-1].finish_reason, "tokens were streamed after the end of the answer"
            if logprobs:
                found = [value for chunk in chunks for value in chunk.logprobs]
                assert found == out["log_probs"].response[row].tolist()

    @needs("streaming")
    def test_tokens_are_streamed_before_the_answer_ends(self, backend: Backend) -> None:
        sampling = repeatable(backend, {"max_new_tokens": _STREAMED, "ignore_eos": True})
        with backend.stream(self.rows(backend, 5), sampling, logprobs="none") as stream:
            pieces = [chunk for chunk in stream if chunk.ids]
        # Core hands over what the backend does not, in one piece at the end of the call.
        assert len(pieces) > 1, "the whole answer came in one piece; hand tokens to request.on_tokens as they come"

    @needs("streaming", "per_answer_seeds")
    def test_streaming_changes_no_answer(self, backend: Backend) -> None:
        prompts, sampling = self.rows(backend, 5, 9, 3), {"max_new_tokens": _STREAMED, "seed": 7}
        with backend.stream(prompts, sampling, logprobs="none") as stream:
            list(stream)
        plain = backend.generate(prompts, sampling, logprobs="none")
        assert stream.result.ids.tolist() == plain.ids.tolist()
        assert stream.result.finish_reasons == plain.finish_reasons

    @needs("streaming", "generation_modes")
    def test_streamed_log_probs_are_true(self, backend: Backend) -> None:
        prompts = self.rows(backend, 5, 9, 3)
        with backend.stream(prompts, seeded(backend, {"max_new_tokens": _STREAMED})) as stream:
            list(stream)
        self.assert_true_answers(prompts, stream.result)

    @needs("streaming")
    def test_leaving_a_stream_early_leaves_the_backend_usable(self, backend: Backend) -> None:
        prompts = self.rows(backend, 5, 9)
        with backend.stream(prompts, {"max_new_tokens": _STREAMED, "ignore_eos": True}, logprobs="none") as stream:
            next(stream)
        assert list(stream) == []
        batch = backend.generate(prompts, {"max_new_tokens": 2, "ignore_eos": True}, logprobs="none")
        assert batch.ids.lengths.tolist() == [2, 2]


def _by_row(chunks: list[AnswerChunk], rows: int) -> list[list[AnswerChunk]]:
    return [[chunk for chunk in chunks if chunk.row == row] for row in range(rows)]
