"""`CausalLM`: drives a transformers model in this process. Only this file knows how to call the model's forward."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from corelm.errors import CapabilityError, refuse
from corelm.spec import Ragged, Side
from corelm_engine_kit.transfer import to_device
from transformers_backend.model_state import parts_of


class CausalLM:
    """A model as a function of rows of ids.

    Attributes:
        module: the module to call, PEFT wrapper included.
        base: the transformers model inside `module`.
        vocab_size: width of the logits: what the head's weights say until `SelfTest` has read a row.
        max_context: longest input in tokens, or None if the model states no limit.
        rope_switch: number of tokens in a forward pass above which all positions are encoded differently (longrope);
            None for most models.
        passes_positions: whether the model is given `position_ids`. `SelfTest` turns it off for a model that counts
            its positions in another way.
        keeps_last_logits: whether the model is asked for the logits of the last positions only. `SelfTest` turns it off
            for a model that makes other logits then.
        fixes_shapes: whether decoding gives it keys and values in buffers of fixed shapes, if they fit into them.
            `SelfTest` turns it off for a model that reads others.
        padding: 0 or 1: even rows are padded with this id, odd rows with the other. Nothing must depend on it.
    """

    def __init__(self, module: nn.Module, base: Any) -> None:
        self.module = module
        self.base = base
        text = base.config.get_text_config()
        self._accepted = _forward_parameters(base)
        self.passes_positions = "position_ids" in self._accepted
        self.keeps_last_logits = "logits_to_keep" in self._accepted
        self.fixes_shapes = True
        # Some models state -1 for "no limit".
        limit = getattr(text, "max_position_embeddings", None)
        self.max_context: int | None = limit if limit and limit > 0 else None
        self.rope_switch = _rope_switch(text)
        # Nothing here uses the auxiliary loss of mixture-of-experts models, and with a cache its mask does not fit.
        without_router = {"output_router_logits": False} if "output_router_logits" in self._accepted else {}
        self.padding = 0
        self._always = {"return_dict": True, **without_router}
        self._cache_name = cache_name(base)
        self._embedded: int | None = getattr(_embeddings(base), "num_embeddings", None)
        head = getattr(base.get_output_embeddings(), "weight", None)
        self.vocab_size: int = len(head) if isinstance(head, Tensor) else self._embedded or text.vocab_size

    @property
    def readable(self) -> int:
        """Ids below it have an embedding. A GPU that is given another id fails for the rest of the process."""
        return min(self.vocab_size, self._embedded or self.vocab_size)

    @property
    def device(self) -> torch.device:
        # The weights that accelerate has offloaded say "meta", which computes nothing.
        devices = (each.device for each in self.base.parameters() if each.device.type != "meta")
        device: torch.device = next(devices, self.base.device)
        return device

    @property
    def adapter_reads_ids(self) -> bool:
        """Whether an adapter looks at the ids of each call to find out from which token on it applies (aLoRA).

        It then sees whole rows only: no cache, no padding, no packing.
        """
        active = getattr(self.module, "active_adapters", None)
        configs = getattr(self.module, "peft_config", {})
        if not isinstance(active, (list, tuple)) or self.module is self.base:
            return False
        return any(getattr(configs.get(name), "alora_invocation_tokens", None) for name in active)

    @property
    def is_quantized(self) -> bool:
        """Whether weights or activations are quantized."""
        if getattr(self.base, "is_quantized", False) or getattr(self.base, "hf_quantizer", None) is not None:
            return True
        return any(type(part).__module__.startswith(("torch.ao.", "torchao.")) for part in self.base.modules())

    @property
    def counts_positions_itself(self) -> bool:
        """Whether the model takes `position_ids`, but other ones than 0, 1, 2, …, as RoBERTa does."""
        return "position_ids" in self._accepted and not self.passes_positions

    @property
    def accepts_cache(self) -> bool:
        """Whether the model's forward takes a cache."""
        return self._cache_name is not None

    @property
    def keeps_states(self) -> bool:
        """Whether modules keep tensors of the last forward. Then a cache does not hold all that rows were read into."""
        return any(isinstance(value, Tensor) for module in self.base.modules() for value in vars(module).values())

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Turn gradients and dropout off inside; restore the train/eval mode of every submodule afterwards."""
        in_training = [module for module in parts_of(self.module) if module.training]
        if in_training:
            self.module.eval()
        try:
            # If the caller is in inference_mode, results would be tensors that no later computation can use.
            with torch.inference_mode(False), torch.no_grad():
                yield
        finally:
            for module in in_training:
                module.training = True

    @contextmanager
    def nudged(self) -> Iterator[None]:
        """Round the embeddings of ids otherwise inside, if they are known: each number by one step, up or down."""

        def nudge(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            signs = torch.randint(2, out.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
            return out * (1 + torch.finfo(out.dtype).eps * signs.to(out))

        embeddings = _embeddings(self.base)
        hook = None if embeddings is None else embeddings.register_forward_hook(nudge)
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()

    def inputs(self, rows: Ragged, side: Side) -> dict[str, Tensor | None]:
        """Return `rows` padded on that side: `input_ids`, `attention_mask`, `position_ids`, each int64[rows, width].

        The mask is made from the lengths, because a prompt may contain the padding id. It is None if no row is padded:
        attention is faster without one, and the lengths are known without asking the device.
        """
        mask = rows.mask(side)
        padded = bool((rows.lengths != mask.shape[-1]).any())
        ids = rows.to_padded(0, side)
        if padded and self.readable > 1:
            odd = (torch.arange(len(rows), device=mask.device) + self.padding) % 2
            ids = ids + ~mask * odd[:, None]
        return {
            "input_ids": to_device(ids, self.device),
            "attention_mask": to_device(mask.to(torch.int64), self.device) if padded else None,
            "position_ids": to_device((mask.to(torch.int64).cumsum(-1) - 1).clamp_min(0), self.device),
        }

    def refuse_unreadable(self, rows: Ragged, field: str) -> None:
        """Refuse rows with an id that the model could answer with but not read, because its head is wider.

        Raises:
            InvalidRequestError: it names the rows.
        """
        if self.readable < self.vocab_size:
            outside = rows.row_index[(rows.values >= self.readable).cpu()].unique().tolist()
            refuse(dict.fromkeys(outside, f"the model has embeddings for the {self.readable} first ids only"), field)

    def plain_logits(self, ids: Tensor, last: int | None = None) -> Tensor:
        """Return float[n, vocab]: the logits of one row, int64[n], from the model's own forward, given its ids only.

        Every other way to run the model is compared with this one.

        Args:
            ids: the row.
            last: return the logits of so many last positions only; None for all.

        Raises:
            CapabilityError: the model cannot read such a row.
        """
        try:
            return self._rows_logits(ids[None], last)[0]
        except Exception as error:
            if is_device_failure(error):
                raise
            raise CapabilityError(
                f"{type(self.base).__name__} fails when it reads one row of {len(ids)} ids and nothing else: "
                f"{type(error).__name__}: {error}",
                capability="model",
            ) from error

    def _rows_logits(self, ids: Tensor, last: int | None = None) -> Tensor:
        keep = {"logits_to_keep": last} if last and last < ids.shape[-1] and self.keeps_last_logits else {}
        logits: Tensor = self.forward(None, None, input_ids=ids.to(self.device), use_cache=False, **keep).logits
        return logits if last is None else logits[:, -last:]

    def last_logits(self, ids: Tensor) -> Tensor:
        """Return float32[rows, vocab]: the logits that follow int64[rows, n], rows without padding, without a cache."""
        return self._rows_logits(ids, 1)[:, -1].float()

    def forward(self, attention_mask: Tensor | None, position_ids: Tensor | None, **inputs: Any) -> Any:
        """Return the model's own output.

        Args:
            attention_mask: None if it masks nothing, so that attention can take its fast path.
            position_ids: left out for a model that counts its positions itself.
            inputs: what else the model takes.
        """
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask
        if self.passes_positions and position_ids is not None:
            inputs["position_ids"] = position_ids
        return self.module(**self._always, **inputs)

    def padded_logits(self, rows: Ragged) -> Tensor:
        """Return the logits of all positions of `rows`, ``[rows, width, vocab]``, padded on the right."""
        if len(rows) == 1:
            return self.plain_logits(rows.values)[None]
        logits: Tensor = self.forward(use_cache=False, **self.inputs(rows, "right")).logits
        return logits

    def next_logits(self, cache: Any, attention_mask: Tensor | None, **inputs: Any) -> Tensor:
        """Return float32[rows, vocab]: the logits that follow the last column. `cache` is extended by `inputs`.

        Args:
            cache: a transformers cache.
            attention_mask: int64[rows, columns] over all columns so far; None if no row is padded.
        """
        assert self._cache_name is not None
        if attention_mask is not None and all(getattr(layer, "keys", None) is None for layer in cache.layers):
            # A recurrent state already holds the past, so its mask covers the new columns only. Prompts are padded on
            # the left and read at once, so there is no padding in later columns.
            attention_mask = attention_mask if inputs["input_ids"].shape == attention_mask.shape else None
        keep = {"logits_to_keep": 1} if self.keeps_last_logits else {}
        inputs |= {self._cache_name: cache, "use_cache": True, **keep}
        logits: Tensor = self.forward(attention_mask=attention_mask, **inputs).logits
        return logits[:, -1].float()


def _embeddings(base: Any) -> nn.Module | None:
    """Return the module that embeds ids; None if the model does not say which it is."""
    try:
        found: nn.Module | None = base.get_input_embeddings()
    except NotImplementedError:
        return None
    return found


def is_device_failure(error: Exception) -> bool:
    """Return whether the device failed, for example because its memory is full; the model may be fine."""
    if isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError)):
        return True
    # The libraries under torch report a full memory as a RuntimeError.
    return isinstance(error, RuntimeError) and any(name in str(error) for name in ("CUDA", "CUBLAS", "cuDNN", "HIP"))


def runs_layers_again(module: nn.Module) -> bool:
    """Return whether layers are checkpointed: in the backward pass, they run again as they are switched then."""
    return any(
        hasattr(part, "_checkpoint_wrapped_module")
        or (part.training and getattr(part, "gradient_checkpointing", False))
        for part in module.modules()
    )


def cache_name(base: Any) -> str | None:
    """Return the name of the argument by which the forward of a model, or of a class of models, takes a cache."""
    # transformers 5.24 renamed past_key_values, and the cache_params of state-space models, to cache.
    names = ("past_key_values", "cache", "cache_params")
    return next((name for name in names if name in _forward_parameters(base)), None)


def _forward_parameters(base: Any) -> frozenset[str]:
    """Return the names of the arguments that the model's forward takes.

    A forward of ``(*args, **kwargs)`` passes them on, so the classes it inherits from are asked.
    """
    parameters = inspect.signature(base.forward).parameters
    names = set(parameters)
    if "input_ids" not in names and any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        for kind in type(base).__mro__:
            if "forward" in vars(kind):
                names |= inspect.signature(vars(kind)["forward"]).parameters.keys()
    return frozenset(names)


def _rope_switch(config: Any) -> int | None:
    """Return where longrope (Phi-3) goes from its short to its long factors ("LongRoPE", Ding et al. 2024)."""
    rope = getattr(config, "rope_parameters", None) or {}
    layers = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    switches = [each["original_max_position_embeddings"] for each in layers if each.get("rope_type") == "longrope"]
    return switches[0] if switches else None
