"""`PlainOracle`: the log-probs of a folder's model, computed with transformers alone in the simplest way.

One sequence at a time, no padding, no cache, float32. No plugin takes part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from corelm.errors import described
from corelm.tensors.categorical import log_probs
from corelm.validate import invalid

#: The noise of other weights, relative to the spread of each parameter: the distributions change, and stay as wide.
_NOISE = 0.1
#: The layers that an adapter changes, which every engine with adapters takes, and its rank.
_ADAPTED, _RANK = ("q_proj", "v_proj"), 4


class PlainOracle:
    """The plain forward of a model.

    Args:
        model: a causal language model of transformers, which nothing else changes.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model.eval()

    @classmethod
    def load(
        cls,
        folder: str | PathLike[str],
        *,
        dtype: torch.dtype = torch.float32,
        config: Mapping[str, Any] | None = None,
    ) -> PlainOracle:
        """Load the model of a folder.

        Args:
            folder: where the model is saved.
            dtype: of the weights and of what is computed.
            config: values that replace those of the model's configuration, such as ``{"sliding_window": None}``.

        Raises:
            InvalidRequestError: transformers cannot load it; `field` is ``oracle``.
        """
        try:
            from transformers import AutoConfig, AutoModelForCausalLM

            settings = AutoConfig.from_pretrained(folder)
            for name, value in (config or {}).items():
                setattr(settings.get_text_config(), name, value)
            loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, config=settings)
        except (ImportError, OSError, ValueError) as error:
            raise invalid(
                "oracle",
                f"transformers cannot load {str(folder)!r}, so nothing can be compared; define another oracle in a "
                f"test file, as docs/conformance.md shows: {described(error)}",
            ) from error
        return cls(loaded)

    def logprobs(self, ids: list[int], temperature: float) -> Tensor:
        """Return float32[len(ids)]: the log-prob of every id given those before it; entry 0 is 0."""
        out = torch.zeros(len(ids))
        if len(ids) > 1:
            chosen = torch.tensor(ids[1:])[:, None]
            out[1:] = self._table(ids[:-1], temperature).gather(-1, chosen)[:, 0]
        return out

    def next_logprobs(self, ids: list[int], temperature: float) -> Tensor:
        """Return float32[V]: the log-prob of every id that can follow `ids`."""
        return self._table(ids, temperature)[-1]

    def logits(self, ids: list[int]) -> Tensor:
        """Return float32[len(ids), V]: row t holds the logits after ``ids[: t + 1]``."""
        with torch.no_grad():
            logits: Tensor = self._model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
        return logits

    @property
    def config(self) -> Any:
        """The configuration of the model's text part."""
        config: Any = self._model.config
        return config.get_text_config()

    @property
    def generation_config(self) -> Any:
        """How the model is sampled from by default; None if its folder does not say."""
        return getattr(self._model, "generation_config", None)

    def with_weights(self, change: Callable[[str, Tensor], Tensor]) -> PlainOracle:
        """Return an oracle of a copy of the model, each of whose parameters is ``change(name, parameter)``."""
        other = copy.deepcopy(self._model)
        for name, parameter in other.named_parameters():
            parameter.data = change(name, parameter.data)
        return PlainOracle(other)

    def with_other_weights(self, seed: int = 0) -> PlainOracle:
        """Return an oracle of a copy of the model, to each of whose parameters some noise was added."""
        generator = torch.Generator().manual_seed(seed)

        def noisy(name: str, parameter: Tensor) -> Tensor:
            noise = torch.randn(parameter.shape, generator=generator)
            return parameter + _NOISE * parameter.std(correction=0).clamp(min=1e-3) * noise

        return self.with_weights(noisy)

    def with_adapter(self, seed: int) -> tuple[dict[str, Tensor], dict[str, Any], PlainOracle] | None:
        """Return a LoRA adapter as PEFT saves it, its configuration, and an oracle of a copy with the adapter added.

        None if the model has no linear layers with the names that adapters usually change.
        """
        other = copy.deepcopy(self._model)
        generator = torch.Generator().manual_seed(seed)
        state: dict[str, Tensor] = {}
        for name, layer in other.named_modules():
            if name.rpartition(".")[2] in _ADAPTED and isinstance(layer, nn.Linear):
                down = torch.randn(_RANK, layer.in_features, generator=generator)
                up = torch.randn(layer.out_features, _RANK, generator=generator)
                # So that what is added spreads about as far as the weight itself.
                up *= layer.weight.data.std(correction=0).clamp(min=1e-3) / _RANK**0.5
                layer.weight.data += up @ down
                state |= {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": _RANK, "lora_alpha": _RANK}
        return (state, {**config, "target_modules": [*_ADAPTED]}, PlainOracle(other)) if state else None

    def state_dict(self) -> dict[str, Any]:
        """Return the weights."""
        return self._model.state_dict()

    def _table(self, ids: list[int], temperature: float) -> Tensor:
        return log_probs(self.logits(ids) / temperature)
