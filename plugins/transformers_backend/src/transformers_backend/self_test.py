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

from corelm.errors import CapabilityError, brief
from corelm.spec import Ragged
from transformers_backend.engine import CausalLM, is_device_failure
from transformers_backend.fingerprint import fingerprint
from transformers_backend.masses import log_softmax_at
from transformers_backend.trials import (
    LengthClasses,
    differences,
    sample_of,
    spread,
    token_differences,
    trial_rows,
    typical,
)

_log = logging.getLogger(__name__)

#: In float32, a way may differ from the plain forward by so many times what two plain forwards of the same ids differ
#: by, because one of them reads more ids after them. The cached steps of linear attention sum in another order: 14
#: times for Qwen3-Next. Those of Nemotron-H and Zamba2 are not their full forward: 100 times and more.
_TIMES_NOISE = 24.0
#: The same in a shorter dtype, where 24 times would be as much as a typical defect.
_TIMES_SHORT_NOISE = 3.0
#: A wider pass may add so many steps of float32, times the spread of the logits, to the noise. More may be something
#: else. On an H100 a small Qwen2 differed by 7 steps and a small Granite by 25; its forward is 23 steps from float64.
_STEPS_OF_WIDTH = 32.0
#: Number of positions compared at the end of each row.
TAIL = 16
#: A larger resolution is that of a dtype shorter than float32.
_SHORT = 1e-6
OTHER_NUMBERS = "get other numbers than the model's own forward of one row"
#: Many architectures cannot be packed: that is told at a lower level.
_USUAL = frozenset({"fused", "packed"})
#: How many states of the model's structure are remembered.
_REMEMBERED = 4

#: Given rows, yield the numbers of those that are to be compared, each with the logits of up to `TAIL` last positions,
#: ``[n, vocab]``. One row after another, because the logits of a large vocabulary take megabytes.
TailLogits = Callable[[Ragged], Iterator[tuple[int, Tensor]]]
Way = TypeVar("Way", bound=str)


