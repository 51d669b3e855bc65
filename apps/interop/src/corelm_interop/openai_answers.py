"""`Answer`: one answer as replies and sessions need it, taken from the engine's result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from corelm import Backend, Ragged
from corelm.application import answer_texts
from corelm.spec import GenerateResult, Provenance, SamplingParams, ScoreResult

#: For one token: the most probable ids with their log-probs, the most probable first.
Top = list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer.

    Attributes:
        logprobs: one per id; None if none were asked for.
        top: the most probable ids at each token; None if none were asked for.
        text: the text, without the stop string that ended it.
        provenance: where the log-probs, and the ids, came from.
    """

    ids: list[int]
    logprobs: list[float] | None
    top: list[Top] | None
    text: str
    finish_reason: str
    provenance: Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPrompt:
    """The log-probs of a prompt.

    Attributes:
        logprobs: one per id; None for the first.
        top: the most probable ids at each token, none at the first; None if none were asked for.
    """

    ids: Sequence[int]
    logprobs: list[float | None]
    top: list[Top] | None


def answers_of(
    result: GenerateResult,
    sampling: SamplingParams,
    backend: Backend,
    prompts: Sequence[Sequence[int]] | None = None,
) -> list[Answer]:
    """Return the answers of a result, those to one prompt next to each other.

    Args:
        prompts: those whose texts the answers continue; None for messages.
    """
    before = None if prompts is None else Ragged.from_list(prompts).repeat(sampling.num_samples or 1)
    texts = answer_texts(result, sampling, backend.tokenizer, before)
    provenance = backend.provenance(result)
    ids = result.ids.tolist()
    logprobs = None if result.logprobs is None else result.logprobs.tolist()
    top = _top(result.top_ids, result.top_logprobs)
    return [
        Answer(
            ids=ids[row],
            logprobs=None if logprobs is None else logprobs[row],
            top=None if top is None else top[row],
            text=texts[row],
            finish_reason=result.finish_reasons[row],
            provenance=provenance[row] if isinstance(provenance, tuple) else provenance,
        )
        for row in range(len(ids))
    ]


def scored_prompts(prompts: Sequence[Sequence[int]], result: ScoreResult) -> list[ScoredPrompt]:
    """Return the prompts with their scores."""
    top = _top(result.top_ids, result.top_logprobs)
    logprobs = result.logprobs.tolist()
    scored = result.scored.tolist()
    return [
        ScoredPrompt(
            ids=ids,
            logprobs=[value if known else None for value, known in zip(logprobs[row], scored[row], strict=True)],
            top=None if top is None else top[row],
        )
        for row, ids in enumerate(prompts)
    ]


def _top(ids: Ragged | None, logprobs: Ragged | None) -> list[list[Top]] | None:
    """Return, for each token of each row, the ids that have a probability."""
    if ids is None or logprobs is None:
        return None
    rows: list[list[Top]] = []
    for row_ids, row_logprobs in zip(ids.split(), logprobs.split(), strict=True):
        pairs: Any = zip(row_ids.tolist(), row_logprobs.tolist(), strict=True)
        rows.append([top_of(some_ids, some) for some_ids, some in pairs])
    return rows


def top_of(ids: Sequence[int], logprobs: Sequence[float]) -> Top:
    """Return the most probable ids at one token with their log-probs, without pads and ids of probability 0."""
    return [(each, value) for each, value in zip(ids, logprobs, strict=True) if each >= 0 and value > -math.inf]
