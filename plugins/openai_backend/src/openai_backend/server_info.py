"""`ServerInfo`: what is known about one model of a server, and how the beginning of it is read.

A server of this protocol says little about itself: `probing` adds what it is seen to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from corelm.errors import InvalidRequestError
from corelm.spec import Capabilities, Deadline, Range
from corelm.validate import count, invalid, shown
from corelm_engine_kit import HttpClient, ModelHints, did_you_mean, generation_config, hub_options
from openai_backend.vocabulary import Naming, Vocabulary

MODELS = "/v1/models"
#: A page that many servers have, and that says more than the list of models: whether the engine runs.
HEALTH = "/health"
#: Which distribution the log-probs of sampled tokens are of. `untouched`: known only where nothing reshapes it.
LogprobsMode = Literal["none", "raw", "processed", "scaled", "untouched"]
#: The parameters that a caller may vouch for, with their ranges, and their names in requests.
VOUCHED: dict[str, tuple[Range | None, str]] = {
    "presence_penalty": ((-2.0, 2.0), "presence_penalty"),
    "frequency_penalty": ((-2.0, 2.0), "frequency_penalty"),
    "repetition_penalty": (None, "repetition_penalty"),
    "top_k": (None, "top_k"),
    "min_p": (None, "min_p"),
    "min_new_tokens": (None, "min_tokens"),
}
#: The fields that the plugin decides, so that `extra_body` may not hold them.
SETTLED = frozenset(
    {
        *("model", "prompt", "n", "best_of", "stream", "stream_options", "echo", "suffix", "logprobs", "top_logprobs"),
        *("max_tokens", "temperature", "top_p", "seed", "stop", "stop_token_ids", "ignore_eos", "logit_bias"),
        *("return_token_ids", "return_tokens_as_token_ids", *(name for _, name in VOUCHED.values())),
    }
)


@dataclass(frozen=True)
class ServerInfo:
    """What is known about one model of a server. `probing` fills in what follows `extra`.

    Attributes:
        capabilities: what the backend declares.
        tokenizer: the caller's tokenizer.
        name: the model's name in requests.
        health: the page that answers while the server is healthy.
        fields: the fields that every request carries.
        extra: the names of those that are the caller's.
        takes_ids: prompts are sent as ids; else as texts.
        adds_special_tokens: the server adds the tokenizer's special tokens to a text.
        counts_prompts: ``usage.prompt_tokens`` is the number of ids of a prompt.
        states_ids: replies have ``token_ids``.
        naming: how log-probs name their tokens; None if there are no log-probs, or their names say nothing.
        says_eos: EOS is among the tokens of an answer that it ends.
        ignores_eos: the server honours ``ignore_eos``.
        stops_at_ids: it honours ``stop_token_ids``.
        stops_at_strings: it honours ``stop``, and returns the tokens of the stop string.
        samples: answers at a temperature above 0 differ from greedy ones.
        logprobs: which log-probs sampled tokens have.
        tried: the penalties of which it is known that log-probs include them as `logprobs` says.
        misnames_last: a score of the vocabulary's last id has the name of id 0, as those of SGLang do.
        echo: the ``max_tokens`` with which the server scores a prompt; None if it does not score.
    """

    capabilities: Capabilities
    tokenizer: Any = field(repr=False)
    name: str
    health: str
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False)
    extra: frozenset[str] = frozenset()
    takes_ids: bool = False
    adds_special_tokens: bool = False
    counts_prompts: bool = False
    states_ids: bool = False
    naming: Naming | None = None
    says_eos: bool | None = None
    ignores_eos: bool = False
    stops_at_ids: bool = False
    stops_at_strings: bool = False
    samples: bool = False
    logprobs: LogprobsMode = "none"
    tried: frozenset[str] = frozenset()
    misnames_last: bool = False
    echo: int | None = None

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.tokenizer, self.capabilities.vocab_size)

    @property
    def knows_ids(self) -> bool:
        """Whether the ids that were sampled are known. Otherwise they are the encoding of the answer's text."""
        return self.states_ids or self.naming is not None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.capabilities.eos_token_ids or frozenset()


