"""The plugin: what the author of an engine writes, for the simplest possible engine."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from corelm import Capabilities, Provenance, Ragged, SamplingParams, hookimpl
from corelm.spec import (
    GenerateRequest,
    GenerateResult,
    RowAnswer,
    ScoreRequest,
    ScoreResult,
    StopStrings,
    TokenChunk,
    TokenSets,
    TopIds,
    WeightsStateRequest,
    WeightUpdate,
    generate_result,
)
from corelm_engine_kit import refuse_weights, shape_problems, shapes_of
from corelm_testing.toy.model import Bigram
from corelm_testing.toy.tokenizer import ByteTokenizer


class ToyBackend:
    """Opens a `Bigram`: a given one, one saved at a path, or by default one counted on a few short dialogues."""

    requires_api = ">=1,<2"

    def __init__(self, model: Bigram, tokenizer: Any, max_context: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_context = max_context
        self.capabilities = Capabilities(
            vocab_size=model.table.shape[0],
            max_context=max_context,
            sampling={"temperature": (0.0, 100.0), "top_k": None, "min_new_tokens": None, "stop": None},
            generation_modes=frozenset({"raw", "processed"}),
            score=True,
            score_temperature=True,
            logits=True,
            argmax=True,
            gradients=True,
            score_support=True,
            score_top_k=model.table.shape[0],
            score_top_ids=True,
            return_support=True,
            top_logprobs=model.table.shape[0],
            per_answer_seeds=True,
            streaming=True,
            update_weights=True,
        )

    @classmethod
    def open(
        cls, model: Bigram | str | os.PathLike[str] | None = None, *, tokenizer: Any = None, max_context: int = 512
    ) -> ToyBackend:
        if model is None:
            model = Bigram.of_talk()
        elif not isinstance(model, Bigram):
            model = Bigram.load(model)
        return cls(model, tokenizer or ByteTokenizer(), max_context)

    @hookimpl
    @torch.no_grad()
    def generate(self, request: GenerateRequest) -> GenerateResult:
        prompts = request.prompts.tolist()
        seeds = torch.randint(2**62, (len(prompts),)) if request.seeds is None else request.seeds
        pairs = enumerate(zip(prompts, seeds.tolist(), strict=True))
        return generate_result(request, [self._answer(row, prompt, seed, request) for row, (prompt, seed) in pairs])

    def _answer(self, row: int, prompt: list[int], seed: int, request: GenerateRequest) -> RowAnswer:
        sampling, generator = request.sampling, torch.Generator().manual_seed(seed)
        stop_strings = StopStrings.of(sampling, self.tokenizer).after(prompt).watch() if sampling.stop else None
        ids: list[int] = []
        logprobs: list[float] = []
        kept: list[list[int]] = []
        mass: list[float] = []
        best: list[dict[int, float]] = []

        def answer(finish_reason: str) -> RowAnswer:
            top = TopIds.of(best, request.top_logprobs) if request.top_logprobs else None
            return RowAnswer(ids, logprobs, finish_reason, kept, mass, top)

        for _ in range(sampling.max_new_tokens or self.max_context - len(prompt)):
            logits = self.model(torch.tensor((prompt + ids)[-1]))
            sampled_from, reported = self._distributions(logits, prompt, ids, request)
            token = int(torch.multinomial(sampled_from.exp(), 1, generator=generator))
            logprobs.append(float(reported[token]))
            if request.return_support:
                left = (sampled_from > -math.inf).nonzero().flatten()
                kept.append(left.tolist())
                whole = replace(request, sampling=replace(sampling, top_k=None))
                before, _ = self._distributions(logits, prompt, ids, whole)
                mass.append(float(before[left].logsumexp(-1)))
            if request.top_logprobs:
                best.append(dict(enumerate(reported.tolist())))
            ids.append(token)
            if request.on_tokens is not None:
                request.on_tokens(TokenChunk(row=row, ids=[token], logprobs=logprobs[-1:]))
            if token in request.stop_ids or (stop_strings is not None and stop_strings.completed_by(token)):
                return answer("stop")
        return answer("length")

    def _distributions(
        self, logits: Tensor, prompt: list[int], answer: list[int], request: GenerateRequest
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probs ``[V]`` to sample the next token from, and those to report."""
        processed = _processed(logits, request.sampling, _banned(answer, request))
        return processed, processed if request.logprobs == "processed" else logits.log_softmax(-1)

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        rows = request.sequences
        scored = rows.positions >= request.score_from[rows.row_index]
        with torch.set_grad_enabled(request.grad):
            # Row t of the logits predicts token t, so the model is given the token before it.
            logits = torch.where(scored[:, None], self.model(rows.values.roll(1)), 0.0)
            every = (logits / request.temperature).log_softmax(-1)
            if request.support is not None:
                every = every.masked_fill(~_in_sets(request.support, every), -math.inf).log_softmax(-1)
            logprobs = torch.where(scored, every.gather(-1, rows.values[:, None])[:, 0], 0.0)
            top = _top_ids(every, scored, request)
        argmax = torch.where(scored, logits.argmax(-1), -1)
        return ScoreResult(
            logprobs=Ragged(logprobs, rows.lengths).to(request.device),
            scored=Ragged(scored, rows.lengths).to(request.device),
            logits=Ragged(logits, rows.lengths).to(request.device) if request.return_logits else None,
            argmax=Ragged(argmax, rows.lengths).to(request.device) if request.return_argmax else None,
            **{name: Ragged(values, rows.lengths).to(request.device) for name, values in top.items()},  # type: ignore[arg-type]
            **Provenance.label_of_scores(request.temperature, truncated=request.support is not None),
        )

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        if request.by_owner:
            return True
        state = Bigram.load(request.path).state_dict() if request.path else dict(request.state_dict or {})
        # `load_state_dict` would have copied what fits by the time that it fails.
        problems = shape_problems(shapes_of(state), shapes_of(self.model.state_dict()))
        refuse_weights(problems, "path" if request.path else "state_dict")
        self.model.load_state_dict(state)
        return True

    @hookimpl
    def weights_state(self, request: WeightsStateRequest) -> tuple[int, int]:
        return self.model.table._version, self.model.table.data_ptr()


