"""Build the completion requests, one for each row, and parse the server's replies.

A server ignores fields that it does not know, so a parameter is declared only if `probing` has seen it work, or the
caller says so (``honours=``). A reply is believed only as far as it can be checked against its request: functions that
read one raise `RowError` where it is about another request, contradicts itself, or does not say what is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corelm.errors import CapabilityError
from corelm.spec import (
    GenerateRequest,
    RowAnswer,
    RowFailure,
    RowScores,
    ScoreRequest,
    StopStrings,
    stops_without_specials,
)
from corelm.validate import invalid
from corelm_engine_kit import (
    Payload,
    RowError,
    answer_end,
    checked_finish_reason,
    checked_ids,
    checked_logprobs,
    only_choice,
    prompts_and_limits,
)
from openai_backend.server_info import VOUCHED, ServerInfo
from openai_backend.vocabulary import BY_ID

#: The log-probs of how many tokens to ask for at each position. With 0, some servers return none at all.
LOGPROBS = 1
#: The most stop strings of a request. The others are found in its answer.
MOST_STOPS = 4
#: The range of temperatures in the protocol, and the lowest one above 0: servers raise lower ones, or decode greedily.
HOTTEST, COLDEST = 2.0, 0.01
#: The parameters of the protocol that are tried.
PENALTIES = ("presence_penalty", "frequency_penalty")
#: Fields for which a server may have defaults that change the distribution, at the values that change nothing. They are
#: sent to servers that do not refuse them.
NEUTRAL: Payload = {**dict.fromkeys(PENALTIES, 0.0), "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


# Prompts --------------------------------------------------------------------------------------------------------------


def prompt_of(ids: list[int], info: ServerInfo) -> list[int] | str | None:
    """Return a prompt in the form that the server takes; None if no text stands for these ids."""
    return ids if info.takes_ids else info.vocabulary.prompt_text(ids, info.adds_special_tokens)


def check_prompt(reply: Any, ids: list[int], info: ServerInfo) -> None:
    """Check that the reply does not say that the server has read another prompt."""
    read = only_choice(reply).get("prompt_token_ids")
    if info.takes_ids and isinstance(read, list) and read and read != ids:
        raise RowError("it answers another prompt")
    found = count(reply, "prompt_tokens")
    if info.counts_prompts and found is not None and found != len(ids):
        raise RowError(f"the server says that it read {found} tokens, but the prompt has {len(ids)}")


# Generating -----------------------------------------------------------------------------------------------------------


def generation_requests(request: GenerateRequest, info: ServerInfo) -> dict[int, Payload | RowFailure]:
    """Return the payload of each row, or that its prompt cannot be sent.

    Raises:
        CapabilityError, InvalidRequestError: what the server would ignore or change.
    """
    _check(request, info)
    named = request.logprobs != "none" or (info.naming is not None and not info.states_ids)
    common = {**info.fields, **({"logprobs": LOGPROBS} if named else {})}
    adds = ", and adds its special tokens to it" if info.adds_special_tokens else ""
    no_text = RowFailure(
        f"the server takes prompts as text only{adds}, and no text is encoded to the ids of this prompt; give a prompt "
        "that the tokenizer itself could have made, or use a server that takes ids"
    )
    payloads: dict[int, Payload | RowFailure] = {}
    for row, (ids, limit, seed) in enumerate(prompts_and_limits(request, info.capabilities.max_context)):
        prompt = prompt_of(ids, info)
        own = {"max_tokens": limit, **_parameters(request, info, seed), "prompt": prompt}
        payloads[row] = no_text if prompt is None else {**common, **own}
    return payloads


def _parameters(request: GenerateRequest, info: ServerInfo, seed: int | None) -> Payload:
    sampling = request.sampling
    fields: Payload = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    for name in VOUCHED.keys() & sampling.engine_parameters().keys():
        fields[VOUCHED[name][1]] = getattr(sampling, name)
    if sampling.greedy:
        # Greedy decoding draws nothing, so truncation has no effect.
        fields["top_p"] = 1.0
    elif seed is not None:
        fields["seed"] = seed
    # A server that is told all stop ids needs not know which of them is its own EOS.
    if info.ignores_eos and (info.stops_at_ids or not info.eos_token_ids <= request.stop_ids):
        fields["ignore_eos"] = True
    if info.stops_at_ids:
        fields["stop_token_ids"] = sorted(request.stop_ids)
    # `row_answer` finds all stop strings in the answer, those that the server is not told as well.
    stops = stops_without_specials(sampling, info.tokenizer)[:MOST_STOPS]
    if info.stops_at_strings and stops and not sampling.min_new_tokens:
        fields["stop"] = list(stops)
    return fields


def _check(request: GenerateRequest, info: ServerInfo) -> None:
    """Refuse what the server would serve differently, and log-probs of a distribution that was not tried."""
    sampling, given = request.sampling, request.sampling.engine_parameters()
    truncations: list[str] = [name for name in ("top_k", "top_p", "min_p") if name in given]
    ends_at_eos_only = request.stop_ids <= info.eos_token_ids
    reshaped = ["temperature"] * ("temperature" in given) + truncations if info.logprobs == "untouched" else []
    untried = sorted((VOUCHED.keys() & given.keys()) - info.tried - {"top_k", "min_p"})
    if 0 < sampling.temperature < COLDEST:
        raise invalid(
            "temperature", f"servers raise {sampling.temperature} or decode greedily; give 0 or at least {COLDEST}"
        )
    if not sampling.greedy and not info.samples:
        raise _lacking(
            "temperature",
            "the server answers greedily at every temperature; give temperature=0, or have it sample with a field that "
            "every request carries (extra_body=)",
        )
    if len(truncations) > 1:
        raise _lacking("top_p", "servers apply top_k, top_p and min_p in different orders; give one of them")
    if not info.ignores_eos and not info.eos_token_ids <= request.stop_ids:
        raise _lacking(
            "ignore_eos", "the server ends every answer at EOS, and was not seen to honour ignore_eos; leave it out"
        )
    if not info.knows_ids and not ends_at_eos_only:
        raise _lacking(
            "stop_token_ids", "the server does not say which ids it sampled, so these cannot end an answer; give stop"
        )
    if sampling.min_new_tokens and not info.stops_at_ids and not ends_at_eos_only:
        raise _lacking(
            "min_new_tokens", "the server does not know the stop ids, so it cannot hold them back; leave it out"
        )
    if request.logprobs != "none" and reshaped:
        raise _lacking(
            "generation_modes",
            f"it could not be found out whether the server's log-probs are the model's own with {reshaped[0]}; give "
            "temperature=1 and no truncation, or logprobs='none'",
        )
    if request.logprobs != "none" and untried:
        raise _lacking(
            "generation_modes",
            f"it is not known whether the server's log-probs include {', '.join(untried)}; leave it out, or ask for "
            "logprobs='none'",
        )
    if sampling.max_new_tokens is None and info.capabilities.max_context is None:
        raise _lacking(
            "max_context",
            "the server does not say how long its context is, so an answer cannot fill it; give max_new_tokens, or "
            "open the backend with max_context=",
        )


def _lacking(capability: str, why: str) -> CapabilityError:
    return CapabilityError(why, capability=capability)


def row_answer(
    reply: Any, prompt: list[int], limit: int, request: GenerateRequest, stops: StopStrings, info: ServerInfo
) -> RowAnswer:
    """Return the answer in a reply: its ids as far as they belong to it, their log-probs, and why it ended."""
    check_prompt(reply, prompt, info)
    reason = only_choice(reply).get("finish_reason")
    ids, told = answer_ids(reply, info, need_logprobs=request.logprobs != "none")
    ids = checked_ids(ids, vocab_size=info.capabilities.vocab_size, limit=limit)
    end = answer_end(ids, request.stop_ids, stops)
    length = len(ids) if end is None else end
    if end is not None and reason == "length":
        reason = "stop"
    ended = end is not None or stops.occurs_in(ids)
    if reason == "stop" and not ended and (hidden := _hidden_eos(reply, length, request, info, limit)):
        ids, length, ended = [*ids, *hidden], length + 1, True
    least, last = request.sampling.min_new_tokens, ids[length - 1] if length else None
    reason = checked_finish_reason(reason, length, limit=limit, least=least, ended=ended, aborted=False, last=last)
    logprobs: Sequence[float] = []
    if request.logprobs != "none":
        assert told is not None
        logprobs = checked_logprobs(told.logprobs, len(told))[:length]
        if len(logprobs) < length:
            raise RowError("it ended with EOS, of which it gives no log-prob; ask for logprobs='none'")
        if request.logprobs == "processed" and request.sampling.greedy:
            # The greedy token has probability 1. Servers return its log-prob at temperature 1.
            logprobs = [0.0] * length
    return RowAnswer(ids[:length], logprobs, reason)


def answer_ids(reply: Any, info: ServerInfo, need_logprobs: bool) -> tuple[Any, Reported | None]:
    """Return the ids of an answer, and what the reply says of its tokens, if that is needed."""
    choice = only_choice(reply)
    told = reported(choice) if need_logprobs or (not info.states_ids and info.naming) else None
    if info.states_ids:
        ids = choice.get("token_ids")
        if told is not None and info.naming is not None and isinstance(ids, list):
            if len(told) != len(ids):
                raise RowError(f"it has {len(told)} log-probs for {len(ids)} tokens")
            if (at := info.vocabulary.are_names(told.names, ids, info.naming)) is not None:
                raise RowError(f"its log-prob {at} is that of {told.names[at][:40]!r}, and its token has id {ids[at]}")
        return ids, told
    if info.naming is not None:
        assert told is not None
        return info.vocabulary.ids_of(told.names, info.naming), told
    return _encoded_answer(reply, info), None


def _encoded_answer(reply: Any, info: ServerInfo) -> list[int]:
    """Return the encoding of an answer's text, if it has as many tokens as the server says it has sampled."""
    text = only_choice(reply).get("text")
    if not isinstance(text, str):
        raise RowError("it has no text")
    ids = info.vocabulary.answer_ids(text)
    if info.vocabulary.text(ids, skip_special_tokens=True) != text:
        raise RowError(f"the tokenizer does not give back its text {text[:40]!r}")
    sampled = count(reply, "completion_tokens")
    if sampled is None:
        raise RowError("it has no ids, and does not count the tokens that were sampled (usage.completion_tokens)")
    # Most servers count the EOS that ended the answer.
    ended = only_choice(reply).get("finish_reason") == "stop"
    if len(ids) != sampled and not (ended and len(ids) == sampled - 1):
        raise RowError(
            f"its text is encoded to {len(ids)} tokens, but the server sampled {sampled}: which ones is not known"
        )
    return ids


