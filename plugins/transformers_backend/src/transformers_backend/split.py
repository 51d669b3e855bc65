"""`SplitForward`: a model's own forward, cut between its body and its head.

Between the body's last hidden states and the logits a model may scale, cap or shift. So the model's own forward does
both halves: first with a head that sees one column, then with a body that returns the hidden states it is told to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from transformers_backend.model import CausalLM


class CannotSplit(Exception):
    """The model's forward is not one body followed by one head."""


class SplitForward:
    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._kind: Any = None

    def hidden(self, **inputs: Any) -> Tensor:
        """The body's last hidden states, ``[rows, width, hidden]``; `inputs` are those of `CausalLM.forward`.

        Raises:
            CannotSplit: there is no body to be told apart.
        """
        outputs: list[Any] = []
        read = self._body().forward

        def body(*args: Any, **kwargs: Any) -> Any:
            outputs.append(read(*args, **kwargs))
            # One column is all the head gets to see: its logits are thrown away.
            return type(outputs[-1])(last_hidden_state=outputs[-1].last_hidden_state[:, :1])

        with self._replaced(body):
            self._model.forward(use_cache=False, **inputs)
        if len(outputs) != 1:
            raise CannotSplit
        self._kind = type(outputs[0])
        hidden: Tensor = outputs[0].last_hidden_state
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[n, vocab]`` of hidden states ``[n, hidden]``, once some have been read."""
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.int64, device=self._model.device)
        with self._replaced(lambda *args, **kwargs: self._kind(last_hidden_state=hidden[None])):
            logits: Tensor = self._model.forward(
                torch.ones_like(ids), torch.zeros_like(ids), input_ids=ids, use_cache=False
            ).logits
        return logits[0]

    def _body(self) -> Any:
        body = self._model.base.get_decoder()
        if body is None or body is self._model.base:
            raise CannotSplit
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
