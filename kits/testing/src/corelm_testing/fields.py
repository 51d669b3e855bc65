"""The policy writes every promised field, and no other, and conversations keep the ids of sampled turns."""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

import corelm
from corelm import Backend, History, LLMPolicy
from corelm.containers.classes import flat
from corelm.errors import TemplateError
from corelm.tensors.lazy_rows import nested
from corelm_testing.base import ConformanceBase, needs, not_applicable, require

QUESTIONS = ("Where is the cat?", "Is the tea hot?", "Who?", "When is it dark?")


def questions(shape: tuple[int, ...]) -> list[str]:
    count = math.prod(shape)
    return [QUESTIONS[row % len(QUESTIONS)] for row in range(count)]


def conversations(backend: Backend, shape: tuple[int, ...]) -> History:
    """Return a history with one user question per conversation; not applicable without a chat template.

    Raises:
        TemplateError: there is a template, and it fails.
    """
    chats = [[{"role": "user", "content": question}] for question in questions(shape)]
    history = History.of(chats, shape)
    try:
        History.from_chats([{"role": "user", "content": "Who?"}]).apply_chat_template(backend.tokenizer)
    except TemplateError:
        if _has_template(backend.tokenizer):
            raise
        not_applicable("the tokenizer has no chat template")
    return history


def _has_template(tokenizer: Any) -> bool:
    if not hasattr(tokenizer, "chat_template"):
        # One that renders in a way of its own.
        return hasattr(tokenizer, "apply_chat_template")
    return tokenizer.chat_template is not None


def as_input(backend: Backend, mode: str, shape: tuple[int, ...], rows: list[list[int]]) -> TensorDict:
    """Return the questions under the key that this input mode reads; in tokens mode, `rows` of 5 ids each."""
    if mode == "history":
        return TensorDict(history=conversations(backend, shape), batch_size=shape)
    td = TensorDict({}, batch_size=shape)
    if mode == "text":
        td["text"] = nested(iter(questions(shape)), shape)
    else:
        td["tokens"] = torch.tensor(rows, dtype=torch.int64).reshape(*shape, 5)
    return td


SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (3,), (2, 2))
LAYOUTS = ("ragged", "dense")
#: The most tokens of an answer.
NEW = 4

PARTS = ("prompt", "response", "full")
CONTAINERS: dict[str, tuple[str, ...]] = {
    "text": PARTS,
    "tokens": PARTS,
    "masks": ("all_attention_mask", "all_assistant_mask", "all_response_mask"),
    "log_probs": (*PARTS, "scored_mask"),
    "history": PARTS,
}
DTYPES = {"tokens": torch.int64, "masks": torch.bool, "log_probs": torch.float32}


class Cell:
    """One call of a policy, its input and its output.

    Attributes:
        name: names the call in assertion messages.
        ids: the expected ids, row by row: of the prompts when generating, of whole sequences when scoring.
        batch: the expected batch shape of the output.
    """

    def __init__(self, policy: LLMPolicy, given: TensorDictBase, ids: list[list[int]]) -> None:
        options = policy.options
        self.policy, self.given, self.ids, self.out = policy, given, ids, policy(given)
        self.mode, self.dense = options.input_mode, options.pad_output
        self.batch: tuple[int, ...] = (*given.batch_size, *filter(None, [options.num_samples]))
        layout = "dense" if self.dense else "ragged"
        self.name = f"{self.mode}, {layout}, num_samples={options.num_samples}, batch {tuple(given.batch_size)}"

    def asked(self) -> list[str]:
        """Return the question of each row."""
        shape = tuple(self.given.batch_size)
        samples = self.batch[-1] if len(self.batch) > len(shape) else 1
        return [question for question in questions(shape) for _ in range(samples)]

    def rows(self, *key: str) -> list[list[Any]]:
        return corelm.ragged(self.out, key).tolist()

    def fields(self) -> set[tuple[str, str]]:
        """The fields that hold something."""
        there = {(name, field) for name in CONTAINERS if name in self.out.keys() for field in CONTAINERS[name]}
        return {(name, field) for name, field in there if getattr(self.out[name], field) is not None}


def policy_of(backend: Backend, mode: str, layout: str, **options: Any) -> LLMPolicy:
    """Any log-probs the engine has are raw ones here: at temperature 1 both modes are the same numbers."""
    if options.get("generate", True):
        options = {"sampling_params": {"max_new_tokens": NEW}, **options}
        options["return_log_probs"] = bool(backend.capabilities.generation_modes)
    return LLMPolicy(backend, input_mode=mode, pad_output=layout == "dense", inplace=False, **options)


