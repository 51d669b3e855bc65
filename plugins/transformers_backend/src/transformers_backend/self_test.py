"""`SelfTest`: which ways of running a model give the numbers of its own plain forward, found out by trying.

The plain forward is ``model(input_ids)`` of one row: no padding, no mask, no positions, no cache. Every other way to
read rows is compared with it before it is believed: first on a few short rows, before the model's first answer, and
again on the caller's own rows whenever these are of a length that was not tried. A way that differs is not used, and
the next one in order is tried; the last is the plain forward itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from corelm.errors import CapabilityError
from corelm.spec import Ragged
from transformers_backend.engine import CausalLM
from transformers_backend.fingerprint import fingerprint
from transformers_backend.trials import LengthClasses, difference, spread, trial_rows

_log = logging.getLogger(__name__)

#: A way may differ from the plain forward by so many times what two plain forwards of the same ids differ by, because
#: one of them reads more ids after them. The cached steps of linear attention sum in another order: 14 times for
#: Qwen3-Next. Those of Nemotron-H and Zamba2 are not their full forward: 100 times and more.
_TIMES_NOISE = 24.0
#: Number of positions compared at the end of each row.
TAIL = 16
#: Many architectures cannot be packed: that is told at a lower level.
_USUAL = frozenset({"packed"})
#: How many states of the model's structure are remembered.
_REMEMBERED = 4

#: Given rows, return the logits of up to `TAIL` last positions of each, ``[n, vocab]``.
TailLogits = Callable[[Ragged], Sequence[Tensor]]
Way = TypeVar("Way", bound=str)


@dataclass
class _Record:
    """What is known of one way to run the model.

    Attributes:
        tried: whether it was compared on the trial rows.
        confirmed: the longest row with which it agreed.
        refuted: rows as long as this, or longer, are run in another way.
    """

    tried: bool = False
    confirmed: int = 0
    refuted: float = float("inf")


@dataclass
class _Verdict:
    """What was found out about the model in one state of its structure.

    Attributes:
        structure, weights: what `fingerprint` returned; `weights` is the latest.
        changes: how often `weights` had changed.
        records: one for each way that was tried.
        refusal: why the model cannot be used; None if it can.
        scale: standard deviation of its logits.
        noise: how far two plain forwards are apart that read the same ids and other ids after them.
        passes_positions: whether it may be given `position_ids`.
    """

    structure: Any
    weights: int
    changes: int = 0
    records: dict[str, _Record] = field(default_factory=dict)
    refusal: CapabilityError | None = None
    scale: float = 0.0
    noise: float = 0.0
    passes_positions: bool = False


class SelfTest:
    """Compares ways to run one model, and remembers the results as long as the model stays what it is.

    Attributes:
        rows: the trial rows, see `trial_rows`.
    """

    def __init__(self, engine: CausalLM, tokenizer: Any) -> None:
        self.rows = trial_rows(engine, tokenizer)
        self._engine = engine
        self._tokenizer = tokenizer
        self._lengths = LengthClasses(engine.base.config)
        self._may_pass_positions = engine.passes_positions
        # The latest first. There are several because adapters may be switched on and off between calls.
        self._verdicts: list[_Verdict] = []

    def begin(self) -> None:
        """Try the model if it is new or has changed. Call this before every request.

        Weights that are trained in place change all the time: the model is tried again after 1, 2, 4, 8, … changes.

        Raises:
            CapabilityError: the model is not causal, or its forward fails on one row of ids.
        """
        now, weights = fingerprint(self._engine.module)
        known = next((verdict for verdict in self._verdicts if verdict.structure == now), None)
        verdict = known or _Verdict(now, weights)
        if weights != verdict.weights:
            verdict.weights, verdict.changes = weights, verdict.changes + 1
            if verdict.changes.bit_count() == 1:
                known, verdict = None, _Verdict(now, weights, verdict.changes)
        others = [other for other in self._verdicts if other.structure != now]
        self._verdicts = [verdict, *others[: _REMEMBERED - 1]]
        if known is None:
            try:
                with self._plainly():
                    self._try_plain_forward(verdict)
            except BaseException:
                # Out of memory, or Ctrl-C: nothing was found out.
                self._verdicts = others
                raise
        self._engine.passes_positions = verdict.passes_positions
        if verdict.refusal is not None:
            raise verdict.refusal

    def choose(self, ways: Sequence[Way], rows: Ragged, run: Callable[[Way], TailLogits]) -> Way:
        """Return the first of `ways` that may read `rows`. The last of them is the plain forward and is not tried.

        Args:
            run: returns how to read rows in a certain way.
        """
        longest = int(rows.lengths.max())
        for way in ways[:-1]:
            if not self.may_run(way, longest, run(way), self.rows):
                continue
            if not self.is_confirmed(way, longest):
                self.settle(way, longest, self._agrees(_some(rows), run(way), way))
            if longest < self._record(way).refuted:
                return way
        return ways[-1]

    def may_run(self, way: str, length: int, run: TailLogits, rows: Ragged) -> bool:
        """Return whether `way` agrees with the plain forward on these trial rows, and was not refuted for a length."""
        if self._engine.adapter_reads_ids:
            return False
        record = self._record(way)
        if not record.tried:
            self.settle(way, int(rows.lengths.max()), self._agrees(rows, run, way))
            record.tried = True
        return length < record.refuted

    def is_confirmed(self, way: str, length: int) -> bool:
        """Return whether `way` was compared with rows as long as this."""
        return length <= self._lengths.end_of(self._record(way).confirmed)

    def settle(self, way: str, length: int, agreed: bool) -> None:
        """Remember whether `way` agreed on rows of that length."""
        record = self._record(way)
        if agreed:
            record.confirmed = max(record.confirmed, length)
            return
        # A way that failed on the short trial rows is not used at all.
        record.refuted = self._lengths.start_of(length) if record.confirmed else 0
        _log.log(
            logging.INFO if way in _USUAL else logging.WARNING,
            "%s: %s rows of %d tokens get other numbers than the model's own forward of one row, or fail, so rows of "
            "%d tokens or more are run in a slower way",
            type(self._engine.base).__name__,
            way,
            length,
            record.refuted,
        )

    def agrees_on(self, rows: Sequence[Tensor], logprobs: Sequence[Tensor]) -> bool:
        """Return whether log-probabilities that were reported for the ends of `rows` are those of the plain forward.

        Args:
            rows: int64[n] each.
            logprobs: float32[k] each, those of the last k tokens of the row.
        """
        with self._engine.evaluating():
            return all(self._is_plain(ids, found) for ids, found in zip(rows, logprobs, strict=True))

    def _is_plain(self, ids: Tensor, found: Tensor) -> bool:
        found = found[-4 * TAIL :]
        targets = ids[-len(found) :, None].to(self._engine.device)

        def plain(read: Tensor, last: int) -> Tensor:
            logits = self._engine.plain_logits(read, last)[: len(found)]
            return logits.float().log_softmax(-1).gather(-1, targets)[:, 0]

        wanted = plain(ids[:-1], len(found))
        apart = float((found.to(wanted) - wanted).abs().max())
        # One token's log-probability may be further off than the root mean square over the vocabulary.
        allowed = 4 * self._tolerance()
        if apart <= allowed:
            return True
        # How far two plain forwards are apart depends on the length of the row.
        again = plain(ids, len(found) + 1)
        return apart <= max(allowed, _TIMES_NOISE * float((again - wanted).abs().max()))

    @contextmanager
    def _plainly(self) -> Iterator[None]:
        with self._engine.evaluating(), torch.autocast(self._engine.device.type, enabled=False):
            yield

    def _agrees(self, rows: Ragged, run: TailLogits, way: str) -> bool:
        with self._plainly():
            try:
                found = run(rows)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                # A model's code may fail in any way on inputs that it does not expect.
                _log.debug("%s rows: %s: %s", way, type(error).__name__, error)
                return False
            apart = max(
                difference(tail, self._engine.plain_logits(ids, len(tail)))
                for ids, tail in zip(rows.split(), found, strict=True)
            )
        _log.debug("%s rows of %d: %.2g apart, %.2g allowed", way, rows.lengths.max(), apart, self._tolerance())
        return apart <= self._tolerance()

    @property
    def _now(self) -> _Verdict:
        return self._verdicts[0]

    def _record(self, way: str) -> _Record:
        return self._now.records.setdefault(way, _Record())

    # The plain forward itself -----------------------------------------------------------------------------------------

    def _try_plain_forward(self, verdict: _Verdict) -> None:
        """Find out whether the model is causal, how its numbers are rounded, and whether it counts positions from 0."""
        engine = self._engine
        engine.passes_positions = False
        for with_specials in (True, False):
            self.rows = trial_rows(engine, self._tokenizer, with_specials=with_specials)
            row = self.rows.split()[0]
            try:
                whole = engine.plain_logits(row)
                break
            except CapabilityError as error:
                verdict.refusal = error
        else:
            return
        verdict.refusal = None
        half = max(1, len(row) // 2)
        verdict.scale = spread(whole)
        # Of the same length, so that every sum is made in the same order.
        other = torch.cat([row[:half], self.rows.split()[3][half:]])
        ahead = difference(engine.plain_logits(other)[:half], whole[:half])
        verdict.noise = difference(engine.plain_logits(row[:half]), whole[:half])
        if not (ahead <= self._rounding_limit() and verdict.noise <= self._largest_noise()):
            apart = max(ahead, verdict.noise)
            verdict.refusal = CapabilityError(
                f"{type(engine.base).__name__} is not causal: when later ids change, the log-probabilities of earlier "
                f"positions change by {apart:.2g} on average. So log p(token | earlier tokens) cannot be read from it. "
                "If its configuration has is_decoder or is_causal, load it with True; a quantized model must not scale "
                "activations by a whole row",
                capability="model",
            )
            return
        if self._may_pass_positions:
            engine.passes_positions = True
            inputs = engine.inputs(Ragged.from_list([row]), "right")
            with suppress(Exception):
                found = engine.forward(use_cache=False, **inputs).logits[0]
                verdict.passes_positions = difference(found, whole) <= self._tolerance()

    def _tolerance(self) -> float:
        """Return the largest `difference` that is put down to rounding."""
        eps = torch.finfo(self._dtype()).eps
        rounding = 16 * eps if eps < 1e-6 else min(256 * eps, eps**0.5)
        return min(max(_TIMES_NOISE * self._now.noise, rounding * self._now.scale), self._largest_noise())

    def _largest_noise(self) -> float:
        """Return how far plain forwards of different lengths may be apart."""
        # Where activations are quantized, the rounding of a sum may move one of them to the next level.
        return 0.2 * self._now.scale if _is_quantized(self._engine.base) else self._rounding_limit()

    def _rounding_limit(self) -> float:
        return torch.finfo(self._dtype()).eps ** 0.5 * self._now.scale

    def _dtype(self) -> torch.dtype:
        device, dtype = self._engine.device.type, self._engine.base.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        return dtype if dtype.is_floating_point and dtype.itemsize > 1 else torch.bfloat16


def _some(rows: Ragged) -> Ragged:
    """Return the longest row, the shortest, and one that starts like the longest and goes on otherwise."""
    parts = rows.split()
    by_length = rows.lengths.argsort(stable=True).tolist()
    longest, shortest = parts[by_length[-1]], parts[by_length[0]]
    half = len(longest) // 2
    other = torch.cat([longest[:half], shortest, longest])[: len(longest)]
    return Ragged.from_list([longest, shortest, other])


def _is_quantized(base: Any) -> bool:
    if getattr(base, "is_quantized", False) or getattr(base, "hf_quantizer", None) is not None:
        return True
    return any(type(part).__module__.startswith(("torch.ao.", "torchao.")) for part in base.modules())
