"""`SamplingParams`: the field's names for how to sample, their aliases, their validation; and one seed per answer."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from corelm.errors import InvalidRequestError

ALIASES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "n": "num_samples",
    "num_return_sequences": "num_samples",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "stop_ids": "stop_token_ids",
    "repeat_penalty": "repetition_penalty",
    "random_seed": "seed",
    "beam_width": "num_beams",
}

#: Names that people know for something close, but not the same.
NOT_OURS = {"max_length": "it counts the prompt too; give max_new_tokens", "best_of": "give num_samples and choose"}

#: What core does itself or every engine must do: never looked up in ``Capabilities.sampling``.
EVERY_ENGINE = frozenset(
    {"max_new_tokens", "stop_token_ids", "ignore_eos", "num_samples", "seed", "do_sample", "skip_special_tokens"}
)
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample an answer. Every default but `max_new_tokens` leaves the model's own distribution alone.

    Attributes:
        max_new_tokens: answer length limit in tokens; None fills the model's context.
        min_new_tokens: no stop id and no stop string ends an answer before this many tokens.
        temperature: 0 is greedy. Default 1.0.
        top_p, top_k, min_p: truncation, applied in the order top-k, top-p, min-p; `top_k` None, 0 or -1 is off.
        repetition_penalty: divides positive and multiplies negative logits of ids in prompt or answer (CTRL,
            arXiv:1909.05858, §4.1).
        presence_penalty, frequency_penalty: subtracted from the logits of ids in the answer, once, or once per
            occurrence.
        stop: strings that end an answer. The ids keep the token that completes one; the text ends before it.
        stop_token_ids: ids that end an answer, beside the model's EOS, and stay in it.
        ignore_eos: EOS is a token like any other.
        num_samples: answers per prompt; None is one, without a batch dimension of its own.
        seed: fixes the answers; see `answer_seeds`.
        num_beams, length_penalty, early_stopping: beam search, where an engine has it.
        do_sample: False is temperature 0; it is derived from the temperature when not given.
        skip_special_tokens: leave special tokens out of the text. Ids keep them.
        engine_kwargs: passed to the engine's own sampling call, unchecked by core.

    Raises:
        InvalidRequestError: a value outside its range; `field` names it.
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
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        temperature = self.temperature
        if temperature is None:
            temperature = 0.0 if self.do_sample is False else 1.0
        put("temperature", _number("temperature", temperature, 0.0))
        sampled = temperature > 0
        if self.do_sample is not None and self.do_sample != sampled:
            raise _invalid(
                "do_sample", f"do_sample={self.do_sample} contradicts temperature={temperature}; give one of them"
            )
        put("do_sample", sampled)
        put("stop", _texts("stop", self.stop))
        put("stop_token_ids", tuple(_ids("stop_token_ids", self.stop_token_ids)))
        put("top_k", None if self.top_k in (None, 0, -1) else _count("top_k", self.top_k, 1))
        if self.max_new_tokens is not None:
            put("max_new_tokens", _count("max_new_tokens", self.max_new_tokens, 1))
        put("min_new_tokens", _count("min_new_tokens", self.min_new_tokens, 0))
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise _invalid("min_new_tokens", f"{self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}")
        put("top_p", _number("top_p", self.top_p, 0.0, 1.0, above=True))
        put("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        put("repetition_penalty", _number("repetition_penalty", self.repetition_penalty, 0.0, above=True))
        put("presence_penalty", _number("presence_penalty", self.presence_penalty))
        put("frequency_penalty", _number("frequency_penalty", self.frequency_penalty))
        put("length_penalty", _number("length_penalty", self.length_penalty))
        put("num_beams", _count("num_beams", self.num_beams, 1))
        if self.num_samples is not None:
            put("num_samples", _count("num_samples", self.num_samples, 1))
        if self.seed is not None:
            put("seed", _count("seed", self.seed, None))
        for name in ("ignore_eos", "early_stopping", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, f"expected True or False, got {getattr(self, name)!r}")
        if self.num_beams == 1 and (self.length_penalty != 1.0 or self.early_stopping):
            raise _invalid("num_beams", "length_penalty and early_stopping belong to beam search; give num_beams > 1")
        if not isinstance(self.engine_kwargs, Mapping):
            raise _invalid("engine_kwargs", f"expected a mapping, got {self.engine_kwargs!r}")
        put("engine_kwargs", dict(self.engine_kwargs))

    def __hash__(self) -> int:
        # By value, like ==. What the engine's own arguments hold need not be hashable, their names are.
        plain = (getattr(self, name) for name in FIELDS if name != "engine_kwargs")
        return hash((*plain, frozenset(self.engine_kwargs)))

    @classmethod
    def make(cls, value: SamplingParams | Mapping[str, Any] | None = None, **changes: Any) -> SamplingParams:
        """From a `SamplingParams`, a mapping or nothing, with keyword changes on top. Aliases are understood.

        >>> params = SamplingParams.make({"max_tokens": 8, "do_sample": False}, n=2)
        >>> params.max_new_tokens, params.temperature, params.num_samples
        (8, 0.0, 2)

        Raises:
            InvalidRequestError: an unknown name (with the nearest known one), or two names for one thing that disagree.
        """
        changes = _canonical(changes)
        if isinstance(value, SamplingParams):
            if "temperature" in changes or "do_sample" in changes:
                # The one that is not given follows the other, as it did when `value` was made.
                changes = {"temperature": None, "do_sample": None, **changes}
            return dataclasses.replace(value, **changes) if changes else value
        if value is not None and not isinstance(value, Mapping):
            raise InvalidRequestError(
                f"sampling parameters: expected a SamplingParams or a mapping, got {value!r}", field="sampling_params"
            )
        return cls(**{**_canonical(value or {}), **changes})

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p cut the distribution."""
        return self.top_k is not None or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def truncates_support(self) -> bool:
        """Whether some ids may have lost their probability.

        Top-k, top-p and min-p cut the distribution, ``min_new_tokens`` forbids the ids that end an answer for a while,
        and core does not know what ``engine_kwargs`` do.
        """
        return self.truncates or self.min_new_tokens > 0 or bool(self.engine_kwargs)

    @property
    def penalties(self) -> tuple[tuple[str, float], ...]:
        """The penalties in force, by name."""
        return tuple(
            (name, getattr(self, name)) for name in PENALTIES if getattr(self, name) != getattr(_NEUTRAL, name)
        )

    def engine_parameters(self) -> dict[str, Any]:
        """The parameters in force that an engine has to honour by declaring them: set, and not core's own business."""
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in EVERY_ENGINE and getattr(self, f.name) != getattr(_NEUTRAL, f.name)
        }


