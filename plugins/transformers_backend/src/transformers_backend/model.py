"""`CausalLM`: what this plugin needs of a transformers model, and the only file that knows how to ask for it."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from corelm.errors import CapabilityError
from corelm.rows import Ragged, Side

#: From position (row, column) pairs, int64[n] each, to the float32[n, vocab] logits of the token that follows.
Predictions = Callable[[Tensor, Tensor], Tensor]


class CausalLM:
    """A model as a function of rows of ids.

    Attributes:
        module: what is called, PEFT wrapper included. base: the transformers model inside it.
        vocab_size: width of the logits. max_context: longest input, or None where the model states none.
        eos_token_ids: the ids its generation config ends an answer with; everything else in there is ignored.
    """

    def __init__(self, module: nn.Module, base: Any) -> None:
        self.module = module
        self.base = base
        text = base.config.get_text_config()
        head = base.get_output_embeddings()
        self.vocab_size: int = text.vocab_size if head is None else head.weight.shape[0]
        self.max_context: int | None = getattr(text, "max_position_embeddings", None)
        self.eos_token_ids = _eos_token_ids(base.generation_config)
        self._accepted = inspect.signature(base.forward).parameters.keys()
        # The auxiliary loss of experts is nobody's here, and with a cache its mask does not fit.
        quiet = {"output_router_logits": False} if "output_router_logits" in self._accepted else {}
        self._always = {"return_dict": True, **quiet}
        # State-space models call it cache_params.
        self._cache_name = next((name for name in ("past_key_values", "cache_params") if name in self._accepted), None)
        self._slices: bool | None = None

    @property
    def device(self) -> torch.device:
        device: torch.device = self.base.device
        return device

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """No gradients and no dropout inside; every submodule's own train/eval mode afterwards, whatever happened."""
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        try:
            # A caller's inference_mode would make tensors that no later computation may use.
            with torch.inference_mode(False), torch.no_grad():
                yield
        finally:
            for module, training in modes:
                module.training = training

    def new_cache(self) -> Any:
        """An empty cache of the kind the model's layers need (attention, sliding windows, recurrent states)."""
        from transformers import DynamicCache

        return DynamicCache(config=self.base.config)

    def inputs(self, rows: Ragged, side: Side) -> dict[str, Tensor]:
        """`rows` with padding on that side: `input_ids`, `attention_mask` and `position_ids`, each int64[rows, width].

        The mask comes from the lengths: a prompt may contain the id that pads.
        """
        mask = rows.mask(side).to(self.device, torch.int64)
        return {
            "input_ids": rows.to_padded(0, side).to(self.device),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp_min(0),
        }

    def forward(self, attention_mask: Tensor, position_ids: Tensor, **inputs: Any) -> Any:
        """The model's own output. A mask of ones is left out, which lets attention take its fast path."""
        if not bool(attention_mask.all()):
            inputs["attention_mask"] = attention_mask
        if "position_ids" in self._accepted:
            inputs["position_ids"] = position_ids
        return self.module(**self._always, **inputs)

    def next_logits(self, cache: Any, attention_mask: Tensor, **inputs: Any) -> Tensor:
        """float32[rows, vocab] of what follows the last column; `cache` is extended by `inputs`.

        Raises:
            CapabilityError: the model's forward takes no cache that we know.
        """
        if self._cache_name is None:
            raise CapabilityError(
                f"{type(self.base).__name__} has no cache to decode with, so it can score but not generate",
                capability="generate",
            )
        if self._cache_name == "cache_params":
            # A recurrent state has taken the past in: here the mask is of the new columns alone.
            attention_mask = attention_mask[:, -inputs["input_ids"].shape[1] :]
        keep = {"logits_to_keep": 1} if "logits_to_keep" in self._accepted else {}
        inputs |= {self._cache_name: cache, "use_cache": True, **keep}
        logits: Tensor = self.forward(attention_mask=attention_mask, **inputs).logits
        return logits[:, -1].float()

    def predictions(self, rows: Ragged) -> Predictions:
        """Read `rows` once; logits are then made for the positions asked for only, where the model allows it."""
        inputs = self.inputs(rows, "right")
        if not self._head_works_on_slices():
            logits = self.forward(use_cache=False, **inputs).logits
            return lambda row, column: logits[row, column].float()
        hidden, kind = self._read(inputs)
        return lambda row, column: self._head(hidden[row, column], kind).float()

    # The head, a slice at a time --------------------------------------------------------------------------------------
    #
    # Between the body's last hidden state and the logits a model may scale, cap or shift. So the model's own forward
    # does that step, with a body that returns the hidden states it is told to.

    def _head_works_on_slices(self) -> bool:
        """Whether slices give what the plain forward gives. Tried once, with slices that do not line up with rows."""
        if self._slices is None:
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(self.vocab_size, (15,), generator=generator)
            rows = Ragged(ids, torch.tensor([8, 7]))
            row, column = rows.row_index, rows.positions
            with self.evaluating():
                inputs = self.inputs(rows, "right")
                whole = self.forward(use_cache=False, **inputs).logits[row, column].float()
                try:
                    hidden, kind = self._read(inputs)
                    parts = [
                        self._head(hidden[r, c], kind).float()
                        for r, c in zip(row.split(5), column.split(5), strict=True)
                    ]
                except _NoSeparateBody:
                    self._slices = False
                else:
                    tolerance = torch.finfo(self.base.dtype).eps ** 0.5 * float(whole.abs().max())
                    self._slices = torch.allclose(torch.cat(parts), whole, rtol=0.0, atol=tolerance)
        return self._slices

    def _read(self, inputs: dict[str, Tensor]) -> tuple[Tensor, type]:
        """The body's last hidden states ``[rows, width, hidden]``, and the class of its output."""
        outputs: list[Any] = []
        read = self._body().forward

        def body(*args: Any, **kwargs: Any) -> Any:
            outputs.append(read(*args, **kwargs))
            # One column is all the head gets to see: its logits are thrown away.
            return type(outputs[-1])(last_hidden_state=outputs[-1].last_hidden_state[:, :1])

        with self._replaced(body):
            self.forward(use_cache=False, **inputs)
        if len(outputs) != 1:
            raise _NoSeparateBody
        return outputs[0].last_hidden_state, type(outputs[0])

    def _head(self, hidden: Tensor, kind: type) -> Tensor:
        """Logits ``[n, vocab]`` of hidden states ``[n, hidden]``."""
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=self.device)
        with self._replaced(lambda *args, **kwargs: kind(last_hidden_state=hidden[None])):
            logits: Tensor = self.module(input_ids=ids, use_cache=False, **self._always).logits
        return logits[0]

    def _body(self) -> Any:
        body = self.base.get_decoder()
        if body is None or body is self.base:
            raise _NoSeparateBody
        return body

    @contextmanager
    def _replaced(self, forward: Callable[..., Any]) -> Iterator[None]:
        """The body answers with `forward` inside, and as before afterwards. An own `forward` may be there already."""
        own = vars(self._body())
        before = own.get("forward")
        own["forward"] = forward
        try:
            yield
        finally:
            del own["forward"]
            if before is not None:
                own["forward"] = before


class _NoSeparateBody(Exception):
    """The model's forward is not one body followed by one head."""


class Deadline:
    """When a call has to be over."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._end = None if timeout is None else time.monotonic() + timeout

    def check(self) -> None:
        """Raises:
        TimeoutError: the time is over.
        """
        if self._end is not None and time.monotonic() > self._end:
            raise TimeoutError(f"not done within {self.timeout} s; allow more time or ask for less at once")


def micro_batches(lengths: Tensor, max_tokens: int) -> Iterator[Tensor]:
    """Rows that share a forward pass, int64[n] each: similar lengths together, longest first, padding counted.

    Lengths ``[2, 9, 3, 9]`` with 18 tokens give ``[1, 3]`` and ``[2, 0]``. A row longer than `max_tokens` goes alone.
    """
    order = lengths.argsort(descending=True, stable=True)
    while len(order):
        # The longest comes first, so that what does not fit into memory fails at once.
        rows = max(1, max_tokens // max(1, int(lengths[order[0]])))
        yield order[:rows]
        order = order[rows:]


def _eos_token_ids(config: Any) -> frozenset[int]:
    eos = None if config is None else config.eos_token_id
    return frozenset([eos] if isinstance(eos, int) else eos or [])
