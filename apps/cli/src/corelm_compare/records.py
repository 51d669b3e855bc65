"""What a comparison finds: plain frozen records, each with `to_json`; `from_json`; and `CAUSES`, the names of causes.

The numbers of a `Gap` are ``Δ = other − one`` in nats: two scorings of the same tokens, subtracted token by token. A
ratio is ``exp(Δ)``, as in `corelm.kl`.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from corelm._version import __version__
from corelm.validate import invalid, one_of, shown

R = TypeVar("R")
Verdict = Literal["agree", "rounding", "differ", "unexplained"]
Confidence = Literal["certain", "likely", "possible"]
GapKind = Literal["sides", "sampled", "again", "company", "order", "late_start", "oracle"]

#: The format of `Comparison.to_json`. The number rises when a name goes or means something else.
FORMAT = "corelm_compare/1"
#: Exit codes of a comparison that ran to its end. Errors have those of `corelm_cli`: 2 refused, 3 the engine failed.
EXIT_CODES: dict[Verdict, int] = {"agree": 0, "rounding": 0, "differ": 1, "unexplained": 1}
#: The text of rows that are made of the ids of others; other rows of ids have none.
MADE_OF_OTHERS = "(made of the other rows)"
#: How the reason begins for which a cause was not tried in time.
OUT_OF_TIME = "the budget of "
#: What comparisons that were saved by earlier versions do not have.
_ADDED = frozenset({"limits", "oracle_limits", "settings"})
#: id → what it means. The ids are stable: programs may test for them.
CAUSES: dict[str, str] = {
    # Texts and conversations.
    "tokenization": "the same text has other ids",
    "bos-added": "an id, such as BOS, is put before a text or before ids",
    "bos-doubled": "BOS is put before ids that begin with it already",
    "bos-missing": "BOS at the beginning is left out",
    "first-token-dropped": "the first id of a row is left out",
    "special-tokens-as-text": "the text of a special token is read as ordinary characters",
    "chat-template": "a conversation is rendered otherwise",
    "generation-prompt": "the end of a conversation, which prompts for an answer, is left out or added",
    # Which number is returned.
    "shift": "the numbers are those of the token before or after",
    "units": "the logarithm has another base",
    "temperature": "log-probs of sampled tokens are taken after the temperature",
    "truncation-in-logprobs": "log-probs of sampled tokens are taken over what top-k or top-p left",
    "penalties": "log-probs of sampled tokens are taken after penalties",
    "top-only": "scores are normalised over the most probable ids",
    "vocab-padding": "padded ids of the output layer count in the softmax",
    "eos-suppressed": "EOS is impossible where log-probs are taken",
    "sampled-differs": "what is said of a token when it is sampled is not what is said when it is scored",
    # What is computed.
    "missing-softcap": "a softcap of logits or of attention is left out",
    "missing-scale": "a scale of the configuration is left out, or logits are multiplied by a constant",
    "missing-bias": "biases are left out",
    "sliding-window": "the sliding window is ignored",
    "rope": "the scaling or the base of rotary positions is another one",
    "truncation": "only the last ids of a long row are read",
    "chunked-prefill": "long rows are read in chunks that do not see one another, or change at one length",
    # With which weights, and how exactly.
    "dtype": "the numbers are rounded as a lower precision rounds them",
    "quantized": "the weights are rounded as a scheme of quantization rounds them",
    "stale-weights": "the weights are those of another checkpoint, which was named",
    "other-weights": "the weights are others, or the model is computed otherwise",
    "adapter-not-applied": "the adapter changes nothing",
    "wrong-adapter": "the adapter is another one",
    # From call to call.
    "company": "the other rows of a call change a row",
    "prefix-cache": "a cache of prefixes has other entries than what would be computed",
    "not-deterministic": "equal calls give different numbers",
    # Where answers end.
    "ends": "answers end at other ids",
    "stop-string": "answers go on after a stop string",
}


@dataclass(frozen=True, slots=True)
class Record:
    """What all records have in common."""

    def to_json(self, arrays: bool = False) -> dict[str, Any]:
        """Return the attributes as values of JSON. NaN and infinities, which JSON does not have, are null.

        Args:
            arrays: whether every `Gap` has `delta`, `rows`, `positions`, `first` and `second` as well, as lists.
        """
        return plain(self, arrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side(Record):
    """One of the engines that were compared.

    Attributes:
        name: the name in this comparison, unique: the backend's, with a number if there are two of them.
        backend: the name that the engine was opened by.
        model: the path, or the name of the model object.
        options: the options that it was opened with, as texts; secrets are masked.
        software: distributions and versions of plugin and engine, as far as they are known.
        provenance: the label of its scores, as in `Provenance.to_dict`.
        dtype: the dtype of its logits; None if it returns none.
        abilities: what it can do that matters here: `score`, `logits`, `score_temperature`, `raw`, `processed`, …
        calls: how many calls of its engine the comparison made.
        tokens: how many tokens these calls had, prompts and answers together.
        seconds: how long they took.
    """

    name: str
    backend: str
    model: str
    options: Mapping[str, str] = field(default_factory=dict)
    software: str = ""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    abilities: tuple[str, ...] = ()
    calls: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Record):
    """One row of tokens that all sides scored.

    Attributes:
        ids: prompt and completion.
        prompt_length: how many of the ids are the prompt.
        tokens: the text of each id.
        text: the prompt as the caller gave it: a text, a rendered conversation, or what the ids decode to.
        kind: what the caller gave: `text`, `conversation` or `ids`.
        sampled_by: the side that sampled the completion; None if the caller gave it.
        numbers: each side's log-prob of every id, by the name of the side; NaN where there is none, as at position 0.
    """

    ids: tuple[int, ...]
    prompt_length: int
    tokens: tuple[str, ...] = ()
    text: str
    kind: Literal["text", "conversation", "ids"]
    sampled_by: str | None = None
    numbers: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def made_of_others(self) -> bool:
        """Whether it is no prompt, but made of the ids of all prompts, to be short or long."""
        return self.kind == "ids" and self.text == MADE_OF_OTHERS


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstToken(Record):
    """A token at which two scorings differ most.

    Attributes:
        row, position: where it is; `position` counts from the first id of the row.
        token_id, token: the id and its text.
        one, other: both numbers, in nats.
    """

    row: int
    position: int
    token_id: int
    token: str
    one: float
    other: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gap(Record):
    """How far apart two scorings of the same tokens are, token by token: ``Δ = other − one``, in nats.

    Of no tokens, all figures are 0.

    Attributes:
        kind: what was compared: `sides`, two sides' scores; `oracle`, a side with the plain float32 forward; `sampled`,
            what a side said when it sampled with what it says when it scores; and a side's distance to itself: `again`,
            the same call twice; `company`, each row alone and all rows together; `order`, the rows in another order;
            `late_start`, scores from the end of the prompt on, for which an engine may use a cache of prefixes.
        one, other: what is subtracted, and from what: names of sides, or words such as "vllm, alone".
        count: how many tokens both scored.
        skipped: how many tokens only one of the two scored.
        mean: the mean of Δ, with its sign.
        mean_abs: the mean of `|Δ|`.
        median_abs, p90, p99, p999, max_abs: quantiles of `|Δ|`.
        outside: the share of tokens whose ratio exp(Δ) is outside [0.9, 1.1].
        k3: an estimate of KL(one‖other): the mean of ``exp(Δ) − 1 − Δ``. Unbiased if `one` sampled the tokens.
        worst: the tokens with the largest `|Δ|`, the largest first.
        delta: float32[count], for plots.
        rows, positions: int64[count], where each Δ is.
        first, second: float32[count], the numbers of `one` and of `other`.
    """

    kind: GapKind
    one: str
    other: str
    count: int
    skipped: int
    mean: float
    mean_abs: float
    median_abs: float
    p90: float
    p99: float
    p999: float
    max_abs: float
    outside: float
    k3: float
    worst: tuple[WorstToken, ...]
    delta: Tensor
    rows: Tensor
    positions: Tensor
    first: Tensor
    second: Tensor

    def __str__(self) -> str:
        return (
            f"{self.one} → {self.other}: {self.count} tokens, |Δ| mean {self.mean_abs:.2e}, median "
            f"{self.median_abs:.2e}, p99 {self.p99:.2e}, max {self.max_abs:.2e}; mean Δ {self.mean:+.2e}; "
            f"{self.outside:.1%} outside [0.9, 1.1]; k3 {self.k3:.2e}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence(Record):
    """Where a row of two sides first differs.

    Attributes:
        what: `ids`, the tokens of the same prompt; `answer`, the tokens that both sampled greedily; `numbers`, the
            log-probs of the same tokens, by more than the tolerance.
        one, other: names of the sides.
        row: the row; for `ids` and `answer`, the prompt.
        position: the first position that differs, from the first id of the row (of the answer, for `answer`).
        first, second: what each side has there: an id, a number, or None after its end.
        text: the text before that position, in words of the first side: its last few tokens.
    """

    what: Literal["ids", "answer", "numbers"]
    one: str
    other: str
    row: int
    position: int
    first: float | int | None
    second: float | int | None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Experiment(Record):
    """One thing was changed, and the gap was measured again.

    Attributes:
        id: the detector that did it.
        side: the side that it is about.
        changed: the one thing, as a sentence: "the plain forward without the softcap of the logits".
        before: mean `|Δ|` before, in nats.
        after: mean `|Δ|` after, in nats.
        tokens: over how many tokens.
        explains: whether the change explains the difference: `after` is down to noise.
        note: what else was found, such as a fitted constant.
    """

    id: str
    side: str
    changed: str
    before: float
    after: float
    tokens: int
    explains: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class Cause(Record):
    """Why a side differs.

    Attributes:
        id: a stable name, a key of `corelm_compare.CAUSES`.
        side: the side that is wrong; None if it is only known that the sides differ.
        confidence: `certain`: one change explains the numbers to within noise, or the ids show it. `likely`: the
            pattern fits nothing else that was tried. `possible`: it fits, and something that was not tried might too.
        evidence: one sentence, with figures.
        advice: what to type, or to look at.
        figures: the numbers of the sentence, by name.
    """

    id: str
    side: str | None
    confidence: Confidence
    evidence: str
    advice: str
    figures: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.id} ({self.side or 'side not known'}, {self.confidence}): {self.evidence} → {self.advice}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison(Record):
    """Everything that one comparison found.

    Attributes:
        sides: the engines, the first of which the others are compared with.
        rows: the tokens that were scored, with every side's numbers.
        gaps: between each two sides, and between each side and the oracle if there is one (`sides` and `oracle`).
        own: each side's distances to itself (`again`, `company`, `order`, `late_start`, `sampled`); `one` is the
            name of the side.
        tolerances: mean `|Δ|` in nats up to which another side's scores agree with a side's, by the name of the side.
        limits: mean `|Δ|` in nats up to which a side's distance to itself is rounding, by the name of the side: that of
            its dtype, or of bfloat16 if the dtype is not known.
        oracle_limits: mean `|Δ|` in nats up to which a side's distance to the plain forward is rounding, by the name of
            the side: that of its dtype, as it says or as its numbers show, or else that of float32.
        settings: `sampling` (`max_new_tokens`, `temperature` and what is not at its default), `tolerance`, `budget`,
            `quick` and `timeout`, as they were used.
        divergences: where ids, answers and numbers first differ.
        experiments: everything that was tried, in order.
        causes: what was found, the surest first.
        ruled_out: names of causes that were tried and do not explain the difference.
        not_tried: names of causes that could not be tried, each with the reason.
        notes: what limits this comparison, in sentences.
        oracle: the folder of the plain float32 forward; None if there was none.
        seed: of everything that was sampled.
        seconds: how long it took.
        verdict: `agree`: all sides are within noise of each other, and nothing was found. `rounding`: they differ by
            no more than their dtypes round. `differ`: a cause was found. `unexplained`: they differ, and no cause
            was found.
    """

    sides: tuple[Side, ...]
    rows: tuple[Row, ...]
    gaps: tuple[Gap, ...]
    own: tuple[Gap, ...]
    tolerances: Mapping[str, float]
    divergences: tuple[Divergence, ...]
    experiments: tuple[Experiment, ...]
    causes: tuple[Cause, ...]
    ruled_out: tuple[str, ...]
    not_tried: Mapping[str, str]
    notes: tuple[str, ...]
    oracle: str | None
    seed: int
    seconds: float
    verdict: Verdict
    limits: Mapping[str, float] = field(default_factory=dict)
    oracle_limits: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 if the sides agree or differ by rounding alone, else 1."""
        return EXIT_CODES[self.verdict]

    @property
    def calls(self) -> int:
        """How many calls of engines the comparison made."""
        return sum(side.calls for side in self.sides)

    def to_json(self, arrays: bool = False) -> dict[str, Any]:
        """Return everything as values of JSON. See `Record.to_json`."""
        more = {"headline": self.headline, "exit_code": self.exit_code, "calls": self.calls}
        return {"format": FORMAT, "corelm": __version__, **plain(self, arrays), **more}

    def __str__(self) -> str:
        lines = [self.headline, *(f"  {gap}" for gap in self.gaps), *(f"  cause: {cause}" for cause in self.causes)]
        if self.verdict == "unexplained":
            lines.append(f"  ruled out: {', '.join(self.ruled_out) or 'nothing'}")
        return "\n".join(lines)

    @property
    def headline(self) -> str:
        """The verdict as one sentence."""
        names = " and ".join(side.name for side in self.sides)
        found = ", ".join(dict.fromkeys(cause.id for cause in self.causes))
        return {
            "agree": f"{names} agree",
            "rounding": f"{names} differ as their dtypes round, and by no more",
            "differ": f"{names} differ: {found}",
            "unexplained": f"{names} differ, {self._why_unexplained}",
        }[self.verdict]

    @property
    def _why_unexplained(self) -> str:
        late = [reason for reason in self.not_tried.values() if reason.startswith(OUT_OF_TIME)]
        if not late:
            return "cause not found"
        return f"and {late[0]} with {len(late)} cause{'s' * (len(late) != 1)} untried; give a larger budget"


