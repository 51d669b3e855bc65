"""Scoring by id: vLLM returns one array with the log-probs of exactly the ids and positions that were asked for.

The plain way (`prompt_logprobs`) also ranks every token of the prompt, and builds Python lists of all of them. The
array (`prompt_logprob_token_ids`) needs vLLM 0.32 and its V2 model runner. It is used once it has agreed with the plain
way on the engine that was opened; everything works without it, more slowly.

It has not been run on a GPU yet. On a CPU it has run under Triton's interpreter: tests/engines/vllm/interpreted.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from corelm.spec import Ragged, ScoreRequest, ScoreResult
from vllm_backend.capabilities import ModelInfo

_log = logging.getLogger(__name__)

#: Ids of a row that is scored in both ways.
_LENGTH = 32
#: How far, in nats, the two ways may be apart. They may round the logits of 16-bit models differently.
_TOLERANCE = 0.25
#: How many times farther the scores of a row must be apart from each other, so that agreement means something.
_MARGIN = 8.0


def offered(config: Any) -> bool:
    """Return whether an engine with this `VllmConfig` takes `prompt_logprob_token_ids`."""
    from vllm import SamplingParams

    return (
        "prompt_logprob_token_ids" in SamplingParams.__struct_fields__
        and config.use_v2_model_runner
        # vLLM refuses the combination, because its numbers would be wrong.
        and not config.cache_config.kv_sharing_fast_prefill
        and config.model_config.max_logprobs != 0
    )


def tried(info: ModelInfo, score: Callable[[ScoreRequest, ModelInfo], ScoreResult]) -> ModelInfo:
    """Return `info` with `scores_by_id` if that agrees with the plain way on short rows, else unchanged.

    Args:
        info: what is known about the model.
        score: scores rows in the way that a `ModelInfo` says.
    """
    by_id, request = replace(info, scores_by_id=True), _trial(info)
    found, plain = score(request, by_id), score(request, info)
    problem = _disagreement(found, plain)
    if problem:
        _log.warning("vLLM's prompt_logprob_token_ids is not used for scoring: %s", problem)
        return info
    return by_id


def _trial(info: ModelInfo) -> ScoreRequest:
    """Return a request for two rows: one is scored as a whole, the other from its middle on."""
    length, vocab_size = min(_LENGTH, info.max_context), info.capabilities.vocab_size
    rows = [[(3 + step * place) % vocab_size for place in range(length)] for step in (7, 11)]
    return ScoreRequest(
        sequences=Ragged.from_list(rows),
        score_from=torch.tensor([1, max(1, length // 2)]),
        temperature=1.0,
        return_logits=False,
        grad=False,
        device=None,
        request_ids=("trial-0", "trial-1"),
        timeout=None,
    )


def _disagreement(found: ScoreResult, plain: ScoreResult) -> str:
    """Return why the scores found by id cannot be believed; "" if they can."""
    for result, way in ((plain, "the plain way"), (found, "it")):
        failures = [error for error in result.errors or () if error]
        if failures:
            return f"{way} failed ({failures[0]})"
    if not torch.equal(found.scored.values, plain.scored.values):
        return "it scored other positions than the plain way"
    expected = plain.logprobs.values[plain.scored.values]
    difference = float((found.logprobs.values[found.scored.values] - expected).abs().max())
    spread = float(expected.max() - expected.min())
    # Keep the `not`: NaN fails every comparison and must be rejected.
    if not (difference <= _TOLERANCE and difference * _MARGIN <= spread):
        return f"its log-probs are up to {difference:.3g} nats from the plain ones, which are {spread:.3g} nats apart"
    return ""
