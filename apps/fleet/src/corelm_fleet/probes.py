"""The probes: a few fixed sequences of token ids, what a trainer's model or an engine says about them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from corelm import Backend
from corelm.errors import CapabilityError
from corelm.tensors.categorical import log_probs
from corelm.validate import count, invalid, shown, token_ids

#: A sequence of token ids.
Probe = tuple[int, ...]
Row = tuple[float, ...]
#: Log-probs by the ids of their probe.
Scores = Mapping[Probe, Row]
#: Tokens of the long probes, of which the first `_SHARED` are the same in both. Engines cache blocks of 16, 64 or 128
#: tokens (vLLM on a CPU), so a cache holds at least one whole block of them.
_LONG, _SHARED = 144, 136
#: Tokens of the short probes.
_SHORT = (3, 9)
#: Tokens that are sampled after the first long probe.
SAMPLED = 8


@dataclass(frozen=True, slots=True)
class ProbeScores:
    """The log-probabilities of the tokens of a few probes, under one set of weights.

    `probe_scores` makes it from a trainer's model; ``update_weights(…, expect=…)`` compares an
    engine with it. It can be pickled and copied; `to_dict` and `make` convert it to and from plain JSON values.

    Attributes:
        probes: the token ids of each probe.
        logprobs: for each probe, the log-probability in nats of every token but the first, at temperature 1.
        dtype: what the numbers were computed in, such as "float32", or "tf32"; None if it is not known.

    Raises:
        InvalidRequestError: the values are of other types or lengths; `field` is ``expect``.
    """

    probes: tuple[Probe, ...]
    logprobs: tuple[tuple[float, ...], ...]
    dtype: str | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        put("probes", tuple(token_ids("expect", probe) for probe in _sequence("probes", self.probes)))
        put("logprobs", tuple(map(_floats, _sequence("logprobs", self.logprobs))))
        if [max(len(probe) - 1, 0) for probe in self.probes] != [len(row) for row in self.logprobs] or not self.probes:
            raise invalid(
                "expect",
                "expected one row of log-probs for each probe, with one number for each token but the first; "
                "make it with probe_scores(model)",
            )
        if self.dtype is not None and not isinstance(self.dtype, str):
            raise invalid("expect", f"dtype: expected a name such as 'float32' or None, got {shown(self.dtype)}")

    def by_probe(self) -> dict[Probe, tuple[float, ...]]:
        """Return the log-probs by the ids of their probe."""
        return dict(zip(self.probes, self.logprobs, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as lists, numbers and texts."""
        return {
            "probes": [list(probe) for probe in self.probes],
            "logprobs": [list(row) for row in self.logprobs],
            "dtype": self.dtype,
        }

    @classmethod
    def make(cls, given: Any) -> ProbeScores | None:
        """Return what a caller expects: `given` itself, or what its `to_dict` described; None for None.

        Raises:
            InvalidRequestError: `given` is something else; `field` is ``expect``.
        """
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise invalid("expect", f"expected what probe_scores(model) returns, got {shown(given)}")
        if given.keys() != {"probes", "logprobs", "dtype"}:
            names = ", ".join(sorted(map(str, given)))
            raise invalid("expect", f"expected the keys of probe_scores(model).to_dict(), got: {names or 'none'}")
        return cls(**given)


@dataclass(frozen=True, slots=True)
class Probes:
    """The probes for one engine.

    Attributes:
        rows: two short probes, then two long ones that share their beginning.
        shared: how many tokens the long ones share.
        sampled: how many tokens to sample after the first long probe.
    """

    rows: tuple[Probe, ...]
    shared: int
    sampled: int

    @property
    def pair(self) -> tuple[Probe, Probe]:
        """The two long probes."""
        return self.rows[-2], self.rows[-1]


