"""Find out by trying what a server does not say, step by step: how it takes prompts, whether it says which ids it has
sampled, how answers can end, what it honours, and which log-probs it returns.

What cannot be shown is not declared. Each function takes what is known so far and returns it with what it has found.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from corelm.errors import CoreLMError, EngineError, InvalidRequestError
from corelm.spec import SamplingParams, StopStrings
from corelm_engine_kit import RowError, only_choice
from openai_backend.capabilities import no_completions
from openai_backend.probing_logprobs import CANDIDATES, with_logprobs, with_penalties, with_scores
from openai_backend.replies import BY_ID, count
from openai_backend.sampling import COLDEST, HOTTEST, NEUTRAL
from openai_backend.server_info import ServerInfo
from openai_backend.trials import TEXTS, Answer, Trials, is_completion
from openai_backend.vocabulary import Naming

if TYPE_CHECKING:
    from corelm.spec import Deadline
    from corelm_engine_kit import HttpClient

_log = logging.getLogger(__name__)

#: Fields by which servers say which ids they have sampled.
_ASK_FOR_IDS: dict[str, Any] = {"return_token_ids": True, "return_tokens_as_token_ids": True}
#: The tokens of an answer. Two seeds hardly ever agree on so many by chance.
_LENGTH = 12
#: How many seeds are tried, and how many different answers they have to give. If a server
#: ignores seeds, its answers are drawn from some distribution. Whatever that is, it repeats eight answers of which four
#: differ in two more rounds with a chance below 1e-8. An engine whose answers hardly differ does not get its seeds
#: declared, even if it honours them.
_SEEDS, _DIFFERENT = 8, 4
#: The tokens of answers that are compared where they need not be equal for certain.
_COMPARED = 4
#: More prompts for that.
_MORE_TEXTS = ("My name is", "It was a dark and stormy night, and", "def add(a, b):")
#: A bias with which a token is always the most probable one.
_CERTAIN = 100
#: A top_p that only the most probable token passes.
_TIGHT = 1e-6


def probe_server(client: HttpClient, info: ServerInfo, deadline: Deadline) -> ServerInfo:
    """Return `info` with what the server is seen to do.

    Raises:
        EngineError: the server has no completions, or reads prompts in no way that is known.
        InvalidRequestError: it refuses the plainest request, for example because of the model's name.
        TimeoutError: the deadline has passed.
    """
    trials = Trials(client, deadline)
    for step in (
        with_prompts,
        with_ids,
        with_ends,
        with_sampling,
        with_seeds,
        with_logprobs,
        with_penalties,
        with_scores,
    ):
        info = step(trials, info)
    _log.info("%s: %s", client.base_url, _summary(info))
    return info


def with_prompts(trials: Trials, info: ServerInfo) -> ServerInfo:
    """Find out whether the server takes ids, and which fields it does not refuse."""
    vocabulary, optional = info.vocabulary, {**NEUTRAL, **_ASK_FOR_IDS}
    prompts = [vocabulary.encode(text) for text in TEXTS]
    plain = {**info.fields, "max_tokens": 1, "temperature": 0.0}
    requests = [{**plain, "prompt": TEXTS[0]}, *({**plain, "prompt": prompt} for prompt in prompts)]
    requests += [{**plain, name: value, "prompt": TEXTS[0]} for name, value in optional.items()]
    by_text, *replies = trials.post(requests)
    if isinstance(by_text, CoreLMError):
        raise _refusal(trials, info, by_text)
    if not is_completion(by_text):
        raise EngineError(
            f"{trials.client.base_url}: what it answers is not a completion with one choice", usable=False
        )
    by_ids, others = replies[: len(prompts)], replies[len(prompts) :]
    accepted = {
        name: value
        for (name, value), reply in zip(optional.items(), others, strict=True)
        if not isinstance(reply, CoreLMError)
    }
    info = replace(info, fields={**accepted, **info.fields})
    if all(_reads(reply, ids) for reply, ids in zip(by_ids, prompts, strict=True)):
        _check_tokenizer(trials, info)
        counts = all(count(reply, "prompt_tokens") == len(ids) for reply, ids in zip(by_ids, prompts, strict=True))
        return replace(info, takes_ids=True, counts_prompts=counts)
    read = [
        count(by_text, "prompt_tokens"),
        *(count(reply, "prompt_tokens") for reply in trials.post([{**plain, "prompt": text} for text in TEXTS[1:]])),
    ]
    for adds in (False, True):
        if read == [len(vocabulary.encode(text, add_special_tokens=adds)) for text in TEXTS]:
            return replace(info, adds_special_tokens=adds, counts_prompts=True)
    if None not in read:
        raise _other_tokenizer(f"it reads {TEXTS[0]!r} as {read[0]} tokens, and the tokenizer makes {len(prompts[0])}")
    if vocabulary.encode("", add_special_tokens=True):
        raise EngineError(
            "the server takes prompts as text only and does not count their tokens, so it cannot be found out whether "
            "it adds the tokenizer's special tokens to them",
            usable=True,
        )
    return info


def with_ids(trials: Trials, info: ServerInfo) -> ServerInfo:
    """Find out whether replies say which ids were sampled, and how they name tokens."""
    requests = [{"max_tokens": _LENGTH, "temperature": heat, "logprobs": CANDIDATES} for heat in (0.0, 1.0, HOTTEST)]
    forced = [
        {"max_tokens": 1, "logprobs": CANDIDATES, "logit_bias": {str(token): _CERTAIN}} for token in _telling(info)
    ]
    answers = [each for each in trials.ask(info, *requests, *requests, *forced) if each is not None]
    stating = replace(info, states_ids=True)
    found = [Answer(each.reply, stating) for each in answers]
    # An id stands for a text: a server with another tokenizer would be found here.
    states_ids = bool(found) and all(each.ids is not None and _spells(each, each.ids, info) for each in found)
    # Most entries of a vocabulary are the same as their texts, so what more names stand for is what is meant.
    known = {each: info.vocabulary.known(_all_names(answers), each) for each in _possible_names(answers)}
    shown = [each for each in known if _is_shown(answers, each, info, states_ids)]
    naming = max(shown, key=lambda each: known[each], default=None)
    return replace(info, states_ids=states_ids, naming=naming)


def with_ends(trials: Trials, info: ServerInfo) -> ServerInfo:
    """Find out how answers can be ended, and kept from ending."""
    if not info.knows_ids:
        return info
    eos = min(info.eos_token_ids, default=None)
    if eos is not None:
        # With a bias, the first token is EOS, whatever the model.
        certain = {"max_tokens": 3, "logit_bias": {str(eos): _CERTAIN}}
        plain, ignoring = trials.ask(info, certain, {**certain, "ignore_eos": True})
        if plain is not None and plain.reason == "stop" and plain.ids in ([], [eos]):
            says, ignores = plain.ids == [eos], ignoring is not None and ignoring.ids == [eos] * 3
            info = replace(info, says_eos=says, ignores_eos=ignores and says)
    goes_on = {"max_tokens": _LENGTH, **({"ignore_eos": True} if info.ignores_eos else {})}
    (free,) = trials.ask(info, goes_on)
    if free is None or not free.ids:
        return info
    ids = free.ids
    # The last token that is new, so that an answer has to go on for a while before it ends, and would go on.
    at = max(at for at, token in enumerate(ids[:-1] or ids) if token not in ids[:at])
    stop, end = _stop_string(ids, info)
    by_id, by_string = trials.ask(
        info, {**goes_on, "stop_token_ids": [ids[at]]}, {**goes_on, **({} if stop is None else {"stop": [stop]})}
    )

    def ends(answer: Answer | None, length: int) -> bool:
        return answer is not None and answer.ids == ids[:length] and answer.reason == "stop"

    return replace(
        info,
        # EOS is sent as one of the stop ids, so the server has to ignore it otherwise.
        stops_at_ids=info.ignores_eos and at + 1 < len(ids) and ends(by_id, at + 1),
        stops_at_strings=stop is not None and ends(by_string, end),
    )


def with_sampling(trials: Trials, info: ServerInfo) -> ServerInfo:
    """Find out whether temperature and top_p do what they should."""
    draw = {"max_tokens": _LENGTH}
    greedy, *again = trials.ask(info, *[draw] * 4)
    # Some servers take no temperature above 1.
    for hottest in (HOTTEST, 1.0):
        hot = {**draw, "temperature": hottest}
        found = trials.ask(info, *[hot] * 4, *[{**hot, "top_p": _TIGHT}] * 4)
        drawn, cut = found[:4], found[4:]
        if any(each is not None for each in drawn):
            break
    sampling = dict(info.capabilities.sampling)
    samples = any(each is not None and (greedy is None or each.key != greedy.key) for each in drawn)
    if not samples:
        _log.warning("the server answers greedily at every temperature, so it is only asked for greedy answers")
        sampling["temperature"] = (0.0, 0.0)
    elif greedy is None:
        sampling["temperature"] = (COLDEST, hottest)
    elif sum(_equal(each, greedy) for each in again) > 1:
        # A 16-bit engine may answer in two ways if two tokens are equally likely, but not in another one each time.
        sampling["temperature"] = (0.0, hottest)
        if all(_equal(each, greedy) for each in cut):
            sampling["top_p"] = None
    else:
        _log.warning("the server samples at temperature 0 as well, so it is not asked for temperatures")
    # The plugin finds stop strings itself, in ids that were sampled and in those that the text is encoded to.
    sampling["stop"] = None
    return replace(info, samples=samples, capabilities=replace(info.capabilities, sampling=sampling))


def with_seeds(trials: Trials, info: ServerInfo) -> ServerInfo:
    """Find out whether equal seeds give equal answers, no matter what else the server works on."""
    if not info.samples:
        return info
    rows = [{"max_tokens": _LENGTH, "temperature": HOTTEST, "seed": seed} for seed in range(1, _SEEDS + 1)]
    together = trials.ask(info, *rows)
    again = trials.ask(info, *rows[::-1], *rows[::-1])
    alone = trials.ask(info, rows[1])
    keys = [each and each.key for each in together]
    honoured = (
        [each and each.key for each in again] == [*keys[::-1], *keys[::-1]]
        and [each and each.key for each in alone] == keys[1:2]
        and None not in keys
        and len({*keys}) >= _DIFFERENT
    )
    # A server does not say whether it is slower with seeds, and some are.
    capabilities = replace(info.capabilities, per_answer_seeds=honoured, seeds_are_costly=honoured)
    return replace(info, capabilities=capabilities)


def _check_tokenizer(trials: Trials, info: ServerInfo) -> None:
    """Refuse a tokenizer whose ids are not the server's: it reads other texts in them, and answers otherwise.

    Greedy answers are compared, where they are the same twice. Those of a 16-bit engine may still differ by chance, and
    those to different prompts may be equal by chance, so most of them decide.
    """
    encode = info.vocabulary.encode
    forms = [[text, text, encode(text), encode(text, add_special_tokens=True)] for text in (*TEXTS, *_MORE_TEXTS)]
    plain = {**info.fields, "max_tokens": _COMPARED, "temperature": 0.0}
    replies = trials.post([{**plain, "prompt": prompt} for prompts in forms for prompt in prompts])
    texts = [only_choice(each).get("text") if is_completion(each) else None for each in replies]
    rows = [texts[at : at + 4] for at in range(0, len(texts), 4)]
    telling = [row for row in rows if row[0] and row[0] == row[1]]
    others = [row for row in telling if row[0] not in row[2:]]
    if len(others) > len(telling) / 2:
        said, _, by_ids, _ = others[0]
        raise _other_tokenizer(f"it answers {said!r} to a text, and {by_ids!r} to its ids")


def _other_tokenizer(why: str) -> EngineError:
    return EngineError(f"the server has another tokenizer: {why}; pass the server's own as tokenizer=", usable=True)


# Helpers --------------------------------------------------------------------------------------------------------------


def _refusal(trials: Trials, info: ServerInfo, error: CoreLMError) -> CoreLMError:
    """Return the error for a server that refuses the plainest request."""
    said = str(error)
    if "status 404" in said or "status 405" in said:
        return no_completions(trials.client, info.name, said)
    why = f"the server does not complete a text with the model {info.name!r}: {said}"
    return InvalidRequestError(why, field="model") if isinstance(error, InvalidRequestError) else EngineError(why)


def _equal(one: Answer | None, other: Answer) -> bool:
    return one is not None and one.key == other.key


def _reads(reply: Any, ids: list[int]) -> bool:
    """Return whether a reply says that the server has read these ids."""
    if isinstance(reply, CoreLMError) or not is_completion(reply):
        return False
    stated = only_choice(reply).get("prompt_token_ids")
    return stated == ids if isinstance(stated, list) and stated else count(reply, "prompt_tokens") == len(ids)


def _spells(answer: Answer, ids: list[int], info: ServerInfo) -> bool:
    """Return whether ids decode to the text of an answer, of which a server may hold half a character back."""
    if not ids or max(ids) >= info.vocabulary.size:
        return False
    text = info.vocabulary.text(ids, skip_special_tokens=True)
    return text.rstrip("\ufffd") == answer.text.rstrip("\ufffd")


def _telling(info: ServerInfo) -> list[int]:
    """Return a few ids whose entries in the vocabulary are not what they decode to: an answer may have none of them."""
    vocabulary = info.vocabulary
    ids = sorted({token for text in TEXTS for token in vocabulary.encode(text)})
    return [token for token in ids if vocabulary.name(token, "text") != vocabulary.name(token, "entry")][:4]


def _all_names(answers: list[Answer]) -> set[str]:
    """Return the names of all tokens of these answers, and of those that were likely instead."""
    told = [each.told for each in answers if each.told is not None]
    return {name for each in told for names in (each.names, *each.top) for name in names}


def _possible_names(answers: list[Answer]) -> tuple[Naming, ...]:
    """Return the ways in which the tokens of these answers may be named."""
    names = _all_names(answers)
    if not names or any(each.told is None for each in answers):
        return ()
    return ("id",) if all(name.startswith(BY_ID) for name in names) else ("text", "entry")


def _is_shown(answers: list[Answer], naming: Naming, info: ServerInfo, states_ids: bool) -> bool:
    """Return whether an answer shows that its tokens are named in this way, and no answer shows that they are not.

    A name may stand for several ids: then the server does not say which one was sampled, and nothing follows from the
    answer.
    """
    shown = False
    for answer in answers:
        assert answer.told is not None
        names = answer.told.names
        if states_ids:
            ids = Answer(answer.reply, replace(info, states_ids=True)).ids
            if ids is None or len(ids) != len(names) or info.vocabulary.are_names(names, ids, naming) is not None:
                return False
        else:
            try:
                ids = info.vocabulary.ids_of(names, naming)
            except RowError:
                continue
            if max(ids, default=0) >= info.vocabulary.size:
                # The model has outputs that the tokenizer does not know.
                continue
            if not _spells(answer, ids, info):
                return False
        shown = True
    return shown


def _stop_string(ids: list[int], info: ServerInfo) -> tuple[str | None, int]:
    """Return a string that the answer with these ids has, and the number of ids that complete it; None if none fits."""
    for at in range(1, len(ids) - 1):
        before, whole = (info.vocabulary.text(ids[: at + more], skip_special_tokens=True) for more in (0, 1))
        new = whole[len(before) :] if whole.startswith(before) else ""
        # Servers hold back text that ends in the middle of a character.
        if new.strip() and "\ufffd" not in new and not before.endswith("\ufffd"):
            stops = StopStrings.of(SamplingParams(stop=(new,)), info.tokenizer)
            if stops.first_end(ids) == at + 1:
                return new, at + 1
    return None, 0


def _summary(info: ServerInfo) -> str:
    prompts = "takes ids" if info.takes_ids else "takes text"
    ids = "states ids" if info.states_ids else f"names tokens by {info.naming}" if info.naming else "states no ids"
    facts: Mapping[str, bool] = {
        "ignores EOS": info.ignores_eos,
        "stops at ids": info.stops_at_ids,
        "stops at strings": info.stops_at_strings,
        "honours seeds": info.capabilities.per_answer_seeds,
        "scores": info.echo is not None,
    }
    said = ", ".join(name for name, shown in facts.items() if shown)
    return f"{prompts}, {ids}, log-probs: {info.logprobs}; {said or 'nothing else'}"
