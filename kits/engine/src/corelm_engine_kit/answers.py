"""`Answers`: what is sampled for a request, token by token. `AnswerGroup`: those of its answers that grow together."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from corelm.spec import GenerateRequest, GenerateResult, Provenance, Ragged, TokenChunk, TokenSets, TopIds
from corelm_engine_kit.ending import AnswerEnding
from corelm_engine_kit.loop import Call
from corelm_engine_kit.masses import KeptIds
from corelm_engine_kit.sampling import NOT_NUMBERS, Drawn, Sampler


class Answers:
    """The answers of a request.

    Attributes:
        steps: what was sampled for which rows of the request, int64[n] on the CPU. The last steps may be taken back.
        errors: why rows have no answer.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.steps: list[tuple[Tensor, Drawn]] = []
        self.errors: dict[int, str] = {}
        self._reasons = ["abort"] * len(request.prompts)

    def end(self, row: int, reason: str) -> None:
        """Note that a row has ended."""
        self._reasons[row] = reason

    def take_back(self, first: int) -> None:
        """Forget the steps from one on. Their rows begin anew."""
        for rows, _ in self.steps[first:]:
            for row in rows.tolist():
                self.errors.pop(row, None)
                self._reasons[row] = "abort"
        del self.steps[first:]

    def ids(self) -> Ragged:
        """Return the ids so far, on the CPU."""
        return self.by_row([drawn.ids for _, drawn in self.steps], self.steps)

    def by_row(self, values: Sequence[Tensor], steps: Sequence[tuple[Tensor, Any]]) -> Ragged:
        """Return values of the tokens of some steps in the order of the rows, on the CPU."""
        order, lengths = self._order(steps)
        return Ragged(torch.cat(list(values)).cpu()[order] if values else order, lengths)

    def result(self) -> GenerateResult:
        """Return the result of the request, with an error for each row whose logits were no numbers."""
        request, (order, lengths) = self.request, self._order(self.steps)
        device = request.prompts.values.device
        drawn = [each for _, each in self.steps]
        logprobs = self.by_row([each.logprobs for each in drawn], self.steps)
        logprobs = logprobs.with_values(logprobs.values.float())
        fields: dict[str, Any] = {}
        if request.return_support:
            kept = [each.kept for each in drawn if each.kept is not None]
            sets, mass = KeptIds.ordered(kept, order, lengths) if kept else (TokenSets.empty(lengths), logprobs)
            fields |= {"kept_ids": sets.to(device), "kept_log_mass": mass.to(device)}
        if request.top_logprobs:
            top = TopIds.cat([each.top for each in drawn if each.top is not None], request.top_logprobs)
            fields |= TopIds(*(column[order] for column in top.columns)).fields(lengths, device)
        result = GenerateResult(
            ids=self.ids().to(device),
            logprobs=None if request.logprobs == "none" else logprobs.to(device),
            finish_reasons=tuple(self._reasons),
            **fields,
            **Provenance.label(request.logprobs, request.sampling),
        )
        odd = logprobs.row_index[logprobs.values.isnan()].tolist()
        return without_answers(result, dict.fromkeys(odd, NOT_NUMBERS) | self.errors)

    def _order(self, steps: Sequence[tuple[Tensor, Any]]) -> tuple[Tensor, Tensor]:
        """Return where the tokens of steps stand in the order of the rows, int64[n], and how many each row has."""
        which = torch.cat([torch.empty(0, dtype=torch.int64), *(rows for rows, _ in steps)])
        return which.argsort(stable=True), which.bincount(minlength=len(self._reasons))