def _banned(answer: list[int], request: GenerateRequest) -> frozenset[int]:
    return request.stop_ids if len(answer) < request.sampling.min_new_tokens else frozenset()


def _processed(logits: Tensor, sampling: SamplingParams, banned: frozenset[int]) -> Tensor:
    """Return the log-probs ``[V]`` of the distribution sampled from. Greedy decoding puts all mass on one token."""
    logits = logits.index_fill(0, torch.tensor(sorted(banned), dtype=torch.int64), -math.inf)
    top_k = 1 if sampling.temperature == 0 else sampling.top_k
    if sampling.temperature:
        logits = logits / sampling.temperature
    if top_k is not None:
        best = logits.topk(min(top_k, len(logits))).indices
        logits = torch.full_like(logits, -math.inf).index_copy(0, best, logits[best])
    return logits.log_softmax(-1)


def _in_sets(support: TokenSets, like: Tensor) -> Tensor:
    """Return bool ``[total, V]``: the ids of the set at each position, or all ids if it is empty."""
    marks = torch.zeros(like.shape, dtype=torch.bool)
    marks[support.ids.row_index, support.ids.values] = True
    return marks | (support.ids.lengths == 0)[:, None]


def _top_ids(logprobs: Tensor, scored: Tensor, request: ScoreRequest) -> dict[str, Tensor]:
    """Return the fields of a result about the most probable ids, or about those of the request."""
    if request.top_ids is not None:
        ids = torch.where(scored[:, None], request.top_ids.values, -1)
    elif request.top_k:
        ids = torch.where(scored[:, None], logprobs.topk(request.top_k).indices, -1)
    else:
        return {}
    named = ids >= 0
    marks = torch.zeros_like(logprobs, dtype=torch.bool).scatter(-1, ids.clamp_min(0), named)
    found = logprobs.gather(-1, ids.clamp_min(0)).masked_fill(~named, -math.inf)
    tail = logprobs.masked_fill(marks, -math.inf).logsumexp(-1)
    return {
        "top_ids": ids,
        "top_logprobs": torch.where(scored[:, None], found, 0.0),
        "tail_log_mass": torch.where(scored, tail, 0.0),
    }
