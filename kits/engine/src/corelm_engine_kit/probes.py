"""Requests by which a plugin tries out its own engine when it opens, and what the answers have to show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from corelm.spec import GenerateRequest, GenerateResult, Ragged, SamplingParams, ScoreRequest, ScoreResult

#: The prompts with which kept ids are tried, tokens of an answer, and the ids that each is drawn from.
_PROMPTS, _TOKENS, _IDS = [[3, 2, 1], [3]], 4, 5
#: How far, in nats, the mass of kept ids may be from what the scores say. They may round 16-bit logits differently.
_SAME_MASS = 0.25


def probe_generation(prompts: Ragged, sampling: SamplingParams, **fields: Any) -> GenerateRequest:
    """Return a request for raw log-probs, without seeds and stop ids, unless `fields` say otherwise."""
    known: dict[str, Any] = {"logprobs": "raw", "seeds": None, "stop_ids": frozenset(), "timeout": None}
    known["request_ids"] = tuple(f"probe-{row}" for row in range(len(prompts)))
    return GenerateRequest(prompts=prompts, sampling=sampling, **{**known, **fields})


def probe_scoring(sequences: Ragged, score_from: Tensor, **fields: Any) -> ScoreRequest:
    """Return a request for scores at temperature 1, unless `fields` say otherwise."""
    known: dict[str, Any] = {"temperature": 1.0, "return_logits": False, "grad": False, "device": None, "timeout": None}
    known["request_ids"] = tuple(f"probe-{row}" for row in range(len(sequences)))
    return ScoreRequest(sequences=sequences, score_from=score_from, **{**known, **fields})


def wrong_kept_ids(
    generate: Callable[[GenerateRequest], GenerateResult],
    score: Callable[[ScoreRequest], ScoreResult],
    vocab_size: int,
) -> str:
    """Return why the kept ids of two short answers cannot be those of the engine's own scores; "" if they can.

    Args:
        generate: the engine's hook. It is asked for kept ids.
        score: the engine's hook. It is asked for the most probable ids.
        vocab_size: ids are below it.
    """
    prompts, k = Ragged.from_list(_PROMPTS), min(_IDS, vocab_size)
    sampling = SamplingParams(max_new_tokens=_TOKENS, top_k=k)
    answers = generate(probe_generation(prompts, sampling, logprobs="none", return_support=True))
    if problem := next(filter(None, answers.errors or ()), ""):
        return problem
    scores = score(probe_scoring(prompts.join(answers.ids), prompts.lengths, top_k=k))
    if problem := next(filter(None, scores.errors or ()), ""):
        return problem
    assert answers.kept_ids is not None and answers.kept_log_mass is not None and scores.top_logprobs is not None
    top, counts = scores.top_logprobs.values[scores.scored.values].double(), answers.kept_ids.counts.values
    if not bool((counts == k).all()):
        return f"it drew from {counts.tolist()} ids instead of {k}"
    if not bool(answers.kept_ids.contains(answers.ids.values).all()):
        return "a token is not in its set"
    # Keep the `not`: NaN fails every comparison and must be rejected.
    if not float((top.logsumexp(-1) - answers.kept_log_mass.values.double()).abs().max()) <= _SAME_MASS:
        return "the probabilities of its sets are not those of the model's scores"
    return ""
