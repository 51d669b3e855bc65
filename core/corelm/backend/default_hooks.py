"""Core's own `tokenize` and `to_containers`, for plugins that do not implement them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from corelm.backend.encoding import Encoder
from corelm.spec.hookspecs import hookimpl
from corelm.spec.records import ContainerRequest, TokenizeRequest, TokenizeResult

if TYPE_CHECKING:
    from tensordict import TensorDict


class DefaultHooks:
    """Core's hooks. Every engine has them, and they run only if the plugin implements none."""

    def __init__(self, tokenizer: Any) -> None:
        self._encode = Encoder(tokenizer)

    @hookimpl(trylast=True)
    def tokenize(self, request: TokenizeRequest) -> TokenizeResult:
        return self._encode(request)

    @hookimpl(trylast=True)
    def to_containers(self, request: ContainerRequest) -> TensorDict:
        # Only here: importing tensordict takes as long as opening a small model, and records need none.
        from corelm.containers.assemble import assemble

        return assemble(request)
