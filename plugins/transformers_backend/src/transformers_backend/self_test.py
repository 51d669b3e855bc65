"""`SelfTest`: which ways of running a model give the numbers of its own plain forward, found out by trying.

The plain forward is ``model(input_ids)`` of one row: no padding, no mask, no positions, no cache.

===================== ============================================== ===============================================
when                  what is tried                                  against what
===================== ============================================== ===============================================
a way is first used   trial rows together: a row with special ids,   the plain forward of the first of them, read when
                      the same cut short, twice, and another row     the model was opened
… in a short dtype    the row that is twice among them               itself beside other rows, to the last bit
it fails              the row again; with other later ids, and       the plain forward of the row
                      without; with positions; its last logits only
a pass is the widest  two or three rows of the call itself           the plain forward of each of them
===================== ============================================== ===============================================

Trial rows show positions, masks, the head, and a model that is not causal. They are short, so that an id that a way
loses is much of what a position reads: the rounding of a dtype shorter than float32 could hide a smaller part. It could
also hide a mask that leaks a thousandth of a neighbour. Rows of a call show what begins at a length.

The plain forward decides how large a difference may be: its dtype does, and where that does not suffice, how far its
numbers move when the embeddings of the row are rounded otherwise. A way that differs is not used, and the next one in
order is tried; the last is the plain forward itself. What trial rows showed is kept on disk: see `verdicts`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from corelm.errors import CapabilityError, brief
from corelm.spec import Ragged
from transformers_backend import trials
from transformers_backend.engine import CausalLM, is_device_failure
from transformers_backend.model_state import fingerprint
from transformers_backend.verdicts import Verdict, file_of

_log = logging.getLogger(__name__)

#: What a difference in float32 may be, in steps of float32 times the spread of the logits. A plain forward is 15 to 25
#: such steps from float64 at most positions, and 80 at a few.
_STEPS = 96.0
#: How many times as much as the plain forward moves when its embeddings are rounded otherwise: in float32, and at most
#: in a shorter dtype. Linear attention sums in another order when it decodes with a cache. In a short dtype, a way with
#: twice the plain forward's error differs from it by 0.8 times as much as that moves with 2 layers, and 1.6 with 30.
_TIMES_NOISE, _TIMES_SHORT_NOISE = 12.0, 1.7
#: A difference at so many positions is compared with the spread of the logits, or with what a router makes of rounding.
_MOST = 0.75
#: Number of positions compared at the end of each row.
TAIL = 16
TAKES_NO_CACHE = "its forward takes no cache"
_OTHER_NUMBERS = "get other numbers than the model's own forward of one row"
#: How many states of the model's structure are remembered.
_REMEMBERED = 4

#: Returns the number of each row that is to be compared, with the logits of its last positions, ``[n, vocab]``.
TailLogits = Callable[[Ragged], Iterable[tuple[int, Tensor]]]
Way = TypeVar("Way", bound=str)


@dataclass(frozen=True, eq=False)
class OwnRow:
    """A row of the caller's, and what a way made of it."""

    ids: Tensor  # int64[n], what the model read
    found: Tensor  # the logits of its last k positions, ``[k, vocab]``, or the log-probs of `targets` there, float32
    targets: Tensor | None = None  # int64[k] or int64[k, 2]


