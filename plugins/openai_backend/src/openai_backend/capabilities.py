"""What a server can do, read from its list of models and from the caller's options.

A server of this protocol says little about itself: `probing` adds what it is seen to do.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from corelm.errors import EngineError, InvalidRequestError
from corelm.spec import Capabilities
from corelm.validate import count, invalid, shown, token_ids
from corelm_engine_kit import did_you_mean, eos_token_ids, hub_options, why_unreadable
from openai_backend.sampling import VOUCHED
from openai_backend.server_info import ServerInfo

if TYPE_CHECKING:
    from corelm.spec import Deadline
    from corelm_engine_kit import HttpClient

MODELS = "/v1/models"
#: A page that many servers have, and that says more than the list of models: whether the engine runs.
HEALTH = "/health"
#: The fields that the plugin decides, so that `extra_body` may not hold them.
SETTLED = frozenset(
    {
        *("model", "prompt", "n", "best_of", "stream", "stream_options", "echo", "suffix", "logprobs", "top_logprobs"),
        *("max_tokens", "temperature", "top_p", "seed", "stop", "stop_token_ids", "ignore_eos", "logit_bias"),
        *("return_token_ids", "return_tokens_as_token_ids", *(name for _, name in VOUCHED.values())),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHints:
    """What the caller says about the model.

    Attributes:
        name: the model's name in requests; None for the server's only model.
        tokenizer: a tokenizer, or the folder or hub name of one; None to read the one that the model's name leads to.
        vocab_size: ids are below it; None for what `_vocab_size` reads.
        max_context: the longest prompt + answer, in tokens; None for what the server says.
        eos_token_ids: the ids with which the server ends every answer; None for those of the tokenizer and its folder.
        trust_remote_code: allow code that comes with the tokenizer that the caller names.
        honours: sampling parameters that the server is known to honour; see `sampling.VOUCHED`.
        extra_body: fields that every request carries.
    """

    name: str | None = None
    tokenizer: Any = None
    vocab_size: int | None = None
    max_context: int | None = None
    eos_token_ids: Iterable[int] | None = None
    trust_remote_code: bool = False
    honours: Iterable[str] = ()
    extra_body: Mapping[str, Any] | None = None


def read_server(client: HttpClient, hints: ModelHints, deadline: Deadline) -> ServerInfo:
    """Return what the server's list of models and `hints` say. Nothing is generated.

    Raises:
        InvalidRequestError: an option is wrong, or one is missing that the server does not say; `field` names it.
        EngineError: the server does not answer.
        TimeoutError: the deadline has passed.
    """
    extra = _checked_extra(hints.extra_body)
    vouched = _checked_names(hints.honours)
    cards = _model_cards(client, hints.name, deadline)
    name = _name(hints.name, cards)
    card = cards.get(name, {})
    tokenizer = _tokenizer(hints, str(card.get("root") or name), () if card else tuple(cards))
    folder = getattr(tokenizer, "name_or_path", None)
    vocab_size = _vocab_size(hints.vocab_size, tokenizer, folder)
    given = hints.eos_token_ids
    sources = (_given_eos(given, vocab_size),) if given is not None else (tokenizer, _generation_config(folder))
    capabilities = Capabilities(
        vocab_size=vocab_size,
        max_context=_max_context(card, hints.max_context),
        eos_token_ids=eos_token_ids(*sources, vocab_size=vocab_size),
        sampling={parameter: VOUCHED[parameter][0] for parameter in vouched},
        concurrent_calls=True,
        # Not `stops_at_timeout`: some servers go on with an answer whose connection was closed.
        abort=True,
    )
    health = HEALTH if client.answers(HEALTH, min(5.0, deadline.left() or 5.0)) else MODELS
    return ServerInfo(capabilities, tokenizer, name, health, {"model": name, **extra}, extra=frozenset(extra))


def _vocab_size(given: int | None, tokenizer: Any, folder: Any) -> int:
    """Return how many ids a model may sample. Many have more outputs than their tokenizer has entries."""
    if given is not None:
        return count("vocab_size", given, 1)
    if not hasattr(tokenizer, "__len__"):
        raise invalid("vocab_size", "the tokenizer does not say how many ids it has; pass vocab_size=")
    return max(len(tokenizer), _outputs(folder))


def _outputs(folder: Any) -> int:
    """Return how many outputs the model has whose configuration is next to the tokenizer; 0 if there is none."""
    from transformers import PretrainedConfig

    if not (isinstance(folder, str) and folder):
        return 0
    try:
        config, _ = PretrainedConfig.get_config_dict(folder, **hub_options(folder))
    except (OSError, ValueError):
        return 0
    sizes = [part.get("vocab_size") for part in (config, config.get("text_config")) if isinstance(part, dict)]
    return max((size for size in sizes if type(size) is int), default=0)


def _checked_extra(given: Any) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise invalid("extra_body", f"expected a mapping of field names, got {type(given).__name__}")
    for name in given:
        if name in SETTLED:
            raise invalid("extra_body", f"corelm sets {name!r} itself; pass it as a sampling parameter or an option")
    return given


def _given_eos(given: Any, vocab_size: int) -> tuple[int, ...]:
    ids = token_ids("eos_token_ids", given)
    for token in ids:
        if token >= vocab_size:
            raise invalid("eos_token_ids", f"the vocabulary has the ids 0 to {vocab_size - 1}, got {token}")
    return ids


def _checked_names(given: Any) -> frozenset[str]:
    if not isinstance(given, Iterable):
        raise invalid("honours", f"expected names of sampling parameters, got {shown(given)}")
    names = (given,) if isinstance(given, str) else tuple(given)
    for name in names:
        if name not in VOUCHED:
            known = did_you_mean(str(name), list(VOUCHED)) or f"; expected some of {', '.join(VOUCHED)}"
            raise invalid("honours", f"a caller cannot vouch for {name!r}{known}")
    return frozenset(names)


def _model_cards(client: HttpClient, name: str | None, deadline: Deadline) -> Mapping[str, Mapping[str, Any]]:
    """Return the server's entry for each model that it lists.

    Some servers list only a part of what they serve, and some fail to list anything.
    """
    if name == "":
        raise invalid("model", "expected the model's name in requests, or None, got ''")
    if name is not None and not client.answers(MODELS, min(30.0, deadline.left() or 30.0)):
        return {}
    page = client.get(MODELS, timeout=deadline.left())
    found = page.get("data") if isinstance(page, dict) else None
    return {
        str(card["id"]): card
        for card in (found if isinstance(found, list) else ())
        if isinstance(card, dict) and "id" in card
    }


def _name(given: str | None, cards: Mapping[str, Any]) -> str:
    """Return the model's name in requests: the one that is given, or that of the only model."""
    if given is not None:
        return given
    if len(cards) != 1:
        raise invalid("model", f"the server lists {_listed(cards) or 'none'}; name one of them with model=")
    return next(iter(cards))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))[:300]