@dataclass
class _Record:
    """What is known of one way to run the model.

    Attributes:
        tried: whether it was compared on the trial rows.
        confirmed: the number of columns of the widest forward pass with which it agreed.
        refuted: a forward pass of so many columns, or more, is run in another way.
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
        refusal: why the model cannot be used; "" if it can.
        rounded: a dtype shorter than that of the weights to which all its logits are rounded, because its forward
            turns autocast on, for example; None if there is none.
        scale: standard deviation of its logits.
        noise: how far plain forwards of the same ids are apart if they read more or fewer ids after them.
        passes_positions: whether it may be given `position_ids`.
    """

    structure: Any
    weights: int
    changes: int = 0
    records: dict[str, _Record] = field(default_factory=dict)
    refusal: str = ""
    rounded: torch.dtype | None = None
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
        self._checkpoint: Callable[[], object] = lambda: None

    def begin(self, checkpoint: Callable[[], object]) -> None:
        """Try the model if it is new or has changed. Call this before every request.

        Weights that are trained in place change all the time: the model is tried again after 1, 2, 4, 8, … changes.

        Args:
            checkpoint: called before the model is tried in a certain way, during this request. What it raises ends the
                trial; nothing was found out then.

        Raises:
            CapabilityError: the model is not causal, or its forward fails on one row of ids.
        """
        self._checkpoint = checkpoint
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
        if verdict.refusal:
            # A new error for each call: its traceback holds that call's tensors.
            raise CapabilityError(verdict.refusal, capability="model")

    def forget(self) -> None:
        """Try the model again before the next request, because its weights were replaced."""
        self._verdicts = []

    def choose(
        self,
        ways: Sequence[Way],
        rows: Ragged,
        run: Callable[[Way], TailLogits],
        widest: Callable[[Way], tuple[int, Ragged] | None] = lambda way: None,
    ) -> Way:
        """Return the first of `ways` that may read `rows`. The last of them is the plain forward and is not tried.

        Args:
            run: returns how to read rows in a certain way.
            widest: returns the number of columns of the widest forward pass that reads `rows` in a certain way, and
                the rows that it reads. None for a way whose passes are as wide as their longest row.
        """
        longest = int(rows.lengths.max())
        for way in ways[:-1]:
            if not self.may_run(way, longest, run(way), self.rows):
                continue
            columns, some = widest(way) or (longest, None)
            if not self.is_confirmed(way, columns):
                self.compare(way, columns, run(way), sample_of(rows) if some is None else some)
            if columns < self._record(way).refuted:
                return way
        return ways[-1]

    def may_run(self, way: str, columns: int, run: TailLogits, rows: Ragged) -> bool:
        """Return whether `way` agrees with the plain forward on these trial rows, and was not refuted for a forward
        pass of so many columns.
        """
        if self._engine.adapter_reads_ids:
            return False
        record = self._record(way)
        if not record.tried:
            self.compare(way, int(rows.lengths.max()), run, rows)
            record.tried = True
        return columns < record.refuted

    def is_confirmed(self, way: str, columns: int) -> bool:
        """Return whether `way` was compared on a forward pass as wide as this."""
        record = self._record(way)
        return columns <= self._lengths.end_of(record.confirmed) and columns < record.refuted

    def compare(self, way: str, columns: int, run: TailLogits, rows: Ragged) -> None:
        """Compare `way` with the plain forward on these rows, and remember whether it agreed.

        Args:
            columns: the width of the forward pass that reads them.
        """
        self._checkpoint()
        parts, apart = rows.split(), 0.0
        with self._plainly():
            found = run(rows)
            while True:
                try:
                    number, tail = next(found)
                except StopIteration:
                    break
                except Exception as error:
                    if is_device_failure(error):
                        raise
                    # A model's code may fail in any way on inputs that it does not expect.
                    self.settle(way, columns, f"fail with {type(error).__name__}: {error}")
                    return
                apart = max(apart, self._difference(tail, self._engine.plain_logits(parts[number], len(tail))))
        _log.debug("%s rows, %d columns: %.2g apart, %.2g allowed", way, columns, apart, self._tolerance())
        self.settle(way, columns, "" if apart <= self._tolerance() else OTHER_NUMBERS)

    def settle(self, way: str, columns: int, fault: str) -> None:
        """Remember what became of a forward pass of so many columns.

        Args:
            fault: what its rows do instead of agreeing with the plain forward; "" if they agree.
        """
        record = self._record(way)
        if not fault:
            record.confirmed = max(record.confirmed, columns)
            return
        # A way that failed on the short trial rows is not used at all.
        record.refuted = min(record.refuted, self._lengths.start_of(columns)) if record.confirmed else 0
        _log.log(
            logging.INFO if way in _USUAL else logging.WARNING,
            "%s: %s rows of %d tokens %s, so %s",
            type(self._engine.base).__name__,
            way,
            columns,
            brief(fault),
            f"{record.refuted} tokens or more are run in a slower way" if record.refuted else "a slower way is used",
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
        found = found[-2 * TAIL :]
        targets = ids[-len(found) :].to(self._engine.device)

        def plain(read: Tensor, last: int) -> Tensor:
            logits = self._engine.plain_logits(read, last)[: len(found)]
            pairs = zip(logits.split(1), targets.split(1), strict=True)
            return torch.cat([log_softmax_at(some.float(), target) for some, target in pairs])

        wanted = plain(ids[:-1], len(found))
        apart = token_differences(found.to(wanted), wanted)
        # One token's log-probability may be further off than the root mean square over the vocabulary.
        tolerance = self._tolerance()
        if self._is_short():
            return float(apart.max()) <= 8 * tolerance and typical(apart) <= 1.5 * tolerance
        if float(apart.max()) <= 4 * tolerance:
            return True
        if self._engine.rope_switch == len(ids) - 1:
            # With one id more, all positions are encoded differently: that shows nothing about rounding.
            return False
        # How far two plain forwards are apart depends on the length of the row.
        noise = token_differences(plain(ids, len(found) + 1), wanted)
        return float(apart.max()) <= _TIMES_NOISE * float(noise.max())

    @contextmanager
    def _plainly(self) -> Iterator[None]:
        with self._engine.evaluating(), torch.autocast(self._engine.device.type, enabled=False):
            yield

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
            self._checkpoint()
            self.rows = trial_rows(engine, self._tokenizer, with_specials=with_specials)
            row = self.rows.split()[0]
            try:
                whole = engine.plain_logits(row)
                break
            except CapabilityError:
                if not with_specials:
                    raise
        half = max(1, len(row) // 2)
        verdict.scale = spread(whole)
        verdict.rounded = _rounded_to(whole) if verdict.scale > 0.0 else None
        # Of the same length, so that every sum is made in the same order.
        other = torch.cat([row[:half], self.rows.split()[3][half:]])
        ahead = self._difference(engine.plain_logits(other)[:half], whole[:half])
        verdict.noise = self._difference(engine.plain_logits(row[:half]), whole[:half])
        if not (ahead <= self._rounding_limit() and verdict.noise <= self._largest_noise()):
            apart = max(ahead, verdict.noise)
            verdict.refusal = (
                f"{type(engine.base).__name__} is not causal: when later ids change, the log-probabilities of earlier "
                f"positions change by {apart:.2g} on average. So log p(token | earlier tokens) cannot be read from it. "
                "If its configuration has is_decoder or is_causal, load it with True; a quantized model must not scale "
                "activations by a whole row"
            )
            return
        if not self._is_short():
            verdict.noise = max(verdict.noise, self._noise_of_width(whole))
        if self._may_pass_positions:
            engine.passes_positions = True
            inputs = engine.inputs(Ragged.from_list([row]), "right")
            with suppress(Exception):
                found = engine.forward(use_cache=False, **inputs).logits[0]
                verdict.passes_positions = self._difference(found, whole) <= self._tolerance()

    def _noise_of_width(self, whole: Tensor) -> float:
        """Return how far the logits of trial row 0, `whole`, are from those of the same ids with all trial rows after
        them, but at most `_STEPS_OF_WIDTH`; 0.0 if the model cannot read so many ids.

        A GPU sums half of a row in the same order as the whole, but not a pack of many rows.
        """
        engine, row = self._engine, torch.cat(self.rows.split())
        limit = min(engine.max_context or len(row), engine.rope_switch or len(row))
        with suppress(CapabilityError):
            apart = self._difference(engine.plain_logits(row[:limit])[: len(whole)], whole)
            return min(apart, _STEPS_OF_WIDTH * torch.finfo(self._dtype()).eps * self._now.scale)
        return 0.0

    # How large a difference is rounding -------------------------------------------------------------------------------

    def _difference(self, found: Tensor, wanted: Tensor) -> float:
        """Return how far two sets of logits ``[positions, vocab]`` are apart.

        In float32 that is the difference at the position where it is largest. In a shorter dtype it is the median: at
        single positions, rounding makes a router choose another expert.
        """
        apart = differences(found, wanted)
        return typical(apart) if self._is_short() else float(apart.max())

    def _tolerance(self) -> float:
        """Return the largest `_difference` that is put down to rounding."""
        eps, scale, noise = torch.finfo(self._dtype()).eps, self._now.scale, self._now.noise
        if self._is_short():
            # Every layer rounds the states twice, and the errors add up as in a random walk.
            found = max(_TIMES_SHORT_NOISE * noise, eps * (2 * self._layers() + 1) ** 0.5 * scale)
        else:
            found = max(_TIMES_NOISE * noise, 16 * eps * scale)
        return min(found, self._largest_noise())

    def _largest_noise(self) -> float:
        """Return how far plain forwards of different lengths may be apart."""
        if self._is_short():
            return 0.5 * self._now.scale
        # Where activations are quantized, the rounding of a sum may move one of them to the next level.
        return 0.2 * self._now.scale if _is_quantized(self._engine.base) else self._rounding_limit()

    def _rounding_limit(self) -> float:
        return torch.finfo(self._dtype()).eps ** 0.5 * self._now.scale

    def _is_short(self) -> bool:
        return torch.finfo(self._dtype()).eps > _SHORT

    def _layers(self) -> int:
        return getattr(self._engine.base.config.get_text_config(), "num_hidden_layers", None) or 1

    def _dtype(self) -> torch.dtype:
        device, dtype = self._engine.device.type, self._now.rounded or self._engine.base.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        return dtype if dtype.is_floating_point and dtype.itemsize > 1 else torch.bfloat16


def _rounded_to(logits: Tensor) -> torch.dtype | None:
    """Return the short dtype that holds all these logits exactly, or None."""
    shorts = (short for short in (torch.bfloat16, torch.float16) if torch.equal(logits.to(short).to(logits), logits))
    return next(shorts, None)


def _is_quantized(base: Any) -> bool:
    if getattr(base, "is_quantized", False) or getattr(base, "hf_quantizer", None) is not None:
        return True
    return any(type(part).__module__.startswith(("torch.ao.", "torchao.")) for part in base.modules())