def cell_of(policy: LLMPolicy, shape: tuple[int, ...]) -> Cell:
    """Call the policy on a batch of this shape; the expected ids are those of the backend's template and tokenizer."""
    backend, mode, options = policy.backend, policy.options.input_mode, policy.options
    rows = ConformanceBase().rows(backend, *[5] * math.prod(shape))
    given = as_input(backend, mode, shape, rows)
    if mode == "text":
        rows = backend.tokenize(questions(shape)).ids.tolist()
    elif mode == "history":
        texts = flat(given["history"].apply_chat_template(backend.tokenizer, add_generation_prompt=options.generate))
        rows = backend.tokenize(texts, add_special_tokens=False).ids.tolist()
    return Cell(policy, given, [row for row in rows for _ in range(options.num_samples or 1)])


def check_layout(cell: Cell) -> None:
    """Assert that dense fields are one tensor, and other fields one tensor per row, in lists nested like the batch."""
    for name, field in cell.fields():
        value = getattr(cell.out[name], field)
        if name == "history":
            assert tuple(value.batch_size) == cell.batch, cell.name
        elif name == "text":
            assert value == nested(iter(flat(value)), cell.batch), cell.name
            assert all(isinstance(text, str) for text in flat(value)), cell.name
        else:
            where, dtype = (cell.name, name, field), torch.bool if field == "scored_mask" else DTYPES[name]
            if cell.dense:
                assert value.dtype == dtype and tuple(value.shape[:-1]) == cell.batch, where
            else:
                assert len(flat(value)) == math.prod(cell.batch), where
                assert all(row.dtype == dtype and row.ndim == 1 for row in flat(value)), where
    if cell.dense:
        tokens, masks = cell.out["tokens"], cell.out["masks"]
        for field in ("all_attention_mask", "all_assistant_mask", "all_response_mask"):
            mask = getattr(masks, field)
            assert mask is None or mask.shape == tokens.full.shape, (cell.name, field)