class AnswerGroup:
    """Answers of a request that grow together.

    Args:
        answers: where they are noted.
        call: the call of the request.
        rows: int64[n] on the CPU, their rows in the request.
        prompts, seeds, limits: theirs: the ids before them, int64[n], and the most tokens that each may get, int64[n].
        tokenizer: decodes the ids in which stop strings are searched.
        vocab_size, device: of the logits.

    Attributes:
        rows: those that go on.
    """

    def __init__(
        self,
        answers: Answers,
        call: Call,
        rows: Tensor,
        prompts: Ragged,
        seeds: Tensor,
        limits: Tensor,
        tokenizer: Any,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.rows, self._numbers = rows, rows.tolist()
        self._answers, self._call, request = answers, call, answers.request
        self._sampler = Sampler(
            request.sampling,
            prompts,
            seeds,
            request.stop_ids,
            vocab_size,
            device,
            raw=request.logprobs == "raw",
            support=request.return_support,
            top=request.top_logprobs,
        )
        self._ending = AnswerEnding(request.sampling, request.stop_ids, limits, tokenizer, prompts)

    @property
    def length(self) -> int:
        """How many tokens each has."""
        return self._ending.length

    def sample(
        self, logits: Tensor, *, read: bool = False, errors: Mapping[int, str] | None = None
    ) -> tuple[Drawn, Tensor]:
        """Note the next token of each answer. Return it, and the indices of the answers that go on, int64[k].

        Args:
            logits: float32[n, V].
            read: also return Python numbers.
            errors: why some of the logits are no numbers, by place, where the reason is known.
        """
        on_tokens = self._answers.request.on_tokens
        drawn = self._sampler(logits, read=read or self._ending.reads_ids or on_tokens is not None)
        self._answers.steps.append((self.rows, drawn))
        ended = self._ending(drawn.read and drawn.read[0])
        reasons = {place: "stop" if stopped else "length" for place, stopped in ended.items()}
        if drawn.read is not None:
            for place, (token, logprob) in enumerate(zip(*drawn.read, strict=True)):
                if math.isnan(logprob):
                    reasons[place] = "error"
                    self._answers.errors[self._numbers[place]] = (errors or {}).get(place, NOT_NUMBERS)
                elif on_tokens is not None:
                    reason = reasons.get(place)
                    row = self._numbers[place]
                    on_tokens(TokenChunk(row=row, ids=[token], logprobs=[logprob], finish_reason=reason))
        return drawn, self._left(reasons)

    def wanted(self) -> Tensor:
        """Return the indices of the answers that are not aborted, int64[k]."""
        return self._left({})

    def _left(self, ended: dict[int, str]) -> Tensor:
        for place in self._call.aborted_among(self.rows):
            ended.setdefault(place, "abort")
        for place, reason in ended.items():
            self._answers.end(self._numbers[place], reason)
        return without(ended, len(self.rows))

    def of(self, indices: Tensor) -> AnswerGroup:
        """Return a group of these answers only, int64[k] on the CPU. This one may go on with others."""
        other = copy(self)
        other._sampler, other._ending = self._sampler.of(indices), self._ending.of(indices)
        other.rows = self.rows[indices]
        other._numbers = other.rows.tolist()
        return other

    def keep(self, indices: Tensor) -> None:
        """Go on with these answers only, int64[k] on the CPU."""
        self._sampler.keep(indices)
        self._ending.keep(indices)
        self.rows = self.rows[indices]
        self._numbers = self.rows.tolist()


def answer_seeds(request: GenerateRequest) -> Tensor:
    """Return int64[rows]. Without seeds the answers follow torch's global generator, like other sampling in torch."""
    return torch.randint(2**63 - 1, (len(request.prompts),)) if request.seeds is None else request.seeds.cpu()


def without(gone: Collection[int], rows: int) -> Tensor:
    """Return int64[n]: the rows that are left, with the last rows moved to where those `gone` were.

    That way few rows have to move. Five rows without 1 and 3 are ``[0, 4, 2]``.
    """
    left = rows - len(gone)
    last = (row for row in range(left, rows) if row not in gone)
    return torch.tensor([next(last) if place in gone else place for place in range(left)], dtype=torch.int64)


def without_answers(result: GenerateResult, errors: Mapping[int, str]) -> GenerateResult:
    """Return the result with errors in place of the answers of some rows."""
    if not errors:
        return result
    rows = range(len(result.ids))
    stop = result.ids.lengths * torch.tensor([row not in errors for row in rows])
    names = ("ids", "logprobs", "kept_ids", "kept_log_mass", "top_ids", "top_logprobs", "tail_log_mass")
    columns = {name: getattr(result, name) for name in names}
    return replace(
        result,
        **{name: each.slice(torch.zeros_like(stop), stop) for name, each in columns.items() if each is not None},
        finish_reasons=tuple("error" if row in errors else result.finish_reasons[row] for row in rows),
        errors=tuple(errors.get(row, "") for row in rows),
    )
