"""Core's own `tokenize` and `to_containers`, called when a plugin brings none."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from corelm.assemble import assemble
from corelm.hookspecs import hookimpl
from corelm.messages import ContainerRequest, TokenBatch, TokenizeRequest
from corelm.rows import Ragged


class DefaultHooks:
    """Registered `trylast` beside every backend."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @hookimpl(trylast=True)
    def tokenize(self, request: TokenizeRequest) -> TokenBatch:
        if not request.texts:
            return TokenBatch(ids=Ragged.from_list([]))
        # Only what is asked for is passed on, so that a plain callable serves as a tokenizer.
        options: dict[str, Any] = {"add_special_tokens": request.add_special_tokens}
        if not request.parse_special:
            options["split_special_tokens"] = True
        if request.offsets:
            options["return_offsets_mapping"] = True
        encoded = self.tokenizer(list(request.texts), **options)
        offsets = None
        if request.offsets:
            flat = [pair for row in encoded["offset_mapping"] for pair in row]
            offsets = torch.tensor(flat, dtype=torch.int64).reshape(-1, 2)
        return TokenBatch(ids=Ragged.from_list(encoded["input_ids"]), offsets=offsets)

    @hookimpl(trylast=True)
    def to_containers(self, request: ContainerRequest) -> TensorDict:
        return assemble(request)
