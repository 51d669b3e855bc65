"""Find out by trying what a server does not say, step by step: how it takes prompts, whether it says which ids it has
sampled, how answers can end, what it honours, and which log-probs it returns.

What cannot be shown is not declared. Each step takes what is known so far and returns it with what it has found.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from corelm.errors import CoreLMError, EngineError, InvalidRequestError
from corelm.spec import GenerationMode, SamplingParams, StopStrings
from corelm_engine_kit import HttpEngine, Payload, RowError, TransientError, only_choice
from openai_backend.protocol import (
    COLDEST,
    HOTTEST,
    LOGPROBS,
    NEUTRAL,
    PENALTIES,
    answer_ids,
    count,
    echo_request,
    prompt_of,
    reported,
    row_scores,
)
from openai_backend.server_info import LogprobsMode, ServerInfo
from openai_backend.vocabulary import BY_ID, Naming

if TYPE_CHECKING:
    from corelm.spec import Deadline

T = TypeVar("T")
LogProbs = Mapping[str, float]
#: Takes a token of an answer under a penalty, the log-probs of its candidates without and with the penalty, and what
#: the penalty takes from each. Returns whether the penalty has changed something; None if it does not explain it.
PenaltyCheck = Callable[[str, LogProbs, LogProbs, LogProbs], bool | None]

_log = logging.getLogger(__name__)

#: What is logged of what was found.
_FOUND = ("takes_ids", "states_ids", "naming", "logprobs", "ignores_eos", "stops_at_ids", "stops_at_strings", "echo")
#: Texts to begin with. After the second one, answers repeat themselves, so that penalties change them.
TEXTS = ("Where is the", "One, two, three, four, one, two, three, four, one, two,")
#: More prompts for answers that are compared where they need not be equal for certain, and how many tokens they have.
_MORE_TEXTS, _COMPARED = ("My name is", "It was a dark and stormy night, and", "def add(a, b):"), 4
#: Fields by which servers say which ids they have sampled.
_ASK_FOR_IDS: Payload = {"return_token_ids": True, "return_tokens_as_token_ids": True}
#: Statuses by which servers, rightly or not, refuse a request that they do not understand.
_NOT_UNDERSTOOD = frozenset({500, 501})
#: What is raised for a reply that is not about its request, or not built as expected.
_MALFORMED = (RowError, AttributeError, IndexError, KeyError, TypeError, ValueError)
#: The tokens of an answer. Two seeds hardly ever agree on so many by chance.
_LENGTH = 12
#: How many seeds are tried, and how many different answers they have to give. If a server
#: ignores seeds, its answers are drawn from some distribution. Whatever that is, it repeats eight answers of which four
#: differ in two more rounds with a chance below 1e-8. An engine whose answers hardly differ does not get its seeds
#: declared, even if it honours them.
_SEEDS, _DIFFERENT = 8, 4
#: A bias with which a token is always the most probable one, and a top_p that only the most probable token passes.
_CERTAIN, _TIGHT = 100, 1e-6
#: The two temperatures at which log-probs are compared, and how many tokens to draw at each.
_COLD, _HOT, _DRAWS = 1.0, 2.0, 8
#: How many of the most probable tokens to ask for: the most that OpenAI's servers allow.
_CANDIDATES = 5
#: The least distance in nats between the likeliest and the least likely token. Below it, rounding could decide.
_SPREAD = 0.1
#: How far the quotient of two spreads may be from its ideal value.
_QUOTIENT = 0.1
#: How far, in nats, two log-probs of one token may be apart: 16-bit engines compute them in different batches.
_SAME = 0.05
#: A penalty that changes answers, and how long they are.
_PENALTY, _PENALISED_LENGTH = 2.0, 24


def probe_server(engine: HttpEngine, deadline: Deadline) -> ServerInfo:
    """Return the `info` of an engine with what its server is seen to do.

    Raises:
        EngineError: the server has no completions, or reads prompts in no way that is known.
        InvalidRequestError: it refuses the plainest request, for example because of the model's name.
        TimeoutError: the deadline has passed.
    """
    trials, info = Trials(engine, deadline), engine.info
    for step in STEPS:
        info = step(trials, info)
    _log.info("%s: %s", trials.url, ", ".join(f"{name}={getattr(info, name)}" for name in _FOUND))
    return info


class Answer:
    """What a server answered.

    Attributes:
        text: the answer's text.
        reason: its finish reason.
        told: what the reply says of its tokens; None if it says nothing.
        ids: the ids that were sampled; None if they are not known.
        key: what is equal in equal answers.
    """

    def __init__(self, reply: Any, info: ServerInfo) -> None:
        choice = only_choice(reply)
        self.reply, self.text, self.reason = reply, str(choice.get("text")), choice.get("finish_reason")
        self.told = _attempt(reported, choice)
        read = _attempt(answer_ids, reply, info, False) if info.knows_ids else None
        ids = None if read is None else read[0]
        self.ids: list[int] | None = ids if isinstance(ids, list) and {*map(type, ids)} <= {int} else None
        self.key = (None if self.ids is None else tuple(self.ids), self.text, self.reason)


class Trials:
    """Sends short requests to a server that is being opened, and returns what it answers."""

    def __init__(self, engine: HttpEngine, deadline: Deadline) -> None:
        self.url = engine.client.base_url
        self._engine, self._deadline = engine, deadline

    def post(self, payloads: Sequence[Payload]) -> list[Any]:
        """Return the reply to each payload, or the error with which the server refuses it."""
        return self._engine.try_rows(payloads, self._deadline, _is_refusal)

    def ask(self, info: ServerInfo, *requests: Mapping[str, Any], text: str = TEXTS[0]) -> list[Answer | None]:
        """Return the answer to each request; None where the server refuses it, or does not complete it.

        Args:
            requests: fields in addition to those of every request; ``ids`` replaces the prompt.
        """
        ids = info.vocabulary.encode(text, add_special_tokens=info.adds_special_tokens)
        payloads = []
        for given in requests:
            fields = {name: value for name, value in given.items() if name != "ids"}
            prompt = prompt_of(given.get("ids", ids), info)
            plain = {"temperature": 0.0, "top_p": 1.0, "logprobs": LOGPROBS} if info.naming else {"temperature": 0.0}
            payloads.append({**info.fields, **plain, **fields, "prompt": text if prompt is None else prompt})
        return [_attempt(Answer, reply, info) for reply in self.post(payloads)]


# Prompts --------------------------------------------------------------------------------------------------------------


def with_prompts(trials: Trials, info: ServerInfo) -> ServerInfo:
    """Find out whether the server takes ids, and which fields it does not refuse."""
    vocabulary, optional = info.vocabulary, {**NEUTRAL, **_ASK_FOR_IDS}
    prompts = [vocabulary.encode(text) for text in TEXTS]
    plain = {**info.fields, "max_tokens": 1, "temperature": 0.0}
    requests = [{**plain, "prompt": prompt} for prompt in (TEXTS[0], *prompts)]
    requests += [{**plain, name: value, "prompt": TEXTS[0]} for name, value in optional.items()]
    by_text, *replies = trials.post(requests)
    if isinstance(by_text, CoreLMError):
        raise _refusal(trials.url, info.name, by_text)
    if not _is_completion(by_text):
        raise EngineError(f"{trials.url}: what it answers is not a completion with one choice", usable=False)
    by_ids, others = replies[: len(prompts)], replies[len(prompts) :]
    tried = zip(optional.items(), others, strict=True)
    accepted = {name: value for (name, value), reply in tried if not isinstance(reply, CoreLMError)}
    info = replace(info, fields={**accepted, **info.fields})
    if all(_reads(reply, ids) for reply, ids in zip(by_ids, prompts, strict=True)):
        _check_tokenizer(trials, info)
        counts = all(count(reply, "prompt_tokens") == len(ids) for reply, ids in zip(by_ids, prompts, strict=True))
        return replace(info, takes_ids=True, counts_prompts=counts)
    more = trials.post([{**plain, "prompt": text} for text in TEXTS[1:]])
    read = [count(reply, "prompt_tokens") for reply in (by_text, *more)]
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


def _reads(reply: Any, ids: list[int]) -> bool:
    """Return whether a reply says that the server has read these ids."""
    if not _is_completion(reply):
        return False
    stated = only_choice(reply).get("prompt_token_ids")
    return stated == ids if isinstance(stated, list) and stated else count(reply, "prompt_tokens") == len(ids)


def _check_tokenizer(trials: Trials, info: ServerInfo) -> None:
    """Refuse a tokenizer whose ids are not the server's: it reads other texts in them, and answers otherwise.

    Greedy answers are compared, where they are the same twice. Those of a 16-bit engine may still differ by chance, and
    those to different prompts may be equal by chance, so most of them decide.
    """
    encode = info.vocabulary.encode
    forms = [[text, text, encode(text), encode(text, add_special_tokens=True)] for text in (*TEXTS, *_MORE_TEXTS)]
    plain = {**info.fields, "max_tokens": _COMPARED, "temperature": 0.0}
    replies = trials.post([{**plain, "prompt": prompt} for prompts in forms for prompt in prompts])
    texts = [only_choice(each).get("text") if _is_completion(each) else None for each in replies]
    rows = [texts[at : at + 4] for at in range(0, len(texts), 4)]
    telling = [row for row in rows if row[0] and row[0] == row[1]]
    others = [row for row in telling if row[0] not in row[2:]]
    if len(others) > len(telling) / 2:
        raise _other_tokenizer(f"it answers {others[0][0]!r} to a text, and {others[0][2]!r} to its ids")


def _other_tokenizer(why: str) -> EngineError:
    return EngineError(f"the server has another tokenizer: {why}; pass the server's own as tokenizer=", usable=True)


def _refusal(url: str, name: str, error: CoreLMError) -> CoreLMError:
    """Return the error for a server that refuses the plainest request."""
    said = str(error)
    if "status 404" in said or "status 405" in said:
        return EngineError(
            f"{url} does not answer /v1/completions for the model {name!r} ({said}). A server that only chats renders "
            "conversations by itself, so the ids that it reads would not be those that corelm has rendered and "
            "records. Use one that has /v1/completions: llama.cpp, vLLM, SGLang, LM Studio and `transformers serve` do",
            usable=False,
        )
    why = f"the server does not complete a text with the model {name!r}: {said}"
    return InvalidRequestError(why, field="model") if isinstance(error, InvalidRequestError) else EngineError(why)


# Ids and names --------------------------------------------------------------------------------------------------------


def with_ids(trials: Trials, info: ServerInfo) -> ServerInfo:
    """Find out whether replies say which ids were sampled, and how they name tokens."""
    vocabulary = info.vocabulary
    requests = [{"max_tokens": _LENGTH, "temperature": heat, "logprobs": _CANDIDATES} for heat in (0.0, 1.0, HOTTEST)]
    # A few ids whose entries in the vocabulary are not what they decode to: an answer may have none of them.
    ids = sorted({token for text in TEXTS for token in vocabulary.encode(text)})
    telling = [token for token in ids if vocabulary.name(token, "text") != vocabulary.name(token, "entry")][:4]
    forced = [{"max_tokens": 1, "logprobs": _CANDIDATES, "logit_bias": {str(token): _CERTAIN}} for token in telling]
    answers = [each for each in trials.ask(info, *requests, *requests, *forced) if each is not None]
    stated = [Answer(each.reply, replace(info, states_ids=True)).ids for each in answers]
    # An id stands for a text: a server with another tokenizer would be found here.
    states_ids = bool(answers) and all(_spells(*each, info) for each in zip(answers, stated, strict=True))
    told = [each.told for each in answers if each.told is not None]
    names = {name for each in told for group in (each.names, *each.top) for name in group}
    possible: tuple[Naming, ...] = ("id",) if all(name.startswith(BY_ID) for name in names) else ("text", "entry")
    if not names or len(told) < len(answers):
        possible = ()
    known_ids = stated if states_ids else [None] * len(answers)
    shown = [each for each in possible if _is_shown(answers, known_ids, each, info)]
    # Most entries of a vocabulary are the same as their texts, so what more names stand for is what is meant.
    naming = max(shown, key=lambda each: vocabulary.known(names, each), default=None)
    return replace(info, states_ids=states_ids, naming=naming)


def _is_shown(answers: list[Answer], stated: Sequence[list[int] | None], naming: Naming, info: ServerInfo) -> bool:
    """Return whether an answer shows that its tokens are named in this way, and no answer shows that they are not.

    A name may stand for several ids, or for an output of the model that the tokenizer does not know: then the server
    does not say which one was sampled, and nothing follows from the answer.
    """
    vocabulary, shown = info.vocabulary, False
    for answer, ids in zip(answers, stated, strict=True):
        assert answer.told is not None
        names = answer.told.names
        if ids is not None:
            if len(ids) != len(names) or vocabulary.are_names(names, ids, naming) is not None:
                return False
        else:
            named = _attempt(vocabulary.ids_of, names, naming)
            if named is None or max(named, default=0) >= vocabulary.size:
                continue
            if not _spells(answer, named, info):
                return False
        shown = True
    return shown


def _spells(answer: Answer, ids: list[int] | None, info: ServerInfo) -> bool:
    """Return whether ids decode to the text of an answer, of which a server may hold half a character back."""
    if not ids or max(ids) >= info.vocabulary.size:
        return False
    text = info.vocabulary.text(ids, skip_special_tokens=True)
    return text.rstrip("\ufffd") == answer.text.rstrip("\ufffd")


# Sampling -------------------------------------------------------------------------------------------------------------


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


def with_sampling(trials: Trials, info: ServerInfo) -> ServerInfo:
    """Find out whether temperature and top_p do what they should."""
    draw = {"max_tokens": _LENGTH}
    greedy, *again = _keys(trials.ask(info, *[draw] * 4))
    # Some servers take no temperature above 1.
    for hottest in (HOTTEST, 1.0):
        hot = {**draw, "temperature": hottest}
        found = _keys(trials.ask(info, *[hot] * 4, *[{**hot, "top_p": _TIGHT}] * 4))
        drawn, cut = found[:4], found[4:]
        if {*drawn} != {None}:
            break
    sampling = dict(info.capabilities.sampling)
    samples = not {*drawn} <= {None, greedy}
    if not samples:
        _log.warning("the server answers greedily at every temperature, so it is only asked for greedy answers")
        sampling["temperature"] = (0.0, 0.0)
    elif greedy is None:
        sampling["temperature"] = (COLDEST, hottest)
    elif again.count(greedy) > 1:
        # A 16-bit engine may answer in two ways if two tokens are equally likely, but not in another one each time.
        sampling["temperature"] = (0.0, hottest)
        if cut.count(greedy) == len(cut):
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
    keys, again = _keys(trials.ask(info, *rows)), _keys(trials.ask(info, *rows[::-1], *rows[::-1]))
    alone = _keys(trials.ask(info, rows[1]))
    honoured = again == [*keys[::-1], *keys[::-1]] and alone == keys[1:2]
    honoured = honoured and None not in keys and len({*keys}) >= _DIFFERENT
    # A server does not say whether it is slower with seeds, and some are.
    capabilities = replace(info.capabilities, per_answer_seeds=honoured, seeds_are_costly=honoured)
    return replace(info, capabilities=capabilities)


# Log-probs ------------------------------------------------------------------------------------------------------------


def with_logprobs(trials: Trials, info: ServerInfo) -> ServerInfo:
    """Find out which distribution the log-probs of sampled tokens are of."""
    if info.naming is None:
        return info
    mode = _mode(trials, info)
    if info.extra and not (mode == "raw" and _same_without_extra(trials, info)):
        _log.warning("the fields of extra_body may change the server's log-probs, so none are used")
        mode = "none"
    declared: set[GenerationMode] = set()
    if mode != "none":
        declared.add("raw" if mode == "untouched" else mode)
    capabilities = replace(info.capabilities, generation_modes=frozenset(declared))
    return replace(info, logprobs=mode, capabilities=capabilities)


def _mode(trials: Trials, info: ServerInfo) -> LogprobsMode:
    """Return which log-probs the server returns, as far as two temperatures and a truncation can show it.

    The difference between two tokens does not contain the normaliser. A temperature divides it unless the log-probs are
    the model's own; a truncation moves all that are left if they are those of the distribution drawn from. What a
    server has only divided by the temperature is not a distribution.
    """
    cold, hot, greedy = (_by_name(trials, info, temperature=heat) for heat in (_COLD, _HOT, 0.0))
    if not cold:
        return "none"
    common = sorted(cold.keys() & hot.keys(), key=lambda name: -cold[name])
    if len(common) < 2 or (spread := cold[common[0]] - cold[common[-1]]) < _SPREAD:
        return _undecided(f"it names {len(common)} tokens at both temperatures, or equally likely ones")
    if sum(map(math.exp, hot.values())) > 1 + _SAME:
        return _undecided(f"at temperature {_HOT} the probabilities of its tokens have a sum above 1")
    best = math.exp(cold[common[0]])
    if best > 1 - _SPREAD:
        return _undecided("its likeliest token is almost certain, so that a truncation would not change its log-prob")
    top = _by_name(trials, info, temperature=_COLD, top_p=best / 2).get(common[0])
    unmoved = top is not None and _agree(cold, {common[0]: top}) and _agree(cold, greedy)
    quotient = (hot[common[0]] - hot[common[-1]]) / spread
    if abs(quotient - 1) < _QUOTIENT:
        # At temperature 0 and under a truncation they have to be the model's own as well.
        return "raw" if unmoved and _agree(cold, hot) else _undecided("they differ")
    if abs(quotient - _COLD / _HOT) >= _QUOTIENT:
        return _undecided(f"the distances of its tokens are {quotient:.3f} times as large at temperature {_HOT}")
    if top is None or "top_p" not in info.capabilities.sampling:
        return _undecided("it could not be tried whether a truncation changes them")
    if abs(top) < _SAME:
        return "processed"
    return "scaled" if unmoved else _undecided("they differ")


def _undecided(why: str) -> LogprobsMode:
    _log.warning("the server's log-probs are only used at temperature 1 without truncation: %s", why)
    return "untouched"


def _same_without_extra(trials: Trials, info: ServerInfo) -> bool:
    """Return whether the caller's fields leave the log-probs alone, such as a grammar would not."""
    fields = {name: value for name, value in info.fields.items() if name not in info.extra}
    own, without = (_by_name(trials, each, temperature=_COLD) for each in (info, replace(info, fields=fields)))
    return len(own.keys() & without.keys()) > 1 and _agree(own, without)


