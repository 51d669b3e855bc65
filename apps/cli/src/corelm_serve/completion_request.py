"""`CompletionAsk` and `TokenAsk`: the bodies of requests about texts and about ids, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from corelm.spec import SamplingParams
from corelm.validate import count, flag, invalid, is_index, one_of, shown, token_ids
from corelm_serve.fields import LENGTHS, SAMPLING, Ask, check_names, model_of, sampling_of, streaming_of

_COMPLETION = frozenset(
    {
        *("model", "prompt", "n", "min_tokens", "max_tokens", "stream", "stream_options", "logprobs", "echo"),
        "return_tokens_as_token_ids",
        *SAMPLING,
    }
)
_TOKENS = frozenset(
    {*("model", "prompt_token_ids", "n", "min_tokens", "logprobs", "top_logprobs"), *LENGTHS, *SAMPLING}
)
#: The largest number of answers to one request: all its prompts together.
MOST_ANSWERS = 4096

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionAsk(Ask):
    """A request for completions of texts.

    Attributes:
        samples: whether to sample at all: ``max_tokens=0`` with `echo` only scores.
        echo: whether the prompt begins the text of the answer, and its log-probs those of the answer.
        logprobs: how many of the most probable ids to return for each token, with its own log-prob; None for no
            log-probs.
        by_id: whether log-probs name each token by its id, as ``token_id:5``. Several ids may have one text.
    """

    texts: tuple[str, ...] | None
    ids: tuple[Ids, ...] | None
    samples: bool
    echo: bool
    stream: bool
    include_usage: bool
    logprobs: int | None
    by_id: bool

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> CompletionAsk:
        """Check a body.

        Raises:
            InvalidRequestError: a field is unknown, not supported or illegal; `field` names it.
        """
        check_names(given, _COMPLETION)
        stream, include_usage = streaming_of(given)
        echo = flag("echo", given.get("echo", False))
        logprobs = given.get("logprobs")
        samples = not (given.get("max_tokens") == 0 and type(given["max_tokens"]) is int)
        if not samples and not echo:
            raise invalid("max_tokens", "0 only scores the prompt; give echo=true as well, or at least 1")
        # Nothing is sampled, so the limit does not matter.
        sampled = given if samples else {name: value for name, value in given.items() if name != "max_tokens"}
        sampling = sampling_of(sampled, default_max_tokens=16)
        texts, ids = _prompts(given.get("prompt"))
        _check_answers(len(texts or ids or ()), sampling, "prompt")
        return cls(
            model=model_of(given),
            texts=texts,
            ids=ids,
            sampling=sampling,
            samples=samples,
            echo=echo,
            stream=stream,
            include_usage=include_usage,
            logprobs=None if logprobs is None else count("logprobs", logprobs, 0),
            by_id=flag("return_tokens_as_token_ids", given.get("return_tokens_as_token_ids", False)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAsk(Ask):
    """A request for answers to ids, as ids.

    Attributes:
        logprobs: the distribution of the log-probs to return; None for that of the server.
    """

    prompts: tuple[Ids, ...]
    logprobs: Literal["none", "raw", "processed"] | None
    top_logprobs: int

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> TokenAsk:
        """Check a body.

        Raises:
            InvalidRequestError: a field is unknown, not supported or illegal; `field` names it.
        """
        check_names(given, _TOKENS)
        logprobs = given.get("logprobs")
        if logprobs is not None:
            one_of("logprobs", logprobs, ("none", "raw", "processed"))
        top = count("top_logprobs", given.get("top_logprobs", 0), 0)
        if top and logprobs == "none":
            raise invalid("top_logprobs", "they belong to logprobs; give logprobs as raw or processed, or leave it out")
        sampling = sampling_of(given, default_max_tokens=16)
        rows = given.get("prompt_token_ids")
        if not isinstance(rows, list) or not rows:
            raise invalid("prompt_token_ids", f"expected a list of ids, or a list of such lists, got {shown(rows)}")
        prompts = _rows_of_ids(rows, "prompt_token_ids")
        _check_answers(len(prompts), sampling, "prompt_token_ids")
        return cls(
            model=model_of(given),
            prompts=prompts,
            sampling=sampling,
            logprobs=logprobs,
            top_logprobs=top,
        )


def _prompts(given: Any) -> tuple[tuple[str, ...] | None, tuple[Ids, ...] | None]:
    if isinstance(given, str):
        return (given,), None
    if not isinstance(given, list) or not given:
        raise invalid("prompt", f"expected a text, a list of texts, ids, or a list of lists of ids, got {shown(given)}")
    if isinstance(given[0], str):
        if odd := [each for each in given if not isinstance(each, str)]:
            raise invalid("prompt", f"expected texts only, got {shown(odd[0])} among them")
        return tuple(given), None
    return None, _rows_of_ids(given, "prompt")


def _rows_of_ids(given: list[Any], field: str) -> tuple[Ids, ...]:
    rows = [given] if is_index(given[0]) else given
    if odd := [each for each in rows if not isinstance(each, list)]:
        raise invalid(field, f"expected lists of ids only, got {shown(odd[0])} among them")
    return tuple(token_ids(field, row) for row in rows)


def _check_answers(prompts: int, sampling: SamplingParams, field: str) -> None:
    if prompts * (sampling.num_samples or 1) > MOST_ANSWERS:
        asked = f"{prompts} prompts with n={sampling.num_samples}"
        raise invalid(field, f"{asked} are more than {MOST_ANSWERS} answers to one request; send several requests")
