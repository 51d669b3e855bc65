"""What a server behind a URL can do, read from its pages and from the model's files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from corelm.errors import CoreLMError, EngineError, InvalidRequestError
from corelm.spec import Capabilities
from corelm.validate import invalid
from corelm_engine_kit import ModelHints, eos_token_ids, generation_config, model_config
from vllm_backend.capabilities import EngineInfo, mixes_rows, obstacle, sleep_levels
from vllm_backend.sampling import HONOURED

if TYPE_CHECKING:
    from corelm.spec import Deadline
    from corelm_engine_kit import HttpClient

#: Fields that a server's completion requests must have. Without them it is not known exactly which ids were sampled, or
#: which request a reply answers.
REQUIRED_FIELDS = frozenset(
    {"request_id", "return_token_ids", "return_tokens_as_token_ids", "stop_token_ids", "ignore_eos"}
)

#: Fields that scoring needs.
SCORING_FIELDS = frozenset({"prompt_logprobs", "logit_bias"})

#: The routes that new weights need. A server has them only in its development mode.
WEIGHT_ROUTES = frozenset(
    {"/collective_rpc", "/pause", "/reset_prefix_cache", "/resume", "/update_weight_version", "/weight_info"}
)

#: The routes of a server that can sleep, also of its development mode.
SLEEP_ROUTES = frozenset({"/sleep", "/wake_up"})

#: The routes by which a server loads adapters, if it was started with LoRA and may change what it has loaded.
ADAPTER_ROUTES = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})

#: Where a server in its development mode says which configuration it runs. It collects the page for some seconds, once.
SERVER_INFO = "/server_info"

#: The server's names of sampling parameters, where they differ from corelm's.
_SERVER_NAMES = {"min_new_tokens": "min_tokens"}


@dataclass(frozen=True, kw_only=True)
class ServerInfo(EngineInfo):
    """What is known about one model of a server; `probing.probe_server` adds what the server does not say.

    Attributes:
        model: the folder or hub name that the server loaded the model from.
        name: the model's name in requests.
        routes: the paths that the server lists; empty where it does not describe itself.
        fields: the fields of a completion request; None where the server does not describe itself.
        files: the folder or hub name of the model's files; of an adapter, those of its base model.
        base_name: the name in requests of the model without adapters.
        adapters: the names of the adapters of this model that the server has.
        weight_transfer: how the server takes tensors from another process; None if it does not, or does not say.
    """

    model: str
    name: str
    routes: frozenset[str]
    fields: frozenset[str] | None
    files: str = ""
    base_name: str = ""
    adapters: frozenset[str] = frozenset()
    weight_transfer: str | None = None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.capabilities.eos_token_ids or frozenset()

    def has_field(self, name: str) -> bool:
        """Return whether completion requests have that field, or the server does not say.

        A server ignores other fields without an error.
        """
        return self.fields is None or name in self.fields


def read_server(client: HttpClient, hints: ModelHints, deadline: Deadline) -> ServerInfo:
    """Return what the server's pages, the model's files and `hints` say. Nothing is generated.

    Raises:
        InvalidRequestError: the caller has to pass something that the server does not say; `field` names it.
        EngineError: the server cannot be asked, or its requests lack a field that every call needs.
        TimeoutError: the deadline has passed.
    """
    routes, fields = _description(client, deadline)
    if fields is not None and not fields >= REQUIRED_FIELDS:
        missing = ", ".join(sorted(REQUIRED_FIELDS - fields))
        raise EngineError(
            f"{client.base_url} is not a vLLM server, or too old: its completion requests lack {missing}", usable=True
        )
    card, parent, adapters = _model_cards(client, hints.name, deadline)
    model = str(card.get("root") or card["id"])
    # A server must not choose whose code runs here, so only a model that the caller has named is trusted.
    trusted = hints.trust_remote_code and model == hints.name
    if hints.trust_remote_code and not trusted and not isinstance(hints.tokenizer, (str, os.PathLike)):
        raise invalid(
            "trust_remote_code",
            f"code runs only from a folder or repository that you name, and not from {model!r}, "
            "which the server names; pass it as tokenizer= if you trust it",
        )
    files = model
    config, problem = model_config(model, trusted)
    if config is None and parent:
        # The folder of an adapter holds no configuration, and often no tokenizer.
        files, trusted = str(parent.get("root") or parent["id"]), False
        config, problem = model_config(files, trusted)
    if hints.vocab_size is None and config is None:
        raise _must_be_passed("vocab_size", f"the configuration of the server's model {files!r} {problem}")
    vocab_size = int(config.get_text_config().vocab_size) if hints.vocab_size is None else hints.vocab_size
    tokenizer = hints.read_tokenizer(files, trusted)
    context = hints.context(card.get("max_model_len") or parent.get("max_model_len"))
    if context is None:
        raise _must_be_passed("max_context", "the server does not say how long its context is")
    scores = fields is None or fields >= SCORING_FIELDS
    running = _running_config(client, routes, deadline)
    device = _setting(running, "device_config", "device")
    mixes = mixes_rows(running.get("lora_config") is not None, device)
    why_not_again = obstacle(None if config is None else config.get_text_config(), device)
    takes_weights = routes >= WEIGHT_ROUTES and not why_not_again
    # Without this mode, a server that is told to sleep frees nothing.
    may_sleep = routes >= SLEEP_ROUTES and _setting(running, "model_config", "enable_sleep_mode") is True
    capabilities = Capabilities(
        vocab_size=vocab_size,
        max_context=context,
        eos_token_ids=eos_token_ids(generation_config(files) or config, tokenizer, vocab_size=vocab_size),
        sampling={name: span for name, span in HONOURED.items() if _honours(fields, name)},
        score=scores,
        # Also needs candidates, which `probing.probe_server` looks for.
        argmax=scores,
        concurrent_calls=not mixes,
        stops_at_timeout=True,
        streaming=_honours(fields, "stream"),
        update_weights=takes_weights,
        weight_stream=takes_weights,
        sleep_levels=sleep_levels(may_sleep, takes_weights),
        adapters=bool(adapters) or routes >= ADAPTER_ROUTES,
        abort=True,
    )
    return ServerInfo(
        capabilities=capabilities,
        tokenizer=tokenizer,
        model=model,
        name=str(card["id"]),
        routes=routes,
        fields=fields,
        files=files,
        base_name=str((parent or card)["id"]),
        adapters=adapters,
        weight_transfer=_setting(running, "weight_transfer_config", "backend"),
        scores_alone=mixes,
        reasons={"update_weights": why_not_again} if why_not_again else {},
    )


def _honours(fields: frozenset[str] | None, parameter: str) -> bool:
    """Return whether requests with these fields have one for that parameter of `SamplingParams`."""
    if parameter == "engine_kwargs":
        # Their names can be checked only against a server that describes itself.
        return fields is not None
    return fields is None or _SERVER_NAMES.get(parameter, parameter) in fields


def _description(client: HttpClient, deadline: Deadline) -> tuple[frozenset[str], frozenset[str] | None]:
    """Return the routes and the fields of a completion request from the server's OpenAPI page, if it has one."""
    try:
        page = client.get("/openapi.json", timeout=deadline.left())
        routes = frozenset(page["paths"])
        fields = frozenset(page["components"]["schemas"]["CompletionRequest"]["properties"])
    except InvalidRequestError:
        return frozenset(), None
    except (KeyError, TypeError):
        raise EngineError(
            f"{client.base_url} is not a vLLM server: its /openapi.json describes no CompletionRequest"
        ) from None
    return routes, fields


