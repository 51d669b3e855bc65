"""Random changes of the weights of an engine: whatever happens, a label names one set of weights and no other."""

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from corelm import Backend, hookimpl
from corelm.errors import BackendAsleepError, CapabilityError, EngineError, InvalidRequestError
from corelm.spec import (
    GenerateRequest,
    GenerateResult,
    RowAnswer,
    ScoreRequest,
    ScoreResult,
    SleepRequest,
    WakeRequest,
    WeightUpdate,
    generate_result,
)
from corelm_engine_kit import RowVersions, VersionLog
from corelm_testing.toy import Bigram, ToyBackend
from helpers.each import each, examples
from helpers.interrupts import interrupt_everywhere

PATIENCE = 20.0
ROWS, LONG = [[5, 6]], {"max_new_tokens": 6, "ignore_eos": True}
#: How a hook that changes something may end, and what the caller then gets.
ENDS: dict[str, Any] = {
    "done": None,
    "refused": InvalidRequestError("does not fit", field="weights"),
    "not supported": CapabilityError("not now", capability="update_weights"),
    "failed": RuntimeError("half-way"),
    "interrupted": KeyboardInterrupt(),
    "false": None,
}
REFUSED = ("refused", "not supported")


class Walked(ToyBackend):
    """A toy that updates in flight, sleeps and takes adapters. A number in its table says which weights it has.

    Attributes:
        end: how the next change ends, one of `ENDS`.
        read: which weights were read for each token and row, and the adapter's.
        half_way, go_on: an answer stops after half of its tokens while `go_on` is not set.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        levels = frozenset({1, 2})
        self.capabilities = replace(self.capabilities, adapters=True, sleep_levels=levels, updates_in_flight=True)
        self.end, self.count, self.log = "done", 0, VersionLog()
        self.read: list[tuple[float, float | None]] = []
        self.loaded: dict[str, float] = {}
        self.kept: torch.Tensor | None = None
        self.half_way, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.train()

    def train(self) -> float:
        """Change the weights in place, and return their number."""
        self.count += 1
        with torch.no_grad():
            self.model.table.nan_to_num_()
            self.model.table[0, 0] = self.count
        return float(self.count)

    def ending(self, change: Callable[[], object]) -> bool:
        end, self.end = self.end, "done"
        if end in REFUSED:
            raise ENDS[end]
        change()
        if ENDS[end] is not None:
            raise ENDS[end]
        return end == "done"

    @hookimpl
    def update_weights(self, request: WeightUpdate) -> bool:
        name = request.adapter
        if request.unloads and name not in self.loaded:
            raise InvalidRequestError(f"adapter: there is no {name!r}", field="adapter")

        def change() -> None:
            if name is None:
                if not request.by_owner:
                    self.train()
                self.log.note(request)
            elif request.unloads:
                del self.loaded[name]
            else:
                self.count += 1
                self.loaded[name] = self.count

        return self.ending(change)

    @hookimpl
    def sleep(self, request: SleepRequest) -> bool:
        def change() -> None:
            self.kept = self.model.table.detach().clone() if request.level == 1 else None
            self.model.table.data = torch.full_like(self.model.table, torch.nan)

        return self.ending(change)

    @hookimpl
    def wake(self, request: WakeRequest) -> bool:
        def change() -> None:
            if "weights" in request.tags and self.kept is not None:
                self.model.table.data, self.kept = self.kept, None

        return self.ending(change)

    @hookimpl
    def score_logprobs(self, request: ScoreRequest) -> ScoreResult:
        self.note(request.adapter)
        return super().score_logprobs(request)

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        versions = RowVersions(1, self.log.now(request))
        for token in range(6):
            if token == 3:
                self.half_way.set()
                assert self.go_on.wait(PATIENCE)
            versions.sampled(0, token, self.log.now(request))
            self.note(request.adapter)
        answer = RowAnswer([7] * 6, [-1.0] * 6, "length")
        return replace(generate_result(request, [answer]), version_runs=versions.runs)

    def note(self, adapter: Any) -> None:
        if adapter and adapter not in self.loaded:
            raise InvalidRequestError(f"adapter: there is no {adapter!r}", field="adapter")
        added = {None: None, False: -1.0}.get(adapter, self.loaded.get(adapter))
        self.read.append((float(self.model.table.detach()[0, 0]), added))


def opened() -> tuple[Walked, Backend]:
    engine = Walked.open(Bigram.of_talk())
    assert isinstance(engine, Walked)
    return engine, Backend.from_plugin(engine, "walked")


class Truth:
    """Which weights each label was seen on. A second kind of weights under one label is what no walk may find."""

    def __init__(self, engine: Walked, backend: Backend) -> None:
        self.engine, self.backend = engine, backend
        self.named: dict[str, tuple[float, float | None]] = {}

    def check(self, labels: list[str]) -> None:
        """Compare the labels of rows or tokens with the weights that the engine has read for them."""
        assert len(labels) == len(self.engine.read)
        for label, weights in zip(labels, self.engine.read, strict=True):
            assert self.named.setdefault(label, weights) == weights, f"{label!r} names two sets of weights"
        self.engine.read.clear()

    def score(self, adapter: Any = None) -> str:
        found = self.backend.score_logprobs(ROWS, adapter=adapter)
        assert found.weight_versions is not None
        self.check([*found.weight_versions])
        return found.weight_versions[0]

    def answered(self, batch: GenerateResult) -> None:
        assert batch.weight_versions is not None
        runs = batch.version_runs or (((batch.weight_versions[0], 0),),)
        self.check([[label for label, first in runs[0] if first <= token][-1] for token in range(6)])


NAMES = st.sampled_from(["one", "two"])
LABELS = st.sampled_from([None, None, "mine", "0", "2", "mine+1"])
EVERY_END = st.sampled_from(["done", "done", "done", *ENDS])


class Walk(RuleBasedStateMachine):
    """One user of an engine, who expects of each call what its documentation says."""

    @initialize()
    def open(self) -> None:
        self.engine, self.backend = opened()
        self.truth = Truth(self.engine, self.backend)
        self.asleep: set[str] = set()
        self.dropped = False
        self.label, self.used = "0", {"0"}
        self.adapters: dict[str, str] = {}
        self.adapters_used: dict[str, set[str]] = {"one": {"0"}, "two": {"0"}}
        self.answer: Future[GenerateResult] | None = None
        self.pool = ThreadPoolExecutor(1)

    def idle(self) -> bool:
        return self.answer is None

    def change(self, end: str, call: Callable[[], Any]) -> Any:
        """Make a change that ends like this, and return what the call returned; None unless it succeeded."""
        self.engine.end = end
        try:
            if end == "done":
                return call()
            expected = {"interrupted": KeyboardInterrupt, "false": EngineError, "failed": EngineError}
            with pytest.raises(expected.get(end, type(ENDS[end]))):
                call()
            return None
        finally:
            self.engine.end = "done"

    def put(self, label: str) -> None:
        self.label = label
        self.used.add(label)

    # Base weights ----------------------------------------------------------------------------------------------------

    @rule(end=EVERY_END, version=LABELS, owner=st.booleans(), data=st.data())
    def update(self, end: str, version: str | None, owner: bool, data: Any) -> None:
        when = "now" if self.answer is not None else data.draw(st.sampled_from(["drain", "now"]))
        if owner and self.answer is not None:
            return
        if self.answer is not None:
            # A label that is loaded twice while an answer goes on tells nothing of its tokens.
            version = version and f"in flight {len(self.used)}"

        def call() -> str:
            if owner:
                return self.backend.weights_changed(version)
            return self.backend.update_weights({}, version, when)

        if "weights" in self.asleep or (owner and self.dropped):
            with pytest.raises(BackendAsleepError):
                call()
            return
        if owner:
            self.engine.train()
        label = self.change(end, call)
        if end == "done":
            assert label == version if version else label not in self.used
            if label in self.used:
                # The user has said that these weights have the label.
                own = re.compile(re.escape(label) + r"(\+none|\+(one|two)@.*)?")
                for name in filter(own.fullmatch, [*self.truth.named]):
                    del self.truth.named[name]
            self.dropped = False
        elif end in REFUSED and not owner:
            label = self.label
        else:
            label = self.backend.weight_version
            assert label not in self.used and label != version
        self.put(label)

    @precondition(idle)
    @rule()
    def train(self) -> None:
        if not self.asleep and not self.dropped:
            self.engine.train()
            label = self.backend.weight_version
            assert label not in self.used
            self.put(label)

    # Adapters --------------------------------------------------------------------------------------------------------

    @precondition(idle)
    @rule(name=NAMES, end=EVERY_END, version=LABELS, load=st.booleans())
    def adapter(self, name: str, end: str, version: str | None, load: bool) -> None:
        def call() -> str | None:
            if load:
                return self.backend.load_adapter(name, {}, config={}, version=version)
            return self.backend.unload_adapter(name)

        before = dict(self.adapters)
        if "weights" in self.asleep:
            with pytest.raises(BackendAsleepError):
                call()
        elif not load and name not in self.engine.loaded:
            with pytest.raises(InvalidRequestError):
                call()
        else:
            label, used = self.change(end, call), self.adapters_used[name]
            if end == "done" and load:
                assert label == version if version else label not in used
                self.adapters[name] = label
                used.add(label)
                for each in [each for each in self.truth.named if each.endswith(f"+{name}@{label}")]:
                    del self.truth.named[each]
            elif end == "done":
                self.adapters.pop(name, None)
            elif end not in REFUSED:
                partly = self.backend.engine.weights.version_with(name).rpartition("@")[2]
                assert partly not in used and (partly != version or not load)
                used.add(partly)
                if name in self.adapters:
                    self.adapters[name] = partly
            assert self.backend.adapters == self.adapters
            return
        assert self.backend.adapters == before

    # Sleep -----------------------------------------------------------------------------------------------------------

    @precondition(idle)
    @rule(level=st.sampled_from([1, 1, 2]), end=EVERY_END)
    def sleep(self, level: int, end: str) -> None:
        if self.asleep or (level == 2 and self.adapters):
            with pytest.raises((BackendAsleepError, InvalidRequestError)):
                self.backend.sleep(level)
            return
        self.change(end, lambda: self.backend.sleep(level))
        if end not in REFUSED:
            self.asleep, self.dropped = {"weights", "kv_cache"}, self.dropped or level == 2

    @precondition(idle)
    @rule(tags=st.sampled_from([None, "weights", "kv_cache"]), end=EVERY_END)
    def wake(self, tags: str | None, end: str) -> None:
        wanted = {"weights", "kv_cache"} if tags is None else {tags}
        if not wanted & self.asleep:
            self.backend.wake(tags)
            return
        self.change(end, lambda: self.backend.wake(tags))
        if end == "done":
            self.asleep -= wanted

    # Reading ---------------------------------------------------------------------------------------------------------

    @precondition(idle)
    @rule(adapter=st.sampled_from([None, False, "one", "two"]))
    def score(self, adapter: Any) -> None:
        if self.asleep or self.dropped:
            for call in (self.backend.score_logprobs, self.backend.generate):
                with pytest.raises(BackendAsleepError):
                    call(ROWS, adapter=adapter)
        elif adapter and adapter not in self.engine.loaded:
            with pytest.raises(InvalidRequestError):
                self.truth.score(adapter)
        else:
            added = "" if adapter is None else "+none" if adapter is False else f"+{adapter}@"
            label = self.truth.score(adapter)
            assert label.startswith(self.label + added)
            if adapter in self.adapters:
                assert label == self.label + added + self.adapters[adapter]

    @precondition(idle)
    @rule()
    def begin_answer(self) -> None:
        if not self.asleep and not self.dropped:
            self.engine.half_way.clear()
            self.engine.go_on.clear()
            self.answer = self.pool.submit(self.backend.generate, ROWS, LONG, timeout=PATIENCE)
            assert self.engine.half_way.wait(PATIENCE)

    @precondition(lambda self: self.answer is not None)
    @rule()
    def end_answer(self) -> None:
        assert self.answer is not None
        self.engine.go_on.set()
        self.truth.answered(self.answer.result(PATIENCE))
        self.answer = None

    @invariant()
    def the_label_in_force_is_the_expected_one(self) -> None:
        if hasattr(self, "backend"):
            assert self.backend.weight_version == self.label

    def teardown(self) -> None:
        if hasattr(self, "backend"):
            self.engine.go_on.set()
            self.pool.shutdown()
            self.backend.close()


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)


# Interrupts at any point ---------------------------------------------------------------------------------------------


def _sleep_and_wake(backend: Backend) -> None:
    backend.sleep()
    backend.wake("weights")
    backend.wake()


CHANGES: dict[str, Callable[[Backend], object]] = {
    "update": lambda backend: backend.update_weights({}),
    "now": lambda backend: backend.update_weights({}, "mine", "now"),
    "changed": lambda backend: backend.weights_changed(),
    "adapter": lambda backend: backend.load_adapter("one", {}, config={}),
    "unload": lambda backend: backend.unload_adapter("one"),
    "sleep": _sleep_and_wake,
}


@pytest.mark.filterwarnings("ignore:Exception ignored in. <generator:pytest.PytestUnraisableExceptionWarning")
@each("change", CHANGES)
def test_an_interrupt_at_any_point_of_a_change_leaves_labels_that_are_true(change: str) -> None:
    engine, backend = opened()
    truth, points = Truth(engine, backend), 0
    with backend, ThreadPoolExecutor(1) as other:

        def ready() -> None:
            """Do what a user does after Ctrl-C, on a thread that would wait for a lock that was left behind."""
            backend.wake()
            backend.load_adapter("one", {}, config={})
            assert truth.score() == backend.weight_version

        other.submit(ready).result(PATIENCE)
        for _ in interrupt_everywhere(lambda: CHANGES[change](backend), step=5):
            points += 1
            if change == "changed":
                engine.train()
            if not backend.engine.weights.state.asleep:
                other.submit(truth.score).result(PATIENCE)
                if "one" in engine.loaded:
                    other.submit(truth.score, "one").result(PATIENCE)
            other.submit(ready).result(PATIENCE)
            # The user's own label is for whole weights: reused, it may name others than before.
            truth.named = {label: weights for label, weights in truth.named.items() if label != "mine"}
    assert points > 10