def _by_name(trials: Trials, info: ServerInfo, **fields: float) -> LogProbs:
    """Return the log-probs of the token after a prompt by name, as far as several replies give them.

    Names that do not stand for one token are left out. All ids without an entry in the tokenizer have the name "", for
    example: their log-probs differ, and say nothing about the distribution.
    """
    assert info.naming is not None
    requests = [{"max_tokens": 1, "logprobs": most, **fields} for most in (_CANDIDATES, 1) for _ in range(_DRAWS)]
    found: dict[str, float] = {}
    for answer in trials.ask(info, *requests):
        if answer is not None and answer.told is not None and len(answer.told) == 1:
            found |= _numbers({**answer.told.top[0], answer.told.names[0]: answer.told.logprobs[0]})
    one_token = [name for name in found if _attempt(info.vocabulary.ids_of, [name], info.naming)]
    return {name: found[name] for name in one_token}


def with_scores(trials: Trials, info: ServerInfo) -> ServerInfo:
    """Find out whether the server scores a prompt that it echoes, and whether sampled tokens have the same scores."""
    if info.logprobs == "none" or not info.takes_ids:
        return info
    # Several, and short ones as well, because an answer may hold a token whose name says nothing.
    asked = [{"max_tokens": length, "temperature": 1.0} for length in (24, 8, 2) for _ in range(_DRAWS)]
    # Whether the server misnames the last id is found out below, once its scores are known to be right.
    prompt, last = info.vocabulary.encode(TEXTS[0]), info.vocabulary.size - 1
    answers = [each for each in trials.ask(info, *asked) if each is not None and each.ids and each.told is not None]
    answer = next((each for each in answers if last not in (each.ids or ())), None)
    if answer is None or answer.ids is None or answer.told is None:
        return info
    ids, sampled = [*prompt, *answer.ids], answer.told.logprobs
    for most in (0, 1):
        trying = replace(info, echo=most)
        (reply,) = trials.post([echo_request(ids, trying)])
        scores = _attempt(row_scores, reply, ids, trying)
        if scores is None:
            continue
        if _attempt(_all_same, scores.logprobs[len(prompt) - 1 :], sampled):
            # The last id may have the name of the first one.
            row = [*prompt, last, *prompt]
            (reply,) = trials.post([echo_request(row, trying)])
            renamed = replace(trying, misnames_last=True)
            plain, other = (_attempt(row_scores, reply, row, each) for each in (trying, renamed))
            if plain is None and other is not None:
                trying = renamed
            # To score, a server samples a token, even if it does not return it.
            context = info.capabilities.max_context
            context = None if context is None else context - 1
            return replace(trying, capabilities=replace(info.capabilities, score=True, max_context=context))
        _log.warning("the server's scores of an echoed prompt are not those of the same tokens when sampled")
    return info


