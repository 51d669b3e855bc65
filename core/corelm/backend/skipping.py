"""Serve the good rows of a batch when some are bad: which rows to serve, and where their results go back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from corelm.errors import InvalidRequestError, Problems, refuse
from corelm.spec.provenance import Mode, Provenance
from corelm.spec.records import GenerateResult, ScoreResult
from corelm.spec.sampling import SamplingParams
from corelm.tensors.ragged import Ragged

OnError = Literal["raise", "skip"]


def admitted(problems: Problems, rows: int, on_error: OnError, field: str) -> Tensor:
    """Return int64: the rows to serve, ascending.

    Raises:
        InvalidRequestError: for all bad rows together, unless `on_error` is "skip".
    """
    if on_error == "raise":
        refuse(problems, field)
    elif on_error != "skip":
        raise InvalidRequestError(f"on_error: expected 'raise' or 'skip', got {on_error!r}", field="on_error")
    return torch.tensor([row for row in range(rows) if row not in problems], dtype=torch.int64)


def no_answers(mode: Mode | Literal["none"], sampling: SamplingParams) -> GenerateResult:
    """Return what an engine would return for no prompts."""
    return GenerateResult(
        ids=Ragged.from_list([]),
        logprobs=Ragged.from_list([], dtype=torch.float32),
        finish_reasons=(),
        **Provenance.label(mode, sampling),
    )


def no_scores(temperature: float, vocab_size: int) -> ScoreResult:
    """Return what an engine would return for no sequences."""
    return ScoreResult(
        logprobs=Ragged.from_list([], dtype=torch.float32),
        scored=Ragged.from_list([], dtype=torch.bool),
        logits=Ragged(torch.zeros(0, vocab_size), torch.zeros(0, dtype=torch.int64)),
        **Provenance.label_of_scores(temperature),
    )


def spread_answers(
    batch: GenerateResult, answers: Tensor, samples: int, problems: Problems, version: str
) -> GenerateResult:
    """Put the answers back among the skipped rows, which are empty and have the finish reason `error` and a message."""
    total = len(answers) + len(problems) * samples
    # Skipped rows are empty, so the flat values stay as they are and only the lengths are spread.
    lengths = torch.zeros(total, dtype=torch.int64)
    lengths[answers] = batch.ids.lengths
    messages = [problems.get(row // samples, "") for row in range(total)]
    return replace(
        batch,
        ids=Ragged(batch.ids.values, lengths),
        logprobs=None if batch.logprobs is None else Ragged(batch.logprobs.values, lengths),
        finish_reasons=_spread(batch.finish_reasons, answers, total, "error"),
        texts=None if batch.texts is None else _spread(batch.texts, answers, total, ""),
        weight_versions=_spread(batch.weight_versions or (), answers, total, version),
        errors=_merged(batch.errors, answers, messages),
    )


def spread_scores(batch: ScoreResult, lengths: Tensor, served: Tensor, problems: Problems, version: str) -> ScoreResult:
    """Put the scores back among the skipped rows. Nothing of a skipped row is scored, and a message says why."""
    total = len(lengths)
    index = Ragged(torch.arange(int(lengths.sum())), lengths).select(served).values

    def spread(rows: Ragged) -> Ragged:
        values = rows.values.new_zeros((int(lengths.sum()), *rows.values.shape[1:]))
        return Ragged(values.index_copy(0, index.to(values.device), rows.values), lengths)

    return replace(
        batch,
        logprobs=spread(batch.logprobs),
        scored=spread(batch.scored),
        logits=None if batch.logits is None else spread(batch.logits),
        weight_versions=_spread(batch.weight_versions or (), served, total, version),
        errors=_merged(batch.errors, served, [problems.get(row, "") for row in range(total)]),
    )


def _spread(values: tuple[Any, ...], rows: Tensor, total: int, filler: Any) -> tuple[Any, ...]:
    out = [filler] * total
    for row, value in zip(rows.tolist(), values, strict=True):
        out[row] = value
    return tuple(out)


def _merged(errors: tuple[str, ...] | None, rows: Tensor, messages: list[str]) -> tuple[str, ...]:
    """Return the engine's messages for the rows that it served and core's messages for the rest."""
    for row, message in zip(rows.tolist(), errors or ("",) * len(rows), strict=True):
        messages[row] = message
    return tuple(messages)
