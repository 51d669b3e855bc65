"""Build the result of a call from the outcome of each of its rows.

Many engines answer row by row, and a row may fail alone. A plugin turns the reply for a row into a `RowAnswer`
(or, of a scored row, `RowScores`) or a `RowFailure`. These functions then lay out the tensors and label them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from corelm.spec.provenance import Provenance
from corelm.spec.records import GenerateRequest, GenerateResult, ScoreRequest, ScoreResult
from corelm.tensors.ragged import Ragged


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """The answer to one prompt.

    Attributes:
        ids: the sampled ids, with the one that ended the answer.
        logprobs: one number for each id; empty if none were asked for.
        finish_reason: ``stop``, ``length`` or ``abort``.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class RowScores:
    """The scores of the last ids of one sequence, up to and including its last.

    Attributes:
        logprobs: one number for each of these ids.
        argmax: the most probable id at each of these positions; empty if none were asked for.
    """

    logprobs: Sequence[float]
    argmax: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A row that has no answer.

    Attributes:
        why: the reason, in words that help the caller.
        aborted: the row was aborted before it had an answer. Nothing went wrong, so a generated row gets the finish
            reason ``abort`` and no error.
    """

    why: str
    aborted: bool = False


def generate_result(request: GenerateRequest, rows: Sequence[RowAnswer | RowFailure]) -> GenerateResult:
    """Return the result of `request` from the outcome of each of its rows, in their order.

    A row that failed has no ids, and its finish reason is ``error``, or ``abort`` if it was aborted.
    """
    answers = [_no_answer(row) if isinstance(row, RowFailure) else row for row in rows]
    errors = [row.why if isinstance(row, RowFailure) and not row.aborted else "" for row in rows]
    device = request.prompts.values.device
    logprobs = None
    if request.logprobs != "none":
        logprobs = Ragged.from_list([answer.logprobs for answer in answers], torch.float32).to(device)
    return GenerateResult(
        ids=Ragged.from_list([answer.ids for answer in answers]).to(device),
        logprobs=logprobs,
        finish_reasons=tuple(answer.finish_reason for answer in answers),
        errors=tuple(errors) if any(errors) else None,
        **Provenance.label(request.logprobs, request.sampling),
    )


def score_result(request: ScoreRequest, rows: Mapping[int, RowScores | RowFailure]) -> ScoreResult:
    """Return the result of `request` from the scores of each of its rows.

    Sequences ``[[5, 6, 7], [8, 9]]`` scored from 1 and 1, with rows
    ``{0: RowScores([-0.5, -2.0]), 1: RowFailure("too long")}``::

        logprobs  [[0.0, -0.5, -2.0], [0.0, 0.0]]
        scored    [[False, True, True], [False, False]]
        errors    ("", "too long")

    Args:
        rows: by row number, the scores of the last ids of the sequence. There may be more of them than
            ``request.score_from`` asks for; the first ones are dropped. A row may be missing only if nothing of it was
            asked for. A row with fewer scores than were asked for is an error of that row.
    """
    sequences = request.sequences
    starts = request.score_from.clamp_min(1).tolist()
    values = torch.zeros(sequences.values.shape[0])
    scored = torch.zeros(sequences.values.shape[0], dtype=torch.bool)
    argmax = torch.full((sequences.values.shape[0],), -1) if request.return_argmax else None
    errors = [""] * len(sequences)
    for number, found in rows.items():
        first, end = sequences.offsets[number : number + 2].tolist()
        if isinstance(found, RowFailure):
            errors[number] = found.why
            continue
        asked = max(0, end - first - starts[number])
        count = len(found.logprobs)
        if count < asked:
            errors[number] = f"the engine returned {count} log-probs, but {asked} were asked for"
            continue
        if argmax is not None:
            if len(found.argmax) != count:
                errors[number] = f"the engine returned {len(found.argmax)} most probable ids for {count} log-probs"
                continue
            argmax[end - asked : end] = Ragged.from_list([found.argmax[count - asked :]]).values
        values[end - asked : end] = Ragged.from_list([found.logprobs[count - asked :]], torch.float32).values
        scored[end - asked : end] = True
    device = request.device or sequences.values.device
    return ScoreResult(
        logprobs=Ragged(values, sequences.lengths).to(device),
        scored=Ragged(scored, sequences.lengths).to(device),
        argmax=None if argmax is None else Ragged(argmax, sequences.lengths).to(device),
        errors=tuple(errors) if any(errors) else None,
        **Provenance.label_of_scores(request.temperature),
    )


def _no_answer(failure: RowFailure) -> RowAnswer:
    return RowAnswer([], [], "abort" if failure.aborted else "error")
