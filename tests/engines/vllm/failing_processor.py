"""For vLLM's workers: a logits processor that fails if a request says so."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor

NAME = "engines.vllm.failing_processor:Failing"


class Failing(LogitsProcessor):
    def __init__(self, *args: Any) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        for _, params, *_ in batch_update.added if batch_update else ():
            if (params.extra_args or {}).get("fail"):
                raise ArithmeticError("inside a step")

    def apply(self, logits: Tensor) -> Tensor:
        return logits