def _max_context(card: Mapping[str, Any], given: int | None) -> int | None:
    stated = card.get("max_model_len")
    stated = stated if type(stated) is int and stated > 0 else None
    if given is None:
        return stated
    given = count("max_context", given, 2)
    if stated is not None and given > stated:
        raise invalid("max_context", f"the server's context is {stated} tokens, got {given}")
    return given


def _tokenizer(hints: ModelHints, model: str, unlisted: Sequence[str]) -> Any:
    """Return the tokenizer that the caller names, or the one that the model's name leads to.

    Args:
        unlisted: the models that the server lists, if that of the caller is not among them.
    """
    given = hints.tokenizer
    if given is not None and not isinstance(given, (str, os.PathLike)):
        return given
    from transformers import AutoTokenizer

    try:
        # A server must not choose whose code runs here.
        trusted = hints.trust_remote_code and given is not None
        source = model if given is None else given
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trusted, **hub_options(source))
    except (OSError, ValueError) as error:
        if given is None and unlisted:
            raise invalid(
                "model",
                f"the server lists {_listed(unlisted)}, and not {model!r}{did_you_mean(model, unlisted) or '.'} If it "
                "serves that as well, pass tokenizer=, too",
            ) from error
        raise InvalidRequestError(
            f"tokenizer: that of {os.fspath(given or model)!r} {why_unreadable(error)}; pass tokenizer=, the server's "
            "own tokenizer or its folder: the protocol does not hand it over",
            field="tokenizer",
        ) from error


def _generation_config(folder: Any) -> Any:
    from transformers import GenerationConfig

    try:
        if not (isinstance(folder, str) and folder):
            return None
        return GenerationConfig.from_pretrained(folder, **hub_options(folder))
    except (OSError, ValueError):
        return None


def no_completions(client: HttpClient, name: str, why: str) -> EngineError:
    """Return the error for a server without completions, such as one that only chats."""
    return EngineError(
        f"{client.base_url} does not answer /v1/completions for the model {name!r} ({why}). A server that only chats "
        "renders conversations by itself, so the ids that it reads would not be those that corelm has rendered and "
        "records. Use one that has /v1/completions: llama.cpp, vLLM, SGLang, LM Studio and `transformers serve` do",
        usable=False,
    )