def counted(rows: Sequence[Row]) -> str:
    """Return how many rows there are, in words: "4 prompts and 3 rows made of their ids"."""
    made = sum(row.made_of_others for row in rows)
    prompts = f"{len(rows) - made:,} prompt{'s' * (len(rows) - made != 1)}"
    return f"{prompts} and {made} row{'s' * (made != 1)} made of their ids" if made else prompts


def plain(value: Any, arrays: bool) -> Any:
    """Return a record as dicts, lists, texts and numbers. See `Record.to_json`."""
    if isinstance(value, Record):
        given = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return plain({name: one for name, one in given.items() if arrays or not isinstance(one, Tensor)}, arrays)
    if isinstance(value, Mapping):
        return {str(key): plain(each, arrays) for key, each in value.items()}
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(each, arrays) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)


def from_json(found: Mapping[str, Any]) -> Comparison:
    """Return the comparison that `Comparison.to_json` made this of.

    The arrays of its gaps are empty unless it was made with ``arrays=True``. Null is NaN where a number is expected.

    Raises:
        InvalidRequestError: it is not such a comparison, or of another version of the format; `field` names the place.
    """
    if _of_type(Mapping, found, "comparison").get("format") != FORMAT:
        raise invalid("format", f"expected {FORMAT!r}, got {shown(found.get('format'))}")
    return _record(Comparison, found, "comparison")


