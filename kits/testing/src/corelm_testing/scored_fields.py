"""Scoring writes only the fields that its input determines; generated and scored values align."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import corelm
from corelm import Backend
from corelm.containers.classes import flat
from corelm_testing.base import ConformanceBase, needs, require
from corelm_testing.fields import LAYOUTS, SHAPES, Cell, cell_of, check_layout, policy_of
from corelm_testing.prompts import as_input

SCORED = {("text", "full"), ("tokens", "full"), ("masks", "all_attention_mask")}
SCORED |= {("log_probs", "full"), ("log_probs", "scored_mask")}
OF_HISTORY = {("history", "full"), ("masks", "all_assistant_mask")}
OF_SPLIT = {("tokens", "prompt"), ("tokens", "response"), ("log_probs", "prompt"), ("log_probs", "response")}
OF_SPLIT |= {("masks", "all_response_mask"), ("masks", "all_assistant_mask")}


class ScoredFieldPromises(ConformanceBase):
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
