"""Generation: one decoding loop that records each chosen token's log-probability as it goes.

The answers of a prompt share its prefill, a row leaves the batch when it ends, and nothing of the model's generation
config is read, so what was asked for is what runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from corelm.errors import InvalidRequestError
from corelm.spec import GenerateRequest, GenerateResult, Ragged, SamplingParams
from transformers_backend.model import CausalLM, Deadline, micro_batches, one_encoding
from transformers_backend.onednn import quick_head
from transformers_backend.sampler import Sampler

#: What a part of a character decodes to. The next token may turn it into the whole one.
_HALF = "\ufffd"


@dataclass(frozen=True)
class Answers:
    """What a batch of prompts was answered with. `stopped`: bool[rows], False where the length ran out."""

    ids: Ragged
    logprobs: Ragged
    stopped: Tensor


def generate(model: CausalLM, tokenizer: Any, request: GenerateRequest, max_batch_tokens: int) -> GenerateResult:
    """Answer every prompt, in as few batches as `max_batch_tokens` of prompt and answer allow.

    Raises:
        InvalidRequestError: no `max_new_tokens`, and the model states no context to fill.
        TimeoutError: the request's timeout has passed.
    """
    sampling, prompts = request.sampling, request.prompts
    deadline = Deadline(request.timeout)
    limits = answer_limits(model, request)
    # Without seeds the answers follow torch's global generator, as any other sampling in torch does.
    seeds = torch.randint(2**63 - 1, (len(prompts),)) if request.seeds is None else request.seeds.cpu()
    raw, processed = request.logprobs == "raw", request.logprobs == "processed"
    order, parts = [], []
    with model.evaluating(), quick_head(model.base):
        for rows in _batches(model, prompts.lengths, limits, max_batch_tokens):
            batch = prompts.select(rows)
            sampler = Sampler(sampling, batch, seeds[rows], request.stop_ids, model.vocab_size, model.device, raw)
            ending = Ending(sampling, request.stop_ids, limits[rows], tokenizer)
            order.append(rows)
            parts.append(_decode(model, batch, sampler, ending, deadline))
        back, device = torch.cat(order).argsort(), prompts.values.device
        ids = Ragged.cat([part.ids for part in parts]).select(back).to(device)
        logprobs = Ragged.cat([part.logprobs for part in parts]).select(back).to(device)
        stopped = torch.cat([part.stopped for part in parts])[back].tolist()
    return GenerateResult(
        ids=ids,
        logprobs=None if request.logprobs == "none" else logprobs,
        finish_reasons=tuple("stop" if stop else "length" for stop in stopped),
        mode="processed" if processed else "raw",
        temperature=(sampling.temperature or 0.0) if processed else 1.0,
        support="truncated" if processed and (sampling.truncates or sampling.min_new_tokens) else "full",
    )


def _batches(model: CausalLM, lengths: Tensor, limits: Tensor, max_tokens: int) -> Iterator[Tensor]:
    """Rows that are decoded together, int64[n] each."""
    switch = model.rope_switch
    # The last token of an answer is not read.
    if switch is not None and bool((crossing := (lengths <= switch) & (lengths + limits - 1 > switch)).any()):
        what = f"its prompt is within {switch} tokens and its answer may go beyond; there the model encodes positions"
        problems = dict.fromkeys(crossing.nonzero()[:, 0].tolist(), f"{what} in another way, so ask for less")
        row, problem = next(iter(problems.items()))
        raise InvalidRequestError(f"max_new_tokens: row {row}: {problem}", field="max_new_tokens", problems=problems)
    for side in one_encoding(lengths, switch):
        for rows in micro_batches((lengths + limits)[side], max_tokens):
            yield side[rows]


def answer_limits(model: CausalLM, request: GenerateRequest) -> Tensor:
    """int64[rows]: the longest answer each prompt may get."""
    lengths, limit = request.prompts.lengths, request.sampling.max_new_tokens
    if limit is not None:
        return torch.full_like(lengths, limit)
    if model.max_context is None:
        raise InvalidRequestError(
            "max_new_tokens=None fills the model's context, but this model states none; give a number",
            field="max_new_tokens",
        )
    return model.max_context - lengths


def _decode(model: CausalLM, prompts: Ragged, sampler: Sampler, ending: Ending, deadline: Deadline) -> Answers:
    distinct, answers = _distinct(prompts)
    cache = model.new_cache()
    inputs = model.inputs(distinct, "left")
    mask, position = _if_padded(inputs.pop("attention_mask")), inputs["position_ids"][:, -1:]
    logits = model.next_logits(cache, attention_mask=mask, **inputs)

    # From here on a row is an answer: first one for every prompt, then those that have not ended.
    if len(distinct) < len(prompts):
        shared = answers.to(model.device)
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
            alive, keep = alive[rows], rows.to(model.device)
            token, position = token[keep], position[keep]
            mask = None if mask is None else _if_padded(mask[keep])
            cache.reorder_cache(keep)
            sampler.keep(keep)
            ending.keep(rows)
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=-1)
        position = position + 1
        logits = model.next_logits(cache, input_ids=token[:, None], attention_mask=mask, position_ids=position)

    which, ids, logprobs = (torch.cat(column).cpu() for column in zip(*steps, strict=True))
    order, lengths = which.argsort(stable=True), which.bincount(minlength=len(prompts))
    return Answers(Ragged(ids[order], lengths), Ragged(logprobs[order], lengths), stopped)


def _if_padded(mask: Tensor) -> Tensor | None:
    """The mask, where it masks anything: attention is faster without."""
    return None if bool(mask.all()) else mask


def _without(gone: Collection[int], rows: int) -> Tensor:
    """int64[n]: the rows that are left, the last of them in the places of those `gone`, so that few have to move.

    Five rows without 1 and 3 are ``[0, 4, 2]``.
    """
    left = rows - len(gone)
    last = (row for row in range(left, rows) if row not in gone)
    return torch.tensor([next(last) if place in gone else place for place in range(left)])


def _distinct(prompts: Ragged) -> tuple[Ragged, Tensor]:
    """The prompts that differ, and for every prompt which of them it is, int64[rows]."""
    padded, which = prompts.to("cpu").to_padded(-1, "left").unique(dim=0, return_inverse=True)
    if len(padded) == len(prompts):
        return prompts, torch.arange(len(prompts))
    return Ragged.from_padded(padded, padded >= 0), which


class Ending:
    """Says after every step which answers it ended, and which of those by a stop id or a stop string.

    A stop string ends an answer when the newest token completes it and the answer has ``min_new_tokens``. Stop ids are
    not sampled before that.
    """

    def __init__(self, sampling: SamplingParams, stop_ids: frozenset[int], limits: Tensor, tokenizer: Any) -> None:
        self._sampling = sampling
        self._stop_ids = stop_ids
        self._limits: list[int] = limits.tolist()
        self._tokenizer = tokenizer
        self._length = 0
        self._tails: list[list[int]] = [[] for _ in self._limits]
        # A token in a tail is at least one byte; the margin is for decoders that treat the start of a text differently.
        self._window = max((len(stop.encode()) for stop in sampling.stop), default=0) + 4

    def __call__(self, ids: Tensor) -> dict[int, bool]:
        """The rows that the newest ids, int64[rows], ended: True for those stopped by what was generated."""
        self._length += 1
        ended = {row: False for row, limit in enumerate(self._limits) if limit <= self._length}
        if self._stop_ids or self._sampling.stop:
            for row, token in enumerate(ids.tolist()):
                if token in self._stop_ids or (self._sampling.stop and self._completes(self._tails[row], token)):
                    ended[row] = True
        return ended

    def keep(self, rows: Tensor) -> None:
        kept = rows.tolist()
        self._limits = [self._limits[row] for row in kept]
        self._tails = [self._tails[row] for row in kept]

    def _completes(self, tail: list[int], token: int) -> bool:
        """Whether `token` completes a stop string; it joins the `tail` of the answer's latest ids, in place."""
        before = self._decode(tail)
        tail.append(token)
        text = self._decode(tail)
        if text == before and not text.endswith(_HALF):
            # It does not show, so it must not use up the window.
            tail.pop()
        del tail[: -self._window]
        late_enough = self._length >= self._sampling.min_new_tokens
        return late_enough and any(_ends_late(text, before, stop) for stop in self._sampling.stop)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._sampling.skip_special_tokens)
        return text


def _ends_late(text: str, before: str, stop: str) -> bool:
    """Whether `stop` occurs in `text` and ends in what `text` has more than `before`."""
    old = len(before.rstrip(_HALF))
    return stop in text[max(0, old - len(stop) + 1) :]