def _hidden_eos(reply: Any, length: int, request: GenerateRequest, info: ServerInfo, limit: int) -> list[int]:
    """Return the EOS that ended an answer of so many tokens if the server does not say it; empty if it would have.

    Where that is not known, the server has to have counted one more token. Otherwise it may have ended the answer for a
    reason that this backend does not know.
    """
    unsure = info.says_eos is None and info.knows_ids
    if info.says_eos or (unsure and count(reply, "completion_tokens") != length + 1):
        return []
    possible, own = request.stop_ids & info.eos_token_ids, getattr(info.tokenizer, "eos_token_id", None)
    if not possible or length >= limit:
        raise RowError("it ends, but not at EOS, at no stop string and before its limit")
    return [own if own in possible else min(possible)]


# Scoring --------------------------------------------------------------------------------------------------------------


def scoring_requests(request: ScoreRequest, info: ServerInfo) -> dict[int, Payload]:
    """Return the payloads by row number, without the rows of which nothing is asked."""
    starts = request.score_from.clamp_min(1).tolist()
    rows = enumerate(zip(request.sequences.tolist(), starts, strict=True))
    return {row: echo_request(ids, info) for row, (ids, start) in rows if start < len(ids)}


def echo_request(ids: list[int], info: ServerInfo) -> Payload:
    """Return the request that scores these ids.

    Temperature 1 without truncation makes every kind of log-prob the model's own.
    """
    details = {"echo": True, "logprobs": LOGPROBS, "max_tokens": info.echo, "temperature": 1.0, "top_p": 1.0}
    return {**info.fields, **details, "prompt": prompt_of(ids, info)}


