"""What this server can do: from arguments, else from the server and its model's files, else by trying."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from corelm.errors import EngineError, InvalidRequestError
from corelm.spec import Capabilities
from corelm.support import HttpClient
from sglang_backend.answers import Expected
from sglang_backend.sampling import HONOURED
from sglang_backend.server import ALIVE
from sglang_backend.trial import Trial

#: Beside the model's own EOS, SGLang ends answers with these if the tokenizer has added them.
_ALSO_EOS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
#: What changes the distribution before "original" log-probs are taken from it. A server that returns those would pass
#: them off as the model's own.
_RESHAPING = ("presence_penalty", "frequency_penalty", "min_new_tokens", "engine_kwargs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the caller says about the model, so that nobody has to be asked."""

    tokenizer: Any = None
    vocab_size: int | None = None
    max_context: int | None = None
    eos_token_ids: Iterable[int] | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of a server that was looked at.

    Attributes:
        label: what it calls its weights. model: what it was started with.
    """

    capabilities: Capabilities
    tokenizer: Any
    label: str
    model: str


def look(client: HttpClient, given: Given) -> Found:
    """Ask the server, and try it.

    Raises:
        InvalidRequestError: something can neither be asked nor read; the message says what to pass.
        EngineError: this is no SGLang server, or none that generates.
    """
    about, settings = _object(client, ALIVE), _object(client, "/server_info")
    if about.get("is_generation") is not True:
        raise EngineError(f"{client.base_url} is no SGLang server with a model that generates text", usable=False)
    model = str(settings.get("model_path"))
    tokenizer = _tokenizer(given, str(about.get("tokenizer_path") or model))
    config, generation = _configs(model, given.trust_remote_code)
    vocab_size = given.vocab_size or _vocab_size(config, model)
    label = str(about.get("weight_version"))
    trial = Trial(client, Expected(label, vocab_size))
    capabilities = Capabilities(
        vocab_size=vocab_size,
        max_context=given.max_context or _max_context(settings),
        eos_token_ids=frozenset(
            # A configuration class may default to the EOS of a larger vocabulary.
            token
            for token in _eos_token_ids(given, (config, generation), tokenizer)
            if token < vocab_size
        ),
        generation_modes=trial.generation_modes(),
        score=True,
        per_answer_seeds=trial.honours_seeds(),
        concurrent_calls=True,
        update_weights=True,
        abort=True,
    )
    left_out = _left_out(capabilities, settings)
    honoured = {name: span for name, span in HONOURED.items() if name not in left_out}
    return Found(replace(capabilities, sampling=honoured), tokenizer, label, model)


def _object(client: HttpClient, path: str) -> Mapping[str, Any]:
    found = client.get(path)
    if not isinstance(found, dict):
        raise EngineError(f"{client.base_url}{path} holds no object; is this an SGLang server?", usable=False)
    return found


def _left_out(capabilities: Capabilities, settings: Mapping[str, Any]) -> set[str]:
    """Sampling parameters that this server does not honour, or does not survive."""
    names: set[str] = set()
    if capabilities.per_answer_seeds or settings.get("enable_deterministic_inference"):
        # Its sampler asserts that there is none, and the server goes down.
        names.add("min_p")
    if settings.get("skip_tokenizer_init"):
        names |= {"stop", "min_new_tokens"}
    if "raw" in capabilities.generation_modes:
        names.update(_RESHAPING)
    return names


def _max_context(settings: Mapping[str, Any]) -> int:
    """The longest row that the server takes, whatever is asked of it: the first prompt that is too long, less one.

    That is 7 tokens less than the model's context: SGLang keeps some free, and says nothing when it ends an answer for
    that reason.
    """
    first_too_long = settings.get("max_req_input_len")
    if not isinstance(first_too_long, int):
        raise InvalidRequestError("max_context: the server does not tell; pass max_context=", field="max_context")
    return first_too_long - 1


def _vocab_size(config: Any, model: str) -> int:
    if config is None:
        raise InvalidRequestError(
            f"vocab_size: the configuration of {model!r} is not on this machine; pass vocab_size=", field="vocab_size"
        )
    return int(config.get_text_config().vocab_size)


def _configs(model: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """The model's configuration and generation configuration, each None where it cannot be read here."""
    from transformers import AutoConfig, GenerationConfig

    def read(load: Any, **options: Any) -> Any:
        try:
            return load(model, **options)
        except (OSError, ValueError):
            return None

    config = read(AutoConfig.from_pretrained, trust_remote_code=trust_remote_code)
    return config, read(GenerationConfig.from_pretrained)


def _tokenizer(given: Given, path: str) -> Any:
    from transformers import AutoTokenizer

    wanted = path if given.tokenizer is None else given.tokenizer
    if not isinstance(wanted, (str, os.PathLike)):
        return wanted
    try:
        return AutoTokenizer.from_pretrained(wanted, trust_remote_code=given.trust_remote_code)
    except (OSError, ValueError) as error:
        raise InvalidRequestError(
            f"tokenizer: {os.fspath(wanted)!r} cannot be loaded on this machine; pass tokenizer=", field="tokenizer"
        ) from error


def _eos_token_ids(given: Given, configs: Iterable[Any], tokenizer: Any) -> set[int]:
    """What the server ends an answer with by itself."""
    if given.eos_token_ids is not None:
        return set(given.eos_token_ids)
    found: set[int] = set()
    for holder in (*configs, tokenizer):
        eos = getattr(holder, "eos_token_id", None)
        found.update([eos] if isinstance(eos, int) else eos or ())
    added = tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else {}
    return found | {added[text] for text in _ALSO_EOS if text in added}