class FieldPromises(ConformanceBase, theme="fields"):
    """The policy writes every promised field, and no other, for every input mode, layout and batch shape.

    It is called once per cell of that matrix. Each test then checks one promise on all outputs.
    """

    # Generating ------------------------------------------------------------------------------------------------------

    @pytest.fixture(scope="class", params=product(("history", "text", "tokens"), LAYOUTS), ids="-".join)
    @classmethod
    def generated(cls, request: pytest.FixtureRequest, backend: Backend) -> list[Cell]:
        return [
            cell_of(policy_of(backend, *request.param, num_samples=samples), shape)
            for samples, shape in product((None, 1, 2), SHAPES)
        ]

    def test_generating_writes_every_promised_field_and_no_other(self, generated: list[Cell]) -> None:
        for cell in generated:
            absent = set() if cell.mode == "history" else {"history"}
            if "log_probs" not in cell.policy.options.fields:
                absent.add("log_probs")
            promised = {(name, field) for name in CONTAINERS if name not in absent for field in CONTAINERS[name]}
            assert cell.fields() == promised, cell.name
            assert set(cell.policy.out_keys) == {*promised, "finish_reason", "errors"}, cell.name
            assert {*cell.policy.out_keys} <= {*cell.out.keys(include_nested=True)}, cell.name
            assert {*cell.out.keys()} == {name for name, _ in promised} | {"finish_reason", "errors"}, cell.name

    def test_generated_fields_have_the_shape_of_their_batch(self, generated: list[Cell]) -> None:
        for cell in generated:
            assert tuple(cell.out.batch_size) == cell.batch, cell.name
            check_layout(cell)

    def test_generated_tokens_are_the_prompt_and_then_the_response(self, generated: list[Cell]) -> None:
        for cell in generated:
            prompts, answers = cell.rows("tokens", "prompt"), cell.rows("tokens", "response")
            assert prompts == cell.ids, cell.name
            assert all(1 <= len(answer) <= NEW for answer in answers), cell.name
            joined = [a + b for a, b in zip(prompts, answers, strict=True)]
            assert cell.rows("tokens", "full") == joined, cell.name

    def test_prompts_are_padded_left_and_responses_right(self, generated: list[Cell]) -> None:
        for cell in generated:
            if not cell.dense:
                continue
            tokens, mask = cell.out["tokens"], cell.out["masks"].all_attention_mask
            assert torch.equal(tokens.full, torch.cat([tokens.prompt, tokens.response], -1)), cell.name
            before, after = mask.split([tokens.prompt.shape[-1], tokens.response.shape[-1]], -1)
            lengths = torch.tensor([len(row) for row in cell.ids], dtype=torch.int64).reshape(cell.batch)
            assert torch.equal(before.sum(-1), lengths), cell.name
            assert bool((before[..., 1:] >= before[..., :-1]).all()), cell.name
            assert bool((after[..., 1:] <= after[..., :-1]).all()), cell.name
            assert tokens.full[~mask].unique().numel() <= 1, f"{cell.name}: all pads must have one id"

    def test_masks_follow_from_lengths(self, generated: list[Cell]) -> None:
        for cell in generated:
            answers = cell.rows("tokens", "response")
            only_answers = [[False] * len(a) + [True] * len(b) for a, b in zip(cell.ids, answers, strict=True)]
            assert cell.rows("masks", "all_attention_mask") == [[True] * len(row) for row in only_answers], cell.name
            assert cell.rows("masks", "all_response_mask") == only_answers, cell.name
            assert cell.rows("masks", "all_assistant_mask") == only_answers, cell.name

    @needs("generation_modes")
    def test_generating_scores_the_response_and_nothing_else(self, generated: list[Cell]) -> None:
        for cell in generated:
            assert cell.rows("log_probs", "scored_mask") == cell.rows("masks", "all_response_mask"), cell.name
            response = cell.rows("log_probs", "response")
            assert [len(row) for row in response] == [len(row) for row in cell.rows("tokens", "response")], cell.name
            prompt = [[0.0] * len(ids) for ids in cell.ids]
            assert cell.rows("log_probs", "prompt") == prompt, cell.name
            joined = [a + b for a, b in zip(prompt, response, strict=True)]
            assert cell.rows("log_probs", "full") == joined, cell.name
            if cell.dense:
                log_probs = cell.out["log_probs"]
                assert log_probs.full.shape == log_probs.scored_mask.shape == cell.out["tokens"].full.shape, cell.name
                assert not log_probs.full[~log_probs.scored_mask].any(), f"{cell.name}: unscored positions must be 0.0"

    def test_generated_text_is_the_prompt_and_then_the_response(self, generated: list[Cell]) -> None:
        for cell in generated:
            prompts, answers, full = (flat(getattr(cell.out["text"], part)) for part in PARTS)
            if cell.mode == "text":
                assert prompts == cell.asked(), cell.name
            assert full == [a + b for a, b in zip(prompts, answers, strict=True)], cell.name

    def test_an_answer_joins_its_conversation_with_its_ids(self, generated: list[Cell]) -> None:
        for cell in generated:
            if cell.mode != "history":
                assert "history" not in cell.out.keys(), cell.name
                continue
            history = cell.out["history"]
            texts, ids = flat(cell.out["text"].response), cell.rows("tokens", "response")
            assert [[(turn.role, turn.content) for turn in chat] for chat in history.prompt.chats] == [
                [("user", question)] for question in cell.asked()
            ], cell.name
            for prompt, reply, full, text, answer in zip(
                history.prompt.chats, history.response.chats, history.full.chats, texts, ids, strict=True
            ):
                assert full == prompt + reply and len(reply) == 1, cell.name
                assert (reply[0].role, reply[0].content) == ("assistant", text), cell.name
                assert reply[0].token_ids == tuple(answer), cell.name

    def test_every_answer_says_how_it_ended(self, generated: list[Cell]) -> None:
        for cell in generated:
            reasons, errors = cell.out["finish_reason"], cell.out["errors"]
            count = math.prod(cell.batch)
            assert flat(errors) == [""] * count, cell.name
            assert len(flat(reasons)) == count and set(flat(reasons)) <= {"stop", "length"}, cell.name
            for reason, answer in zip(flat(reasons), cell.rows("tokens", "response"), strict=True):
                assert reason == "stop" or len(answer) == NEW, cell.name


SCORED = {("text", "full"), ("tokens", "full"), ("masks", "all_attention_mask")}
SCORED |= {("log_probs", "full"), ("log_probs", "scored_mask")}
OF_HISTORY = {("history", "full"), ("masks", "all_assistant_mask")}
OF_SPLIT = {("tokens", "prompt"), ("tokens", "response"), ("log_probs", "prompt"), ("log_probs", "response")}
OF_SPLIT |= {("masks", "all_response_mask"), ("masks", "all_assistant_mask")}


