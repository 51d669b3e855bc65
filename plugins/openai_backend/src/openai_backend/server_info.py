"""`ServerInfo`: what is known about one model of a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from corelm.spec import Capabilities
from openai_backend.vocabulary import Naming, Vocabulary

#: Which distribution the log-probs of sampled tokens are of. `untouched`: known only where nothing reshapes it.
LogprobsMode = Literal["none", "raw", "processed", "scaled", "untouched"]


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
        most_stops: the most stop strings of a request.
        samples: answers at a temperature above 0 differ from greedy ones.
        logprobs: which log-probs sampled tokens have.
        tried: the penalties of which it is known that log-probs include them as `logprobs` says.
        misnames_last: a score of the vocabulary's last id has the name of id 0, as those of SGLang do.
        echo: the ``max_tokens`` with which the server scores a prompt; None if it does not score.
    """

    capabilities: Capabilities
    tokenizer: Any
    name: str
    health: str
    fields: Mapping[str, Any] = field(default_factory=dict)
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
    most_stops: int = 4
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
