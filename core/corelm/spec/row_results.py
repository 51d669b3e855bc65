"""Build the result of a call from the outcome of each of its rows.

Many engines answer row by row, and a row may fail alone. A plugin turns the reply for a row into a `RowAnswer`
(or, of a scored row, `RowScores`) or a `RowFailure`. These functions then lay out the tensors and label them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from corelm.spec.provenance import Provenance
from corelm.spec.records import GenerateRequest, GenerateResult, ScoreRequest, ScoreResult
from corelm.tensors.ragged import Ragged
from corelm.tensors.token_sets import TokenSets


@dataclass(frozen=True, slots=True, eq=False)
class TopIds:
    """The most probable ids at the positions of one row, the most probable first.

    Attributes:
        ids: int64[positions, k]; -1 where fewer than k ids have a probability.
        logprobs: float32[positions, k]; -inf where the id is -1.
        tail: float32[positions]: the log of the probability that all other ids have together.
    """

    ids: Tensor
    logprobs: Tensor
    tail: Tensor

    @classmethod
    def of(cls, found: Sequence[Mapping[int, float]], k: int) -> TopIds:
        """Build from the log-probs by id of each position, of which only the k largest are kept.

        >>> top = TopIds.of([{7: -0.7, 3: -0.2, 9: -5.0}, {4: 0.0}], 2)
        >>> top.ids.tolist()
        [[3, 7], [4, -1]]
        """
        best = [sorted(each.items(), key=lambda pair: -pair[1])[:k] for each in found]
        rows = [pairs + [(-1, -torch.inf)] * (k - len(pairs)) for pairs in best]
        ids = torch.tensor([[token for token, _ in row] for row in rows], dtype=torch.int64).reshape(-1, k)
        values = torch.tensor([[value for _, value in row] for row in rows], dtype=torch.float64).reshape(-1, k)
        ids[values == -torch.inf] = -1
        # Where fewer ids than were asked for have a probability, nothing is left for others.
        tail = log_tail_mass(values).masked_fill((ids == -1).any(-1), -torch.inf)
        return cls(ids, values.float(), tail)

    @classmethod
    def nothing(cls, positions: int, k: int) -> TopIds:
        """Return what stands at positions of which nothing is known: no ids, and log-probs of 0.0."""
        return cls(torch.full((positions, k), -1), torch.zeros(positions, k), torch.zeros(positions))

    @staticmethod
    def cat(parts: Sequence[TopIds], k: int) -> TopIds:
        """Return the positions of all `parts`, one part after another."""
        parts = [TopIds.nothing(0, k), *parts]
        return TopIds(*(torch.cat(column) for column in zip(*(part.columns for part in parts), strict=True)))

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """`ids`, `logprobs` and `tail`."""
        return self.ids, self.logprobs, self.tail

    def fields(self, lengths: Tensor, device: torch.device) -> dict[str, Any]:
        """Return the fields of a result, if these are the positions of rows of such `lengths`."""
        names = ("top_ids", "top_logprobs", "tail_log_mass")
        return {name: Ragged(each, lengths).to(device) for name, each in zip(names, self.columns, strict=True)}


def log_tail_mass(logprobs: Tensor) -> Tensor:
    """Return float32[...]: the log of the probability that all ids but those of ``logprobs[..., k]`` have together.

    Log-probs are rounded, so the result is only as good as their sum: a tail of 1e-6 may be off by a tenth.
    It is -inf if the probabilities add up to 1 or, by rounding, to more.
    """
    mass = logprobs.double().exp().sum(-1)
    return torch.log1p(-mass.clamp(max=1.0)).float()


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """The answer to one prompt.

    Attributes:
        ids: the sampled ids, with the one that ended the answer.
        logprobs: one number for each id; empty if none were asked for.
        finish_reason: ``stop``, ``length`` or ``abort``.
        kept_ids: for each id, the ids that truncation had left, in any order; empty if they were not asked for.
        kept_log_mass: for each id, the log of the probability of those ids before truncation; empty likewise.
        top: the most probable ids where each id was sampled; None if they were not asked for.
        cached_tokens: how many ids of the prompt came from the prefix cache; what is no count is left out.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    kept_ids: Sequence[Sequence[int]] = ()
    kept_log_mass: Sequence[float] = ()
    top: TopIds | None = None
    cached_tokens: Any = None


