"""The canary: finds out by asking an engine whether it answers as its weights should.

No checksum of tensors sees a prefix cache of the old weights, a checkpoint of which half was loaded, or a server that
was restarted with its first weights. Answers show all three. So after the engine is opened, and after every change of
its weights, a few fixed probes are scored and one is sampled greedily, before any other call is served::

    backend = corelm.get_backend("vllm", model, canary=True)
    expect = corelm_fleet.probe_scores(trainer_model)
    backend.update_weights(path, expect=expect)    # StaleWeightsError if the engine disagrees
    canary_of(backend).look()                      # at any time, for example after a restart

The canary compares:

- Within one look: tokens sampled with the same tokens scored, and scores after a shared prefix with scores of the whole
  probe. A prefix cache of old weights makes them differ.
- After an update: with `expect`, if it was given. Without it, the canary can tell only that nothing has changed: the
  probes' scores are the same to the last bit, although weights were handed over that differ much from the last ones.
- If `expect` was given for the last two updates: how far the trainer's scores have moved, and the engine's. This also
  shows old weights after a step that moves scores by less than the tolerance.
- In ``look()``: with the last good look at the same weights, and with earlier weights. ``look(expect=…)`` also compares
  with a trainer's scores, or with the `scores` of another engine's canary.

One look is three calls, of about 890 tokens in all, 8 of them sampled. An update makes two calls of about 440 tokens
before it as well, so that the probes are in the engine's prefix cache.

Nothing is concluded from what the scores look like: a new random model may give the same log-prob to every token.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from corelm import Backend, validate
from corelm.application import prepare_scoring
from corelm.errors import (
    BackendClosedError,
    BackendTimeoutError,
    CapabilityError,
    EngineError,
    InvalidRequestError,
    StaleWeightsError,
    message,
)
from corelm.spec import WeightUpdate
from corelm.validate import invalid, shown
from corelm_fleet.fingerprints import Fingerprint, differ_much, fingerprint
from corelm_fleet.probes import Answers, Probe, ProbeScores, Questions, Sampled, Scores, apart, probe_scores

__all__ = ["Canary", "ProbeScores", "Watch", "canary_of", "probe_scores", "watch"]

_log = logging.getLogger(__name__)

#: How far apart two scorings of a probe may be, by the less precise of their dtypes: in nats, averaged over its tokens.
#: Tiny models of 13 families were at most 3e-6 from their plain forward in float32, and in float16 and bfloat16 at most
#: 0.03 and 0.16 from float32. With half of the tensors of other weights, they were at least 1 away.
TOLERANCES = {"float64": 1e-3, "float32": 1e-3, "tf32": 0.05, "float16": 0.05, "bfloat16": 0.25}
#: Other weights are in force if scores are this many times nearer to those of the other weights.
_NEARER = 10
#: Differences below this part of the tolerance are not read as a change of the weights.
_NOTICED = 1 / 10
#: How many earlier weights are remembered, in addition to the first.
_REMEMBERED = 4
#: How often a look is begun again because the weights changed in the meantime.
_LOOKS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """Options of a canary. ``canary=True`` means the defaults.

    Attributes:
        tolerance: how far apart two scorings of one probe may be, in nats, averaged over its tokens. None for twice the
            `precision` that the engine declares, or else for that of the dtype: 0.001 in float32, 0.05 in float16 and
            TF32, 0.25 in bfloat16. An engine that returns no logits does not show its dtype, and is taken to compute in
            bfloat16.

    Raises:
        InvalidRequestError: the tolerance is not a number above 0.
    """

    tolerance: float | None = None

    def __post_init__(self) -> None:
        if self.tolerance is not None:
            validate.positive("tolerance", self.tolerance)

    @classmethod
    def make(cls, given: Any) -> Canary | None:
        """Return the options that ``canary=`` asks for; None without a canary.

        Raises:
            InvalidRequestError: not a bool or a `Canary`; `field` is ``canary``.
        """
        if isinstance(given, Canary):
            return given
        if given is None or isinstance(given, bool):
            return cls() if given else None
        raise invalid("canary", f"expected True, False or Canary(tolerance=…), got {shown(given)}")


@dataclass(frozen=True, slots=True)
class _Good:
    """The last good look: the label of the weights, what the engine said, and what the trainer expected, if it did."""

    label: str
    answers: Answers
    expected: ProbeScores | None


def watch(backend: Backend, options: Canary | None = None) -> Watch:
    """Put a canary in front of the backend's engine, and look for the first time, if the engine has weights.

    Raises:
        CapabilityError: the engine can neither score nor sample greedily with raw log-probs.
        StaleWeightsError: the engine's answers contradict one another, or are not numbers.
        EngineError: the engine failed.
    """
    made = Watch(backend, options or Canary())
    if backend.engine.weights.answers:
        made.look()
    backend.engine.listener = made
    return made


def canary_of(backend: Backend) -> Watch:
    """Return the canary in front of the backend's engine.

    Raises:
        InvalidRequestError: it has none; `field` is ``backend``.
    """
    if not isinstance(found := backend.engine.listener, Watch):
        raise invalid("backend", "it has no canary; open it with canary=True")
    return found


class Watch:
    """The canary in front of one engine.

    The engine is asked in the call of the thread that looks. During an update, that is the call around it, so no other
    call comes between. Attributes are replaced as a whole, and no lock is held while the engine is asked.

    Args:
        backend: the backend to watch. A batcher's queue is not used.
        options: how to compare.

    Raises:
        CapabilityError: the engine can neither score nor sample greedily with raw log-probs.
    """

    def __init__(self, backend: Backend, options: Canary) -> None:
        self._engine, self.options, self._questions = backend.engine, options, Questions(backend)
        self._good: _Good | None = None
        self._earlier: tuple[Answers, ...] = ()
        self._handed_over: Fingerprint | None = None
        self._next: tuple[Fingerprint | None, Answers | None] = (None, None)
        self._suspect: str | None = None

    @property
    def scores(self) -> ProbeScores | None:
        """What the engine said in the last good look, to compare another engine of the same weights with.

        None from an engine that cannot score, and before the first look.
        """
        if self._good is None or not self._good.answers.scores:
            return None
        found = self._good.answers.scores
        return ProbeScores(tuple(found), tuple(found.values()), self._questions.dtype)

    @property
    def sampled(self) -> Mapping[Probe, Sampled]:
        """What the engine sampled in the last good look, to compare an engine that cannot score with."""
        return {} if self._good is None else self._good.answers.sampled

    def compare_sampled(self, other: Mapping[Probe, Sampled]) -> None:
        """Compare what the engine sampled in the last good look with what another one with the same weights did.

        Raises:
            StaleWeightsError: they differ.
        """
        self._compare_sampled(self.sampled, other, "those that another engine sampled")

    def look(self, expect: ProbeScores | Mapping[str, Any] | None = None) -> None:
        """Ask the engine, and compare its answers with the last good ones of the same weights.

        Weights that were not looked at before, for example of a model that its owner trains in place, are compared with
        nothing earlier. If the engine disagrees, it is asked again while no other call is in it; if it still does, the
        weights get a label that none had before.

        Args:
            expect: what the engine should say, as for `Backend.update_weights`.

        Raises:
            StaleWeightsError: the engine disagrees, or has done so since its weights last changed.
            EngineError: the engine failed.
        """
        expected = ProbeScores.make(expect)
        self._require_comparable(expected)
        if self._engine.weight_version == self._suspect:
            raise self._stale("the last update failed, or the canary has disagreed before")
        try:
            self._compare_with_good(expected)
        except StaleWeightsError as error:
            _log.warning("%s: the canary disagrees, and asks again: %s", self._engine.name, error)
            self._engine.alone(lambda: self._compare_or_relabel(expected))

    def before_update(self, update: WeightUpdate) -> None:
        """Refuse what cannot be compared, and fill the engine's prefix cache with the probes under the old weights.

        Raises:
            InvalidRequestError: `expect` is no `ProbeScores`, or the engine cannot score its probes.
            CapabilityError: the engine cannot score.
            BackendTimeoutError: the engine did not answer in time.
        """
        self._require_comparable(ProbeScores.make(update.expect))
        if not update.by_owner and self._engine.weights.answers:
            try:
                self._questions.warm_up()
            except (BackendClosedError, BackendTimeoutError):
                # The engine may still work on the call, so nothing may be loaded now.
                raise
            except EngineError as error:
                # The update may be what heals it.
                _log.info("%s: could not be asked before the update: %s", self._engine.name, error)
        good = self._good
        before = good.answers if good is not None and good.label == self._engine.weight_version else None
        self._next = fingerprint(update), before

    def after_update(self, update: WeightUpdate) -> None:
        """Ask the engine, compare its answers with those that the new weights should give, and remember them.

        Raises:
            StaleWeightsError: the engine disagrees.
            EngineError: the engine failed.
        """
        (handed_over, before), last, expect = self._next, self._good, ProbeScores.make(update.expect)
        now = self._ask(expect)
        if expect is not None:
            self._compare(now.scores, expect.by_probe(), "those expected", expect.dtype)
        if before is not None:
            self._require_moved(before, now, last.expected if last else None, expect)
            if self._handed_over and handed_over and differ_much(self._handed_over, handed_over) and now.equals(before):
                raise self._stale(
                    "the scores of all probes are those of the weights before, to the last bit, although weights were "
                    "handed over that differ much from the last ones"
                )
        self._handed_over = None if update.by_owner else handed_over
        self._accept(update.version, now, expect)

    def awake(self) -> None:
        """Ask an engine that was woken. See `look`."""
        self.look()

    def update_failed(self, label: str) -> None:
        """Fail every look at the weights with this label: loading them failed, or the engine disagreed."""
        self._suspect, self._handed_over = label, None

    # Asking ----------------------------------------------------------------------------------------------------------

    def _ask(self, expected: ProbeScores | None) -> Answers:
        """Ask the engine, and compare its answers with one another."""
        try:
            now = self._questions.ask(expected)
        except (CapabilityError, InvalidRequestError) as error:
            raise EngineError(f"backend {self._engine.name!r} refused a probe: {message(error)}") from error
        except EngineError as error:
            if not error.usable:
                raise
            # It answered, but with what cannot be: NaN, for example.
            raise self._stale(message(error)) from error
        for answer in now.sampled.values():
            if answer.scored is not None:
                self._compare({(): answer.logprobs}, {(): answer.scored}, "those of the same tokens when scored")
        self._compare(now.tails, now.ends, "those that do not use a prefix cache")
        return now

    def _require_comparable(self, expected: ProbeScores | None) -> None:
        if expected is None:
            return
        self._engine.require("score", "expect= needs an engine that scores")
        try:
            prepare_scoring(self._engine, [list(probe) for probe in expected.probes])
        except InvalidRequestError as error:
            raise invalid("expect", f"the engine cannot score its probes: {message(error)}") from error

    # Comparing -------------------------------------------------------------------------------------------------------

    def _compare_with_good(self, expected: ProbeScores | None) -> None:
        for _ in range(_LOOKS):
            label, good = self._engine.weight_version, self._good
            now = self._ask(expected)
            if self._engine.weight_version == label and self._good is good:
                break
        else:
            raise EngineError(
                f"backend {self._engine.name!r}: the weights changed during each look; look between two updates",
                usable=True,
            )
        if expected is not None:
            self._compare(now.scores, expected.by_probe(), "those expected", expected.dtype)
        if good is not None and good.label == label:
            self._compare(now.scores, good.answers.scores, "those of the last good look")
            self._compare_sampled(now.sampled, good.answers.sampled, "those sampled at the last good look")
            self._require_not_earlier(now, good.answers)
        else:
            self._accept(label, now, expected)

    def _compare_or_relabel(self, expected: ProbeScores | None) -> None:
        try:
            self._compare_with_good(expected)
        except StaleWeightsError:
            self.update_failed(self._engine.weights.relabel())
            raise

    def _compare(self, one: Scores, other: Scores, what: str, dtype: str | None = "float32") -> None:
        difference, tolerance = apart(one, other), self._tolerance(dtype)
        if not difference <= tolerance:
            raise self._stale(
                f"the log-probs of a probe differ from {what} by {difference:.3g} nats a token on average "
                f"(tolerance {tolerance:g})"
            )

    def _compare_sampled(self, one: Mapping[Probe, Sampled], other: Mapping[Probe, Sampled], what: str) -> None:
        """Compare what was sampled up to the first id that differs: it may do so where two ids are equally probable."""
        for prompt in one.keys() & other.keys():
            now, then = one[prompt], other[prompt]
            alike = next((n for n, (a, b) in enumerate(zip(now.ids, then.ids, strict=False)) if a != b), len(now.ids))
            rows = now.logprobs[: alike + 1], then.logprobs[: alike + 1]
            self._compare({(): rows[0]}, {(): rows[1]}, what)

    def _require_not_earlier(self, now: Answers, good: Answers) -> None:
        for earlier in self._earlier:
            moved = apart(earlier.scores, good.scores)
            if moved > self._least() and apart(now.scores, earlier.scores) * _NEARER < moved:
                raise self._stale("the scores of the probes are those of earlier weights")

    def _require_moved(
        self, before: Answers, now: Answers, last: ProbeScores | None, expected: ProbeScores | None
    ) -> None:
        if last is None or expected is None or last.dtype != expected.dtype:
            return
        trained = apart(last.by_probe(), expected.by_probe())
        moved = apart({probe: before.scores[probe] for probe in before.scores.keys() & {*expected.probes}}, now.scores)
        if trained > self._least() and moved * _NEARER < trained:
            raise self._stale(
                f"the trainer's scores have moved by {trained:.3g} nats a token since the last update, and the "
                f"engine's by {moved:.3g}"
            )

    def _tolerance(self, dtype: str | None) -> float:
        if self.options.tolerance is not None:
            return self.options.tolerance
        coarsest, precision = TOLERANCES["bfloat16"], self._engine.capabilities.precision
        own = TOLERANCES.get(self._questions.dtype or "", coarsest) if precision is None else 2 * precision
        return max(TOLERANCES.get(dtype or "", coarsest), own)

    def _least(self) -> float:
        return self._tolerance("float32") * _NOTICED

    def _accept(self, label: str, now: Answers, expected: ProbeScores | None) -> None:
        if self._good is not None:
            self._earlier = (*self._earlier[:1], *(*self._earlier[1:], self._good.answers)[-_REMEMBERED:])
        self._good, self._suspect = _Good(label, now, expected), None

    def _stale(self, what: str) -> StaleWeightsError:
        return StaleWeightsError(
            f"backend {self._engine.name!r} does not answer as its weights should: {what}. It may hold weights of "
            "before, part of a checkpoint, or caches of other weights: load the weights again. If they are right, set "
            "get_backend(…, canary=Canary(tolerance=…))",
            usable=True,
        )
