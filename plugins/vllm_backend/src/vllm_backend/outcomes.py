"""What becomes of a row, and of all of them together: the same in this process and over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from corelm.spec import GenerateRequest, GenerateResult, Ragged


@dataclass(frozen=True)
class Unserved:
    """A row without an answer, and why: vLLM refused it, or it was aborted before it had one."""

    why: str
    aborted: bool = False


def generation_batch(
    request: GenerateRequest,
    ids: Sequence[list[int]],
    logprobs: Sequence[list[float]],
    reasons: Sequence[str],
    errors: Sequence[str],
) -> GenerateResult:
    """The answers of all rows, labelled with the distribution that their log-probs are of."""
    sampling, processed = request.sampling, request.logprobs == "processed"
    # What forbids ids is truncation as well: the distribution is no longer the model's.
    reshaped = sampling.truncates or sampling.min_new_tokens or sampling.engine_kwargs
    device = request.prompts.values.device
    return GenerateResult(
        ids=Ragged.from_list(ids).to(device),
        logprobs=None if request.logprobs == "none" else Ragged.from_list(logprobs, torch.float32).to(device),
        finish_reasons=tuple(reasons),
        mode="processed" if processed else "raw",
        temperature=sampling.temperature if processed else 1.0,
        support="truncated" if processed and reshaped else "full",
        errors=tuple(errors) if any(errors) else None,
    )
