"""Find out by trying what a server does not say, step by step: how it takes prompts, whether it says which ids it has
sampled, how answers can end, what it honours, and which log-probs it returns.

What cannot be shown is not declared.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, TypeVar

from corelm.errors import CoreLMError, EngineError, InvalidRequestError
from corelm.spec import Deadline, SamplingParams, StopStrings
from corelm_engine_kit import HttpEngine, Payload, RowError, TransientError, checked_ids, only_choice
from openai_backend import protocol
from openai_backend.server_info import LogprobsMode, ServerInfo
from openai_backend.vocabulary import BY_ID, Naming

T = TypeVar("T")
LogProbs = Mapping[Any, float]

_log = logging.getLogger(__name__)

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
#: How many seeds are tried, and how many different answers they have to give. A server that ignores seeds repeats eight
#: answers of which four differ in two more rounds with a chance below 1e-8, whatever distribution it draws from. An
#: engine whose answers hardly differ does not get its seeds declared, even if it honours them.
_SEEDS, _DIFFERENT = 8, 4
#: A bias with which a token is always the most probable one, and a top_p that only the most probable token passes.
_CERTAIN, _TIGHT = 100, 1e-6
#: The two temperatures at which log-probs are compared, how many tokens to draw at each, and how many of the most
#: probable ones to ask for: the most that OpenAI's servers allow.
_COLD, _HOT, _DRAWS, _CANDIDATES = 1.0, 2.0, 8, 5
#: The least distance in nats between the likeliest and the least likely token: below it, rounding could decide. And how
#: far the quotient of two such distances may be from its ideal value.
_SPREAD, _QUOTIENT = 0.1, 0.1
#: How far, in nats, two log-probs of one token may be apart: 16-bit engines compute them in different batches.
_SAME = 0.05
#: A penalty that changes answers, and how long they are.
_PENALTY, _PENALISED_LENGTH = 2.0, 24


def probe_server(engine: HttpEngine, deadline: Deadline) -> ServerInfo:
    """Return the `info` of an engine with what its server is seen to do. `OpenAIBackend.open` lists the errors."""
    probe = _Probe(engine, deadline)
    probe.prompts()
    probe.ids()
    probe.ends()
    probe.sampling()
    probe.seeds()
    probe.logprobs()
    probe.penalties()
    probe.scores()
    _log.info("%s: %s", probe.url, probe.info)
    return probe.info


class _Answer:
    """What a server answered.

    Attributes:
        ids: the ids that were sampled; None if they are not known.
        told: what the reply says of its tokens; None if it says nothing, or not one thing for each.
        key: what is equal in equal answers.
    """

    def __init__(self, reply: Any, info: ServerInfo) -> None:
        choice = only_choice(reply)
        self.reply, self.text, self.reason = reply, str(choice.get("text")), choice.get("finish_reason")
        known = _attempt(protocol.answer_ids, reply, info, False) if info.knows_ids else None
        limits = {"vocab_size": info.vocabulary.size, "limit": _PENALISED_LENGTH}
        self.ids = None if known is None else _attempt(lambda: checked_ids(known[0], **limits))
        told = _attempt(protocol.reported, choice)
        self.told = None if told and self.ids is not None and len(told) != len(self.ids) else told
        self.key = (None if self.ids is None else tuple(self.ids), self.text, self.reason)


class _Probe:
    """Sends short requests to a server that is being opened. Each step adds what it finds to `info`."""

    def __init__(self, engine: HttpEngine, deadline: Deadline) -> None:
        self.url, self.info = engine.client.base_url, engine.info
        self._engine, self._deadline = engine, deadline

    def post(self, payloads: Sequence[Payload]) -> list[Any]:
        """Return the reply to each payload, or the error with which the server refuses it."""
        return self._engine.try_rows(payloads, self._deadline, _is_refusal)

    def ask(self, *requests: Payload, text: str = TEXTS[0]) -> list[_Answer | None]:
        """Return the answer to each request; None where the server refuses it, or does not complete it.

        Args:
            requests: fields in addition to those of every request, or instead of them.
        """
        info = self.info
        prompt = protocol.prompt_of(info.vocabulary.encode(text, add_special_tokens=info.adds_special_tokens), info)
        own: Payload = {**info.fields, "temperature": 0.0, "prompt": text if prompt is None else prompt}
        own |= {"top_p": 1.0, "logprobs": protocol.LOGPROBS} if info.naming else {}
        return [_attempt(_Answer, reply, info) for reply in self.post([{**own, **given} for given in requests])]

    def keys(self, *requests: Payload) -> list[Any]:
        return [answer and answer.key for answer in self.ask(*requests)]

    def learn(self, **found: Any) -> None:
        self.info = replace(self.info, **found)

    def declare(self, **found: Any) -> None:
        self.learn(capabilities=replace(self.info.capabilities, **found))

    def prompts(self) -> None:
        """Find out whether the server takes ids, and which fields it does not refuse."""
        encode, optional = self.info.vocabulary.encode, {**protocol.NEUTRAL, **_ASK_FOR_IDS}
        plain = {**self.info.fields, "max_tokens": 1, "temperature": 0.0}
        ids = [encode(text) for text in TEXTS]
        requests = [{**plain, "prompt": prompt} for prompt in (*TEXTS, *ids)]
        requests += [{**plain, name: value, "prompt": TEXTS[0]} for name, value in optional.items()]
        replies = self.post(requests)
        if isinstance(replies[0], CoreLMError):
            raise _refusal(self.url, self.info.name, replies[0])
        if _attempt(only_choice, replies[0]) is None:
            raise EngineError(f"{self.url}: what it answers is not a completion with one choice", usable=False)
        count = len(TEXTS)
        by_text, by_ids, others = replies[:count], replies[count : 2 * count], replies[2 * count :]
        tried = zip(optional, others, strict=True)
        accepted = {name: optional[name] for name, reply in tried if not isinstance(reply, CoreLMError)}
        self.learn(fields={**accepted, **self.info.fields})
        if all(map(_reads, by_ids, ids)):
            self._check_tokenizer()
            counts = [protocol.count(reply, "prompt_tokens") for reply in by_ids] == [*map(len, ids)]
            return self.learn(takes_ids=True, counts_prompts=counts)
        read = [protocol.count(reply, "prompt_tokens") for reply in by_text]
        for adds in (False, True):
            if read == [len(encode(text, add_special_tokens=adds)) for text in TEXTS]:
                return self.learn(adds_special_tokens=adds, counts_prompts=True)
        if None not in read:
            raise _other_tokenizer(f"it reads {TEXTS[0]!r} as {read[0]} tokens, and the tokenizer makes {len(ids[0])}")
        if encode("", add_special_tokens=True):
            raise EngineError(
                "the server takes prompts as text only and does not count their tokens, so it cannot be found out "
                "whether it adds the tokenizer's special tokens to them",
                usable=True,
            )

    def _check_tokenizer(self) -> None:
        """Refuse a tokenizer whose ids are not the server's: it reads other texts in them, and answers otherwise.

        Greedy answers are compared, where they are the same twice. Those of a 16-bit engine may still differ by chance,
        and those to different prompts may be equal by chance, so most of them decide.
        """
        encode = self.info.vocabulary.encode
        forms = [[text, text, encode(text), encode(text, add_special_tokens=True)] for text in (*TEXTS, *_MORE_TEXTS)]
        plain = {**self.info.fields, "max_tokens": _COMPARED, "temperature": 0.0}
        replies = self.post([{**plain, "prompt": prompt} for prompts in forms for prompt in prompts])
        texts = [(_attempt(only_choice, reply) or {}).get("text") for reply in replies]
        rows = [texts[at : at + 4] for at in range(0, len(texts), 4)]
        telling = [row for row in rows if row[0] and row[0] == row[1]]
        others = [row for row in telling if row[0] not in row[2:]]
        if len(others) > len(telling) / 2:
            raise _other_tokenizer(f"it answers {others[0][0]!r} to a text, and {others[0][2]!r} to its ids")

    def ids(self) -> None:
        """Find out whether replies say which ids were sampled, and how they name tokens."""
        info, vocabulary = self.info, self.info.vocabulary
        heats = (0.0, 1.0, protocol.HOTTEST) * 2
        requests: list[Payload] = [{"max_tokens": _LENGTH, "temperature": heat} for heat in heats]
        # A few ids whose entries in the vocabulary are not what they decode to: an answer may have none of them.
        known = sorted({token for text in TEXTS for token in vocabulary.encode(text)})
        telling = [token for token in known if vocabulary.name(token, "text") != vocabulary.name(token, "entry")][:4]
        requests += [{"max_tokens": 1, "logit_bias": {str(token): _CERTAIN}} for token in telling]
        found = self.ask(*({**each, "logprobs": _CANDIDATES} for each in requests))
        answers = [each for each in found if each is not None]
        stated = [_Answer(each.reply, replace(info, states_ids=True)).ids for each in answers]
        # An id stands for a text: a server with another tokenizer would be found here.
        states_ids = bool(answers) and all(_spells(*each, info) for each in zip(answers, stated, strict=True))
        told = [each.told for each in answers if each.told is not None]
        names = {name for each in told for group in (each.names, *each.top) for name in group}
        possible: tuple[Naming, ...] = ("id",) if all(name.startswith(BY_ID) for name in names) else ("text", "entry")
        possible = possible if names and len(told) == len(answers) else ()
        known_ids = stated if states_ids else [None] * len(answers)
        shown = [each for each in possible if _is_shown(answers, known_ids, each, info)]
        # Most entries of a vocabulary are the same as their texts, so what more names stand for is what is meant.
        naming = max(shown, key=lambda each: len(names & vocabulary.table(each).keys()), default=None)
        self.learn(states_ids=states_ids, naming=naming)

    def ends(self) -> None:
        """Find out how answers can be ended, and kept from ending."""
        info = self.info
        if not info.knows_ids:
            return
        eos = min(info.eos_token_ids, default=None)
        if eos is not None:
            # With a bias, the first token is EOS, whatever the model.
            certain: Payload = {"max_tokens": 3, "logit_bias": {str(eos): _CERTAIN}}
            plain, ignoring = self.ask(certain, {**certain, "ignore_eos": True})
            if plain is not None and plain.reason == "stop" and plain.ids in ([], [eos]):
                says, ignores = plain.ids == [eos], ignoring is not None and ignoring.ids == [eos] * 3
                self.learn(says_eos=says, ignores_eos=ignores and says)
        goes_on = {"max_tokens": _LENGTH, **({"ignore_eos": True} if self.info.ignores_eos else {})}
        (free,) = self.ask(goes_on)
        if free is None or not free.ids:
            return
        ids = free.ids
        # The last token that is new, so that an answer has to go on for a while before it ends, and would go on.
        at = max(at for at, token in enumerate(ids[:-1] or ids) if token not in ids[:at])
        stop, end = _stop_string(ids, info)
        fields: list[Payload] = [{"stop_token_ids": [ids[at]]}, {"stop": [stop]} if stop else {}]
        found = self.ask(*({**goes_on, **each} for each in fields))
        by_id, by_string = ([*(each.ids or ()), each.reason] if each is not None else None for each in found)
        self.learn(
            # EOS is sent as one of the stop ids, so the server has to ignore it otherwise.
            stops_at_ids=self.info.ignores_eos and at + 1 < len(ids) and by_id == [*ids[: at + 1], "stop"],
            stops_at_strings=bool(stop) and by_string == [*ids[:end], "stop"],
        )

    def sampling(self) -> None:
        """Find out whether temperature and top_p do what they should."""
        draw: Payload = {"max_tokens": _LENGTH}
        greedy, *again = self.keys(*[draw] * 4)
        # Some servers take no temperature above 1.
        for hottest in (protocol.HOTTEST, 1.0):
            hot = {**draw, "temperature": hottest}
            found = self.keys(*[hot] * 4, *[{**hot, "top_p": _TIGHT}] * 4)
            drawn, cut = found[:4], found[4:]
            if {*drawn} != {None}:
                break
        sampling, samples = dict(self.info.capabilities.sampling), not {*drawn} <= {None, greedy}
        if not samples:
            _log.warning("the server answers greedily at every temperature, so it is only asked for greedy answers")
            sampling["temperature"] = (0.0, 0.0)
        elif greedy is None:
            sampling["temperature"] = (protocol.COLDEST, hottest)
        elif again.count(greedy) > 1:
            # A 16-bit engine may answer in two ways if two tokens are equally likely, but not in another one each time.
            sampling["temperature"] = (0.0, hottest)
            if cut.count(greedy) == len(cut):
                sampling["top_p"] = None
        else:
            _log.warning("the server samples at temperature 0 as well, so it is not asked for temperatures")
        # The plugin finds stop strings itself, in ids that were sampled and in those that the text is encoded to.
        sampling["stop"] = None
        self.learn(samples=samples)
        self.declare(sampling=sampling)

    def seeds(self) -> None:
        """Find out whether equal seeds give equal answers, no matter what else the server works on."""
        if not self.info.samples:
            return
        rows: list[Payload] = [
            {"max_tokens": _LENGTH, "temperature": protocol.HOTTEST, "seed": 1 + n} for n in range(_SEEDS)
        ]
        keys, again, alone = self.keys(*rows), self.keys(*rows[::-1], *rows[::-1]), self.keys(rows[1])
        honoured = again == [*keys[::-1], *keys[::-1]] and alone == keys[1:2]
        honoured = honoured and None not in keys and len({*keys}) >= _DIFFERENT
        # A server does not say whether it is slower with seeds, and some are.
        self.declare(per_answer_seeds=honoured, seeds_are_costly=honoured)

    def logprobs(self) -> None:
        """Find out which distribution the log-probs of sampled tokens are of."""
        if self.info.naming is None:
            return
        mode = self._mode()
        if self.info.extra and not (mode == "raw" and self._same_without_extra()):
            _log.warning("the fields of extra_body may change the server's log-probs, so none are used")
            mode = "none"
        self.learn(logprobs=mode)
        modes = {"none": (), "untouched": ("raw",)}.get(mode, (mode,))
        self.declare(generation_modes=frozenset(modes))

    def _mode(self) -> LogprobsMode:
        """Return which log-probs the server returns, as far as two temperatures and a truncation can show it.

        The difference between two tokens does not contain the normaliser. A temperature divides it unless the log-probs
        are the model's own; a truncation moves all that are left if they are those of the distribution drawn from. What
        a server has only divided by the temperature is not a distribution.
        """
        cold, hot, greedy = (self.by_name(temperature=heat) for heat in (_COLD, _HOT, 0.0))
        if not cold:
            return "none"
        common = sorted(cold.keys() & hot.keys(), key=lambda name: -cold[name])
        spread = cold[common[0]] - cold[common[-1]] if common else 0.0
        if spread < _SPREAD:
            return _undecided(f"it names {len(common)} tokens at both temperatures, or equally likely ones")
        best = math.exp(cold[common[0]])
        if best > 1 - _SPREAD:
            return _undecided("its likeliest token is almost certain, so that a truncation would change nothing")
        if sum(map(math.exp, hot.values())) > 1 + _SAME:
            return _undecided(f"at temperature {_HOT} the probabilities of its tokens have a sum above 1")
        top = self.by_name(temperature=_COLD, top_p=best / 2).get(common[0])
        unmoved = top is not None and _agree(cold, {common[0]: top}) and _agree(cold, greedy)
        quotient = (hot[common[0]] - hot[common[-1]]) / spread
        if abs(quotient - 1) < _QUOTIENT:
            # At temperature 0 and under a truncation they have to be the model's own as well.
            return "raw" if unmoved and _agree(cold, hot) else _undecided("they differ")
        if abs(quotient - _COLD / _HOT) >= _QUOTIENT:
            return _undecided(f"the distances of its tokens are {quotient:.3f} times as large at temperature {_HOT}")
        if top is None or "top_p" not in self.info.capabilities.sampling:
            return _undecided("it could not be tried whether a truncation changes them")
        if abs(top) < _SAME:
            return "processed"
        return "scaled" if unmoved else _undecided("they differ")

    def _same_without_extra(self) -> bool:
        """Return whether the caller's fields leave the log-probs alone, such as a grammar would not."""
        plain = copy(self)
        plain.learn(fields={name: value for name, value in self.info.fields.items() if name not in self.info.extra})
        own, without = (each.by_name(temperature=_COLD) for each in (self, plain))
        return len(own.keys() & without.keys()) > 1 and _agree(own, without)

    def by_name(self, **fields: float) -> LogProbs:
        """Return the log-probs of the token after a prompt by name, as far as several replies give them.

        Names that do not stand for one token are left out. All ids without an entry in the tokenizer have the name "",
        for example: their log-probs differ, and say nothing about the distribution.
        """
        requests = [{"max_tokens": 1, "logprobs": most, **fields} for most in (_CANDIDATES, 1) for _ in range(_DRAWS)]
        found: dict[str, float] = {}
        for answer in self.ask(*requests):
            if answer is not None and answer.told is not None and len(answer.told) == 1:
                found |= _numbers({**answer.told.top[0], answer.told.names[0]: answer.told.logprobs[0]})
        return {name: found[name] for name in found if _attempt(self.info.vocabulary.ids_of, [name], self.info.naming)}

    def scores(self) -> None:
        """Find out whether the server scores a prompt that it echoes, as it scores the same tokens when sampled."""
        info = self.info
        if info.logprobs == "none" or not info.takes_ids:
            return
        # Several, and short ones as well, because an answer may hold a token whose name says nothing.
        asked = [{"max_tokens": length, "temperature": 1.0} for length in (24, 8, 2) for _ in range(_DRAWS)]
        # Whether the server misnames the last id is found out below, once its scores are known to be right.
        prompt, last = info.vocabulary.encode(TEXTS[0]), info.vocabulary.size - 1
        answers = [each for each in self.ask(*asked) if each and each.ids and each.told and last not in each.ids]
        if not answers:
            return
        answer, told = answers[0].ids or [], answers[0].told
        ids, sampled = [*prompt, *answer], _numbers(dict(enumerate(told.logprobs if told else ())))
        for most in (0, 1):
            trying = replace(info, echo=most)
            (reply,) = self.post([protocol.echo_request(ids, trying)])
            scores = _attempt(protocol.row_scores, reply, ids, trying)
            if scores is None:
                continue
            scored = dict(enumerate(scores.logprobs[len(prompt) - 1 :]))
            if len(sampled) == len(answer) and _agree(sampled, scored):
                # The last id may have the name of the first one.
                row = [*prompt, last, *prompt]
                (reply,) = self.post([protocol.echo_request(row, trying)])
                renamed = replace(trying, misnames_last=True)
                plain, other = (_attempt(protocol.row_scores, reply, row, each) for each in (trying, renamed))
                self.learn(echo=most, misnames_last=plain is None and other is not None)
                # To score, a server samples a token, even if it does not return it.
                context = info.capabilities.max_context
                self.declare(score=True, max_context=None if context is None else context - 1)
                return
            _log.warning("the server's scores of an echoed prompt are not those of the same tokens when sampled")

    def penalties(self) -> None:
        """Find out which penalties the server honours, and whether they are in its log-probs if they should be."""
        mode = self.info.logprobs
        if mode not in ("raw", "processed", "scaled") or not self.info.takes_ids:
            return
        greedy = "raw" if mode == "raw" else "reshaped"
        shown = {each for each in protocol.PENALTIES if self._is_shown_by(each, greedy)}
        self.declare(sampling={**self.info.capabilities.sampling, **dict.fromkeys(shown, (-2.0, 2.0))})
        if mode == "processed":
            shown = {each for each in shown if self._is_shown_by(each, "included", temperature=1.0)}
        self.learn(tried=frozenset(shown))

    def _is_shown_by(self, name: str, mode: str, **fields: float) -> bool:
        """Return whether a penalty explains answers that were sampled under it, and has changed some.

        Each token is compared with an answer of one token at the same place without the penalty.
        """
        changed = False
        asked = {"max_tokens": _PENALISED_LENGTH, "logprobs": _CANDIDATES, name: _PENALTY, **fields}
        asked |= {"ignore_eos": True} if self.info.ignores_eos else {}
        one = {"max_tokens": 1, "temperature": 1.0, "logprobs": _CANDIDATES}
        for text in TEXTS:
            (answer,) = self.ask(asked, text=text)
            if answer is None or not answer.ids or not answer.told:
                return False
            prompt = self.info.vocabulary.encode(text)
            own = self.ask(*({**one, "prompt": [*prompt, *answer.ids[:at]]} for at in range(len(answer.ids))))
            seen: Counter[str] = Counter()
            for token, top, plain in zip(answer.told.names, answer.told.top, own, strict=True):
                before = _numbers(plain.told.top[0]) if plain is not None and plain.told else {}
                times = {each: seen[each] if name == "frequency_penalty" else each in seen for each in before}
                cost = {each: _PENALTY * times[each] for each in before}
                found = _effect(token, before, _numbers(top), cost, mode)
                if found is None:
                    return False
                changed |= found
                seen[token] += 1
        return changed


