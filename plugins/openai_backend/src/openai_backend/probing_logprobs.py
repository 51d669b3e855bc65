"""Find out by trying which log-probs a server returns: of which distribution, with which penalties, of a prompt."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from corelm.errors import CoreLMError
from corelm.spec import GenerationMode
from corelm_engine_kit import RowError
from openai_backend.protocol import echo_request, row_scores
from openai_backend.sampling import PENALTIES
from openai_backend.server_info import LogprobsMode, ServerInfo
from openai_backend.trials import TEXTS, Answer, Trials

_log = logging.getLogger(__name__)

#: The two temperatures to compare, and how many tokens to draw at each.
_COLD, _HOT, _DRAWS = 1.0, 2.0, 8
#: How many of the most probable tokens to ask for: the most that OpenAI's servers allow.
CANDIDATES = 5
#: The least distance in nats between the likeliest and the least likely token. Below it, rounding could decide.
_SPREAD = 0.1
#: How far the quotient of two spreads may be from its ideal value.
_QUOTIENT = 0.1
#: How far, in nats, two log-probs of one token may be apart: 16-bit engines compute them in different batches.
_SAME = 0.05
#: A penalty that changes answers, and how long they are.
_PENALTY, _LENGTH = 2.0, 24

#: What is raised for a reply that is not about its request, or not built as expected.
_MALFORMED = (RowError, AttributeError, IndexError, KeyError, TypeError, ValueError)

LogProbs = Mapping[str, float]


def with_logprobs(trials: Trials, info: ServerInfo) -> ServerInfo:
    """Find out which distribution the log-probs of sampled tokens are of."""
    if not info.knows_ids or info.naming is None:
        return info
    mode = _mode(trials, info)
    if info.extra and not (mode == "raw" and _same_without_extra(trials, info)):
        _log.warning("the fields of extra_body may change the server's log-probs, so none are used")
        mode = "none"
    modes: dict[LogprobsMode, GenerationMode] = {
        "raw": "raw",
        "processed": "processed",
        "scaled": "scaled",
        "untouched": "raw",
    }
    declared = frozenset({modes[mode]}) if mode in modes else frozenset()
    return replace(info, logprobs=mode, capabilities=replace(info.capabilities, generation_modes=declared))


def with_penalties(trials: Trials, info: ServerInfo) -> ServerInfo:
    """Find out which penalties the server honours, and whether they are in its log-probs if they should be."""
    if info.logprobs not in ("raw", "processed", "scaled") or not info.takes_ids:
        return info
    shown = {name for name in PENALTIES if _is_penalised(trials, info, name)}
    sampling = {**info.capabilities.sampling, **dict.fromkeys(shown, (-2.0, 2.0))}
    capabilities = replace(info.capabilities, sampling=sampling)
    tried = frozenset(name for name in shown if info.logprobs != "processed" or _is_included(trials, info, name))
    return replace(info, tried=tried, capabilities=capabilities)


def with_scores(trials: Trials, info: ServerInfo) -> ServerInfo:
    """Find out whether the server scores a prompt that it echoes, and whether sampled tokens have the same scores."""
    if info.logprobs == "none" or not info.takes_ids:
        return info
    # Several, and short ones as well, because an answer may hold a token whose name says nothing.
    asked = [{"max_tokens": length, "temperature": 1.0} for length in (_LENGTH, 8, 2) for _ in range(_DRAWS)]
    answers = trials.ask(info, *asked)
    # Whether the server misnames the last id is found out below, once its scores are known to be right.
    last = info.vocabulary.size - 1
    answer = next(
        (each for each in answers if each is not None and each.ids and last not in each.ids and each.told is not None),
        None,
    )
    if answer is None or answer.ids is None or answer.told is None:
        return info
    prompt = info.vocabulary.encode(TEXTS[0])
    ids, sampled = [*prompt, *answer.ids], answer.told.logprobs
    for most in (0, 1):
        trying = replace(info, echo=most)
        (reply,) = trials.post([echo_request(ids, trying)])
        if isinstance(reply, CoreLMError):
            continue
        try:
            scores = row_scores(reply, ids, trying).logprobs[len(prompt) - 1 :]
            same = all(abs(one - other) < _SAME for one, other in zip(scores, sampled, strict=True))
        except _MALFORMED as error:
            _log.info("the server does not score what it echoes: %s", error)
            continue
        if same:
            # To score, a server samples a token, even if it does not return it.
            context = info.capabilities.max_context
            context = None if context is None else context - 1
            trying = replace(trying, misnames_last=_misnames_last(trials, trying))
            return replace(trying, capabilities=replace(info.capabilities, score=True, max_context=context))
        _log.warning("the server's scores of an echoed prompt are not those of the same tokens when sampled")
    return info


def _misnames_last(trials: Trials, info: ServerInfo) -> bool:
    """Return whether the server scores the vocabulary's last id under the name of id 0."""
    prompt = info.vocabulary.encode(TEXTS[0])
    ids = [*prompt, info.vocabulary.size - 1, *prompt]
    (reply,) = trials.post([echo_request(ids, info)])
    if isinstance(reply, CoreLMError):
        return False
    with suppress(*_MALFORMED):
        row_scores(reply, ids, info)
        return False
    with suppress(*_MALFORMED):
        row_scores(reply, ids, replace(info, misnames_last=True))
        return True
    return False


