"""What the engine can do, read from vLLM's configuration (`read_model`) or from a server (`read_server`)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corelm.errors import EngineError, InvalidRequestError
from corelm.spec import Capabilities, GenerationMode
from corelm.support import eos_token_ids, local_checkpoint, why_unreadable
from vllm_backend.sampling import HONOURED

if TYPE_CHECKING:
    from corelm.support import Deadline, HttpClient

#: vLLM's modes that return log-probs, with corelm's names for them. vLLM's other modes return logits.
LOGPROBS_MODES: dict[str, GenerationMode] = {"raw_logprobs": "raw", "processed_logprobs": "processed"}

#: The load formats after which vLLM can load other weights from a folder.
RELOADABLE_FORMATS = frozenset({"auto", "hf", "safetensors", "fastsafetensors"})

#: Fields that a server's completion requests must have. Without them it is not known exactly which ids were sampled, or
#: which request a reply answers.
REQUIRED_FIELDS = frozenset(
    {"request_id", "return_token_ids", "return_tokens_as_token_ids", "stop_token_ids", "ignore_eos"}
)

#: Fields that scoring needs.
SCORING_FIELDS = frozenset({"prompt_logprobs", "logprob_token_ids"})

#: The routes that new weights need. A server has them only in its development mode.
WEIGHT_ROUTES = frozenset(
    {"/collective_rpc", "/pause", "/reset_prefix_cache", "/resume", "/update_weight_version", "/weight_info"}
)

#: The routes by which a server loads adapters, if it was started with LoRA and may change what it has loaded.
ADAPTER_ROUTES = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})

#: The server's names of sampling parameters, where they differ from corelm's.
_SERVER_NAMES = {"min_new_tokens": "min_tokens"}


# In this process ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelInfo:
    """The model of an engine in this process, as far as it is known before the first request.

    Attributes:
        capabilities: what the backend declares.
        tokenizer: the tokenizer of the backend.
        checkpoint: the folder of the model's safetensors; None if vLLM could not load other weights.
        speculative: vLLM drafts tokens, and ignores the ids whose log-probs are asked for at a sampled position.
        files: the folder of the model's safetensors, even if vLLM could not load others; None if there is none.
        largest_rank: the largest rank of an adapter; None if vLLM was not started with ``enable_lora=True``.
    """

    capabilities: Capabilities
    tokenizer: Any
    checkpoint: Path | None
    speculative: bool = False
    files: Path | None = None
    largest_rank: int | None = None

    @property
    def max_context(self) -> int:
        context = self.capabilities.max_context
        assert context is not None
        return context


def read_model(config: Any, tokenizer: Any, *, abort: bool, concurrent_calls: bool) -> ModelInfo:
    """Return what the `VllmConfig` of a started engine says.

    Args:
        config: the `VllmConfig`.
        tokenizer: the caller's tokenizer; None to load the one that vLLM uses.
        abort: whether requests can be aborted.
        concurrent_calls: whether several threads may call at once.
    """
    model = config.model_config
    if tokenizer is None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            model.tokenizer, revision=model.tokenizer_revision, trust_remote_code=model.trust_remote_code
        )
    vocab_size: int = model.get_vocab_size()
    checkpoint = _checkpoint(config)
    speculative = config.speculative_config is not None
    # With skip_tokenizer_init vLLM decodes no text, so it cannot find stop strings.
    honoured = {name: span for name, span in HONOURED.items() if name != "stop" or not model.skip_tokenizer_init}
    capabilities = Capabilities(
        vocab_size=vocab_size,
        # A scored row is then a prompt as a whole, and vLLM keeps one position for a sampled token.
        max_context=model.max_model_len - speculative,
        eos_token_ids=eos_token_ids(model.try_get_generation_config(), tokenizer, vocab_size=vocab_size),
        sampling=honoured,
        generation_modes=frozenset({LOGPROBS_MODES[model.logprobs_mode]}),
        score=True,
        argmax=model.max_logprobs != 0 and not _has_logits_processors(model),
        per_answer_seeds=True,
        seeds_are_costly=_seeds_are_costly(),
        concurrent_calls=concurrent_calls and not _mixes_adapters(config),
        stops_at_timeout=True,
        streaming=True,
        update_weights=checkpoint is not None,
        adapters=config.lora_config is not None,
        abort=abort,
    )
    rank = None if config.lora_config is None else config.lora_config.max_lora_rank
    return ModelInfo(capabilities, tokenizer, checkpoint, speculative, checkpoint or _files(config), rank)


def _seeds_are_costly() -> bool:
    """Return whether vLLM samples faster without seeds: on a GPU its fused sampler of top-k and top-p takes none."""
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()


def _mixes_adapters(config: Any) -> bool:
    """Return whether vLLM gives rows without an adapter the one of other rows that it runs in the same step.

    It does so on a CPU, where a row without an adapter has the index -1, which is the last one (seen with vLLM 0.32). A
    call has one adapter, so calls that are made one after another are right.
    """
    from vllm.platforms import current_platform

    return config.lora_config is not None and current_platform.is_cpu()


def _has_logits_processors(model: Any) -> bool:
    """Return whether vLLM runs custom code on the logits. Its greedy token may then not be the most probable one."""
    return bool(model.logits_processors or entry_points(group="vllm.logits_processors"))


def _can_reload(config: Any) -> bool:
    """Return whether vLLM uses every tensor of the weights that it is told to load later."""
    from vllm.platforms import current_platform

    # On a CPU vLLM packs the weights of the head when it first loads them. A head that is tied to the embeddings is not
    # loaded again: the model would go on with a new body and the old, packed head. A mixture of experts answers with
    # neither the old weights nor the new ones after it was loaded again (seen with vLLM 0.32).
    model = config.model_config
    tied = getattr(model.hf_text_config, "tie_word_embeddings", False)
    wrong_afterwards = current_platform.is_cpu() and (tied or model.is_moe)
    return config.load_config.load_format in RELOADABLE_FORMATS and not wrong_afterwards


def _checkpoint(config: Any) -> Path | None:
    """Return the folder of the model's safetensors; None if vLLM has loaded something else or cannot load again."""
    return _files(config) if _can_reload(config) else None


