"""Serve the good rows of a batch when some are bad: which rows to serve, and where their results go back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from corelm import validate
from corelm.backend.futures import own
from corelm.errors import CoreLMError, Problems, refuse, spelled_out
from corelm.spec.provenance import Mode, Provenance
from corelm.spec.records import GenerateResult, ScoreResult
from corelm.spec.sampling import SamplingParams
from corelm.tensors.ragged import Ragged
from corelm.tensors.token_sets import TokenSets

OnError = Literal["raise", "skip"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class ServedRows:
    """The rows of a batch that are served, and where their results go back among the rows that are skipped.

    Attributes:
        index: int64, ascending: the numbers of the served rows.
        total: number of rows, served and skipped.
    """

    index: Tensor
    total: int

    @classmethod
    def without(cls, problems: Collection[int], total: int) -> ServedRows:
        """Return all rows but those that have problems."""
        return cls(torch.tensor([row for row in range(total) if row not in problems], dtype=torch.int64), total)

    def __len__(self) -> int:
        return self.index.shape[0]

    def repeat(self, n: int) -> ServedRows:
        """Return the rows of a batch that has every row `n` times, copies next to each other."""
        if n == 1:
            return self
        return ServedRows((self.index[:, None] * n + torch.arange(n)).flatten(), self.total * n)

    def ragged(self, rows: Ragged) -> Ragged:
        """Put rows back among the skipped ones, which are empty."""
        if len(self) == self.total:
            return rows
        # Empty rows have no values, so only the lengths change.
        lengths = torch.zeros(self.total, dtype=torch.int64)
        lengths[self.index] = rows.lengths
        return Ragged(rows.values, lengths)

    def values(self, values: Sequence[T], filler: T) -> tuple[T, ...]:
        """Put one value per row back among the skipped rows, which get the filler."""
        if len(self) == self.total:
            return tuple(values)
        out = [filler] * self.total
        for row, value in zip(self.index.tolist(), values, strict=True):
            out[row] = value
        return tuple(out)


def admitted(problems: Problems, rows: int, on_error: OnError, field: str) -> ServedRows:
    """Return the rows to serve.

    Raises:
        InvalidRequestError: for all bad rows together, unless `on_error` is "skip".
    """
    validate.one_of("on_error", on_error, ("raise", "skip"))
    if not problems:
        return ServedRows(torch.arange(rows), rows)
    if on_error == "raise":
        refuse(problems, field)
    return ServedRows.without(problems, rows)


def renumbered(error: CoreLMError, rows: Tensor) -> CoreLMError:
    """Return an error about rows of a request as one about the caller's rows.

    Args:
        error: names rows of the request in `problems`. An error that names none, or other ones, is returned as it is.
        rows: int64: the caller's row for each row of the request. Several may belong to one.
    """
    problems: Problems = getattr(error, "problems", {})
    names = rows.tolist()
    if not all(0 <= row < len(names) for row in problems):
        return error
    found: Problems = {}
    for row, why in problems.items():
        found.setdefault(names[row], why)
    if found == problems:
        return error
    # A copy: a plugin may raise the same object again.
    made = own(error)
    told, message = spelled_out(found), str(error.args[0])
    before, named, after = message.partition(spelled_out(problems))
    # A message that names rows in words of its own is quoted: its numbers are those of the request.
    text = f"{before}{told}{after}" if named else f"{told}; in the numbers of the engine's rows: {message}"
    made.args, made.__dict__["problems"] = (text,), dict(sorted(found.items()))
    return made


def no_answers(
    mode: Mode | Literal["none"], sampling: SamplingParams, *, support: bool = False, top_logprobs: int = 0
) -> GenerateResult:
    """Return what an engine would return for no prompts."""
    return GenerateResult(
        kept_ids=TokenSets.from_list([]) if support else None,
        kept_log_mass=Ragged.from_list([], dtype=torch.float32) if support else None,
        **_no_top(top_logprobs),
        ids=Ragged.from_list([]),
        logprobs=Ragged.from_list([], dtype=torch.float32),
        finish_reasons=(),
        **Provenance.label(mode, sampling),
    )


def no_scores(
    temperature: float, vocab_size: int, *, argmax: bool, support: bool = False, top_ids: int = 0
) -> ScoreResult:
    """Return what an engine would return for no sequences."""
    return ScoreResult(
        logprobs=Ragged.from_list([], dtype=torch.float32),
        scored=Ragged.from_list([], dtype=torch.bool),
        logits=Ragged(torch.zeros(0, vocab_size), torch.zeros(0, dtype=torch.int64)),
        argmax=Ragged.from_list([]) if argmax else None,
        **_no_top(top_ids),
        **Provenance.label_of_scores(temperature, truncated=support),
    )


def _no_top(k: int) -> dict[str, Any]:
    if not k:
        return {}
    none = torch.zeros(0, dtype=torch.int64)
    ids, logprobs = Ragged(torch.zeros(0, k, dtype=torch.int64), none), Ragged(torch.zeros(0, k), none)
    return {"top_ids": ids, "top_logprobs": logprobs, "tail_log_mass": Ragged(torch.zeros(0), none)}


def spread_answers(
    batch: GenerateResult, served: ServedRows, samples: int, problems: Problems, version: str
) -> GenerateResult:
    """Put the answers back among those to skipped prompts: empty ones, with the finish reason `error` and a message.

    Args:
        served: the answers that the engine gave.
        samples: answers per prompt.
        problems: the skipped prompts, and why.
        version: the label of the weights in force.
    """
    skipped = {row * samples + sample: why for row, why in problems.items() for sample in range(samples)}
    return replace(
        batch,
        ids=served.ragged(batch.ids),
        logprobs=None if batch.logprobs is None else served.ragged(batch.logprobs),
        finish_reasons=served.values(batch.finish_reasons, "error"),
        texts=None if batch.texts is None else served.values(batch.texts, ""),
        weight_versions=served.values(batch.weight_versions or (), version),
        version_runs=None if batch.version_runs is None else served.values(batch.version_runs, ((version, 0),)),
        errors=_errors(batch, served, skipped),
        cached_tokens=None if batch.cached_tokens is None else served.values(batch.cached_tokens, None),
        kept_ids=None if batch.kept_ids is None else TokenSets.from_flat(*map(served.ragged, batch.kept_ids.as_rows)),
        **_more(batch, lambda rows, filler: served.ragged(rows)),
    )


def spread_scores(
    batch: ScoreResult, served: ServedRows, lengths: Tensor, problems: Problems, version: str
) -> ScoreResult:
    """Put the scores back among the skipped sequences. Nothing of a skipped sequence is scored; a message says why.

    Args:
        served: the sequences that the engine scored.
        lengths: int64[rows], the lengths of all sequences.
        problems: the skipped sequences, and why.
        version: the label of the weights in force.
    """
    total = int(lengths.sum())
    index = Ragged(torch.arange(total), lengths).select(served.index).values

    def spread(rows: Ragged, filler: int = 0) -> Ragged:
        values = rows.values.new_full((total, *rows.values.shape[1:]), filler)
        return Ragged(values.index_copy(0, index.to(values.device), rows.values), lengths)

    return replace(
        batch,
        logprobs=spread(batch.logprobs),
        scored=spread(batch.scored),
        logits=None if batch.logits is None else spread(batch.logits),
        argmax=None if batch.argmax is None else spread(batch.argmax, -1),
        weight_versions=served.values(batch.weight_versions or (), version),
        errors=_errors(batch, served, problems),
        **_more(batch, spread),
    )


def _more(batch: GenerateResult | ScoreResult, spread: Callable[[Ragged, int], Ragged]) -> dict[str, Any]:
    """Return, spread, the fields that are None unless more than the log-probs of given ids was asked for."""
    fillers = {"kept_log_mass": 0, "top_ids": -1, "top_logprobs": 0, "tail_log_mass": 0}
    found = {name: getattr(batch, name, None) for name in fillers}
    return {name: spread(rows, fillers[name]) for name, rows in found.items() if rows is not None}


def _errors(batch: GenerateResult | ScoreResult, served: ServedRows, problems: Problems) -> tuple[str, ...]:
    """Return the engine's messages for the rows that it served and core's messages for the skipped ones."""
    errors = served.values(batch.errors or ("",) * len(served), "")
    return tuple(problems.get(row, error) for row, error in enumerate(errors))
