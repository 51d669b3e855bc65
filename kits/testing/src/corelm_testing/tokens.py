"""Text survives tokenizing, and token ids come back unchanged."""

from __future__ import annotations

import torch
from tensordict import TensorDict

import corelm
from corelm import Backend, LLMPolicy, Tokens
from corelm_testing.base import ConformanceBase, needs

TEXTS = ["Where is the cat?", "a", "two\nlines, and  two spaces", "naïve café, 猫 🐈", "{'x': [1, 2.5]}"]


class TokenPromises(ConformanceBase):
    def test_text_survives_tokenizing(self, backend: Backend) -> None:
        ids = backend.tokenize(TEXTS, add_special_tokens=False).ids
        assert backend.detokenize(ids) == TEXTS

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
        """Return rows of 6 ids with pads and EOS in unusual places: masks and lengths must not be inferred from ids."""
        plain, first, middle, last = self.rows(backend, 6, 6, 6, 6)
        first[0] = last[-1] = middle[2] = backend.pad_id
        middle[3] = min(backend.eos_token_ids, default=backend.pad_id)
        return [plain, first, middle, last, [backend.pad_id] * 6]