def _files(config: Any) -> Path | None:
    model = config.model_config
    return local_checkpoint(model.model, revision=model.revision, cache_dir=config.load_config.download_dir)


# Behind a URL ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelHints:
    """What the caller says about a server's model. Each hint replaces what would be read from the server or its files.

    Attributes:
        name: the model's name in requests; None for the server's only model.
        tokenizer: a tokenizer, or the folder or hub name of one; None for the model's own.
        vocab_size: ids are below it; None to read the model's configuration.
        max_context: the longest prompt + answer, in tokens; None for the server's limit.
        trust_remote_code: allow code from the folder or repository that `tokenizer` or `name` names.
    """

    name: str | None = None
    tokenizer: Any = None
    vocab_size: int | None = None
    max_context: int | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """What is known about one model of a server.

    Attributes:
        capabilities: what the backend declares; `probing.probe_server` adds what the server does not say.
        tokenizer: the model's tokenizer.
        model: the folder or hub name that the server loaded the model from.
        name: the model's name in requests.
        routes: the paths that the server lists; empty where it does not describe itself.
        fields: the fields of a completion request; None where the server does not describe itself.
        files: the folder or hub name of the model's files; of an adapter, those of its base model.
        base_name: the name in requests of the model without adapters.
        adapters: the names of the adapters of this model that the server has.
    """

    capabilities: Capabilities
    tokenizer: Any
    model: str
    name: str
    routes: frozenset[str]
    fields: frozenset[str] | None
    files: str = ""
    base_name: str = ""
    adapters: frozenset[str] = frozenset()

    @property
    def max_context(self) -> int:
        context = self.capabilities.max_context
        assert context is not None
        return context

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
        raise InvalidRequestError(
            f"trust_remote_code: code runs only from a folder or repository that you name, and not from {model!r}, "
            "which the server names; pass it as tokenizer= if you trust it",
            field="trust_remote_code",
        )
    files = model
    config, problem = _config(model, trusted)
    if config is None and parent:
        # The folder of an adapter holds no configuration, and often no tokenizer.
        files, trusted = str(parent.get("root") or parent["id"]), False
        config, problem = _config(files, trusted)
    vocab_size = _vocab_size(config, files, problem) if hints.vocab_size is None else hints.vocab_size
    tokenizer = _tokenizer(hints, files, trusted)
    scores = fields is None or fields >= SCORING_FIELDS
    capabilities = Capabilities(
        vocab_size=vocab_size,
        max_context=_max_context(card.get("max_model_len") or parent.get("max_model_len"), hints.max_context),
        eos_token_ids=eos_token_ids(_generation_config(files) or config, tokenizer, vocab_size=vocab_size),
        sampling={name: span for name, span in HONOURED.items() if _honours(fields, name)},
        score=scores,
        # A server does not state its --max-logprobs. With 0, it refuses each row that asks for the most probable ids.
        argmax=scores,
        concurrent_calls=True,
        stops_at_timeout=True,
        streaming=_honours(fields, "stream"),
        update_weights=routes >= WEIGHT_ROUTES,
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
    )


def _honours(fields: frozenset[str] | None, parameter: str) -> bool:
    """Return whether requests with these fields have one for that parameter of `SamplingParams`."""
    if parameter == "engine_kwargs":
        # Their names can be checked only against a server that describes itself.
        return fields is not None
    return fields is None or _SERVER_NAMES.get(parameter, parameter) in fields


def _vocab_size(config: Any, model: str, problem: str) -> int:
    if config is None:
        raise _must_be_passed("vocab_size", f"the configuration of the server's model {model!r} {problem}")
    return int(config.get_text_config().vocab_size)


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


def _max_context(of_server: Any, given: int | None) -> int:
    if given is None and not isinstance(of_server, int):
        raise _must_be_passed("max_context", "the server does not say how long its context is")
    if given is not None and isinstance(of_server, int) and given > of_server:
        raise InvalidRequestError(
            f"max_context: the server's context is {of_server} tokens, got {given}", field="max_context"
        )
    return of_server if given is None else given


def _config(model: str, trust_remote_code: bool) -> tuple[Any, str]:
    """Return the model's configuration; None and the reason if it cannot be read."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code), ""
    except (OSError, ValueError) as error:
        return None, why_unreadable(error)


def _tokenizer(hints: ModelHints, model: str, trusted: bool) -> Any:
    given = hints.tokenizer
    if given is not None and not isinstance(given, (str, os.PathLike)):
        return given
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            given or model, trust_remote_code=trusted if given is None else hints.trust_remote_code
        )
    except (OSError, ValueError) as error:
        if given is not None:
            raise
        raise _must_be_passed(
            "tokenizer", f"the tokenizer of the server's model {model!r} {why_unreadable(error)}"
        ) from error


def _generation_config(model: str) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model)
    except (OSError, ValueError):
        return None


def _must_be_passed(field: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {why}; pass {field}=", field=field)
