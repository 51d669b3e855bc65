"""`SamplingParams`: how to sample an answer, under the names that the field uses, and their aliases."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

from corelm.spec.other_libraries import NOT_OURS, instead_of, sampling_fields
from corelm.validate import count, factor, flag, invalid, is_index, number, shown, token_ids, unencodable

ALIASES = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_new_tokens"),
    "min_tokens": "min_new_tokens",
    **dict.fromkeys(("n", "num_return_sequences"), "num_samples"),
    **dict.fromkeys(("stop_sequences", "stop_strings"), "stop"),
    "stop_ids": "stop_token_ids",
    "repeat_penalty": "repetition_penalty",
    "random_seed": "seed",
    "beam_width": "num_beams",
}

#: Parameters that core handles itself or that every engine must honour. They are not looked up in
#: ``Capabilities.sampling``.
EVERY_ENGINE = frozenset(
    {
        *("max_new_tokens", "stop_token_ids", "ignore_eos", "num_samples", "seed", "do_sample"),
        *("skip_special_tokens", "reasoning_marks"),
    }
)
#: The most stop strings of a call. OpenAI's protocol allows four.
MOST_STOPS = 64
#: The largest count of any kind: engines keep them in 32 bits.
LARGEST = 2**31 - 1
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample an answer. Every default except `max_new_tokens` leaves the model's own distribution alone.

    The order is penalties → temperature → top-k → top-p → min-p, and what one step has cut off, the next does not see.

    Attributes:
        max_new_tokens: answer length limit in tokens; None fills the model's context.
        min_new_tokens: no stop id and no stop string ends an answer before this many tokens.
        temperature: 0 is greedy; else 1e-30 to 1e30, because engines compute in float32. Default 1.0.
        top_k: keep this many of the likeliest tokens; None, 0 or -1 keeps all. Applied first.
        top_p: keep the smallest set of the likeliest tokens whose probabilities sum to at least this. Applied second.
        min_p: keep the tokens that are at least this fraction as likely as the likeliest one. Applied last.
        repetition_penalty: divides positive and multiplies negative logits of ids in prompt or answer (CTRL,
            arXiv:1909.05858, §4.1).
        presence_penalty: subtracted once from the logits of ids that are in the answer.
        frequency_penalty: subtracted from the logits of ids in the answer, once for each occurrence.
        stop: strings that end an answer. The ids keep the token that completes the string; the text ends
            before it. At most 64.
        stop_token_ids: ids that end an answer, in addition to the model's EOS, and stay in it.
        ignore_eos: EOS is a token like any other and ends no answer.
        num_samples: answers per prompt; None is one answer and adds no batch dimension.
        seed: fixes the answers: each gets a seed derived from this one, its prompt's row and its number among
            that prompt's samples.
        num_beams: number of beams, if the engine has beam search; 1 samples. A search draws nothing: it takes
            only the temperatures 0 and 1, which mean the same then, no truncation and no `num_samples`.
        length_penalty: exponent of the length in a beam's score: the sum of its log-probs divided by length ** penalty.
        early_stopping: end the beam search as soon as there are `num_beams` complete answers.
        do_sample: False is temperature 0. It follows from the temperature if it is not given.
        skip_special_tokens: leave special tokens out of the text. Ids keep them.
        reasoning_marks: the texts that begin and end the reasoning of an answer, in which no stop string
            counts: ``("<think>", "</think>")``, for example. A policy takes them from its `response_parser`.
        engine_kwargs: passed to the engine's own sampling call. Names of core, and those that would change
            what the engine returns, are refused.

    Aliases such as `max_tokens` are understood.

    Raises:
        InvalidRequestError: an unknown name, or a value outside its range; `field` names it.
    """

    max_new_tokens: int | None = 256
    min_new_tokens: int = 0
    temperature: float = None  # type: ignore[assignment]  # never None once made: do_sample decides
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_samples: int | None = None
    seed: int | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    do_sample: bool = None  # type: ignore[assignment]  # never None once made: the temperature decides
    skip_special_tokens: bool = True
    reasoning_marks: tuple[str, ...] = ()
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name, (default, read) in _READ.items():
            value = getattr(self, name)
            if value is not default and not (value is None and name == "max_new_tokens"):
                put(self, name, read(name, value))
        if type(self.engine_kwargs) is not dict or self.engine_kwargs:
            put(self, "engine_kwargs", _of_engine("engine_kwargs", self.engine_kwargs))
        if self.temperature is None:
            put(self, "temperature", 0.0 if self.do_sample is False else 1.0)
        sampled = self.temperature > 0
        if self.do_sample not in (None, sampled):
            both = f"do_sample={self.do_sample} contradicts temperature={self.temperature}"
            raise invalid("do_sample", f"{both}; give one of them")
        put(self, "do_sample", sampled)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise invalid("min_new_tokens", f"{self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}")
        if self.num_beams == 1 and (self.length_penalty != 1.0 or self.early_stopping):
            raise invalid("num_beams", "length_penalty and early_stopping belong to beam search; give num_beams > 1")
        if self.num_beams > 1 and (self.num_samples or 1) > 1:
            raise invalid("num_samples", "a beam search returns its best answer only; leave num_samples (n) out")

    def __hash__(self) -> int:
        # By value, like ==. The values in engine_kwargs need not be hashable; their names are.
        plain = (getattr(self, name) for name in FIELDS if name != "engine_kwargs")
        return hash((*plain, frozenset(self.engine_kwargs)))

    @classmethod
    def make(cls, value: object = None, **changes: Any) -> SamplingParams:
        """Return parameters from a `SamplingParams`, a mapping or nothing, with the keyword changes applied.

        None in a mapping is the default, except for `max_new_tokens`. A `GenerationConfig` of transformers
        and the `SamplingParams` of vLLM are read as their libraries read them.

        >>> params = SamplingParams.make({"max_tokens": 8, "do_sample": False}, n=2)
        >>> params.max_new_tokens, params.temperature, params.num_samples
        (8, 0.0, 2)

        Raises:
            InvalidRequestError: an unknown name (the message says what to give instead), or two names for one
                parameter with different values, or a field of another library that has no equal here.
        """
        changes = _canonical(changes) if changes else changes
        if isinstance(value, SamplingParams):
            if "temperature" in changes or "do_sample" in changes:
                # The one of the two that is not given follows the other, as it did when `value` was made.
                changes = {"temperature": None, "do_sample": None, **changes}
            return dataclasses.replace(value, **changes) if changes else value
        given = value if isinstance(value, Mapping | None) else sampling_fields(value, {*FIELDS, *ALIASES})
        if given is None and value is not None:
            raise invalid("sampling_params", f"expected a SamplingParams of corelm or a mapping, got {shown(value)}")
        given = _canonical(given or {}, none_is_default=True) | changes
        if given.get("do_sample") is False and given.get("temperature"):
            given["temperature"] = 0.0  # as in transformers, where a temperature means nothing then
        made = object.__new__(cls)
        _made(made, **given)
        return made

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p truncate the distribution."""
        return self.top_k is not None or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def truncates_support(self) -> bool:
        """Whether some ids may have lost their probability: `min_new_tokens` forbids some for a while, and core
        does not know what `engine_kwargs` do.
        """
        return self.truncates or self.min_new_tokens > 0 or bool(self.engine_kwargs)

    @property
    def penalties(self) -> tuple[tuple[str, float], ...]:
        """The penalties in force, by name."""
        values = ((name, getattr(self, name)) for name in PENALTIES)
        return tuple((name, value) for name, value in values if value != getattr(_NEUTRAL, name))

    def engine_parameters(self) -> dict[str, Any]:
        """Return the parameters that an engine must declare to be given them: not at their default, and not left to
        core.
        """
        given = {name: getattr(self, name) for name in DECLARED}
        return {name: value for name, value in given.items() if value != getattr(_NEUTRAL, name)}


def _canonical(given: Mapping[str, Any], none_is_default: bool = False) -> dict[str, Any]:
    """Return the parameters under their own names; refuse conflicts and unknown names.

    With `none_is_default`, None is left out, except for `max_new_tokens`.
    """
    out: dict[str, Any] = {}
    source: dict[str, str] = {}
    for name, value in given.items():
        key = ALIASES.get(name, name)
        if key not in FIELDS:
            hint = instead_of(name, [*FIELDS, *ALIASES])
            hint = hint or "; if it is a parameter of the engine, give engine_kwargs={'" + str(name) + "': …}"
            raise invalid(str(name), f"unknown sampling parameter{hint}")
        if key in out and not _same(out[key], value):
            both = f"{source[key]}={shown(out[key])} and {name}={shown(value)}"
            raise invalid(key, f"{both} are the same parameter; give one")
        out[key], source[key] = value, name
    if none_is_default:
        for key in [*out]:
            if out[key] is None and key != "max_new_tokens":
                del out[key]
    return out


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # a tensor's ==, for example, has no truth value
        return False


def _ids(name: str, value: Any) -> tuple[int, ...]:
    return token_ids(name, (value,) if is_index(value) else () if value is None else value)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else () if value is None else value
    try:
        texts = tuple(found) if isinstance(found, Iterable) else (None,)
    except Exception:
        texts = (None,)
    if not all(isinstance(text, str) and text for text in texts):
        raise invalid(name, f"expected strings of at least one character, got {shown(value)}")
    for text in texts:
        if problem := unencodable(text):
            raise invalid(name, f"{shown(text)}: {problem}")
    return texts


def _stops(name: str, value: Any) -> tuple[str, ...]:
    texts = _texts(name, value)
    if len(texts) > MOST_STOPS:
        raise invalid(name, f"got {len(texts)} strings; give at most {MOST_STOPS} (OpenAI allows 4)")
    return texts


def _marks(name: str, value: Any) -> tuple[str, ...]:
    texts = _texts(name, value)
    if len(texts) not in (0, 2):
        raise invalid(name, f"expected two texts or none, got {shown(texts)}")
    return texts


def _top_k(name: str, value: Any) -> int | None:
    kept = count(name, value, -1, LARGEST)
    return kept if kept > 0 else None


def _limit(name: str, value: Any) -> int:
    # First the usual case, which every call of `generate` reads.
    return value if type(value) is int and 1 <= value <= LARGEST else count(name, value, 1, LARGEST)


def _of_engine(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise invalid(name, f"expected a mapping, got {shown(value)}")
    if odd := [key for key in value if not isinstance(key, str)]:
        raise invalid(name, f"expected names of parameters as keys, got {shown(odd[0])}")
    for key, given in value.items():
        if (own := ALIASES.get(key, key)) in FIELDS:
            raise invalid(name, f"{key} is a sampling parameter of core; give {own}={shown(given)} next to it")
        if key in NOT_OURS:
            raise invalid(name, f"{key} is not passed to engines: {NOT_OURS[key]}")
    return dict(value)


_penalty = partial(number, low=-1e30, high=1e30)
#: How a value is read that is not the default: its type, its range, and what it becomes.
_READERS: dict[str, Callable[[str, Any], Any]] = {
    "do_sample": flag,
    "temperature": partial(factor, zero=True),
    "stop": _stops,
    "reasoning_marks": _marks,
    "stop_token_ids": _ids,
    "top_k": _top_k,
    "max_new_tokens": _limit,
    "min_new_tokens": partial(count, high=LARGEST),
    "top_p": partial(number, low=0.0, high=1.0, above=True),
    "min_p": partial(number, low=0.0, high=1.0),
    "repetition_penalty": factor,
    "presence_penalty": _penalty,
    "frequency_penalty": _penalty,
    "length_penalty": number,
    "num_beams": partial(count, low=1, high=LARGEST),
    "num_samples": partial(count, low=1, high=LARGEST),
    "seed": partial(count, low=None),
    "ignore_eos": flag,
    "early_stopping": flag,
    "skip_special_tokens": flag,
}
_DEFAULTS = {f.name: f.default for f in dataclasses.fields(SamplingParams)}
assert _DEFAULTS.keys() == {*_READERS, "engine_kwargs"}, "each parameter needs a reader"
_READ = {name: (_DEFAULTS[name], read) for name, read in _READERS.items()}


FIELDS = tuple(f.name for f in dataclasses.fields(SamplingParams))
#: Parameters that an engine must declare to be given them.
DECLARED = tuple(name for name in FIELDS if name not in EVERY_ENGINE)
_made = SamplingParams.__init__


@wraps(_made)
def _make(self: SamplingParams, **given: Any) -> None:
    # Aliases and misspelt names are the same mistakes here as in `make`.
    _made(self, **(given if given.keys() <= _NAMES else _canonical(given)))


_NAMES = frozenset(FIELDS)
SamplingParams.__init__ = _make  # type: ignore[method-assign]
_NEUTRAL = SamplingParams()