def _record(kind: Callable[..., R], found: Any, path: str) -> R:
    values, found = {}, _of_type(Mapping, found, path)
    hints = get_type_hints(kind)
    for each in dataclasses.fields(kind):  # type: ignore[arg-type]
        hint, where = hints[each.name], f"{path}.{each.name}"
        if hint is Tensor:
            dtype = torch.int64 if kind is Gap and each.name in ("rows", "positions") else torch.float32
            numbers = [math.nan if value is None else value for value in found.get(each.name, ())]
            values[each.name] = torch.tensor(numbers, dtype=dtype)
        elif each.name in found:
            values[each.name] = _value(hint, found[each.name], where)
        elif each.name not in _ADDED:
            raise invalid(where, "is missing")
    return kind(**values)


def _value(hint: Any, found: Any, path: str) -> Any:
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return found
    if origin in (Union, types.UnionType):
        if found is None and type(None) in parts:
            return None
        return _value(int if int in parts and type(found) is int else parts[0], found, path)
    if origin is Literal:
        one_of(path, found, parts)
        return found
    if origin is tuple:
        return tuple(_value(parts[0], each, f"{path}[{at}]") for at, each in enumerate(_of_type(list, found, path)))
    if origin is Mapping:
        return {
            str(key): _value(parts[1], each, f"{path}.{key}") for key, each in _of_type(Mapping, found, path).items()
        }
    if dataclasses.is_dataclass(hint):
        return _record(cast(Callable[..., Any], hint), found, path)
    if hint is float:
        # JSON has neither NaN nor infinities; and 1 may stand for 1.0.
        return math.nan if found is None else float(_of_type((int, float), found, path))
    return _of_type(hint, found, path)


def _of_type(kind: Any, found: Any, path: str) -> Any:
    if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
        words = {Mapping: "an object", list: "a list"}.get(kind) or getattr(kind, "__name__", "a number")
        raise invalid(path, f"expected {words}, got {shown(found)}")
    return found