@dataclass(frozen=True, slots=True)
class RowScores:
    """The scores of the last ids of one sequence, up to and including its last.

    Attributes:
        logprobs: one number for each of these ids.
        argmax: the most probable id at each of these positions; empty if none were asked for.
        top: the most probable ids at each of these positions; None if they were not asked for.
    """

    logprobs: Sequence[float]
    argmax: Sequence[int] = ()
    top: TopIds | None = None


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A row that has no answer.

    Attributes:
        why: the reason, in words that help the caller.
        aborted: the row was aborted before it had an answer: its finish reason is ``abort``, and it has no error.
    """

    why: str
    aborted: bool = False


def generate_result(request: GenerateRequest, rows: Sequence[RowAnswer | RowFailure]) -> GenerateResult:
    """Return the result of `request` from the outcome of each of its rows, in their order.

    A row that failed has no ids, and its finish reason is ``error``, or ``abort`` if it was aborted. An
    answer that lacks what was asked for at some of its ids is an error of that row.
    """
    if request.return_support or request.top_logprobs:
        rows = [_incomplete(row, request) or row if isinstance(row, RowAnswer) else row for row in rows]
    answers: list[RowAnswer] = []
    errors: list[str] = []
    ids, logprobs, reasons = list[Sequence[int]](), list[Sequence[float]](), list[str]()
    cached: list[int | None] = []
    for row in rows:
        answer = RowAnswer([], [], "abort" if row.aborted else "error") if isinstance(row, RowFailure) else row
        answers.append(answer)
        errors.append(row.why if isinstance(row, RowFailure) and not row.aborted else "")
        ids.append(answer.ids)
        logprobs.append(answer.logprobs)
        reasons.append(answer.finish_reason)
        count = answer.cached_tokens
        cached.append(count if type(count) is int and count >= 0 else None)
    cached_tokens = None
    if not {*cached} <= {None}:
        # An engine that interrupts a request and goes on later finds some of the answer in its cache as well.
        counts = zip(cached, request.prompts.lengths.tolist(), strict=True)
        cached_tokens = tuple(None if count is None else min(count, length) for count, length in counts)
    device = request.prompts.values.device
    found: dict[str, Any] = {"ids": Ragged.from_list(ids), "logprobs": None}
    if request.logprobs != "none":
        found["logprobs"] = Ragged.from_list(logprobs, torch.float32)
    if request.return_support:
        found["kept_ids"] = TokenSets.from_list([[sorted(each) for each in answer.kept_ids] for answer in answers])
        found["kept_log_mass"] = Ragged.from_list([answer.kept_log_mass for answer in answers], torch.float32)
    if k := request.top_logprobs:
        top = TopIds.cat([answer.top for answer in answers if answer.top is not None], k)
        found |= top.fields(found["ids"].lengths, device)
    if device.type != "cpu":
        found = {name: None if field is None else field.to(device) for name, field in found.items()}
    return GenerateResult(
        finish_reasons=tuple(reasons),
        errors=tuple(errors) if any(errors) else None,
        cached_tokens=cached_tokens,
        **found,
        **Provenance.label(request.logprobs, request.sampling),
    )


def _incomplete(answer: RowAnswer, request: GenerateRequest) -> RowFailure | None:
    """Return why an answer does not say of all its ids what was asked for; None if it does."""
    given: list[tuple[str, int]] = []
    if request.return_support:
        given += [("the kept ids", len(answer.kept_ids)), ("the mass of the kept ids", len(answer.kept_log_mass))]
    if request.top_logprobs:
        given += [("the most probable ids", 0 if answer.top is None else len(answer.top.ids))]
    for what, count in given:
        if count != len(answer.ids):
            return RowFailure(f"the engine returned {what} of {count} tokens, and {len(answer.ids)} were sampled")
    return None


def score_result(request: ScoreRequest, rows: Mapping[int, RowScores | RowFailure]) -> ScoreResult:
    """Return the result of `request` from the scores of each of its rows.

    Sequences ``[[5, 6, 7], [8, 9]]`` scored from 1 and 1, with rows
    ``{0: RowScores([-0.5, -2.0]), 1: RowFailure("too long")}``::

        logprobs  [[0.0, -0.5, -2.0], [0.0, 0.0]]
        scored    [[False, True, True], [False, False]]
        errors    ("", "too long")

    Args:
        rows: by row number, the scores of the last ids of the sequence. There may be more of them than
            ``request.score_from`` asks for; the first ones are dropped. A row may be missing only if nothing
            of it was asked for. A row with fewer scores than were asked for is an error of that row.
    """
    sequences = request.sequences
    starts = request.score_from.clamp_min(1).tolist()
    total = sequences.values.shape[0]
    values, scored = torch.zeros(total), torch.zeros(total, dtype=torch.bool)
    argmax = torch.full((total,), -1) if request.return_argmax else None
    k = request.top_k if request.top_ids is None else request.top_ids.values.shape[1]
    top = TopIds.nothing(total, k) if k else None
    errors = [""] * len(sequences)
    for number, found in rows.items():
        first, end = sequences.offsets[number : number + 2].tolist()
        asked = max(0, end - first - starts[number])
        why = found.why if isinstance(found, RowFailure) else _lacking(found, asked, request.return_argmax, k)
        if isinstance(found, RowFailure) or why:
            errors[number] = why
            continue
        at, before = slice(end - asked, end), len(found.logprobs) - asked
        values[at] = Ragged.from_list([found.logprobs[before:]], torch.float32).values
        scored[at] = True
        if argmax is not None:
            argmax[at] = Ragged.from_list([found.argmax[before:]]).values
        if top is not None and found.top is not None:
            for column, given in zip(top.columns, found.top.columns, strict=True):
                column[at] = given[before:]
    device = request.device or sequences.values.device
    return ScoreResult(
        logprobs=Ragged(values, sequences.lengths).to(device),
        scored=Ragged(scored, sequences.lengths).to(device),
        argmax=None if argmax is None else Ragged(argmax, sequences.lengths).to(device),
        errors=tuple(errors) if any(errors) else None,
        **({} if top is None else top.fields(sequences.lengths, device)),
        **Provenance.label_of_scores(request.temperature, truncated=request.support is not None),
    )


def _lacking(found: RowScores, asked: int, return_argmax: bool, k: int) -> str:
    """Return what the scores of a row lack of what was asked for; "" if nothing."""
    count, tops = len(found.logprobs), 0 if found.top is None else len(found.top.ids)
    if count < asked:
        return f"the engine returned {count} log-probs, but {asked} were asked for"
    if return_argmax and len(found.argmax) != count:
        return f"the engine returned {len(found.argmax)} most probable ids for {count} log-probs"
    if k and tops != count:
        return f"the engine returned the most probable ids of {tops} tokens for {count} log-probs"
    return ""
