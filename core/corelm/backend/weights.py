"""`Weights`: which weights an engine has, under which labels, and which part of it sleeps.

`State` says all of it. It is replaced as a whole, so an interrupt leaves either the state before or the one after
it. A change (an update, an adapter, sleep, waking) takes the engine's turn alone, and goes through these states:

=========  =============================================================================================
begun      what is true if nobody learns how it ends: weights under a label that none had before, an
           engine that sleeps
done       what was asked for
refused    what was true before: the hook raised `InvalidRequestError` or `CapabilityError`
failed     as begun. So is what Ctrl-C leaves behind: no thread has to tidy up after it
=========  =============================================================================================

Between two changes, the owner of the model may change its weights in place. An engine that notices (the hook
`weights_state`) is asked before and after every call.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, Protocol

from corelm.errors import (
    BackendAsleepError,
    BackendTimeoutError,
    CapabilityError,
    CoreLMError,
    InvalidRequestError,
    brief,
)
from corelm.spec import records
from corelm.spec.deadline import Deadline
from corelm.spec.provenance import Adapter, VersionRuns
from corelm.spec.version_runs import check_runs, counted_up, renamed, with_runs
from corelm.validate import invalid, shown

_log = logging.getLogger(__name__)

#: How many states of the model keep their label. An owner may switch to and fro, for example an adapter on and off.
_REMEMBERED = 16
#: Seconds between two looks whether an update has ended.
_PAUSE = 0.01
_CHANGED = (
    "the weights of the model were changed during the call, so its numbers are of neither the old weights nor the new "
    "ones; change the weights between two calls, or with update_weights, which waits for the calls under way"
)


class WeightsListener(Protocol):
    """Checks every change of an engine's weights. Core calls it while no other call is in the engine.

    It may call the engine from the thread that tells it.
    """

    def before_update(self, update: records.WeightUpdate) -> None:
        """Prepare for new weights. What this raises ends the update before it began."""

    def after_update(self, update: records.WeightUpdate) -> None:
        """Look at the engine with new weights. An `EngineError` gives them a label that none had before."""

    def awake(self) -> None:
        """Look at the engine, which has slept and has the weights of before. Errors are those of `after_update`."""

    def update_failed(self, label: str) -> None:
        """Learn that weights have this new label because loading them failed, or because of an objection."""


@dataclass(frozen=True, slots=True)
class AdapterState:
    """An adapter that was loaded at some time. One that the engine was opened with has the label "0".

    The label goes on counting if the adapter is loaded again after it was unloaded. `config` is kept for a
    later state dict of the same name; it is None if it is not known.
    """

    label: str = "0"
    loaded: bool = False
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class State:
    """The state of an engine's weights.

    Attributes:
        label: the label of the base weights.
        known: the labels of states of the model, as `weights_state` tells them, the last one at the end.
        changes: how often core has changed something. What the owner has changed does not count.
        asleep: the parts that sleep: `weights`, `kv_cache`, both or none.
        without_weights: whether the engine has no weights, so that only an update can help.
        adapters: the adapters by name.
        unseen: an update that the listener could not look at, because the engine slept.
    """

    label: str = "0"
    known: Mapping[Hashable, str] = field(default_factory=dict)
    changes: int = 0
    asleep: frozenset[str] = frozenset()
    without_weights: bool = False
    adapters: Mapping[str, AdapterState] = field(default_factory=dict)
    unseen: records.WeightUpdate | None = None


@dataclass(eq=False, slots=True)
class _Update:
    """One update of the base weights, as the answers see that go on in it.

    Attributes:
        number: which update of the engine it is, from 1 on.
        asked: the label that it asks for, which the engine is told.
        label: the label that its weights have so far; None if it was refused.
        turn: the turn of the engine's lock in which it is made. While that holds the lock, the label may still change.
    """

    number: int
    asked: str
    label: str | None
    turn: object


class Weights:
    """The weights of one `OpenEngine`: their `state`, and whether it notices what the owner of its model changes."""

    def __init__(self, engine: Any) -> None:
        self.state = State(without_weights=engine.capabilities.without_weights)
        self._engine, self._name = engine, engine.name
        self.noticed = engine.implements("weights_state")
        # The labels that base weights (None) and each adapter had before.
        self._used: dict[str | None, set[str]] = {}
        # The last update, and those before it that answers under way may have seen.
        self._updates: list[_Update] = []
        # A lock in C: its `with` statement cannot be interrupted half-way.
        self._mutex = threading.RLock()

    # Reading ---------------------------------------------------------------------------------------------------------

    @property
    def answers(self) -> bool:
        """Whether the engine can generate and score."""
        return not self.state.asleep and not self.state.without_weights

    @property
    def adapters(self) -> dict[str, str]:
        """The version of each adapter that is loaded, by name."""
        return {name: each.label for name, each in sorted(self.state.adapters.items()) if each.loaded}

    def version_with(self, adapter: Adapter) -> str:
        """Return the label of rows that are made with this adapter and the weights in force.

        Unless a call is in the engine, a change by the owner is noticed first.
        """
        if not (self._engine.lock.holders or self._engine.closed or self._engine.elsewhere):
            self.look()
        return self.state.label if adapter is None else self.named(adapter, self.state.label)

    def named(self, adapter: Adapter, weights: str) -> str:
        """Return the label of rows that were made with this adapter and base weights of this label."""
        if adapter is None:
            return weights
        if adapter is False:
            return f"{weights}+none"
        return f"{weights}+{adapter}@{self.state.adapters.get(adapter, AdapterState()).label}"

    def look(self) -> tuple[Hashable | None, State]:
        """Return the state of the model, None if it is not told or the weights sleep, and the `State` with its label.

        A state of the model that was not seen before gets a new label; the first one gets the label in force.
        """
        if not self.noticed or "weights" in self.state.asleep:
            return None, self.state
        with self._mutex:
            # Read inside, or a thread that was held up here would put the label of an older state in force again.
            seen, state = self._engine.ask("weights_state", records.WeightsStateRequest()), self.state
            if seen is not None and state.known.get(seen) != state.label:
                label = state.known.get(seen) or (self._unused(None) if state.known else state.label)
                if label != state.label:
                    told = "the weights were changed by their owner: %s are in force, after %s"
                    _log.info(told, brief(label), brief(state.label))
                    self._used.setdefault(None, set()).add(state.label)
                known = [*((each, of) for each, of in state.known.items() if each != seen), (seen, label)]
                self.state = replace(state, label=label, known=dict(known[-_REMEMBERED:]))
            return seen, self.state

    def require_same(self, hook: str, then: State, changed: bool = False) -> None:
        """Refuse the numbers of a call during which the owner has changed the weights, since the `State` before it.

        A change by core is none: a wrapper of the hook may update the weights during the call. If the engine
        does not tell another state of its model now (`changed`), what another thread has noticed counts.
        """
        if self.state.changes == then.changes and (changed or self.state.label != then.label):
            raise self._engine.fault(hook)(_CHANGED)

    # Changing --------------------------------------------------------------------------------------------------------

    def update(self, request: records.WeightUpdate, version: str | None) -> str:
        """Load base weights or an adapter, or unload one, or take note that the owner has changed the base weights.

        `request` has no label yet. The one that is returned is `version`; None counts up from the last one.
        Errors are those of `Backend.update_weights`, `load_adapter`, `unload_adapter` and `weights_changed`.
        """
        if version is not None and not isinstance(version, str):
            raise invalid("version", f"expected a str, got {shown(version)}")
        change = self._change_base if request.adapter is None else self._change_adapter
        label: str = self._engine.alone(partial(change, request, version), "update_weights", request.when)
        return label

    def _change_base(self, request: records.WeightUpdate, version: str | None) -> str:
        listener, loads = self._engine.listener, self._engine.capabilities.update_weights
        if loads:
            self._require_room()
            if request.by_owner and self.state.without_weights:
                raise self._lacks_weights()
        if listener is not None:
            listener.before_update(request)
        before, unused = self.state, self._unused(None, version)
        last, holders = self._updates[-1:], list(self._engine.lock.holders)
        number = last[0].number + 1 if last else 1
        request = replace(request, version=unused if version is None else version, number=number)
        update = _Update(number, request.version, unused, self._engine.lock.turns()[0])
        seen = self._updates if any(turn.hook == "generate" for turn in holders) else last
        # Before the label changes: a call that begins now waits for the end of the update.
        self._updates = [*seen, update]
        self._move(label=unused, known={}, unseen=None)
        try:
            if loads:
                self._ask_for("update_weights", request, before, "the new weights are not in force")
            # The listener's first look at the new weights finds a state that has no label yet.
            self._move(known={}, without_weights=False)
            if listener is not None and self.answers:
                listener.after_update(request)
            elif listener is not None:
                self._move(unseen=request)
            update.label = request.version
            self._move(label=request.version, look=True)
        except BaseException:
            if listener is not None and self.state.label == unused:
                listener.update_failed(unused)
            raise
        last_label = brief(repr(before.label))
        _log.info("%s: weights %s are in force, after %s", self._name, brief(repr(request.version)), last_label)
        return request.version

    def _change_adapter(self, request: records.WeightUpdate, version: str | None) -> str:
        self._require_room()
        name, (_, before) = request.adapter, self.look()
        assert name is not None
        last, unused = before.adapters.get(name, AdapterState()), self._unused(name, version)
        request = replace(request, version=unused if version is None else version)
        self._move(adapters={**before.adapters, name: replace(last, label=unused)})
        try:
            self._ask_for("update_weights", request, before, "the adapter is not in force")
        except CoreLMError:
            # Whatever happened to the state of the model, it was no change of the base weights by their owner.
            self._move(look=True)
            raise
        config = request.adapter_config if request.path is None else _read_config(request.path)
        adapter = AdapterState(last.label) if request.unloads else AdapterState(request.version, True, config)
        self._move(adapters={**before.adapters, name: adapter}, look=True)
        how = "unloaded" if request.unloads else "in force"
        _log.info("adapter %s: version %s is %s", brief(name), brief(request.version), how)
        return request.version

    def relabel(self) -> str:
        """Give the base weights a label that none had before, because they are not what they should be."""
        self._move(label=self._unused(None), look=True)
        return self.state.label

    def sleep(self, request: records.SleepRequest) -> None:
        """Put the engine to sleep. See `Backend.sleep`."""

        def change() -> None:
            # Notice what the owner has changed so far: once the engine sleeps, its weights are elsewhere.
            _, before = self.look()
            drops = request.level == max(records.SLEEP_LEVELS)
            if drops and (names := ", ".join(self.adapters)):
                how = f"unload them first ({names}), or sleep at level 1"
                raise invalid("level", f"2 drops the adapters as well; {how}")
            if before.asleep:
                what = f"backend {self._name!r} cannot sleep: its {_named(before.asleep)} sleep already"
                raise BackendAsleepError(f"{what}; call backend.wake() first")
            without = before.without_weights or drops
            self._move(asleep=frozenset(records.SLEEP_TAGS), without_weights=without)
            self._ask_for("sleep", request, before)
            # Weights that were moved are no weights that their owner has changed.
            self._move(look=True)

        self._engine.alone(change, "sleep", request.when)

    def wake(self, tags: frozenset[str]) -> None:
        """Wake these parts of the engine, as far as they sleep. See `Backend.wake`."""

        def change() -> None:
            # If the weights are awake, their owner may have changed them.
            _, before = self.look()
            if not (woken := tags & before.asleep):
                # Another thread has woken it in the meantime.
                return
            self._ask_for("wake", records.WakeRequest(tags=woken, last=woken == before.asleep), before)
            self._move(asleep=before.asleep - woken, look=True)
            if self._engine.listener is None or not self.answers:
                return
            update = self.state.unseen
            self._move(unseen=None)
            try:
                if update is None:
                    self._engine.listener.awake()
                else:
                    self._engine.listener.after_update(update)
            except BaseException:
                self._engine.listener.update_failed(self.relabel())
                raise

        self._engine.require_open()
        if tags & self.state.asleep:
            self._engine.alone(change, "wake")

    def _ask_for(self, hook: str, request: Any, before: State, otherwise: str = "expected True") -> None:
        """Have the engine make a change that has begun. If it refuses, go back to the state `before`."""
        try:
            result = self._engine.ask(hook, request)
        except (InvalidRequestError, CapabilityError):
            if not getattr(request, "by_owner", False):
                with self._mutex:
                    self.state = replace(before, changes=self.state.changes + 1)
                if isinstance(request, records.WeightUpdate) and request.adapter is None:
                    self._updates[-1].label = None
            raise
        if result is not True:
            raise self._engine.fault(hook)(f"returned {shown(result)}: {otherwise}")

    def _move(self, *, look: bool = False, **changes: Any) -> None:
        """Change fields of `State`. With `look`, only the state in which the model is now has a label afterwards."""
        with self._mutex:
            state = replace(self.state, changes=self.state.changes + 1, **changes)
            if look and self.noticed:
                seen = self._engine.ask("weights_state", records.WeightsStateRequest())
                state = replace(state, known={} if seen is None else {seen: state.label})
            self.state = state

    def _unused(self, name: str | None, given: str | None = None) -> str:
        """Return a label that no base weights had (None), or no adapter of this name. It is not `given` either."""
        label = self.state.label if name is None else self.state.adapters.get(name, AdapterState()).label
        used = self._used.setdefault(name, set())
        used.add(label)
        while label in used or label == given:
            label = counted_up(label)
        return label

    def refuse_to_answer(self) -> NoReturn:
        if not (asleep := self.state.asleep):
            raise self._lacks_weights()
        tags = "" if len(asleep) == len(records.SLEEP_TAGS) else repr([*asleep])
        what = f"its {_named(asleep)} {'sleeps' if asleep == {'kv_cache'} else 'sleep'}"
        raise BackendAsleepError(f"backend {self._name!r} cannot answer: {what}; call backend.wake({tags}) first")

    def _lacks_weights(self) -> BackendAsleepError:
        call = "call backend.update_weights(…) with a complete set first"
        return BackendAsleepError(f"backend {self._name!r} has no weights yet; {call}")

    def _require_room(self) -> None:
        if "weights" in self.state.asleep:
            why = "there is no memory for new weights while its weights sleep; call backend.wake(['weights']) first"
            raise BackendAsleepError(f"backend {self._name!r}: {why}")

    # Answers that go on in an update ---------------------------------------------------------------------------------

    def sample(self, request: records.GenerateRequest) -> Any:
        """Have an engine with `updates_in_flight` sample, and return its result under the labels that its weights got.

        The engine says from which token on an answer was sampled with the weights of an update. Whether these
        have the label that the update asked for is known at its end. So a call waits for the end of an update
        in which it begins or whose weights it has seen, unless the update's listener makes it.
        """
        deadline, fail = Deadline(request.timeout), self._engine.fault("generate")
        while True:
            last = self._updates[-1:]
            if not any(map(self._under_way, last)):
                label = self.state.label
                if last == self._updates[-1:]:
                    break
            self._pause(deadline)
        known = last[0].number if last else 0
        batch = self._engine.ask("generate", replace(request, weight_version=label, weight_update=known))
        if not isinstance(batch, records.GenerateResult):
            return batch
        check_runs(batch, fail)
        runs = batch.version_runs
        if runs is None:
            if batch.weight_versions is None:
                needed = "but a backend that declares updates_in_flight has to; see corelm_engine_kit.VersionLog"
                raise fail(f"returned neither version_runs nor weight_versions, {needed}")
            runs = tuple(((version, 0),) for version in batch.weight_versions)
        seen = {version for of_row in runs for version, _ in of_row}
        updates = [each for each in self._updates if each.number > known]
        while [each for each in updates if each.asked in seen and self._under_way(each)]:
            self._pause(deadline)
        if problem := _out_of_order(runs, [label, *[each.asked for each in updates]]):
            raise fail(problem)
        names: dict[str, str] = {}
        for each in updates:
            # If updates of one label have left several, its tokens get one that no good weights have.
            if each.label is not None and (each.asked not in names or each.label != each.asked):
                names[each.asked] = each.label
        refused = {each.asked for each in updates} - names.keys() - {label}
        if wrong := sorted(refused & seen):
            raise fail(f"says that tokens were sampled with the weights {wrong[0]!r}, which it has refused")
        return with_runs(batch, [renamed(of_row, lambda version: names.get(version, version)) for of_row in runs])

    def _under_way(self, update: _Update) -> bool:
        """Return whether another thread makes the update. The lock says so, which no interrupt leaves held."""
        return update.turn in self._engine.lock.holders and update.turn not in self._engine.lock.turns()

    def _pause(self, deadline: Deadline) -> None:
        if deadline.is_over():
            late = "an update of the weights was under way when the timeout of the call was over"
            raise BackendTimeoutError(f"backend {self._name!r}, hook generate: {late}")
        time.sleep(_PAUSE)


def _read_config(folder: Path) -> Mapping[str, Any] | None:
    """Return the configuration of an adapter that PEFT has written to a folder; None if another machine has it."""
    try:
        found = json.loads((folder / "adapter_config.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _out_of_order(rows: Sequence[VersionRuns], labels: Sequence[str]) -> str:
    """Return where runs are in another order than the updates; "". A label that was loaded twice tells nothing."""
    order = {label: place for place, label in enumerate(labels) if labels.count(label) == 1}
    for row, runs in enumerate(rows):
        known = [(order[version], version, first) for version, first in runs if version in order]
        for (place, before, _), (next_place, version, first) in pairwise(known):
            if next_place < place:
                back = f"the weights go back from {before!r} to {version!r} at position {first}"
                return f"row {row}: version_runs: {back}"
    return ""


def _named(tags: Iterable[str]) -> str:
    return " and ".join(tag.replace("kv_cache", "KV cache") for tag in records.SLEEP_TAGS if tag in tags)
