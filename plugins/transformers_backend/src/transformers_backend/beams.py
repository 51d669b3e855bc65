"""Beam search, by transformers' own `model.generate` with every default of the model switched off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from corelm.errors import CapabilityError
from corelm.spec import GenerateRequest, GenerateResult, Ragged, SamplingParams
from corelm_engine_kit.answers import without_answers
from corelm_engine_kit.ending import answer_limits
from corelm_engine_kit.loop import Call
from corelm_engine_kit.sampling import NOT_NUMBERS
from transformers_backend.engine import CausalLM

_HONOURED = {"temperature", "num_beams", "length_penalty", "early_stopping", "min_new_tokens", "engine_kwargs"}


def beam_search(engine: CausalLM, request: GenerateRequest, call: Call, *, use_cache: bool) -> GenerateResult:
    """Return the best beam for every prompt.

    Prompts run one at a time, because `generate` would count padding in its lengths and limits. An aborted row returns
    the best beam that it has. `use_cache` says whether the model's cached steps give the numbers of its plain forward.

    Raises:
        CapabilityError: a sampling parameter that has no meaning in a beam search, an aLoRA adapter, or a model that
            counts its positions in its own way.
    """
    sampling = request.sampling
    _refuse_sampling_parameters(sampling)
    if engine.adapter_reads_ids:
        raise CapabilityError(
            "beam search does not pass the prompt's ids to an aLoRA adapter; disable the adapter or drop num_beams",
            capability="num_beams",
        )
    if engine.counts_positions_itself:
        raise CapabilityError(
            f"beam search gives {type(engine.base).__name__} other positions than the model counts itself; drop "
            "num_beams",
            capability="num_beams",
        )
    limits = answer_limits(request, engine.max_context).tolist()
    stop_ids = sorted(request.stop_ids)
    options = dict(sampling.engine_kwargs)
    criteria = options.pop("stopping_criteria", ())
    answers, reasons, failed = [], [], set()
    with engine.evaluating(), _empty_generation_config(engine.base):
        for row, (prompt, limit) in enumerate(zip(request.prompts.split(), limits, strict=True)):
            call.deadline.check()
            if row in call.aborted:
                answers.append(torch.empty(0, dtype=torch.int64))
                reasons.append("abort")
                continue
            ids = prompt[None].to(engine.device)
            found = engine.base.generate(
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
                use_cache=use_cache,
                stopping_criteria=[*criteria, _look_at(call, row)],
                **options,
            )
            # The search itself reads scores that are not numbers, and says nothing.
            if bool(engine.last_logits(found[:, :-1]).isnan().any()):
                failed.add(row)
            answer = found[0, len(prompt) :].cpu()
            answers.append(answer)
            cut = row in call.aborted and len(answer) < limit
            reasons.append("stop" if int(answer[-1]) in request.stop_ids else "abort" if cut else "length")
    device = request.prompts.values.device
    result = GenerateResult(ids=Ragged.from_list(answers).to(device), logprobs=None, finish_reasons=tuple(reasons))
    return without_answers(result, dict.fromkeys(failed, NOT_NUMBERS))


def _look_at(call: Call, row: int) -> Callable[..., Tensor]:
    """Return a criterion that ends every beam of the row once it is aborted, and raises after the deadline."""

    def ended(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        call.deadline.check()
        return torch.full((len(ids),), row in call.aborted, device=ids.device)

    return ended


def _refuse_sampling_parameters(sampling: SamplingParams) -> None:
    if refused := sampling.engine_parameters().keys() - _HONOURED:
        names = ", ".join(sorted(refused))
        raise CapabilityError(
            f"beam search does not sample, so {names} would have no effect; drop {names} or num_beams",
            capability=min(refused),
        )


@contextmanager
def _empty_generation_config(base: Any) -> Iterator[None]:
    """Give the model an empty generation config inside, because `generate` reads its defaults from it."""
    own = base.generation_config
    base.generation_config = type(own)()
    try:
        yield
    finally:
        base.generation_config = own