# What replies show ----------------------------------------------------------------------------------------------------


def _attempt(function: Callable[..., T], *arguments: Any) -> T | None:
    """Return what a function makes of a reply; None if the reply is not built as it expects."""
    try:
        return function(*arguments)
    except _MALFORMED:
        return None


def _is_refusal(error: CoreLMError) -> bool:
    """Return whether an error says that the server does not understand the request."""
    if isinstance(error, TransientError):
        return error.status in _NOT_UNDERSTOOD
    return isinstance(error, InvalidRequestError) or (isinstance(error, EngineError) and "status 405" in str(error))


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


def _other_tokenizer(why: str) -> EngineError:
    return EngineError(f"the server has another tokenizer: {why}; pass the server's own as tokenizer=", usable=True)


def _undecided(why: str) -> LogprobsMode:
    _log.warning("the server's log-probs are only used at temperature 1 without truncation: %s", why)
    return "untouched"


def _reads(reply: Any, ids: list[int]) -> bool:
    """Return whether a reply says that the server has read these ids."""
    choice = _attempt(only_choice, reply)
    if choice is None:
        return False
    stated = choice.get("prompt_token_ids")
    return stated == ids if isinstance(stated, list) and stated else protocol.count(reply, "prompt_tokens") == len(ids)


def _is_shown(answers: list[_Answer], stated: Sequence[list[int] | None], naming: Naming, info: ServerInfo) -> bool:
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
            if named is None:
                continue
            if not _spells(answer, named, info):
                return False
        shown = True
    return shown