# Penalties ------------------------------------------------------------------------------------------------------------


def with_penalties(trials: Trials, info: ServerInfo) -> ServerInfo:
    """Find out which penalties the server honours, and whether they are in its log-probs if they should be."""
    if info.logprobs not in ("raw", "processed", "scaled") or not info.takes_ids:
        return info
    raw = info.logprobs == "raw"
    shown = {name for name in PENALTIES if _is_shown_by(trials, info, name, _greedy_check(raw))}
    sampling = {**info.capabilities.sampling, **dict.fromkeys(shown, (-2.0, 2.0))}
    tried = shown
    if info.logprobs == "processed":
        tried = {name for name in shown if _is_shown_by(trials, info, name, _is_included, temperature=1.0)}
    return replace(info, tried=frozenset(tried), capabilities=replace(info.capabilities, sampling=sampling))


def _is_shown_by(trials: Trials, info: ServerInfo, name: str, check: PenaltyCheck, **fields: float) -> bool:
    """Return whether a penalty explains answers that were sampled under it, and has changed some.

    Each token is compared with an answer of one token at the same place without the penalty.
    """
    changed = False
    asked = {"max_tokens": _PENALISED_LENGTH, "logprobs": _CANDIDATES, name: _PENALTY, **fields}
    asked |= {"ignore_eos": True} if info.ignores_eos else {}
    one = {"max_tokens": 1, "temperature": 1.0, "logprobs": _CANDIDATES}
    for text in TEXTS:
        (answer,) = trials.ask(info, asked, text=text)
        if answer is None or not answer.ids or answer.told is None or len(answer.told) != len(answer.ids):
            return False
        prompt = info.vocabulary.encode(text)
        own = trials.ask(info, *({**one, "ids": [*prompt, *answer.ids[:at]]} for at in range(len(answer.ids))))
        seen: Counter[str] = Counter()
        for token, top, plain in zip(answer.told.names, answer.told.top, own, strict=True):
            before = _numbers(plain.told.top[0]) if plain is not None and plain.told and plain.told.top else {}
            times = {each: seen[each] if name == "frequency_penalty" else each in seen for each in before}
            found = check(token, before, _numbers(top), {each: _PENALTY * times[each] for each in before})
            if found is None:
                return False
            changed |= found
            seen[token] += 1
    return changed


