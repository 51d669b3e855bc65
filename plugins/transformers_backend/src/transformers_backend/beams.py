"""Beam search, which is transformers' own: `model.generate`, with everything the request does not say switched off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from corelm.errors import CapabilityError
from corelm.messages import GenerateRequest, GenerationBatch
from corelm.rows import Ragged
from corelm.sampling import SamplingParams
from transformers_backend.decoding import answer_limits
from transformers_backend.model import CausalLM, Deadline

_HONOURED = {"temperature", "num_beams", "length_penalty", "early_stopping", "min_new_tokens", "engine_kwargs"}


def beam_search(model: CausalLM, request: GenerateRequest) -> GenerationBatch:
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
    # `generate` fills up with the pad id after an answer; a stop id keeps that out of the answer's own ids.
    ending = {"eos_token_id": stop_ids, "pad_token_id": stop_ids[0]} if stop_ids else {"pad_token_id": 0}
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
                **ending,
                **sampling.engine_kwargs,
            )
            answer = found[0, len(prompt) :].cpu()
            ends = torch.isin(answer, torch.tensor(stop_ids, dtype=torch.int64)).nonzero()[:1, 0].tolist()
            answers.append(answer[: ends[0] + 1] if ends else answer)
            reasons.append("stop" if ends else "length")
    device = request.prompts.values.device
    return GenerationBatch(ids=Ragged.from_list(answers).to(device), logprobs=None, finish_reasons=tuple(reasons))


def _only_what_is_honoured(sampling: SamplingParams) -> None:
    refused = sampling.engine_parameters().keys() - _HONOURED
    if sampling.temperature not in (0.0, 1.0):
        refused |= {"temperature"}
    if refused:
        names = ", ".join(sorted(refused))
        raise CapabilityError(
            f"beam search looks for the likeliest answer and does not sample: {names} would do nothing; drop it or num_beams",
            capability=min(refused),
        )


@contextmanager
def _no_defaults(base: Any) -> Iterator[None]:
    """`generate` fills what it is not told from the model's generation config: an empty one inside, the model's afterwards."""
    own = base.generation_config
    base.generation_config = type(own)()
    try:
        yield
    finally:
        base.generation_config = own