def row_scores(reply: Any, ids: list[int], info: ServerInfo) -> RowScores:
    """Return the scores of all ids but the first one."""
    check_prompt(reply, ids, info)
    told = reported(only_choice(reply))
    assert info.naming is not None
    if not len(ids) <= len(told) <= len(ids) + 1:
        raise RowError(f"it has log-probs of {len(told)} tokens for a prompt of {len(ids)}")
    last = info.vocabulary.size - 1
    named = [0 if token == last else token for token in ids] if info.misnames_last else ids
    if (at := info.vocabulary.are_names(told.names[: len(ids)], named, info.naming)) is not None:
        raise RowError(f"it scores {told.names[at][:40]!r} at position {at}, where the prompt has id {ids[at]}")
    if told.logprobs[0] is not None:
        raise RowError("it gives a log-prob to the first token, which has none: it counts positions differently")
    return RowScores(checked_logprobs(told.logprobs[1 : len(ids)], len(ids) - 1))


# Replies --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reported:
    """What a reply says of each token.

    Log-probs come as parallel lists (OpenAI's Completions, vLLM, SGLang) or as a list of tokens (its Chat Completions,
    llama.cpp).

    Attributes:
        names: how the server names each token: by its text, or ``token_id:5`` if it gives the id.
        logprobs: one for each token; None where the server gives none.
        top: the log-probs of the most probable tokens by name; empty where the server gives none.
    """

    names: list[str]
    logprobs: list[Any]
    top: Sequence[Mapping[str, Any]]

    def __len__(self) -> int:
        return len(self.names)