def _model_cards(
    client: HttpClient, model: str | None, deadline: Deadline
) -> tuple[dict[str, Any], dict[str, Any], frozenset[str]]:
    """Return the card of the model; that of its parent if it is an adapter, else an empty one; and the names of the
    adapters of the base model.
    """
    page = client.get("/v1/models", timeout=deadline.left())
    try:
        cards: dict[str, dict[str, Any]] = {str(card["id"]): card for card in page["data"]}
    except (KeyError, TypeError):
        # Masked before it is cut, or a part of the key could be left at the end.
        said = client.secrets.masked(str(page))[:200]
        raise EngineError(f"{client.base_url}: /v1/models lists no models: {said}") from None
    # Adapters have a parent. They are used only if they are named.
    names = [model] if model is not None else [name for name, card in cards.items() if not card.get("parent")]
    if len(names) != 1 or names[0] not in cards:
        raise _must_be_passed("model", f"the server has {', '.join(map(repr, cards)) or 'no model'}")
    card = cards[names[0]]
    parent = cards.get(str(card.get("parent")), {})
    base = str((parent or card)["id"])
    return card, parent, frozenset(name for name, each in cards.items() if each.get("parent") == base)


def _running_config(client: HttpClient, routes: frozenset[str], deadline: Deadline) -> Mapping[str, Any]:
    """Return the server's `VllmConfig` as nested mappings; an empty one if the server does not tell it.

    Raises:
        TimeoutError: the deadline has passed.
    """
    if SERVER_INFO not in routes:
        return {}
    try:
        page = client.get(f"{SERVER_INFO}?config_format=json", timeout=deadline.left())
    except CoreLMError:
        deadline.check()
        return {}
    # An older server tells it as one text.
    config = page.get("vllm_config") if isinstance(page, dict) else None
    return config if isinstance(config, dict) else {}


def _setting(config: Mapping[str, Any], part: str, name: str) -> Any:
    """Return one setting of a part of the configuration; None if the server does not tell it."""
    found = config.get(part)
    return found.get(name) if isinstance(found, dict) else None


def _must_be_passed(field: str, why: str) -> InvalidRequestError:
    return invalid(field, f"{why}; pass {field}=")
