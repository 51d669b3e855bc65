"""The policy writes every promised field, and no other, for every input mode, layout and batch shape.

The policy is called once per cell of that matrix. Each test then checks one promise on all outputs.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

import corelm
from corelm import Backend, LLMPolicy
from corelm.containers.classes import flat
from corelm.tensors.lazy_rows import nested
from corelm_testing.base import ConformanceBase, needs
from corelm_testing.prompts import as_input, questions

SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (3,), (2, 2))
LAYOUTS = ("ragged", "dense")
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


class FieldPromises(ConformanceBase):
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