def reported(choice: Mapping[str, Any]) -> Reported:
    """Return what a choice says of its tokens."""
    found = choice.get("logprobs")
    if isinstance(found, dict) and isinstance(found.get("content"), list):
        entries = [dict(entry) for entry in found["content"]]
        best = [{_name(each): each.get("logprob") for each in entry.get("top_logprobs") or []} for entry in entries]
        return Reported([*map(_name, entries)], [entry.get("logprob") for entry in entries], best)
    if not isinstance(found, dict) or not isinstance(found.get("tokens"), list):
        raise RowError("it has no log-probs")
    names, logprobs = found["tokens"], found.get("token_logprobs")
    if not isinstance(logprobs, list) or len(logprobs) != len(names) or not {*map(type, names)} <= {str}:
        raise RowError("its log-probs are not one for each of its tokens")
    top = [each if isinstance(each, dict) else {} for each in found.get("top_logprobs") or []]
    return Reported(names, logprobs, [*top, *[{}] * (len(names) - len(top))])


def count(reply: Any, name: str) -> int | None:
    """Return a number of the reply's ``usage``, such as ``prompt_tokens``; None if it has none."""
    usage = reply.get("usage") if isinstance(reply, dict) else None
    found = usage.get(name) if isinstance(usage, dict) else None
    return found if type(found) is int else None


def _name(entry: Mapping[str, Any]) -> str:
    # llama.cpp gives the id as well.
    return f"{BY_ID}{entry['id']}" if type(entry.get("id")) is int else str(entry["token"])