def _spells(answer: _Answer, ids: list[int] | None, info: ServerInfo) -> bool:
    """Return whether ids decode to the text of an answer, of which a server may hold half a character back."""
    text = info.vocabulary.text(ids or [], skip_special_tokens=True)
    return bool(ids) and text.rstrip("\ufffd") == answer.text.rstrip("\ufffd")


def _stop_string(ids: list[int], info: ServerInfo) -> tuple[str, int]:
    """Return a string that the answer with these ids has, and the number of ids that complete it; "" if none fits."""
    for at in range(1, len(ids) - 1):
        before, whole = (info.vocabulary.text(ids[: at + more], skip_special_tokens=True) for more in (0, 1))
        new = whole[len(before) :] if whole.startswith(before) else ""
        # Servers hold back text that ends in the middle of a character.
        whole_characters = new.strip() and "\ufffd" not in new and not before.endswith("\ufffd")
        if whole_characters and StopStrings.of(SamplingParams(stop=(new,)), info.tokenizer).first_end(ids) == at + 1:
            return new, at + 1
    return "", 0


def _effect(token: str, before: LogProbs, after: LogProbs, cost: LogProbs, mode: str) -> bool | None:
    """Return whether a penalty has changed something at a token; None if it does not explain what is there.

    Args:
        before, after: the log-probs of the candidates without and with the penalty.
        cost: what the penalty takes from each.
        mode: "raw" for a greedy token next to log-probs without the penalty, "reshaped" next to others, and "included"
            for a token whose log-probs have to include it.
    """
    if mode == "included":
        common = before.keys() & after.keys()
        # All tokens of a position are off by its normaliser.
        moved = [after[each] - (before[each] - cost[each]) for each in common]
        return None if moved and max(moved) - min(moved) > _SAME else len({cost[each] for each in common}) > 1
    if len(before) < 2 or (mode == "raw" and not _agree(before, after)):
        return None
    penalised = {each: value - cost[each] for each, value in before.items()}
    best = max(penalised.values())
    # What is not among the candidates is less likely than the last of them.
    if best > min(before.values()) and penalised.get(token, -math.inf) < best - _SAME:
        return None
    return token != max(before, key=lambda each: before[each])


def _numbers(given: Mapping[Any, Any]) -> dict[Any, float]:
    """Return the log-probs that are finite; servers report others as very low numbers."""
    kept = {name: value for name, value in given.items() if isinstance(value, (int, float))}
    return {name: float(value) for name, value in kept.items() if -1000 < value <= _SAME}


def _agree(one: LogProbs, other: LogProbs) -> bool:
    return all(abs(one[name] - other[name]) < _SAME for name in one.keys() & other.keys())
