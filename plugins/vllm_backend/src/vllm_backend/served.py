"""What a server says about itself and the model it serves, and what must be said for it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from corelm.errors import CoreLMError, EngineError, InvalidRequestError

if TYPE_CHECKING:
    from corelm.support import HttpClient

#: Without these in a request there is no telling what was sampled.
ESSENTIAL = frozenset({"return_token_ids", "return_tokens_as_token_ids", "stop_token_ids", "ignore_eos"})


@dataclass(frozen=True)
class Served:
    """One model of a server.

    Attributes:
        name: what requests call it. root: the folder or hub name that the server loaded it from.
        routes: the paths that the server has; none where it does not say.
        fields: what a completion request may hold; None where the server does not say.
    """

    name: str
    root: str
    tokenizer: Any
    vocab_size: int
    max_context: int
    eos_token_ids: frozenset[int]
    routes: frozenset[str]
    fields: frozenset[str] | None

    def takes(self, *names: str) -> bool:
        """Whether all these are fields of a completion request, as far as is known: others are ignored in silence."""
        return self.fields is None or self.fields.issuperset(names)


def find(
    client: HttpClient,
    model: str | None,
    tokenizer: Any,
    vocab_size: int | None,
    max_context: int | None,
    trust_remote_code: bool,
) -> Served:
    """Ask the server for its model called `model`, or its only one. The arguments come before what the server says.

    Raises:
        InvalidRequestError: something that has to be given; `field` names it.
        EngineError: the server cannot be asked, or does not know what a request has to hold.
    """
    routes, fields = _described(client)
    if fields is not None and not fields >= ESSENTIAL:
        missing = ", ".join(sorted(ESSENTIAL - fields))
        raise EngineError(f"{client.base_url} is no vLLM server, or too old: it does not know {missing}", usable=True)
    card = _card(client, model)
    root = str(card.get("root") or card["id"])
    config = _config(root, trust_remote_code)
    if vocab_size is None:
        if config is None:
            raise _unknown("vocab_size", f"the configuration of the server's model {root!r} cannot be read here")
        vocab_size = int(config.get_text_config().vocab_size)
    tokenizer = _tokenizer(tokenizer, root, trust_remote_code)
    return Served(
        name=str(card["id"]),
        root=root,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        max_context=_context(card.get("max_model_len"), max_context),
        eos_token_ids=_eos_token_ids(config, root, tokenizer, vocab_size),
        routes=routes,
        fields=fields,
    )


def _described(client: HttpClient) -> tuple[frozenset[str], frozenset[str] | None]:
    """The server's routes and the fields of a completion request, from its own description if it has one."""
    try:
        page = client.get("/openapi.json")
        routes = frozenset(page["paths"])
        fields = frozenset(page["components"]["schemas"]["CompletionRequest"]["properties"])
    except InvalidRequestError:
        return frozenset(), None
    except (KeyError, TypeError):
        raise EngineError(f"{client.base_url} is no vLLM server: its description has no CompletionRequest") from None
    return routes, fields


def _card(client: HttpClient, model: str | None) -> dict[str, Any]:
    page = client.get("/v1/models")
    try:
        cards: dict[str, dict[str, Any]] = {str(card["id"]): card for card in page["data"]}
    except (KeyError, TypeError):
        raise EngineError(f"{client.base_url}: /v1/models lists no models: {str(page)[:200]}") from None
    # Adapters have a parent. They are served if they are asked for.
    names = [model] if model is not None else [name for name, card in cards.items() if not card.get("parent")]
    if len(names) != 1 or names[0] not in cards:
        raise _unknown("model", f"the server has {', '.join(map(repr, cards)) or 'no model'}")
    return cards[names[0]]


def _context(served: Any, given: int | None) -> int:
    if given is None and not isinstance(served, int):
        raise _unknown("max_context", "the server does not say how long its context is")
    if given is not None and isinstance(served, int) and given > served:
        raise InvalidRequestError(f"max_context: the server's context is {served}, got {given}", field="max_context")
    return served if given is None else given


def _config(root: str, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(root, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        return None


def _tokenizer(given: Any, root: str, trust_remote_code: bool) -> Any:
    if given is not None and not isinstance(given, (str, os.PathLike)):
        return given
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(given or root, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        if given is not None:
            raise
        raise _unknown("tokenizer", f"that of the server's model {root!r} cannot be read here") from error


def _eos_token_ids(config: Any, root: str, tokenizer: Any, vocab_size: int) -> frozenset[int]:
    """The model's own list, or its configuration's if it has none, and the tokenizer's."""
    from transformers import GenerationConfig

    try:
        listed = GenerationConfig.from_pretrained(root).eos_token_id
    except (OSError, ValueError):
        listed = getattr(config, "eos_token_id", None)
    found = {getattr(tokenizer, "eos_token_id", None), *(listed if isinstance(listed, list) else [listed])}
    # A configuration class may default to the EOS of a larger vocabulary.
    return frozenset(token for token in found if token is not None and token < vocab_size)


def _unknown(field: str, why: str) -> CoreLMError:
    return InvalidRequestError(f"{field}: {why}; pass {field}=", field=field)
