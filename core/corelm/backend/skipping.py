"""Serve the good rows of a batch when some are bad: which rows to serve, and where their results go back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from corelm import validate
from corelm.errors import CoreLMError, Problems, own, refuse, spelled_out
from corelm.spec.records import GenerateResult, ScoreResult, fields_of_rows
from corelm.tensors.ragged import Ragged
from corelm.tensors.token_sets import TokenSets

OnError = Literal["raise", "skip"]
T = TypeVar("T")
R = TypeVar("R", bound=Ragged | TokenSets)
B = TypeVar("B", GenerateResult, ScoreResult)


@dataclass(frozen=True, slots=True, eq=False)
class ServedRows:
    """The rows of a batch that are served, and where their results go back among the rows that are skipped.

    `index` are their numbers, int64 and ascending; `total` is the number of all rows.
    """

    index: Tensor
    total: int

    @classmethod
    def without(cls, problems: Collection[int], total: int) -> ServedRows:
        """Return all rows but those that have problems."""
        return cls(torch.tensor([row for row in range(total) if row not in problems], dtype=torch.int64), total)

    def ragged(self, rows: R) -> R:
        """Put rows back among the skipped ones, which are empty."""
        if len(self.index) == self.total:
            return rows
        # Empty rows have no values, so only the lengths change.
        lengths = torch.zeros(self.total, dtype=torch.int64)
        lengths[self.index] = rows.lengths
        return replace(rows, lengths=lengths)

    def values(self, values: Sequence[T], filler: T) -> tuple[T, ...]:
        """Put one value per row back among the skipped rows, which get the filler."""
        if len(self.index) == self.total:
            return tuple(values)
        out = [filler] * self.total
        for row, value in zip(self.index.tolist(), values, strict=True):
            out[row] = value
        return tuple(out)


def admitted(problems: Problems, rows: int, on_error: OnError, field: str) -> Tensor:
    """Return int64: the numbers of the rows to serve. Unless `on_error` is "skip", refuse all bad rows together."""
    validate.one_of("on_error", on_error, ("raise", "skip"))
    if on_error == "raise":
        refuse(problems, field)
    return ServedRows.without(problems, rows).index


@contextmanager
def renumbering(rows: Tensor) -> Iterator[None]:
    """Raise what is raised in the block as `renumbered` returns it."""
    try:
        yield
    except CoreLMError as error:
        told = renumbered(error, rows)
        if told is error:
            raise
        raise told from error


def renumbered(error: CoreLMError, rows: Tensor) -> CoreLMError:
    """Return an error about rows of a request as one about the caller's `rows`; several may belong to one of these.

    An error that names no rows in `problems`, or other ones, is returned as it is.
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


def spread(batch: B, served: Tensor, lengths: Tensor, problems: Mapping[int, str], version: str) -> B:
    """Put the `served` rows of a result back among those that were skipped, which get a message in `errors`.

    A skipped answer is empty and has the finish reason `error`. Nothing of a skipped sequence is scored.
    `lengths`, int64[rows], are those of all rows, and `version` is the label of the weights in force.
    """
    fillers = {"finish_reasons": "error", "texts": "", "weight_versions": version, "version_runs": ((version, 0),)}
    total, rows = int(lengths.sum()), ServedRows(served, len(lengths))
    index = Ragged(torch.arange(total), lengths).select(served).values
    found: dict[str, Any] = {}
    given: Any
    for name, given in fields_of_rows(batch).items():
        if isinstance(given, TokenSets):
            # Of answers: those that were skipped are empty.
            found[name] = replace(given, lengths=lengths)
        elif isinstance(given, Ragged):
            filler = -1 if name in ("argmax", "top_ids") else 0
            values = given.values.new_full((total, *given.values.shape[1:]), filler)
            found[name] = Ragged(values.index_copy(0, index.to(values.device), given.values), lengths)
        else:
            found[name] = rows.values(given, fillers.get(name))
    errors = found.get("errors") or ("",) * len(lengths)
    return replace(batch, **{**found, "errors": tuple(problems.get(row, why or "") for row, why in enumerate(errors))})