def _greedy_check(raw: bool) -> PenaltyCheck:
    """Return a check that a greedy token is the likeliest one after the penalty; raw log-probs do not include it."""

    def check(token: str, before: LogProbs, after: LogProbs, cost: LogProbs) -> bool | None:
        if len(before) < 2 or (raw and not _agree(before, after)):
            return None
        penalised = {each: value - cost[each] for each, value in before.items()}
        best = max(penalised, key=lambda each: penalised[each])
        # What is not among the candidates is less likely than the last of them.
        if penalised[best] > min(before.values()) and penalised.get(token, -math.inf) < penalised[best] - _SAME:
            return None
        return token != max(before, key=lambda each: before[each])

    return check


def _is_included(token: str, before: LogProbs, after: LogProbs, cost: LogProbs) -> bool | None:
    """Check that log-probs are those after the penalty."""
    common = before.keys() & after.keys()
    # All tokens of a position are off by its normaliser.
    moved = [after[each] - (before[each] - cost[each]) for each in common]
    if moved and max(moved) - min(moved) > _SAME:
        return None
    return len({cost[each] for each in common}) > 1


#: The steps, in their order.
STEPS: tuple[Callable[[Trials, ServerInfo], ServerInfo], ...] = (
    *(with_prompts, with_ids, with_ends, with_sampling, with_seeds),
    *(with_logprobs, with_penalties, with_scores),
)


