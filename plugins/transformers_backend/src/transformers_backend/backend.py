"""`TransformersBackend`: the hooks, each one line long, and how a model is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from corelm.errors import CapabilityError, InvalidRequestError
from corelm.spec import (
    Capabilities,
    CloseRequest,
    GenerateRequest,
    GenerateResult,
    HealthRequest,
    ScoreRequest,
    ScoreResult,
    WeightUpdate,
    hookimpl,
)
from transformers_backend import beams, decoding, scoring, weights
from transformers_backend.model import CausalLM

#: Sampling parameters honoured, in the ranges that `SamplingParams` itself allows.
HONOURED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_new_tokens",
    "stop",
    "num_beams",
    "length_penalty",
    "early_stopping",
    "engine_kwargs",
)


class TransformersBackend:
    """Samples from and scores with a causal language model, in this process. One call at a time."""

    requires_api = ">=1,<2"

    def __init__(self, model: CausalLM, tokenizer: Any, max_batch_tokens: int) -> None:
        self.model: CausalLM | None = model
        self.scorer: scoring.Scorer | None = scoring.Scorer(model, max_batch_tokens)
        self.tokenizer = tokenizer
        self.max_batch_tokens = max_batch_tokens
        eos = model.eos_token_ids | {tokenizer.eos_token_id}
        self.capabilities = Capabilities(
            vocab_size=model.vocab_size,
            max_context=model.max_context,
            # A configuration class may default to the EOS of a larger vocabulary.
            eos_token_ids=frozenset(token for token in eos if token is not None and token < model.vocab_size),
            sampling=dict.fromkeys(HONOURED),
            generation_modes=frozenset({"raw", "processed"}),
            score=True,
            score_temperature=True,
            logits=True,
            gradients=True,
            per_answer_seeds=True,
            update_weights=True,
        )

    @classmethod
    def open(
        cls,
        model: Any = None,
        *,
        tokenizer: Any = None,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
        max_batch_tokens: int = 32768,
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> TransformersBackend:
        """Load a model, or take one that is there.

        Args:
            model: a folder or hub name, or a model object, PEFT-wrapped or not. An object keeps its device, dtype,
                train/eval mode and `requires_grad`.
            tokenizer: a tokenizer, or a folder or hub name of one; None for the model's own.
            dtype: None for the checkpoint's own. device: None for the first GPU, or the CPU where there is none.
            max_batch_tokens: how many tokens share a forward pass, padding and answers to come included. With
                ``max_new_tokens=None`` an answer counts as long as the context allows: give more to batch those.
            model_kwargs: passed to ``from_pretrained`` as they are.

        Raises:
            InvalidRequestError: nothing to open, options of loading with a model that is loaded, or no tokenizer.
            CapabilityError: a model that this backend cannot run.
        """
        if isinstance(model, (str, os.PathLike)):
            tokenizer = model if tokenizer is None else tokenizer
            module = _load(model, dtype, device, trust_remote_code, attn_implementation, model_kwargs or {})
        elif isinstance(model, nn.Module):
            loading = {"dtype": dtype, "device": device, "attn_implementation": attn_implementation}
            _not_loading({**loading, "model_kwargs": model_kwargs or None})
            module = model
        else:
            raise InvalidRequestError(
                f"model: expected a folder, a hub name or a model object, got {type(model).__name__}", field="model"
            )
        causal = CausalLM(module, _base(module))
        return cls(causal, _tokenizer(tokenizer, causal.base, trust_remote_code), max_batch_tokens)

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        model = self._open_model()
        if request.sampling.num_beams > 1:
            return beams.beam_search(model, request)
        if request.sampling.engine_kwargs:
            raise CapabilityError(
                "engine_kwargs go to transformers' own generate, which serves beams only; drop them or give num_beams",
                capability="engine_kwargs",
            )
        return decoding.generate(model, self.tokenizer, request, self.max_batch_tokens)

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        return self._open_scorer().score(request)

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        model = self._open_model()
        if request.state_dict is not None:
            weights.update(model, request.state_dict)
        elif request.path is not None:
            weights.update_from_path(model, request.path)
        self._open_scorer().forget()
        return True

    @hookimpl
    def health(self, request: HealthRequest) -> bool:
        return self.model is not None

    @hookimpl
    def close(self, request: CloseRequest) -> bool:
        self.model = self.scorer = None
        return True

    def _open_model(self) -> CausalLM:
        if self.model is None:
            raise RuntimeError("this backend is closed")
        return self.model

    def _open_scorer(self) -> scoring.Scorer:
        if self.scorer is None:
            raise RuntimeError("this backend is closed")
        return self.scorer


def _load(
    path: str | os.PathLike[str],
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
    trust_remote_code: bool,
    attn_implementation: str | None,
    model_kwargs: Mapping[str, Any],
) -> nn.Module:
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"weights_only": True, **model_kwargs, "trust_remote_code": trust_remote_code}
    options["dtype"] = dtype or "auto"
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    model: nn.Module = AutoModelForCausalLM.from_pretrained(path, **options)
    if "device_map" in model_kwargs:
        return model
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _not_loading(options: Mapping[str, Any]) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise InvalidRequestError(
            f"{', '.join(given)}: said when a model is loaded, but this one is there already; set it on the model",
            field=given[0],
        )


def _base(module: Any) -> Any:
    """The transformers model itself, without a PEFT wrapper."""
    from transformers import PreTrainedModel

    base = module
    if not isinstance(module, PreTrainedModel) and hasattr(module, "get_base_model"):
        if module.active_peft_config.is_prompt_learning:
            raise CapabilityError(
                f"{type(module).__name__} with prompt learning adds virtual tokens, which are not supported; use LoRA",
                capability="model",
            )
        base = module.get_base_model()
    if not isinstance(base, PreTrainedModel) or not base.can_generate() or base.config.is_encoder_decoder:
        raise CapabilityError(f"{type(base).__name__} is no causal language model of transformers", capability="model")
    return base


def _tokenizer(given: Any, base: Any, trust_remote_code: bool) -> Any:
    if given is None:
        given = base.name_or_path
        if not given:
            raise InvalidRequestError("a model object brings no tokenizer; pass tokenizer=", field="tokenizer")
    if not isinstance(given, (str, os.PathLike)):
        return given
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(given, trust_remote_code=trust_remote_code)