def read_server(client: HttpClient, hints: ModelHints, honours: Any, extra_body: Any, deadline: Deadline) -> ServerInfo:
    """Return what the server's list of models and the caller say. `OpenAIBackend.open` lists the errors."""
    extra, vouched = _checked_extra(extra_body), _checked_names(honours)
    cards, name = _model_cards(client, hints.name, deadline), hints.name
    listed = ", ".join(map(repr, cards))[:300] or "none"
    if name is None:
        if len(cards) != 1:
            raise invalid("model", f"the server lists {listed}; name one of them with model=")
        (name,) = cards
    card = cards.get(name, {})
    model = str(card.get("root") or name)
    try:
        tokenizer = hints.read_tokenizer(model)
    except InvalidRequestError as error:
        if hints.tokenizer is not None or card or not cards:
            raise
        known = did_you_mean(model, list(cards)) or "."
        why = f"the server lists {listed}, and not {model!r}{known} If it serves that as well, pass tokenizer=, too"
        raise invalid("model", why) from error
    folder = getattr(tokenizer, "name_or_path", None)
    vocab_size = _vocab_size(hints.vocab_size, tokenizer, folder)
    capabilities = Capabilities(
        vocab_size=vocab_size,
        max_context=hints.context(card.get("max_model_len")),
        eos_token_ids=hints.eos_ids(tokenizer, generation_config(folder), vocab_size=vocab_size),
        sampling={parameter: VOUCHED[parameter][0] for parameter in vouched},
        concurrent_calls=True,
        # Not `stops_at_timeout`: some servers go on with an answer whose connection was closed.
        abort=True,
    )
    health = HEALTH if client.answers(HEALTH, min(5.0, deadline.left() or 5.0)) else MODELS
    return ServerInfo(capabilities, tokenizer, name, health, {"model": name, **extra}, extra=frozenset(extra))


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
    cards = [card for card in found if isinstance(card, dict) and "id" in card] if isinstance(found, list) else []
    return {str(card["id"]): card for card in cards}


def _vocab_size(given: int | None, tokenizer: Any, folder: Any) -> int:
    """Return how many ids a model may sample. Many have more outputs than their tokenizer has entries."""
    if given is not None:
        return count("vocab_size", given, 1)
    if not hasattr(tokenizer, "__len__"):
        raise invalid("vocab_size", "the tokenizer does not say how many ids it has; pass vocab_size=")
    from transformers import PretrainedConfig

    config: Any = {}
    if isinstance(folder, str) and folder:
        with suppress(OSError, ValueError):
            config, _ = PretrainedConfig.get_config_dict(folder, **hub_options(folder))
    sizes = [part.get("vocab_size") for part in (config, config.get("text_config")) if isinstance(part, dict)]
    return max(len(tokenizer), *(size for size in sizes if type(size) is int), 0)


def _checked_extra(given: Any) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise invalid("extra_body", f"expected a mapping of field names, got {type(given).__name__}")
    for name in given:
        if name in SETTLED:
            raise invalid("extra_body", f"corelm sets {name!r} itself; pass it as a sampling parameter or an option")
    return given


def _checked_names(given: Any) -> frozenset[str]:
    if not isinstance(given, Iterable):
        raise invalid("honours", f"expected names of sampling parameters, got {shown(given)}")
    names = (given,) if isinstance(given, str) else tuple(given)
    for name in names:
        if name not in VOUCHED:
            known = did_you_mean(str(name), list(VOUCHED)) or f"; expected some of {', '.join(VOUCHED)}"
            raise invalid("honours", f"a caller cannot vouch for {name!r}{known}")
    return frozenset(names)
