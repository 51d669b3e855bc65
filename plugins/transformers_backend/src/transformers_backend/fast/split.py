"""`SplitForward`: a model's own forward, cut between its body and its head.

Between the body's last hidden states and the logits a model may scale, cap or shift. So the model's own forward runs
both halves: first with a head that sees one column only, then with a body that returns given hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from transformers_backend.engine import CausalLM

#: Where a module keeps the functions that run when it is called.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype to which autocast casts here; None if it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def is_bare(head: Any) -> bool:
    """Return whether `head` is torch's own linear layer, and calling it does nothing but a matrix product.

    An adapter, a quantized layer or one whose weights are offloaded is something else.
    """
    if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter or head.weight.device.type == "meta":
        return False
    own = vars(head)
    return "forward" not in own and not any(own.get(name) for name in HOOKS)


class CannotSplit(Exception):
    """The model's forward is not one body followed by one head."""


class SplitForward:
    """Runs the two halves.

    Attributes:
        autocast: the dtype to which autocast cast inside the model's forward, in the latest call of `logits`; None
            without. The model may turn it on itself, as one that was prepared by accelerate does.
    """

    def __init__(self, engine: CausalLM) -> None:
        self.autocast: torch.dtype | None = None
        self._engine = engine
        self._output_class: Any = None
        # The latest row in the plain forward: what the body returned, and the logits.
        self._plain: tuple[list[Any], Tensor] | None = None

    def hidden(self, **inputs: Any) -> Tensor:
        """Return the body's last hidden states, ``[rows, width, hidden]``.

        Args:
            inputs: those of `CausalLM.forward`.

        Raises:
            CannotSplit: the model has no body that can be told apart.
        """
        # The logits are thrown away, so the head gets one column only. A bare head takes none, and is not read.
        columns = 0 if is_bare(self._engine.base.get_output_embeddings()) else 1
        with self._recorded(lambda out: type(out)(last_hidden_state=out.last_hidden_state[:, :columns])) as outputs:
            self._engine.forward(use_cache=False, **inputs)
        return self._states(outputs)

    def forget(self) -> None:
        """Read the next row again: the latest may have been read with other weights."""
        self._plain = None

    def plain_logits(self, ids: Tensor) -> Tensor:
        """Return the logits of a row as `CausalLM.plain_logits` does, and remember the states for `whole`."""
        self.forget()
        try:
            self.body()
        except Exception:
            # A model may not say at all, and in any way, what its body is.
            return self._engine.plain_logits(ids)
        with self._recorded(lambda out: out) as outputs:
            logits = self._engine.plain_logits(ids)
        self._plain = outputs, logits
        return logits

    def whole(self, ids: Tensor, known: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the last hidden states ``[n, hidden]`` and the logits ``[n, vocab]`` of a row from one plain forward.

        Args:
            ids: the row.
            known: what `plain_logits` returned for it, if that is still right. If it was the latest, nothing is read.

        Raises:
            CannotSplit: see `hidden`.
        """
        if known is None or self._plain is None or self._plain[1] is not known:
            self.plain_logits(ids)
        if self._plain is None:
            raise CannotSplit
        outputs, logits = self._plain
        return self._states(outputs)[0], logits

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits ``[n, vocab]`` of hidden states ``[n, hidden]``, which this object has returned."""
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=self._engine.device)

        def body(*args: Any, **kwargs: Any) -> Any:
            self.autocast = autocast_dtype(self._engine.device)
            return self._output_class(last_hidden_state=hidden[None])

        with self._replaced(body):
            logits: Tensor = self._engine.forward(None, torch.zeros_like(ids), input_ids=ids, use_cache=False).logits
        return logits[0]

    def body(self) -> Any:
        """Return the module whose last hidden states the head turns into logits.

        Raises:
            CannotSplit: there is none.
        """
        base = self._engine.base
        body = base.get_decoder()
        # Some models call themselves, or a causal language model inside, their decoder.
        while body is not None and (body is base or body.get_output_embeddings() is not None):
            body = getattr(body, "model", None)
        if body is None:
            raise CannotSplit
        return body

    def _states(self, outputs: list[Any]) -> Tensor:
        if len(outputs) != 1:
            raise CannotSplit
        self._output_class = type(outputs[0])
        states: Tensor = outputs[0].last_hidden_state
        return states

    @contextmanager
    def _recorded(self, shown: Callable[[Any], Any]) -> Iterator[list[Any]]:
        """Yield what the body returns inside; the head sees what `shown` makes of it."""
        outputs: list[Any] = []
        read = self.body().forward

        def body(*args: Any, **kwargs: Any) -> Any:
            outputs.append(read(*args, **kwargs))
            return shown(outputs[-1])

        with self._replaced(body):
            yield outputs

    @contextmanager
    def _replaced(self, forward: Callable[..., Any]) -> Iterator[None]:
        """Replace the body's forward inside. A `forward` set on the instance by someone else is restored afterwards."""
        own = vars(self.body())
        before = own.get("forward")
        own["forward"] = forward
        try:
            yield
        finally:
            del own["forward"]
            if before is not None:
                own["forward"] = before
