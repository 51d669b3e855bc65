"""`Decoder`: one decoding loop that records the log-probability of each token as it is chosen.

Equal prompts share their prefill, and a row leaves the batch when it ends. The model's generation config is not read
here, so nothing in it can change what was asked for.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from corelm.spec import GenerateRequest, GenerateResult, Ragged
from corelm.support import Deadline
from transformers_backend.ending import AnswerEnding
from transformers_backend.engine import CausalLM
from transformers_backend.protocol import PromptBatch, SampledAnswers, generation_requests, generation_result
from transformers_backend.sampling import Sampler


class Decoder:
    """Answers one request at a time."""

    def __init__(self, engine: CausalLM, tokenizer: Any, max_batch_tokens: int) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._max_batch_tokens = max_batch_tokens

    def generate(self, request: GenerateRequest) -> GenerateResult:
        """Answer every prompt.

        Raises:
            CapabilityError, InvalidRequestError: see `generation_requests`.
            TimeoutError: the request's timeout has passed.
        """
        deadline = Deadline(request.timeout)
        with self._decoding():
            answers = [
                (batch, self._decode(batch, request, deadline))
                for batch in generation_requests(request, self._engine, self._max_batch_tokens)
            ]
            return generation_result(request, answers)

    def _decoding(self) -> AbstractContextManager[None]:
        """Return the context in which the model is run."""
        return self._engine.evaluating()

    def _new_cache(self) -> Any:
        """Return an empty cache of the kinds that the model's layers need (attention, windows, recurrent states)."""
        from transformers import DynamicCache

        return DynamicCache(config=self._engine.base.config)

    def _decode(self, batch: PromptBatch, request: GenerateRequest, deadline: Deadline) -> SampledAnswers:
        engine, prompts = self._engine, batch.prompts
        sampler = Sampler(
            request.sampling,
            prompts,
            batch.seeds,
            request.stop_ids,
            engine.vocab_size,
            engine.device,
            raw=request.logprobs == "raw",
        )
        ending = AnswerEnding(request.sampling, request.stop_ids, batch.limits, self._tokenizer)
        distinct, answers = _distinct(prompts)
        cache = self._new_cache()
        inputs = engine.inputs(distinct, "left")
        mask, position = _if_padded(inputs.pop("attention_mask")), inputs["position_ids"][:, -1:]
        logits = engine.next_logits(cache, attention_mask=mask, **inputs)

        # From here on a row is an answer: at first one for every prompt, later those that have not ended.
        if len(distinct) < len(prompts):
            shared = answers.to(engine.device)
            cache.reorder_cache(shared)
            logits, position = logits[shared], position[shared]
            mask = None if mask is None else mask[shared]
        alive = torch.arange(len(prompts))
        stopped = torch.zeros(len(prompts), dtype=torch.bool)
        steps: list[tuple[Tensor, Tensor, Tensor]] = []
        while True:
            deadline.check()
            token, logprob = sampler(logits)
            steps.append((alive, token, logprob))
            ended = ending(token)
            if ended:
                stopped[alive[list(ended)]] = torch.tensor(list(ended.values()))
                if len(ended) == len(alive):
                    break
                rows = _without(ended, len(alive))
                alive, keep = alive[rows], rows.to(engine.device)
                token, position = token[keep], position[keep]
                mask = None if mask is None else _if_padded(mask[keep])
                cache.reorder_cache(keep)
                sampler.keep(keep)
                ending.keep(rows)
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=-1)
            position = position + 1
            logits = engine.next_logits(cache, input_ids=token[:, None], attention_mask=mask, position_ids=position)

        which, ids, logprobs = (torch.cat(column).cpu() for column in zip(*steps, strict=True))
        order, lengths = which.argsort(stable=True), which.bincount(minlength=len(prompts))
        return SampledAnswers(Ragged(ids[order], lengths), Ragged(logprobs[order], lengths), stopped)


def _if_padded(mask: Tensor) -> Tensor | None:
    """Return the mask if it masks anything, else None: attention is faster without a mask."""
    return None if bool(mask.all()) else mask


def _without(gone: Collection[int], rows: int) -> Tensor:
    """Return int64[n]: the rows that are left, with the last rows moved to the places of those `gone`.

    That way few rows have to move. Five rows without 1 and 3 are ``[0, 4, 2]``.
    """
    left = rows - len(gone)
    last = (row for row in range(left, rows) if row not in gone)
    return torch.tensor([next(last) if place in gone else place for place in range(left)])


def _distinct(prompts: Ragged) -> tuple[Ragged, Tensor]:
    """Return the distinct prompts, and for every prompt the number of its distinct one, int64[rows]."""
    padded, which = prompts.to("cpu").to_padded(-1, "left").unique(dim=0, return_inverse=True)
    if len(padded) == len(prompts):
        return prompts, torch.arange(len(prompts))
    return Ragged.from_padded(padded, padded >= 0), which