def _canonical(given: Mapping[str, Any]) -> dict[str, Any]:
    """Aliases resolved; conflicts and unknown names refused."""
    out: dict[str, Any] = {}
    source: dict[str, str] = {}
    for name, value in given.items():
        key = ALIASES.get(name, name)
        if key not in FIELDS:
            near = difflib.get_close_matches(str(name), [*FIELDS, *ALIASES], n=1)
            hint = NOT_OURS.get(name) or (
                f"did you mean {near[0]!r}?" if near else "the engine's own go into engine_kwargs"
            )
            raise _invalid(str(name), f"unknown sampling parameter; {hint}")
        if key in out and out[key] != value:
            raise _invalid(key, f"{source[key]}={out[key]!r} and {name}={value!r} name one thing with two values")
        out[key], source[key] = value, name
    return out


def _invalid(name: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"sampling parameter {name!r}: {message}", field=name)


def _number(name: str, value: Any, low: float = -math.inf, high: float = math.inf, above: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _invalid(name, f"expected a finite number, got {value!r}")
    if not low <= value <= high or (above and value == low):
        raise _invalid(name, f"{value} is not in {'(' if above else '['}{low}, {high}]")
    return float(value)


def _count(name: str, value: Any, low: int | None) -> int:
    try:
        if isinstance(value, bool) or int(value) != value:
            raise TypeError
    except (TypeError, ValueError, OverflowError):
        raise _invalid(name, f"expected a whole number, got {value!r}") from None
    if low is not None and value < low:
        raise _invalid(name, f"{value} is less than {low}")
    return int(value)


def _ids(name: str, value: Any) -> Iterable[int]:
    try:
        found = [operator.index(i) for i in ((value,) if isinstance(value, int) else () if value is None else value)]
    except TypeError:
        raise _invalid(name, f"expected token ids, got {value!r}") from None
    return [_count(name, i, 0) for i in found]


def _texts(name: str, value: Any) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else () if value is None else value
    texts = tuple(found) if isinstance(found, Iterable) else (found,)
    if not all(isinstance(text, str) and text for text in texts):
        raise _invalid(name, f"a stop string is a text of at least one character, not {value!r}")
    return texts


FIELDS = tuple(f.name for f in dataclasses.fields(SamplingParams))
_NEUTRAL = SamplingParams()