# Helpers --------------------------------------------------------------------------------------------------------------


def _attempt(function: Callable[..., T], *arguments: Any) -> T | None:
    """Return what a function makes of a reply; None if the reply is not built as it expects."""
    try:
        return function(*arguments)
    except _MALFORMED:
        return None


def _is_completion(reply: Any) -> bool:
    return _attempt(only_choice, reply) is not None


def _is_refusal(error: CoreLMError) -> bool:
    """Return whether an error says that the server does not understand the request."""
    if isinstance(error, TransientError):
        return error.status in _NOT_UNDERSTOOD
    return isinstance(error, InvalidRequestError) or (isinstance(error, EngineError) and "status 405" in str(error))


def _keys(answers: Sequence[Answer | None]) -> list[Any]:
    return [answer and answer.key for answer in answers]


def _numbers(given: Mapping[str, Any]) -> dict[str, float]:
    """Return the log-probs that are finite; servers report others as very low numbers."""
    kept = {name: value for name, value in given.items() if isinstance(value, (int, float))}
    return {name: float(value) for name, value in kept.items() if -1000 < value <= _SAME}


def _agree(one: LogProbs, other: LogProbs) -> bool:
    return all(abs(one[name] - other[name]) < _SAME for name in one.keys() & other.keys())


def _all_same(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(abs(a - b) < _SAME for a, b in zip(one, other, strict=True))
