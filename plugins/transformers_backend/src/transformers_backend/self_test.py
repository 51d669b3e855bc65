"""`SelfTest`: which ways of running a model give the numbers of its own plain forward, found out by trying.

The plain forward is ``model(input_ids)`` of one row: no padding, no mask, no positions, no cache. Every other way to
read rows has to agree with it twice:

on trial rows   before its first use: a row with special ids, the same row cut short, twice, and another row, read
                together. That shows positions, masks, the head and a model that is not causal.
on own rows     in the first call that is wider than what was compared: the numbers of that call itself.

The plain forward decides how large a difference may be: its dtype does, and where that does not suffice, how far its
numbers move when the embeddings of the row are rounded otherwise. A short dtype could hide a mask that leaks a
thousandth of a neighbour. There, the row that is read twice, beside different rows and padding, must get the same
numbers to the last bit.

A way that differs is not used, and the next one in order is tried; the last is the plain forward itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from corelm.errors import CapabilityError, brief
from corelm.spec import Ragged
from transformers_backend.engine import CausalLM, is_device_failure
from transformers_backend.fingerprint import fingerprint
from transformers_backend.masses import log_softmax_at
from transformers_backend.trials import LengthClasses, differences, spread, token_differences, trial_rows

_log = logging.getLogger(__name__)

#: What a difference in float32 may be, in steps of float32 times the spread of the logits. A plain forward is 15 to 25
#: such steps from float64 at most positions.
_STEPS = 64.0
#: How many times as much as the plain forward moves when its embeddings are rounded otherwise, in float32 and in a
#: shorter dtype. Linear attention sums in another order when it decodes with a cache. In a short dtype, a way with
#: twice the plain forward's error differs from it by 1.6 times as much as that moves.
_TIMES_NOISE, _TIMES_SHORT_NOISE = 12.0, 1.7
#: The share of positions for which that has to hold together. In float32 it holds for each position by itself: a few
#: positions of a real model are a thousand times as sensitive to rounding as most.
_MOST = 0.75
#: Number of positions compared at the end of each row.
TAIL = 16
#: Fewer tokens than this say little about how far their log-probs are off on average.
_FEW = 8
#: A larger resolution is that of a dtype shorter than float32.
_SHORT = 1e-6
OTHER_NUMBERS = "get other numbers than the model's own forward of one row"
#: How many states of the model's structure are remembered.
_REMEMBERED = 4

#: Given rows, yield the numbers of those that are to be compared, each with the logits of its last positions, ``[n,
#: vocab]``. One row after another, because the logits of a large vocabulary take megabytes.
TailLogits = Callable[[Ragged], Iterator[tuple[int, Tensor]]]
Way = TypeVar("Way", bound=str)


@dataclass(frozen=True, eq=False)
class OwnRow:
    """A row of the caller's, and what a way made of it.

    Attributes:
        ids: int64[n], what the model read.
        found: the logits of its last k positions, ``[k, vocab]``, or the log-probs of `targets` there, float32[k].
        targets: int64[k], or None.
    """

    ids: Tensor
    found: Tensor
    targets: Tensor | None = None


@dataclass
class _Record:
    """What is known of one way to run the model.

    Attributes:
        tried: how much of it was compared on the trial rows: 0 nothing, 1 how it begins, 2 all of it.
        confirmed: the number of columns of the widest forward pass with which it agreed.
        refuted: a forward pass of so many columns, or more, is run in another way.
        fault: what became of it.
    """

    tried: int = 0
    confirmed: int = 0
    refuted: float = float("inf")
    fault: str = ""


@dataclass
class _Verdict:
    """What was found out about the model in one state of its structure.

    Attributes:
        structure, weights: what `fingerprint` returned; `weights` is the latest.
        changes: how often `weights` had changed.
        plain: the logits of the trial row in the plain forward.
        passes_positions: whether it may be given `position_ids`.
        records: one for each way that was tried.
        causal: whether that is known. Every way that agrees shows it.
        refusal: why the model cannot be used; "" if it can.
        rounded: a dtype shorter than that of the weights to which all its logits are rounded, because its forward
            turns autocast on, for example; None if there is none.
        scale: standard deviation of its logits.
    """

    structure: Any
    weights: int
    changes: int = 0
    plain: Tensor = field(default_factory=lambda: torch.empty(0))
    passes_positions: bool = False
    records: dict[str, _Record] = field(default_factory=dict)
    causal: bool = False
    refusal: str = ""
    rounded: torch.dtype | None = None
    scale: float = 0.0


class SelfTest:
    """Compares ways to run one model, and remembers the results as long as the model stays what it is."""

    def __init__(self, engine: CausalLM, tokenizer: Any) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._rows = trial_rows(engine, tokenizer)
        self._lengths = LengthClasses(engine.base.config)
        self._may_pass_positions = engine.passes_positions
        # The latest first. There are several because adapters may be switched on and off between calls.
        self._verdicts: list[_Verdict] = []
        self._checkpoint: Callable[[], object] = lambda: None
        self._told: set[str] = set()

    @property
    def row(self) -> Tensor:
        """The row of ids, int64[n], that is read in the plain forward."""
        return self._rows.split()[2]

    def begin(self, checkpoint: Callable[[], object]) -> None:
        """Read the trial row in the plain forward if the model is new or has changed. Call this before every request.

        Weights that are trained in place change all the time: the model is tried again after 1, 2, 4, 8, … changes.

        Args:
            checkpoint: called before the model is tried in a certain way, during this request. What it raises ends the
                trial; nothing was found out then.

        Raises:
            CapabilityError: the model is known not to be causal, or its forward fails on one row of ids.
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
        if known is None:
            # If this fails for want of memory, or with Ctrl-C, nothing was found out.
            self._verdicts = others
            self._read_plainly(verdict)
        self._verdicts = [verdict, *others[: _REMEMBERED - 1]]
        self._engine.passes_positions = verdict.passes_positions
        if verdict.refusal:
            # A new error for each call: its traceback holds that call's tensors.
            raise CapabilityError(verdict.refusal, capability="model")

    def forget(self) -> None:
        """Try the model again before the next request, because its weights were replaced."""
        self._verdicts = []

    # Which way --------------------------------------------------------------------------------------------------------

    def choose(
        self,
        ways: Sequence[Way],
        may_run: Callable[[Way], bool],
        columns: Callable[[Way], int],
        name: Callable[[Way], str] = str,
    ) -> Way:
        """Return the first of `ways` that may run, as far as is known for its width. The last of them is the plain
        forward and is not tried.

        Args:
            may_run: asks `SelfTest.may_run`.
            columns: returns the number of columns of the widest forward pass in a certain way.
            name: under which what is found out about a way is remembered.

        Raises:
            CapabilityError: the model is not causal.
        """
        for way in ways[:-1]:
            if may_run(way) and not self.is_refuted(name(way), columns(way)):
                return way
        if not self._now.causal:
            self._examine()
        return ways[-1]

    def may_run(self, way: str, run: TailLogits, *, padded: bool = True, depth: int = 2) -> bool:
        """Return whether `way` agrees with the plain forward on the trial rows.

        Args:
            padded: whether rows of several lengths are read together.
            depth: 1 if `run` only begins with what the way does. It is then confirmed by own rows only.

        Raises:
            CapabilityError: it does not, because the model is not causal.
        """
        if self._engine.adapter_reads_ids:
            return False
        record = self._record(way)
        if record.tried < depth and record.refuted:
            columns, record.tried = int(self._rows.lengths.max()), 0
            fault = self._fault_of(run, padded)
            if fault and not self._now.causal:
                self._examine()
            if fault and self._engine.passes_positions and not self._takes_positions():
                self._engine.passes_positions = self._now.passes_positions = False
                fault = self._fault_of(run, padded)
            self.settle(way, columns, fault)
            if not fault:
                self._now.causal, record.tried = True, depth
                record.confirmed = max(record.confirmed, columns if depth == 2 else 0)
        return record.refuted > 0

    def is_refuted(self, way: str, columns: int) -> bool:
        """Return whether `way` differed from the plain forward on a forward pass as wide as this."""
        return columns >= self._record(way).refuted

    def is_confirmed(self, way: str, columns: int) -> bool:
        """Return whether `way` was compared on a forward pass as wide as this, and agreed."""
        return columns <= self._lengths.end_of(self._record(way).confirmed) and not self.is_refuted(way, columns)

    def confirm(self, way: str, columns: int, rows: Iterable[OwnRow]) -> bool:
        """Return whether rows that were read in a pass of so many columns have the numbers of the plain forward, and
        remember it.
        """
        if self.is_confirmed(way, columns) or self.is_refuted(way, columns):
            return not self.is_refuted(way, columns)
        with self._engine.evaluating():
            agreed = self._agree(list(rows))
        self.settle(way, columns, "" if agreed else OTHER_NUMBERS)
        if agreed:
            self._record(way).confirmed = max(self._record(way).confirmed, columns)
        return agreed

    def settle(self, way: str, columns: int, fault: str) -> None:
        """Remember what a forward pass of so many columns did instead of agreeing, if anything."""
        if not fault:
            return
        record = self._record(way)
        # A way that failed on the short trial rows is not used at all.
        record.refuted = min(record.refuted, self._lengths.start_of(columns)) if record.tried else 0
        record.fault = f"{way} rows of {columns} tokens {brief(fault)}"
        then = f"{record.refuted} tokens or more are run in a slower way" if record.refuted else "a slower way is used"
        _log.info("%s: %s, so %s", type(self._engine.base).__name__, record.fault, then)

    def warn_once(self, what: str, cost: str) -> None:
        """Tell the user, once, that a slower way is used.

        Args:
            what: what is done.
            cost: how much slower that is.
        """
        if what in self._told:
            return
        self._told.add(what)
        causes = [record.fault for record in self._now.records.values() if record.fault]
        advice = "if another release of transformers behaves otherwise, use that one; please report the model type"
        if self._engine.adapter_reads_ids:
            causes, advice = ["its adapter reads the ids of each call (aLoRA)"], "another kind of adapter is faster"
        elif not self._engine.accepts_cache:
            causes.append("its forward takes no cache")
        name = type(self._engine.base).__name__
        _log.warning("%s: %s, which takes %s. Cause: %s; %s", name, what, cost, "; ".join(causes), advice)

    # The comparison ---------------------------------------------------------------------------------------------------

    def _fault_of(self, run: TailLogits, padded: bool) -> str:
        """Return what `run` makes of the trial rows instead of the plain forward's numbers; "" if it agrees."""
        self._checkpoint()
        rows, plain = self._rows, self._now.plain
        if not padded:
            # The row cut short, and the beginning of another.
            shortest = int(rows.lengths.min())
            rows = Ragged.from_list([row[:shortest] for row in rows.split()])
        apart, noisy, found = [], [], {}
        with self._plainly():
            try:
                for number, tail in run(rows):
                    length = int(rows.lengths[number])
                    if torch.equal(rows.split()[number], self.row[:length]):
                        places = slice(length - len(tail), length)
                        apart.append(differences(tail, plain[places]))
                        noisy.append(torch.arange(length)[places])
                        found[number] = tail
            except Exception as error:
                if is_device_failure(error):
                    raise
                # A model's code may fail in any way on inputs that it does not expect.
                return f"fail with {type(error).__name__}: {error}"
            if not self._is_rounding(torch.cat(apart), lambda: self._noise(self.row, plain)[torch.cat(noisy)]):
                return OTHER_NUMBERS
            if self.is_short and not torch.equal(found[0], found[3]) and self._leaks(run, rows, found):
                return "get other numbers when the rows or the padding beside them change"
        return ""

    def _leaks(self, run: TailLogits, rows: Ragged, found: dict[int, Tensor]) -> bool:
        """Return whether the row that is read twice gets other logits if the other rows and the padding are others.

        Not if the plain forward itself gives other bits when later ids change, as experts that read the tokens of a
        batch together do.
        """
        engine, (short, other, row, _) = self._engine, rows.split()
        changed = torch.cat([self.row[: len(short)], self.row[len(short) :].flip(0)])
        ahead = engine.plain_logits(changed)[: len(short)]
        if not torch.equal(ahead, self._now.plain[: len(short)]):
            return False
        # They begin as before, so that rows that are sorted keep their places and share what they shared.
        others = [short, torch.cat([other[:1], other[1:].flip(0)]), changed[: len(row)], short]
        engine.padding = 1
        try:
            again = {number: tail for number, tail in run(Ragged.from_list(others)) if number in (0, 3)}
        finally:
            engine.padding = 0
        return not all(torch.equal(tail, found[number]) for number, tail in again.items())

    def _agree(self, rows: Sequence[OwnRow]) -> bool:
        wanted = [self._engine.plain_logits(row.ids, len(row.found)) for row in rows]
        apart = torch.cat([_apart(row, logits) for row, logits in zip(rows, wanted, strict=True)])
        times = 1.0
        if rows[0].targets is not None:
            # Three of four normal deviates are below 1.15 standard deviations, but not of a few.
            apart, times = apart / 1.15, 1.0 if len(apart) >= _FEW else 2.0

        def noise() -> Tensor:
            moved = (self._noise(row.ids, logits) for row, logits in zip(rows, wanted, strict=True))
            return torch.cat([*moved]) * times

        return self._is_rounding(apart, noise)

    def _is_rounding(self, apart: Tensor, noise: Callable[[], Tensor]) -> bool:
        """Return whether differences at some positions are put down to rounding.

        Args:
            apart: float32[n].
            noise: returns how far the plain forward moves there when it is rounded otherwise, float32[n].
        """
        now, eps, short = self._now, torch.finfo(self._dtype()).eps, self.is_short
        # Every layer rounds the states twice, and the errors add up as in a random walk.
        floor = eps * now.scale * ((2 * self._layers() + 1) ** 0.5 if short else _STEPS)
        typical, worst = float(apart.quantile(_MOST)), float(apart.max())
        if worst == float("inf"):
            return False
        if typical <= floor and (short or worst <= floor):
            return True
        moved, times = noise(), _TIMES_SHORT_NOISE if short else _TIMES_NOISE
        limit = min(max(floor, times * float(moved.quantile(_MOST))), self._largest_noise())
        _log.debug("%.2g apart at most positions, %.2g allowed; %.2g at one", typical, limit, worst)
        # In a short dtype, a router may choose other experts at single positions.
        return typical <= limit and (short or bool((apart <= (times * moved).clamp_min(floor)).all()))

    def _noise(self, ids: Tensor, wanted: Tensor) -> Tensor:
        """Return how far the plain forward moves when its embeddings are rounded otherwise, float32[n].

        Args:
            ids: the row.
            wanted: the logits of its last n positions, ``[n, vocab]``.
        """
        with self._engine.nudged():
            return differences(self._engine.plain_logits(ids, len(wanted)), wanted)

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

    def _read_plainly(self, verdict: _Verdict) -> None:
        """Read the trial row, without special ids if the model fails on these, and how its numbers are rounded."""
        for with_specials in (True, False):
            self._checkpoint()
            self._rows = trial_rows(self._engine, self._tokenizer, with_specials=with_specials)
            try:
                with self._plainly():
                    verdict.plain = self._engine.plain_logits(self.row)
                break
            except CapabilityError:
                if not with_specials:
                    raise
        verdict.passes_positions = self._may_pass_positions
        verdict.scale = spread(verdict.plain)
        verdict.rounded = _rounded_to(verdict.plain) if verdict.scale > 0.0 else None

    def _examine(self) -> None:
        """Find out whether the model is causal, and gives the same numbers twice.

        Raises:
            CapabilityError: it does not.
        """
        self._checkpoint()
        engine, now, half = self._engine, self._now, len(self.row) // 2 or 1
        # Of the same length, so that every sum is made in the same order.
        other = torch.cat([self.row[:half], self._rows.split()[1]])[: len(self.row)]
        with self._plainly():
            again = differences(engine.plain_logits(self.row), now.plain)
            ahead = differences(engine.plain_logits(other)[:half], now.plain[:half])
        limit, name = torch.finfo(self._dtype()).eps ** 0.5 * now.scale, type(engine.base).__name__
        if float(again.max()) > limit:
            now.refusal = (
                f"{name} gives other log-probabilities each time it reads the same ids, by {float(again.max()):.2g} on "
                "average. So none of them can be relied on. If its forward drops out or adds noise, turn that off"
            )
        elif float(ahead.quantile(_MOST) if self.is_short else ahead.max()) > limit:
            now.refusal = (
                f"{name} is not causal: when later ids change, the log-probabilities of earlier positions change by "
                f"{float(ahead.max()):.2g} on average. So log p(token | earlier tokens) cannot be read from it. If its "
                "configuration has is_decoder or is_causal, load it with True; a quantized model must not scale "
                "activations by a whole row"
            )
        if now.refusal:
            raise CapabilityError(now.refusal, capability="model")
        now.causal = True

    def _takes_positions(self) -> bool:
        """Return whether the model gives the numbers of the plain forward if it is given the positions 0, 1, 2, …"""
        inputs = self._engine.inputs(Ragged.from_list([self.row]), "right")
        try:
            with self._plainly():
                found = self._engine.forward(use_cache=False, **inputs).logits[0]
                return self._is_rounding(differences(found, self._now.plain), lambda: self._noise(self.row, found))
        except Exception as error:
            if is_device_failure(error):
                raise
            return False

    # How a number is rounded ------------------------------------------------------------------------------------------

    def _largest_noise(self) -> float:
        """Return the largest difference that may count as rounding."""
        if self.is_short:
            return 0.5 * self._now.scale
        # Where activations are quantized, the rounding of a sum may move one of them to the next level.
        share = 0.2 if _is_quantized(self._engine.base) else torch.finfo(self._dtype()).eps ** 0.5
        return share * self._now.scale

    @property
    def is_short(self) -> bool:
        """Whether numbers are rounded to fewer digits than float32 has."""
        return torch.finfo(self._dtype()).eps > _SHORT

    def _layers(self) -> int:
        return getattr(self._engine.base.config.get_text_config(), "num_hidden_layers", None) or 1

    def _dtype(self) -> torch.dtype:
        device, dtype = self._engine.device.type, self._now.rounded or self._engine.base.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        return dtype if dtype.is_floating_point and dtype.itemsize > 1 else torch.bfloat16


def _apart(row: OwnRow, wanted: Tensor) -> Tensor:
    """Return how far a row is from the logits of the plain forward, float32[k] on the CPU."""
    if row.targets is None:
        return differences(row.found, wanted)
    pairs = zip(wanted.split(1), row.targets.to(wanted.device).split(1), strict=True)
    plain = torch.cat([log_softmax_at(logits.float(), target) for logits, target in pairs])
    return token_differences(row.found.to(plain), plain).cpu()


def _rounded_to(logits: Tensor) -> torch.dtype | None:
    """Return the short dtype that holds all these logits exactly, or None."""
    shorts = (short for short in (torch.bfloat16, torch.float16) if torch.equal(logits.to(short).to(logits), logits))
    return next(shorts, None)


def _is_quantized(base: Any) -> bool:
    if getattr(base, "is_quantized", False) or getattr(base, "hf_quantizer", None) is not None:
        return True
    return any(type(part).__module__.startswith(("torch.ao.", "torchao.")) for part in base.modules())
