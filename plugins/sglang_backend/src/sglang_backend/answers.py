"""What SGLang's ``/generate`` is sent, and what it answers, checked against what was asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from corelm.errors import CoreLMError, InvalidRequestError
from corelm.support import Aborted

#: What a finish reason of the server is called in corelm.
REASONS = {"stop": "stop", "length": "length", "abort": "abort"}
#: How the server says that the logits were no numbers; the id it returns then is made up.
_NAN = "NaN happened"


class Unbelievable(Exception):
    """An answer that is not what was asked for."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row's outcome. `error` says why there is none."""

    ids: list[int]
    logprobs: list[float]
    reason: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class Expected:
    """What every answer must agree with.

    Attributes:
        label: the server's name for the weights in force. vocab_size: ids are below it.
    """

    label: str
    vocab_size: int


def generate_payload(ids: Sequence[int], parameters: dict[str, Any], logprobs: bool) -> dict[str, Any]:
    return {"input_ids": list(ids), "sampling_params": parameters, "return_logprob": logprobs}


def score_payload(ids: Sequence[int], start: int) -> dict[str, Any]:
    """Ask for the log-probs of ``ids[start:]``. SGLang never gives the first one it is asked for."""
    return {
        "input_ids": list(ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 0.0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": max(0, min(start, len(ids)) - 1),
    }


def still_runs(entry: Any) -> bool:
    """Whether the server refuses a request that was repeated, because it has not noticed that the first one is not
    waited for any more.
    """
    return isinstance(entry, InvalidRequestError) and "Duplicate request ID" in str(entry)


def parse_answer(entry: Any, expected: Expected, logprobs: bool) -> Row:
    """The sampled ids, their log-probs if asked for, and why the answer ended."""
    return _parsed(entry, lambda found: _answer(found, expected, logprobs))


def parse_scores(entry: Any, ids: Sequence[int], start: int, expected: Expected) -> Row:
    """The log-probs of ``ids[start:]``."""
    if isinstance(entry, Aborted):
        return Row([], [], "error", "the request was aborted")
    return _parsed(entry, lambda found: _scores(found, ids, start, expected))


def raise_if_none_was_served(entries: Sequence[Any]) -> None:
    """A server that is gone or hangs fails all requests alike, and that is no row's fault."""
    failed = [entry for entry in entries if isinstance(entry, CoreLMError)]
    others = [error for error in failed if not isinstance(error, InvalidRequestError)]
    if others and len(failed) == len(entries):
        raise others[0]


def _parsed(entry: Any, parse: Callable[[Any], Row]) -> Row:
    if isinstance(entry, Aborted):
        return Row([], [], "abort")
    if isinstance(entry, CoreLMError):
        return Row([], [], "error", str(entry))
    try:
        return parse(entry)
    except Unbelievable as error:
        return Row([], [], "error", str(error))
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        what = f"the server's answer is none of SGLang's /generate: {type(error).__name__}: {error}"
        return Row([], [], "error", what)


def _answer(found: Any, expected: Expected, logprobs: bool) -> Row:
    meta, ids = found["meta_info"], [int(token) for token in found["output_ids"]]
    reason = _reason(meta)
    if reason != "abort" or ids:
        # A request that was ended before it ran has none.
        _check_weights(meta, expected.label)
    if not logprobs:
        return Row(ids, [], reason)
    given = meta.get("output_token_logprobs") or []
    _check_echo([token for _, token, *_ in given], ids, expected.vocab_size, "output_token_logprobs")
    return Row(ids, [float(value) for value, *_ in given], reason)


def _scores(found: Any, ids: Sequence[int], start: int, expected: Expected) -> Row:
    meta = found["meta_info"]
    if _reason(meta) == "abort":
        raise Unbelievable("the server aborted the request")
    _check_weights(meta, expected.label)
    asked_from = max(0, min(start, len(ids)) - 1)
    given = meta["input_token_logprobs"]
    _check_echo([token for _, token, *_ in given], ids[asked_from:], expected.vocab_size, "input_token_logprobs")
    # The first has no number, as nothing it could follow was read for it.
    if given[0][0] is not None:
        raise Unbelievable("input_token_logprobs starts with a number; this version of SGLang counts otherwise")
    values = [float(value) for value, *_ in given[1:]]
    return Row([], values if start < len(ids) else [], "length")


def _reason(meta: Any) -> str:
    finish = meta["finish_reason"]
    if finish.get("matched") == _NAN:
        raise Unbelievable("the model's logits were not numbers (SGLang: 'NaN happened')")
    return REASONS[finish["type"]]


def _check_weights(meta: Any, label: str) -> None:
    """Raises:
    Unbelievable: other weights than those in force, or two kinds of them.
    """
    spans = meta.get("weight_versions") or []
    found = {str(meta.get("weight_version")), *(str(span["version"]) for span in spans)}
    if found != {label}:
        raise Unbelievable(
            f"the server answers with weights {' and '.join(sorted(map(repr, found)))}, but {label!r} are in force: it "
            "was restarted, or somebody else has updated it; load the weights again"
        )


def _check_echo(echoed: Sequence[int], ids: Sequence[int], vocab_size: int, name: str) -> None:
    """Raises:
    Unbelievable: the ids beside the log-probs are others than the row's, or more, or fewer.
    """
    if len(echoed) != len(ids):
        raise Unbelievable(f"{name} holds {len(echoed)} tokens, but there are {len(ids)}")
    for position, (got, token) in enumerate(zip(echoed, ids, strict=True)):
        # SGLang echoes the last id of the vocabulary in a prompt as 0; its log-prob is right.
        if got != token and not (got == 0 and token == vocab_size - 1):
            raise Unbelievable(f"{name} is about id {got} at position {position}, but that is {token}")