class ScoredFieldPromises(ConformanceBase, theme="scored_fields"):
    """Scoring writes only the fields that its input determines; generated and scored values align."""

    @pytest.fixture(scope="class", params=product(("history", "text", "tokens"), LAYOUTS), ids="-".join)
    @classmethod
    def scored(cls, request: pytest.FixtureRequest, backend: Backend) -> list[Cell]:
        require(backend, "score")
        policy = policy_of(backend, *request.param, generate=False)
        return [cell_of(policy, shape) for shape in SHAPES]

    @pytest.fixture(scope="class", params=LAYOUTS)
    @classmethod
    def rescored(cls, request: pytest.FixtureRequest, backend: Backend) -> list[Cell]:
        """Generate answers and score them as tokens; `given` is the output of generating."""
        require(backend, "score")
        scorer = policy_of(backend, "tokens", request.param, generate=False)
        samplers = [policy_of(backend, "text", request.param, num_samples=samples) for samples in (None, 2)]
        return [
            Cell(scorer, sampler(as_input(backend, "text", shape, [])), [])
            for sampler, shape in product(samplers, SHAPES)
        ]

    def test_scoring_writes_every_promised_field_and_no_other(self, scored: list[Cell]) -> None:
        for cell in scored:
            promised = SCORED | OF_HISTORY if cell.mode == "history" else SCORED
            assert cell.fields() == promised, cell.name
            assert set(cell.policy.out_keys) == promised, cell.name
            assert promised <= {*cell.out.keys(include_nested=True)}, cell.name
            assert {*cell.out.keys()} == {name for name, _ in promised}, cell.name

    def test_scored_fields_have_the_shape_of_their_batch(self, scored: list[Cell]) -> None:
        for cell in scored:
            assert tuple(cell.out.batch_size) == cell.batch, cell.name
            check_layout(cell)

    def test_scoring_scores_the_given_ids(self, scored: list[Cell]) -> None:
        for cell in scored:
            assert cell.rows("tokens", "full") == cell.ids, cell.name
            if cell.mode == "text":
                assert flat(cell.out["text"].full) == cell.asked(), cell.name
            if cell.mode == "history":
                assert cell.out["history"].full.chats == cell.given["history"].chats, cell.name

    def test_the_scored_mask_leaves_out_only_the_first_token(self, scored: list[Cell]) -> None:
        for cell in scored:
            assert cell.rows("masks", "all_attention_mask") == [[True] * len(row) for row in cell.ids], cell.name
            after_first = [[False] + [True] * (len(row) - 1) for row in cell.ids]
            assert cell.rows("log_probs", "scored_mask") == after_first, cell.name
            values = cell.rows("log_probs", "full")
            assert all(row[0] == 0.0 and all(value < 0 for value in row[1:]) for row in values), cell.name
            if cell.dense:
                log_probs = cell.out["log_probs"]
                assert not log_probs.full[~log_probs.scored_mask].any(), f"{cell.name}: unscored positions must be 0.0"

    def test_scoring_tokens_keeps_their_split(self, rescored: list[Cell]) -> None:
        for cell in rescored:
            assert cell.fields() == SCORED | OF_SPLIT, cell.name
            for key in (*product(("tokens",), ("prompt", "response", "full")), ("masks", "all_response_mask")):
                assert cell.rows(*key) == corelm.ragged(cell.given, key).tolist(), (cell.name, key)

    def test_scoring_a_dense_batch_keeps_its_columns(self, rescored: list[Cell]) -> None:
        for cell in rescored:
            if not cell.dense:
                continue
            for name, field in [("tokens", "full"), ("tokens", "response"), ("masks", "all_attention_mask")]:
                before, now = (getattr(td[name], field) for td in (cell.given, cell.out))
                assert torch.equal(before, now), (cell.name, name, field)

    @needs("generation_modes")
    def test_sampling_and_scoring_agree_on_the_response(self, rescored: list[Cell]) -> None:
        for cell in rescored:
            sampled, scored = (td["log_probs"] for td in (cell.given, cell.out))
            assert 0 in cell.batch or sampled.provenance.matches(scored.provenance), cell.name
            before, now = (corelm.ragged(td, ("log_probs", "response")) for td in (cell.given, cell.out))
            assert torch.equal(before.lengths, now.lengths), cell.name
            self.assert_close(now.values, before.values, cell.name)


TURNS = 3


class ChatPromises(ConformanceBase, theme="chat"):
    """Conversations: sampled turns keep their ids, however many turns follow."""

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
