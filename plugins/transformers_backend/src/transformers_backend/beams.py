"""Beam search, which is transformers' own: `model.generate`, with everything the request does not say switched off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from corelm.errors import CapabilityError
from corelm.spec import GenerateRequest, GenerateResult, Ragged, SamplingParams
from transformers_backend.decoding import answer_limits
from transformers_backend.model import CausalLM, Deadline

_HONOURED = {"temperature", "num_beams", "length_penalty", "early_stopping", "min_new_tokens", "engine_kwargs"}


def beam_search(model: CausalLM, request: GenerateRequest) -> GenerateResult:
    """The best beam for every prompt. A prompt at a time: padding would count in `generate`'s lengths and limits.

    Raises:
        CapabilityError: a sampling parameter that has no meaning in a search.
        TimeoutError: the request's timeout has passed.
    """
    sampling = request.sampling
    _only_what_is_honoured(sampling)
    deadline = Deadline(request.timeout)
    limits = answer_limits(model, request).tolist()
    stop_ids = sorted(request.stop_ids)
    answers, reasons = [], []
    with model.evaluating(), _no_defaults(model.base):
        for prompt, limit in zip(request.prompts.split(), limits, strict=True):
            deadline.check()
            ids = prompt[None].to(model.device)
            found = model.base.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                num_beams=sampling.num_beams,
                length_penalty=sampling.length_penalty,
                early_stopping=sampling.early_stopping,
                max_new_tokens=limit,
                min_new_tokens=sampling.min_new_tokens,
                eos_token_id=stop_ids or None,
                pad_token_id=0,
                **sampling.engine_kwargs,
            )
            answer = found[0, len(prompt) :].cpu()
            answers.append(answer)
            reasons.append("stop" if int(answer[-1]) in request.stop_ids else "length")
    device = request.prompts.values.device
    return GenerateResult(ids=Ragged.from_list(answers).to(device), logprobs=None, finish_reasons=tuple(reasons))


def _only_what_is_honoured(sampling: SamplingParams) -> None:
    refused = sampling.engine_parameters().keys() - _HONOURED
    if sampling.temperature not in (0.0, 1.0):
        refused |= {"temperature"}
    if refused:
        names = ", ".join(sorted(refused))
        raise CapabilityError(
            f"beam search does not sample, so {names} would do nothing; drop that, or num_beams",
            capability=min(refused),
        )


@contextmanager
def _no_defaults(base: Any) -> Iterator[None]:
    """An empty generation config inside, the model's own afterwards: `generate` takes from it what it is not told."""
    own = base.generation_config
    base.generation_config = type(own)()
    try:
        yield
    finally:
        base.generation_config = own