# The distribution -----------------------------------------------------------------------------------------------------


def _mode(trials: Trials, info: ServerInfo) -> LogprobsMode:
    """Return which log-probs the server returns, as far as two temperatures and a truncation can show it.

    The difference between two tokens does not contain the normaliser. A temperature divides it unless the log-probs are
    the model's own; a truncation moves all that are left if they are those of the distribution drawn from. What a
    server has only divided by the temperature is not a distribution.
    """
    cold, hot, greedy = (_by_name(trials, info, temperature=heat) for heat in (_COLD, _HOT, 0.0))
    if cold is None:
        return "none"
    common = sorted(cold.keys() & (hot or {}).keys(), key=lambda name: -cold[name])
    if hot is None or len(common) < 2 or (spread := cold[common[0]] - cold[common[-1]]) < _SPREAD:
        return _undecided(f"it names {len(common)} tokens at both temperatures, or equally likely ones")
    if sum(map(math.exp, hot.values())) > 1 + _SAME:
        return _undecided(f"at temperature {_HOT} the probabilities of its tokens have a sum above 1")
    best = math.exp(cold[common[0]])
    if best > 1 - _SPREAD:
        return _undecided("its likeliest token is almost certain, so that a truncation would not change its log-prob")
    cut = _by_name(trials, info, temperature=_COLD, top_p=best / 2)
    top = None if cut is None else cut.get(common[0])
    unmoved = top is not None and _agree(cold, {common[0]: top}) and (greedy is None or _agree(cold, greedy))
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


def _same_without_extra(trials: Trials, info: ServerInfo) -> bool:
    """Return whether the caller's fields leave the log-probs alone, such as a grammar would not."""
    fields = {name: value for name, value in info.fields.items() if name not in info.extra}
    own, without = (_by_name(trials, each, temperature=_COLD) for each in (info, replace(info, fields=fields)))
    return own is not None and without is not None and len(own.keys() & without.keys()) > 1 and _agree(own, without)


def _by_name(trials: Trials, info: ServerInfo, **fields: float) -> dict[str, float] | None:
    """Return the log-probs of the token after a prompt by name, as far as several replies give them, or None.

    Names that do not stand for one token are left out. All ids without an entry in the tokenizer have the name "", for
    example: their log-probs differ, and say nothing about the distribution.
    """
    requests = [{"max_tokens": 1, "logprobs": most, **fields} for most in (CANDIDATES, 1) for _ in range(_DRAWS)]
    found: dict[str, float] = {}
    for answer in trials.ask(info, *requests):
        if answer is not None and answer.told is not None and len(answer.told) == 1:
            found |= _numbers({**answer.told.top[0], answer.told.names[0]: answer.told.logprobs[0]})
    return {name: value for name, value in found.items() if _is_one_token(info, name)} or None


def _is_one_token(info: ServerInfo, name: str) -> bool:
    if info.naming is None:
        return False
    try:
        info.vocabulary.ids_of([name], info.naming)
    except RowError:
        return False
    return True


def _numbers(given: Mapping[str, object]) -> dict[str, float]:
    """Return the log-probs that are finite; servers report others as very low numbers."""
    return {
        name: float(value)
        for name, value in given.items()
        if isinstance(value, (int, float)) and -1000 < value <= _SAME
    }


def _agree(one: LogProbs, other: LogProbs) -> bool:
    return all(abs(one[name] - other[name]) < _SAME for name in one.keys() & other.keys())


