"""What an SGLang server can do, read from the caller's options, the server's own pages and the model's files.

`probing` adds what the server does not say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from corelm.errors import EngineError
from corelm.spec import Capabilities, Deadline
from corelm.validate import invalid
from corelm_engine_kit import HttpClient, ModelHints, generation_config, model_config
from sglang_backend.sampling import HONOURED

#: A page that needs no scheduler: it answers as soon as the server's own process runs.
MODEL_INFO = "/model_info"
#: A page that answers once the scheduler has returned a token, of any request. That takes a second or more.
HEALTH_GENERATE = "/health_generate"
SERVER_INFO = "/server_info"
#: The load format with which SGLang fills a model with random numbers, for weights that come later.
DUMMY = "dummy"
#: The most probable ids of a position that are asked for: SGLang has no limit, but its replies grow with them. A server
#: that prefills for others has room for fewer.
_MOST_CANDIDATES, _MOST_DISAGGREGATED = 1024, 128
#: SGLang ends an answer with the model's EOS, and also with these tokens if the tokenizer has added them.
_EXTRA_EOS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What is known about one server and the model it serves.

    Attributes:
        capabilities: what the backend declares; `probing.probe_server` adds what the server does not say.
        tokenizer: the model's tokenizer.
        model: the folder or hub name that the server was started with.
        weight_label: the server's own name for the weights in force. A reply that names others is an error.
        ranks: how many processes of the server read each handle of a tensor.
        needs_file: why the server takes no handles; empty if it does.
        no_group: why the server cannot be sent tensors; empty if it can.
        on_gpu: whether the server holds its weights on GPUs of CUDA.
        adapters: the names of the adapters that the server was started with.
        largest_rank: the largest rank of an adapter; None if the server does not say.
        pauses: whether the server can take new weights between two tokens of its answers, as far as its settings tell.
        support_limit: the most ids that the server returns of those that truncation has left at a token; 0 for none.
    """

    capabilities: Capabilities
    tokenizer: Any
    model: str
    weight_label: str
    ranks: int = 1
    needs_file: str = ""
    no_group: str = ""
    on_gpu: bool = False
    adapters: frozenset[str] = frozenset()
    largest_rank: int | None = None
    support_limit: int = 0
    pauses: bool = False


def read_server(client: HttpClient, hints: ModelHints, deadline: Deadline) -> ServerInfo:
    """Return what the server's pages, the model's files and `hints` say. `SGLangBackend.open` lists the errors."""
    model_info, settings = (client.get(page, timeout=deadline.left()) for page in (MODEL_INFO, SERVER_INFO))
    pages = isinstance(model_info, dict) and isinstance(settings, dict)
    if not pages or model_info.get("is_generation") is not True:
        raise EngineError(f"{client.base_url} is not an SGLang server with a model that generates text", usable=False)
    model = str(settings.get("model_path"))
    tokenizer = hints.read_tokenizer(str(model_info.get("tokenizer_path") or model), hints.trust_remote_code)
    config, problem = model_config(model, hints.trust_remote_code)
    if hints.vocab_size is None and config is None:
        raise invalid("vocab_size", f"the configuration of {model!r} {problem}; pass vocab_size=")
    vocab_size = hints.vocab_size or int(config.get_text_config().vocab_size)
    excluded: set[str] = set()
    if settings.get("enable_deterministic_inference"):
        # The sampler of this mode asserts that min_p is not used; a request with one would end the server.
        excluded.add("min_p")
    if settings.get("skip_tokenizer_init"):
        excluded |= {"stop", "min_new_tokens"}
    # `max_req_input_len` is the shortest prompt that is refused, so the limit is one less. That is 7 tokens less than
    # the model's context: SGLang keeps some positions free, and does not report when it ends an answer for that reason.
    refused_length = settings.get("max_req_input_len")
    max_context = hints.max_context or (refused_length - 1 if isinstance(refused_length, int) else None)
    if max_context is None:
        raise invalid("max_context", "the server does not report its limit; pass max_context=")
    added = tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else {}
    ends = [added[text] for text in _EXTRA_EOS if text in added]
    disaggregated = settings.get("disaggregation_mode") not in (None, "null")
    no_group, speculative = _larger_than_one(settings, "dp_size", "pp_size"), settings.get("speculative_algorithm")
    capabilities = Capabilities(
        vocab_size=vocab_size,
        max_context=max_context,
        eos_token_ids=hints.eos_ids(config, generation_config(model), tokenizer, ends, vocab_size=vocab_size),
        sampling={name: span for name, span in HONOURED.items() if name not in excluded},
        score=True,
        argmax=True,
        score_top_k=min(_MOST_DISAGGREGATED if disaggregated else _MOST_CANDIDATES, vocab_size),
        concurrent_calls=True,
        stops_at_timeout=True,
        # Such a server sends deltas and not, as others do, the whole answer so far.
        streaming=not settings.get("incremental_streaming_output"),
        update_weights=True,
        weight_stream=True,
        adapters=bool(settings.get("enable_lora")),
        sleep_levels=_sleep_levels(settings),
        abort=True,
    )
    rank = settings.get("max_lora_rank")
    return ServerInfo(
        capabilities,
        tokenizer,
        model,
        weight_label=str(model_info.get("weight_version")),
        ranks=int(settings.get("tp_size") or 1),
        needs_file=_larger_than_one(settings, "dp_size", "pp_size", "nnodes"),
        # SGLang numbers the processes of a group by their tensor-parallel ranks alone.
        no_group=no_group,
        on_gpu=str(settings.get("device")).startswith("cuda"),
        adapters=_adapters(settings),
        largest_rank=rank if isinstance(rank, int) else None,
        support_limit=_support_limit(settings),
        pauses=not (no_group or disaggregated or speculative),
    )


def _support_limit(settings: Mapping[str, Any]) -> int:
    """Return `ServerInfo.support_limit`, as far as the settings tell. `probing` tries it."""
    limit = settings.get("sampling_mask_max_tokens")
    # SGLang refuses it with Ascend's sampler, and returns less with speculative decoding.
    none = settings.get("sampling_backend") == "ascend" or settings.get("speculative_algorithm")
    return limit if isinstance(limit, int) and limit > 1 and not none else 0


def _larger_than_one(settings: Mapping[str, Any], *names: str) -> str:
    """Return which of these settings is above 1, as a part of a message; empty if none is."""
    for name in names:
        if (settings.get(name) or 1) != 1:
            return f"the server runs with {name}={settings[name]}"
    return ""


def _sleep_levels(settings: Mapping[str, Any]) -> frozenset[int]:
    """Return the levels at which the server can sleep. Unless it was told to, it keeps no copy of the weights."""
    if not settings.get("enable_memory_saver"):
        return frozenset()
    return frozenset({1, 2} if settings.get("enable_weights_cpu_backup") else {2})


def _adapters(settings: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the adapters that a server was started with."""
    given = settings.get("lora_paths") or []
    if isinstance(given, dict):
        return frozenset(given)
    return frozenset(str(each["lora_name"]) for each in given if isinstance(each, dict) and "lora_name" in each)