def probes_for(vocab_size: int, max_context: int | None, never: Collection[int] = ()) -> Probes:
    """Return the probes for a model. They depend on the arguments alone.

    Ids are taken from the middle half of the vocabulary: special ids, for example of images, are at its ends.

    Args:
        vocab_size: legal ids are below.
        max_context: the largest number of tokens in a probe and what is sampled after it; None for no limit.
        never: ids to leave out, such as those that end an answer.
    """
    room = _LONG + SAMPLED if max_context is None else min(max_context, _LONG + SAMPLED)
    long = max(room - SAMPLED, (room + 1) // 2)
    shared = max(long - (_LONG - _SHARED), long // 2)
    legal = _legal(vocab_size, never)
    first, second = _ids("first", long, legal), list(_ids("second", long, legal))
    second[:shared] = first[:shared]
    if second[shared:] and second[shared] == first[shared]:
        second[shared] = legal[(legal.index(second[shared]) + 1) % len(legal)]
    short = [_ids(f"short {size}", min(size, room), legal) for size in _SHORT]
    return Probes((*short, first, tuple(second)), shared, room - long)


def probe_scores(
    model: Backend | nn.Module | Callable[[Tensor], Any],
    *,
    vocab_size: int | None = None,
    max_context: int | None = None,
) -> ProbeScores:
    """Return what a model says about the probes, for ``backend.update_weights(…, expect=…)``.

    A module is called in eval mode, without gradients and autocast, one probe at a time: ``model(ids)`` with int64
    ``[1, time]`` returns logits ``[1, time, vocab]``, or an object with `logits`. If the model is sharded, call this on
    every rank.

    Args:
        model: a torch module, any other callable like it, or a `Backend`.
        vocab_size: legal ids are below; None reads it from the model's config. A callable needs it.
        max_context: the largest number of tokens that the model takes; None reads it from the config, if it is there.

    Raises:
        InvalidRequestError: the model is of another type, its vocabulary is not known, or its logits have another
            shape; `field` names the argument.
        CapabilityError: the backend cannot score.
    """
    if isinstance(model, Backend):
        known = model.capabilities
        rows = probes_for(known.vocab_size, known.max_context, model.eos_token_ids).rows
        return ProbeScores(rows, scores(model, rows, 1), dtype_of_engine(model, rows[0]))
    if not callable(model):
        raise invalid("model", f"expected a module, a callable or a backend, got {shown(model)}")
    config = _config(model)
    if vocab_size is None:
        vocab_size = getattr(config, "vocab_size", None)
    if vocab_size is None:
        raise invalid("vocab_size", "the model has no config that says it; pass vocab_size=")
    if max_context is None:
        max_context = getattr(config, "max_position_embeddings", None)
    size = count("vocab_size", vocab_size, 1)
    rows = probes_for(size, None if max_context is None else count("max_context", max_context, 1)).rows
    weights = list(model.parameters()) if isinstance(model, nn.Module) else []
    device = weights[0].device if weights else torch.device("cpu")
    with plain_modes(), _evaluated(model):
        found = tuple(_scores_of_logits(model, row, size, device) for row in rows)
    return ProbeScores(rows, found, _coarsest(weights))


def scores(backend: Backend, rows: Sequence[Probe], start: int | Sequence[int]) -> tuple[tuple[float, ...], ...]:
    """Return the log-probs of the tokens of each row from position `start` on."""
    starts = [start] * len(rows) if isinstance(start, int) else list(start)
    result = backend.score_logprobs([list(row) for row in rows], score_from=starts)
    split = zip(result.logprobs.tolist(), starts, strict=True)
    return tuple(tuple(row[first:]) for row, first in split)


def dtype_of_engine(backend: Backend, probe: Probe) -> str | None:
    """Return the dtype that an engine's logits were computed in; None if it returns no logits.

    Numbers of a lower precision are still those numbers in float32.
    """
    if not backend.capabilities.logits or len(probe) < 2:
        return None
    result = backend.score_logprobs([list(probe)], return_logits=True)
    assert result.logits is not None
    values = result.logits.values[1:].float()
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        if torch.equal(values.to(dtype).float(), values):
            return name
    return _float32_on(result.logits.values.device)


@contextmanager
def plain_modes() -> Iterator[None]:
    """Switch gradients and autocast off inside, so that the numbers do not depend on the caller's modes."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _legal(vocab_size: int, never: Collection[int]) -> Sequence[int]:
    low = vocab_size // 4
    middle = range(low, low + max(1, vocab_size // 2))
    return [token for token in middle if token not in never] or middle


def _ids(name: str, length: int, legal: Sequence[int]) -> Probe:
    # Python's `random` may draw other numbers in another version.
    digests = (hashlib.sha256(f"{name}, {place}".encode()).digest() for place in range(length))
    return tuple(legal[int.from_bytes(digest[:8], "big") % len(legal)] for digest in digests)


def _config(model: Any) -> Any:
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    return text() if callable(text) else config


def _scores_of_logits(model: Any, row: Probe, vocab_size: int, device: torch.device) -> tuple[float, ...]:
    ids = torch.tensor([row], device=device)
    made = model(ids)
    logits = getattr(made, "logits", made)
    if not isinstance(logits, Tensor) or logits.shape[:2] != ids.shape or logits.shape[-1] < vocab_size:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise invalid("model", f"expected logits [1, {len(row)}, at least {vocab_size}] for a probe, got {shape}")
    logprobs = log_probs(logits[0, :-1].float())
    chosen: list[float] = logprobs.gather(-1, ids[0, 1:, None].to(logprobs.device))[:, 0].tolist()
    return tuple(chosen)


@contextmanager
def _evaluated(model: Any) -> Iterator[None]:
    """Put a module in eval mode inside, and every part of it back afterwards."""
    trained = [part for part in model.modules() if part.training] if isinstance(model, nn.Module) else []
    try:
        for part in trained:
            part.training = False
        yield
    finally:
        for part in trained:
            part.training = True


def _coarsest(weights: Sequence[Tensor]) -> str | None:
    found = [weight for weight in weights if weight.is_floating_point()]
    if not found:
        return None
    weight = max(found, key=lambda weight: torch.finfo(weight.dtype).eps)
    name = str(weight.dtype).removeprefix("torch.")
    return _float32_on(weight.device) if name == "float32" else name


def _float32_on(device: torch.device) -> str:
    """Return in what a device multiplies matrices of float32."""
    return "tf32" if device.type == "cuda" and torch.get_float32_matmul_precision() != "highest" else "float32"


def _sequence(name: str, given: Any) -> Sequence[Any]:
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise invalid("expect", f"{name}: expected a sequence of rows, got {shown(given)}")
    return given


def _floats(given: Any) -> tuple[float, ...]:
    try:
        row = tuple(map(float, given))
    except (TypeError, ValueError):
        raise invalid("expect", f"logprobs: expected rows of numbers, got {shown(given)}") from None
    if not all(map(math.isfinite, row)):
        raise invalid("expect", "logprobs: expected finite numbers; the model returned NaN or infinity")
    return row


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was sampled after one prompt, greedily.

    Attributes:
        logprobs: the log-probs of the ids, as sampling returned them.
        scored: the same, as scoring returns them; None from an engine that cannot score.
    """

    ids: Probe
    logprobs: Row
    scored: Row | None = None


@dataclass(frozen=True, slots=True)
class Answers:
    """What an engine says in one look.

    Attributes:
        scores: the log-probs of each probe.
        sampled: what was sampled, by its prompt.
        tails: the log-probs of the long probes from the end of their shared prefix on, which an engine with a prefix
            cache computes with it.
        ends: the same tokens in `scores`.
    """

    scores: Scores
    sampled: Mapping[Probe, Sampled]
    tails: Scores
    ends: Scores

    def equals(self, other: Answers) -> bool:
        """Return whether nothing differs, to the last bit. Probes that only one of them has do not count."""
        return apart(self.scores, other.scores) == 0.0 and self.sampled == other.sampled


class Questions:
    """Asks one engine.

    Args:
        backend: the backend to ask. A batcher's queue is not used.

    Attributes:
        dtype: the dtype of the engine's logits; None if it returns none, and before it was asked.

    Raises:
        CapabilityError: the engine can neither score nor sample greedily with raw log-probs.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = Backend(backend.engine)
        can = backend.capabilities
        self._probes = probes_for(can.vocab_size, can.max_context, backend.eos_token_ids)
        coldest = can.sampling.get("temperature", (1.0, 1.0))
        self._samples = (
            self._probes.sampled > 0
            and bool(can.generation_modes & {"raw", "scaled"})
            and (coldest is None or coldest[0] == 0.0)
        )
        if not can.score and not self._samples:
            raise CapabilityError(
                f"canary: backend {backend.name!r} can neither score nor sample greedily with raw log-probs, so "
                "nothing shows its weights; leave out canary=True",
                capability="score",
            )
        self.dtype: str | None = None
        self._knows_dtype = False

    def ask(self, expected: ProbeScores | None) -> Answers:
        """Ask everything: two calls that can use a prefix cache, then one that scores all tokens from the first on.

        Args:
            expected: the engine also scores the probes of these.
        """
        sampled, tails = self.warm_up()
        if not self._backend.capabilities.score:
            return Answers({}, sampled, {}, {})
        probes = tuple(dict.fromkeys((*self._probes.rows, *(expected.probes if expected is not None else ()))))
        followed = [(*prompt, *answer.ids) for prompt, answer in sampled.items()]
        starts = [1] * len(probes) + [len(prompt) for prompt in sampled]
        with plain_modes():
            rows = scores(self._backend, [*probes, *followed], starts)
            if not self._knows_dtype:
                self.dtype, self._knows_dtype = dtype_of_engine(self._backend, self._probes.rows[0]), True
        whole = dict(zip(probes, rows, strict=False))
        again = zip(sampled.items(), rows[len(probes) :], strict=True)
        start = max(self._probes.shared, 1) - 1
        return Answers(
            scores=whole,
            sampled={prompt: Sampled(answer.ids, answer.logprobs, row) for (prompt, answer), row in again},
            tails=tails,
            ends={probe: whole[probe][start:] for probe in tails},
        )

    def warm_up(self) -> tuple[dict[Probe, Sampled], dict[Probe, Row]]:
        """Ask what fills the prefix cache. Return what was sampled, and the `tails` of `Answers`."""
        can_score = self._backend.capabilities.score
        sampled, tails = dict[Probe, Sampled](), dict[Probe, Row]()
        with plain_modes():
            if self._samples:
                prompts = self._probes.pair[:1] if can_score else tuple(dict.fromkeys(self._probes.rows))
                sampling = {"max_new_tokens": self._probes.sampled, "temperature": 0.0, "ignore_eos": True}
                made = self._backend.generate([list(prompt) for prompt in prompts], sampling)
                assert made.logprobs is not None
                each = zip(prompts, made.ids.tolist(), made.logprobs.tolist(), strict=True)
                sampled = {prompt: Sampled(tuple(ids), tuple(row)) for prompt, ids, row in each}
            if can_score:
                pair = tuple(dict.fromkeys(self._probes.pair))
                tails = dict(zip(pair, scores(self._backend, pair, max(self._probes.shared, 1)), strict=True))
        return sampled, tails


def apart(one: Scores, other: Scores) -> float:
    """Return how far apart two scorings are: the mean difference of a probe's tokens, of the probe where it is largest.

    Only probes that both have are compared. If a number is NaN, they are infinitely far apart.
    """
    return max((_mean_difference(one[probe], other[probe]) for probe in one.keys() & other.keys()), default=0.0)


def _mean_difference(one: Sequence[float], other: Sequence[float]) -> float:
    differences = [abs(a - b) for a, b in zip(one, other, strict=False)]
    mean = sum(differences) / len(differences) if differences else 0.0
    return math.inf if math.isnan(mean) else mean