def _undecided(why: str) -> LogprobsMode:
    _log.warning("the server's log-probs are only used at temperature 1 without truncation: %s", why)
    return "untouched"


# Penalties ------------------------------------------------------------------------------------------------------------


def _is_penalised(trials: Trials, info: ServerInfo, name: str) -> bool:
    """Return whether each greedy token is the likeliest one after the penalty, and some are others without it."""
    changed = False
    for text in TEXTS:
        answer, own = _penalised(trials, info, text, {name: _PENALTY})
        if answer is None:
            return False
        here = _explains(answer, own, name, in_logprobs=info.logprobs == "raw")
        if here is None:
            return False
        changed |= here
    return changed


def _is_included(trials: Trials, info: ServerInfo, name: str) -> bool:
    """Return whether the log-probs of drawn tokens are those after the penalty, and some would be others without it."""
    changed = False
    for text in TEXTS:
        answer, own = _penalised(trials, info, text, {name: _PENALTY, "temperature": 1.0})
        if answer is None or answer.told is None:
            return False
        seen: Counter[str] = Counter()
        for token, top, plain in zip(answer.told.names, answer.told.top, own, strict=True):
            before, after = _candidates(plain), _numbers(top)
            common = before.keys() & after.keys()
            penalties = _penalties(common, seen, name)
            # All tokens of a position are off by its normaliser.
            moved = [after[each] - (before[each] - penalties[each]) for each in common]
            if moved and max(moved) - min(moved) > _SAME:
                return False
            changed |= len({*penalties.values()}) > 1
            seen[token] += 1
    return changed


def _penalised(
    trials: Trials, info: ServerInfo, text: str, fields: Mapping[str, float]
) -> tuple[Answer | None, list[Answer | None]]:
    """Return an answer under a penalty, and for each of its tokens an answer of one token at the same place without it.

    None if the server does not name the answer's tokens.
    """
    asked = {"max_tokens": _LENGTH, "logprobs": CANDIDATES, **fields}
    (answer,) = trials.ask(info, asked | ({"ignore_eos": True} if info.ignores_eos else {}), text=text)
    if answer is None or not answer.ids or answer.told is None or len(answer.told) != len(answer.ids):
        return None, []
    prompt = info.vocabulary.encode(text)
    one = {"max_tokens": 1, "temperature": 1.0, "logprobs": CANDIDATES}
    return answer, trials.ask(info, *({**one, "ids": [*prompt, *answer.ids[:at]]} for at in range(len(answer.ids))))


def _candidates(answer: Answer | None) -> dict[str, float]:
    """Return the log-probs of the most probable first tokens by name; none if the answer does not have them."""
    return {} if answer is None or answer.told is None or not answer.told.top else _numbers(answer.told.top[0])


def _penalties(names: Iterable[str], seen: Mapping[str, int], name: str) -> dict[str, float]:
    """Return what the penalty of this name takes from the logit of each token, which was sampled so many times."""
    return {each: _PENALTY * (seen.get(each, 0) if name == "frequency_penalty" else each in seen) for each in names}


def _explains(answer: Answer, own: list[Answer | None], name: str, in_logprobs: bool) -> bool | None:
    """Return whether a penalty of this name has changed a greedy answer; None if it does not explain the answer.

    Args:
        answer: sampled under the penalty.
        own: for each of its tokens, an answer of one token at the same place without a penalty.
        in_logprobs: whether the log-probs of `answer` have to be those without a penalty.
    """
    assert answer.told is not None
    seen: Counter[str] = Counter()
    changed = False
    for at, (token, plain) in enumerate(zip(answer.told.names, own, strict=True)):
        logprobs = _candidates(plain)
        if len(logprobs) < 2:
            return None
        penalties = _penalties(logprobs, seen, name)
        penalised = {each: value - penalties[each] for each, value in logprobs.items()}
        best = max(penalised, key=lambda each: penalised[each])
        # What is not among the candidates is less likely than the last of them.
        if penalised[best] > min(logprobs.values()) and penalised.get(token, -math.inf) < penalised[best] - _SAME:
            return None
        changed |= token != max(logprobs, key=lambda each: logprobs[each])
        if in_logprobs and not _agree(logprobs, _numbers(answer.told.top[at])):
            return None
        seen[token] += 1
    return changed