class SelfTest:
    """Compares ways to run one model, and remembers the results as long as the model stays what it is.

    Attributes:
        now: what is known of the model that is tried, or asked about.
    """

    now: Verdict

    def __init__(self, engine: CausalLM, tokenizer: Any, *, fast: bool) -> None:
        self._told: dict[str, str] = {}
        self._engine = engine
        self._tokenizer = tokenizer
        self._fast = fast
        self._rows = trials.trial_rows(engine, tokenizer)
        self._plain: Tensor | None = None
        self._lengths = trials.LengthClasses(engine.base.config)
        self._may = {name: getattr(engine, name) for name in ("passes_positions", "keeps_last_logits", "fixes_shapes")}
        # The latest first. There are several because adapters may be switched on and off between calls.
        self._verdicts: list[Verdict] = []
        self._keeps = True
        self._checkpoint: Callable[[], object] = lambda: None
        # How often `begin` was called: the first time here, the second time by the first request.
        self._begun = 0
        try:
            self.begin(self._checkpoint)
        except Exception:
            # The first request fails with the model's own words, and a model that is only to be updated opens.
            return
        # Neither the configuration nor the head's weights say it for every model: a head may be quantized or cut.
        engine.vocab_size = self.plain.shape[-1]

    @property
    def row(self) -> Tensor:
        """The row of ids, int64[n], that is read in the plain forward."""
        return self._rows.split()[2]

    @property
    def plain(self) -> Tensor:
        """The logits of `row` in the plain forward, ``[n, vocab]``, read once in a request that needs them."""
        if self._plain is None:
            with self._plainly():
                self._plain = self._engine.plain_logits(self.row)
        return self._plain

    def begin(self, checkpoint: Callable[[], object]) -> None:
        """Read the trial row in the plain forward if the model is new or has changed. Call this before every request.

        Weights that are trained in place change all the time: the model is tried again after 1, 2, 4, 8, … changes.

        Args:
            checkpoint: called before the model is tried in a certain way, during this request. What it raises ends the
                trial; nothing was found out then.

        Raises:
            CapabilityError: its forward fails on one row of ids, or draws random numbers.
        """
        self._checkpoint, self._begun = checkpoint, self._begun + 1
        if self._begun != 2:
            self._plain = None
        now, weights = fingerprint(self._engine.module)
        known = next((each for each in self._verdicts if each.structure == now), None)
        verdict, others = known or Verdict(now, weights), [each for each in self._verdicts if each is not known]
        if weights != verdict.weights:
            self._plain = None
            verdict.weights, verdict.changes = weights, verdict.changes + 1
            if verdict.changes.bit_count() == 1:
                known, verdict = None, Verdict(now, weights, verdict.changes)
        if known is None:
            # If this fails for want of memory, or with Ctrl-C, nothing was found out.
            self._verdicts = others
            self._read_plainly(verdict)
        self._verdicts = [verdict, *others[: _REMEMBERED - 1]]
        self._take(verdict)

    def resume(self, verdict: Verdict) -> None:
        """Go on with a request that began with this verdict, after `begin` was called for others."""
        if verdict is not self.now:
            self._plain = None
            self._take(verdict)

    def _take(self, verdict: Verdict) -> None:
        self.now = verdict
        for name, may in self._may.items():
            setattr(self._engine, name, may and name not in verdict.off)

    def forget(self) -> None:
        """Try the model again before the next request, because its weights were replaced."""
        self._verdicts, self._keeps = [], False

    # Which way --------------------------------------------------------------------------------------------------------

    def choose(self, ways: Sequence[Way], may_run: Callable[[Way], bool]) -> Way:
        """Return the first of `ways` of which `may_run` says so, which asks `SelfTest.may_run` and `is_refuted`. The
        last of them is the plain forward and is not tried. If it is the only one, the model is known to be causal.
        """
        for way in ways[:-1]:
            if may_run(way):
                return way
        if len(ways) > 1:
            self._examine()
        return ways[-1]

    def may_run(self, way: str, run: TailLogits, *, padded: bool = True, depth: int = 2, fixed: bool = False) -> bool:
        """Return whether `way` agrees with the plain forward on the trial rows.

        Args:
            padded: whether rows of several lengths are read together.
            depth: 1 if `run` only begins with what the way does. It is then confirmed by own rows only.
            fixed: whether it decodes, and may do so in buffers of fixed shapes. Without them it is tried again.

        Raises:
            CapabilityError: it does not, because the model is not causal.
        """
        if self._engine.adapter_reads_ids:
            return False
        record = self.now.records[way]
        if record.tried < depth and record.refuted:
            columns, record.tried = int(self._rows.lengths.max()), 0
            fault = self._fault_of(run, padded)
            if fault and self._begun == 2:
                # Since the opening, the weights may have been written to in a way that shows nowhere.
                del self._verdicts[0]
                self.begin(self._checkpoint)
                return self.may_run(way, run, padded=padded, depth=depth, fixed=fixed)
            if fault and self._examine():
                fault = self._fault_of(run, padded)
            if fault and fixed and self._engine.fixes_shapes:
                self._engine.fixes_shapes = False
                if not (fault := self._fault_of(run, padded)):
                    self.now.off.add("fixes_shapes")
                self._engine.fixes_shapes = bool(fault)
            if fault:
                self._refute(way, columns, fault)
            else:
                record.tried = depth
                record.confirmed = max(record.confirmed, columns if depth == 2 else 0)
            self.now.keep()
        return record.refuted > 0

    def is_refuted(self, way: str, columns: int) -> bool:
        """Return whether `way` differed from the plain forward on a forward pass as wide as this."""
        return columns >= self.now.records[way].refuted

    def is_confirmed(self, way: str, columns: int, steps: int | None = None) -> bool:
        """Return whether `way` was compared on a forward pass as wide as this, and on so many `steps`, and agreed.

        Steps beyond 16 are not asked for. None is for a way that decodes nothing.
        """
        record = self.now.records[way]
        _, last = self._lengths.around(max(record.confirmed, record.read) if steps == 0 else record.confirmed)
        return columns <= last and record.steps >= min(steps or 0, TAIL) and not self.is_refuted(way, columns)

    def confirm(self, way: str, columns: int, rows: Iterable[OwnRow], steps: int | None = None) -> bool:
        """Return whether rows that were read in a pass of so many columns have the numbers of the plain forward, and
        remember it. So many `steps` of them were decoded one after another.
        """
        if not (self.is_confirmed(way, columns, steps) or self.is_refuted(way, columns)):
            with self._engine.evaluating():
                agreed = all(map(self._agrees, rows))
            if agreed:
                record = self.now.records[way]
                record.steps += steps or 0
                if steps == 0:
                    record.read = max(record.read, columns)
                else:
                    record.confirmed = max(record.confirmed, columns)
            else:
                self._refute(way, columns, _OTHER_NUMBERS)
        return not self.is_refuted(way, columns)

    def _refute(self, way: str, columns: int, fault: str) -> None:
        record = self.now.records[way]
        # A way that failed on the short trial rows is not used at all.
        record.refuted = min(record.refuted, self._lengths.around(columns)[0]) if record.tried else 0
        record.fault = f"{way} rows of {columns} tokens {brief(fault)}"
        then = f"{record.refuted} tokens or more are run in a slower way" if record.refuted else "a slower way is used"
        _log.info("%s: %s, so %s", type(self._engine.base).__name__, record.fault, then)

    def warn_once(self, what: str, cost: str) -> None:
        """Tell the user, once, what is done in a slower way, and how much time that takes."""
        if what in self._told:
            return
        causes = [record.fault for record in self.now.records.values() if record.fault]
        advice = "if another release of transformers behaves otherwise, use that one; please report the model type"
        if self._engine.adapter_reads_ids:
            causes, advice = ["its adapter reads the ids of each call (aLoRA)"], "another kind of adapter is faster"
        elif not self._engine.accepts_cache:
            causes.append(TAKES_NO_CACHE)
        name, cause = type(self._engine.base).__name__, "; ".join(causes)
        self._told[what] = cause
        _log.warning("%s: %s, which takes %s. Cause: %s; %s", name, what, cost, cause, advice)

    def explained(self, way: str, what: str | None) -> str:
        """Return the way, and why it is a slower one if `warn_once` has told of `what`."""
        told = self._told.get(what or "")
        return f"{way}: {told}" if told else way

    # The comparison ---------------------------------------------------------------------------------------------------

    def _fault_of(self, run: TailLogits, padded: bool = True) -> str:
        """Return what `run` makes of the trial rows instead of the plain forward's numbers; "" if it agrees."""
        self._checkpoint()
        rows, plain = self._rows, self.plain
        if not padded:
            # The row cut short, and the beginning of another.
            shortest = int(rows.lengths.min())
            rows = Ragged.from_list([row[:shortest] for row in rows.split()])
        with self._plainly():
            try:
                found = {number: tail for number, tail in run(rows) if number != trials.OTHER}
            except Exception as error:
                if is_device_failure(error):
                    raise
                # A model's code may fail in any way on inputs that it does not expect.
                return f"fail with {type(error).__name__}: {error}"
            noise = cache(partial(self._noise, self.row, plain))
            for number, tail in found.items():
                end = int(rows.lengths[number])
                at = slice(end - len(tail), end)
                if not self._is_rounding(trials.differences(tail, plain[at]), noise, at):
                    return _OTHER_NUMBERS
            if self.is_short and 0 in found and not torch.equal(found[0], found[3]) and self._leaks(run, rows, found):
                return "get other numbers when the rows or the padding beside them change"
        return ""

    def _leaks(self, run: TailLogits, rows: Ragged, found: dict[int, Tensor]) -> bool:
        """Return whether the row that is read twice gets other logits if the other rows and the padding are others.

        Not if the plain forward itself gives other bits when later ids change, as experts that read the tokens of a
        batch together do.
        """
        engine, (short, other, row, _) = self._engine, rows.split()
        changed = torch.cat([self.row[: len(short)], self.row[len(short) :].flip(0)])
        # They begin as before, so that rows that are sorted keep their places and share what they shared.
        others = [short, torch.cat([other[:1], other[1:].flip(0)]), changed[: len(row)], short]
        engine.padding = 1
        try:
            again = {number: tail for number, tail in run(Ragged.from_list(others)) if number in (0, 3)}
        finally:
            engine.padding = 0
        if all(torch.equal(tail, found[number]) for number, tail in again.items()):
            return False
        if torch.equal(engine.plain_logits(changed)[: len(short)], self.plain[: len(short)]):
            return True
        self._refuse_noise(torch.finfo(self._dtype()).eps ** 0.5 * self.now.scale)
        return False

    def _agrees(self, row: OwnRow) -> bool:
        wanted, times = self._engine.plain_logits(row.ids, len(row.found)), 1.0
        if row.targets is None:
            apart = trials.differences(row.found, wanted)
        else:
            apart = trials.token_differences(row.found, wanted, row.targets)
            # Three of four normal deviates are below 1.15 standard deviations, but not of a few.
            apart, times = apart / 1.15, 1.0 if len(apart) >= 8 else 2.0
        return self._is_rounding(apart, lambda: times * self._noise(row.ids, wanted))

    def _is_rounding(self, apart: Tensor, noise: Callable[[], Tensor], at: slice = slice(None)) -> bool:
        """Return whether differences at some positions of a row are put down to rounding.

        A few positions of a real model are a thousand times as sensitive to rounding as most. So each is compared with
        what the plain forward moves there: by itself in float32, and in the mean square in a shorter dtype.

        Args:
            apart: float32[n].
            noise: returns how far the plain forward of the row moves when it is rounded otherwise.
            at: which of that are these positions.
        """
        scale, eps, short = self.now.scale, torch.finfo(self._dtype()).eps, self.is_short
        config = self._engine.base.config.get_text_config()
        # Where activations are quantized, the rounding of a sum may move one of them to the next level.
        largest = scale * (0.5 if short else 0.2 if self.now.quantized else eps**0.5)
        typical = apart.quantile(_MOST)
        if not (typical <= largest and apart.isfinite().all()):
            return False

        def together(values: Tensor) -> float:
            return float(values.square().mean().sqrt() if short else values.max())

        # Every layer rounds the states twice, and the errors add up as in a random walk.
        layers = getattr(config, "num_hidden_layers", 0) or 1
        floor = eps * scale * ((2 * layers + 1) ** 0.5 if short else _STEPS)
        times = min(_TIMES_SHORT_NOISE, ((layers + 5) / 12) ** 0.5) if short else _TIMES_NOISE
        if short and getattr(config, "num_experts_per_tok", None) is not None:
            # Rounding makes a router choose other experts at single positions, each time at others.
            return bool(typical <= floor or typical <= times * noise()[at].quantile(_MOST))
        if together(apart) <= floor:
            return True
        _log.debug("%.2g apart at most positions, %.2g at one; %.2g is allowed at each", typical, apart.max(), floor)
        return together(apart / (times * noise()[at]).clamp_min(floor / 2 if short else floor)) <= 1.0

    def _noise(self, ids: Tensor, wanted: Tensor) -> Tensor:
        """Return float32[n]: how far its last n logits move when the embeddings of a row are rounded otherwise."""
        with self._engine.nudged():
            return trials.differences(self._engine.plain_logits(ids, len(wanted)), wanted)

    @contextmanager
    def _plainly(self) -> Iterator[None]:
        with self._engine.evaluating(), torch.autocast(self._engine.device.type, enabled=False):
            yield

    # The plain forward itself -----------------------------------------------------------------------------------------

    def _read_plainly(self, verdict: Verdict) -> None:
        self._checkpoint()
        self._rows, self._plain = trials.trial_rows(self._engine, self._tokenizer), None
        before = trials.random_states(self._engine.device)
        try:
            plain = self.plain
        except CapabilityError:
            self._rows = trials.trial_rows(self._engine, self._tokenizer, with_specials=False)
            plain = self.plain
        if not all(map(torch.equal, before, trials.random_states(self._engine.device))):
            self._refuse_noise(0.0)
        verdict.scale, verdict.quantized = trials.spread(plain), self._engine.is_quantized
        if verdict.scale > 0.0:
            shorter = (each for each in (torch.bfloat16, torch.float16) if torch.equal(plain.to(each).to(plain), plain))
            verdict.rounded = next(shorter, None)
        if self._keeps and not verdict.changes:
            verdict.load(file_of(self._engine, self._rows, fast=self._fast))

    def _refuse_noise(self, limit: float) -> None:
        """Refuse a model that gives the same ids other numbers the second time, beyond a difference of this limit."""
        with self._plainly():
            again = float(trials.differences(self._engine.plain_logits(self.row), self.plain).max())
        if again > limit:
            raise CapabilityError(
                f"{type(self._engine.base).__name__} gives other log-probabilities each time it reads the same ids, by "
                f"{again:.2g} on average. So none of them can be relied on. If its forward drops out or adds noise, "
                "turn that off",
                capability="model",
            )

    def _examine(self) -> bool:
        """Find out, once, why a way failed, and return whether the model is run otherwise from now on.

        Raises:
            CapabilityError: the model is not causal, or does not give the same numbers twice.
        """
        engine, now, half = self._engine, self.now, len(self.row) // 2 or 1
        if now.examined:
            return False
        self._checkpoint()
        limit = torch.finfo(self._dtype()).eps ** 0.5 * now.scale
        self._refuse_noise(limit)
        # As many other ids, so that every sum is made in the same order; and none, where XLM masks a single position.
        other = torch.cat([self.row[:half], self._rows.split()[trials.OTHER]])[: len(self.row)]
        with self._plainly():
            changed = trials.differences(engine.plain_logits(other)[:half], self.plain[:half])
            left = trials.differences(engine.plain_logits(self.row[:half]), self.plain[:half]).median()
        ahead = float(torch.maximum(changed.quantile(_MOST) if self.is_short else changed.max(), left))
        if ahead > limit:
            raise CapabilityError(
                f"{type(engine.base).__name__} is not causal: when later ids change or are left out, the "
                f"log-probabilities of earlier positions change by {ahead:.2g} on average. So log p(token | earlier "
                "tokens) cannot be read from it. If its configuration has is_decoder or is_causal, load it with True; "
                "a quantized model must not scale activations by a whole row",
                capability="model",
            )
        # As the plain forward, but with the positions 0, 1, 2, …
        inputs = engine.inputs(self._rows.select(torch.tensor([2])), "right")
        tried: list[tuple[str, TailLogits]] = [
            ("passes_positions", lambda _: [(2, engine.forward(use_cache=False, **inputs).logits[0])]),
            ("keeps_last_logits", lambda _: [(2, engine.plain_logits(self.row, 1))]),
            ("keeps_last_logits", lambda _: [(2, engine.plain_logits(self.row, half))]),
        ]
        off = {name for name, run in tried if getattr(engine, name) and self._fault_of(run)}
        for name in off:
            setattr(engine, name, False)
        now.off |= off
        now.examined = True
        return bool(off)

    @property
    def is_short(self) -> bool:
        """Whether numbers are rounded to fewer digits than float32 has."""
        return torch.finfo(self._dtype()).bits < 32

    def _dtype(self) -> torch.dtype:
        device, dtype = self._engine.device.type, self.now.rounded or self._engine.base.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        return dtype if dtype.is_floating_point and dtype.itemsize > 1 else torch.bfloat16
