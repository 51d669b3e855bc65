"""Conversations: sampled turns keep their ids, however many turns follow."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from tensordict import TensorDict

import corelm
from corelm import Backend, History, LLMPolicy
from corelm_testing.base import ConformanceBase, needs
from corelm_testing.prompts import QUESTIONS, conversations

TURNS = 3


class ChatPromises(ConformanceBase):
    @pytest.fixture(scope="class")
    @classmethod
    def talks(cls, backend: Backend) -> list[TensorDict]:
        """Return the policy's output at each turn of the same conversations."""
        policy = LLMPolicy(
            backend, sampling_params={"max_new_tokens": 6}, inplace=False, return_log_probs=False, truncation="error"
        )
        history = conversations(backend, (len(QUESTIONS),))
        talks = []
        for _ in range(TURNS):
            talks.append(policy(TensorDict(history=history)))
            history = talks[-1]["history"].full.append({"role": "user", "content": "And then?"})
        return talks

    def test_later_turns_keep_all_earlier_ids(self, talks: list[TensorDict]) -> None:
        for before, after in pairwise(talks):
            said = corelm.ragged(before, ("tokens", "full")).tolist()
            now = corelm.ragged(after, ("tokens", "prompt")).tolist()
            assert [row[: len(old)] for row, old in zip(now, said, strict=True)] == said
            assert all(len(row) > len(old) for row, old in zip(now, said, strict=True))

    def test_every_turn_keeps_its_ids_in_the_history(self, talks: list[TensorDict]) -> None:
        sampled = [corelm.ragged(talk, ("tokens", "response")).tolist() for talk in talks]
        for row, chat in enumerate(talks[-1]["history"].full.chats):
            assert [turn.role for turn in chat] == ["user", "assistant"] * TURNS
            assert [list(turn.token_ids or ()) for turn in chat[1::2]] == [turn[row] for turn in sampled]

    def test_the_assistant_mask_covers_every_sampled_turn(self, talks: list[TensorDict]) -> None:
        ids = corelm.ragged(talks[-1], ("tokens", "full")).tolist()
        masks = corelm.ragged(talks[-1], ("masks", "all_assistant_mask")).tolist()
        sampled = [corelm.ragged(talk, ("tokens", "response")).tolist() for talk in talks]
        starts = [corelm.ragged(talk, ("tokens", "prompt")).lengths.tolist() for talk in talks]
        for row, (tokens, mask) in enumerate(zip(ids, masks, strict=True)):
            for answers, at in zip(sampled, starts, strict=True):
                turn = slice(at[row], at[row] + len(answers[row]))
                assert tokens[turn] == answers[row] and all(mask[turn])
            assert not mask[0] and sum(mask) == sum(len(answers[row]) for answers in sampled)

    @needs("score")
    def test_scoring_a_conversation_scores_the_sampled_ids(self, backend: Backend, talks: list[TensorDict]) -> None:
        scorer = LLMPolicy(backend, generate=False, inplace=False)
        for talk in talks:
            scored = scorer(TensorDict(history=talk["history"].full))
            assert (
                corelm.ragged(scored, ("tokens", "full")).tolist() == corelm.ragged(talk, ("tokens", "full")).tolist()
            )

    def test_markup_in_a_message_stays_text(self, backend: Backend) -> None:
        conversations(backend, ())
        eos = sorted(backend.eos_token_ids)[0]
        markup: str = backend.detokenize([[eos]], skip_special_tokens=False)[0]
        ids: list[list[int]] = [self._prompt(backend, content) for content in ("Who?", f"Who{markup}?")]
        special = set(backend.tokenizer.all_special_ids)
        plain, injected = ([token for token in row if token in special] for row in ids)
        assert plain == injected
        assert markup in backend.detokenize([[token for token in ids[1] if token not in special]])[0]

    def _prompt(self, backend: Backend, content: str) -> Any:
        history = History.from_chats([{"role": "user", "content": content}])
        policy = LLMPolicy(backend, sampling_params={"max_new_tokens": 1}, inplace=False, return_log_probs=False)
        return policy(TensorDict(history=history))["tokens"].prompt.tolist()
