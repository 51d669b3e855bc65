"""When the canary looks, and what it needs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch import Tensor

import corelm
from apps.fleet.conftest import looks, table
from corelm import Backend, DynamicBatcher, hookimpl
from corelm.errors import BackendTimeoutError, CapabilityError, EngineError, InvalidRequestError, StaleWeightsError
from corelm.spec import When
from corelm_fleet import Canary, ProbeScores, probe_scores
from corelm_fleet.canary import watch
from corelm_testing.toy import Bigram, ToyBackend
from helpers.fakes import SHORT, Fake, Gate
from helpers.tiny_models import tiny_model, tiny_tokenizer


class Counting:
    """A wrapper that counts the calls to the engine.

    Attributes:
        calls: the names of the hooks that were called.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []

    @hookimpl(wrapper=True)
    def generate(self, request: Any) -> Any:
        self.calls.append("generate")
        return (yield)

    @hookimpl(wrapper=True)
    def score_logprobs(self, request: Any) -> Any:
        self.calls.append("score")
        return (yield)

    @hookimpl(wrapper=True)
    def update_weights(self, request: Any) -> Any:
        self.calls.append("update")
        return (yield)


# When it looks -------------------------------------------------------------------------------------------------------


def test_it_looks_when_the_engine_is_opened_and_around_each_update() -> None:
    seen = Counting()
    with corelm.get_backend("toy", canary=True, wrappers=[seen]) as backend:
        # The last call finds out the dtype.
        assert seen.calls == ["generate", "score", "score", "score"]
        seen.calls.clear()
        backend.update_weights(table(0))
        assert seen.calls == ["generate", "score", "update", "generate", "score", "score"]
        seen.calls.clear()
        backend.weights_changed()
        assert seen.calls == ["update", "generate", "score", "score"]
    with corelm.get_backend("toy", wrappers=[seen]) as backend:
        seen.calls.clear()
        backend.update_weights(table(0))
        assert seen.calls == ["update"] and backend.engine.listener is None


def test_an_engine_that_cannot_load_weights_is_asked_when_its_owner_has_changed_them() -> None:
    class Fixed(Fake):
        broken = False

        @hookimpl
        def score_logprobs(self, request: Any) -> Any:
            result = super().score_logprobs(request)
            return None if self.broken else result

    plugin = Fixed(update_weights=False)
    backend = Backend.from_plugin(plugin, "fake")
    watch(backend)
    assert backend.weights_changed() == "1" and backend.weights_changed("mine") == "mine"
    looks(backend).look()
    plugin.broken = True
    with pytest.raises(StaleWeightsError):
        backend.weights_changed("other")
    assert backend.weight_version not in ("0", "1", "mine", "other")
    plugin.broken = False
    with pytest.raises(StaleWeightsError):
        looks(backend).look()
    assert backend.weights_changed("other") == "other"
    looks(backend).look()


def test_an_update_that_failed_is_not_trusted_until_another_succeeds(toy: Backend) -> None:
    class Failing(ToyBackend):
        fails = True

        @hookimpl
        def update_weights(self, request: Any) -> bool:
            if self.fails:
                raise RuntimeError("half-way")
            return super().update_weights(request)

    plugin = Failing.open()
    with Backend.from_plugin(plugin, "toy") as backend:
        watch(backend)
        with pytest.raises(EngineError):
            backend.update_weights(table(0))
        with pytest.raises(StaleWeightsError):
            looks(backend).look()
        plugin.fails = False
        backend.update_weights(table(0))
        looks(backend).look()


@pytest.mark.parametrize("concurrent", [False, True])
def test_no_other_call_comes_between_new_weights_and_the_verdict(concurrent: bool) -> None:
    gate, asked = Gate(), threading.Event()

    class Slow(Fake):
        armed = False

        @hookimpl
        def generate(self, request: Any) -> Any:
            if self.armed and request.prompts.tolist() == [[1]]:
                asked.set()
            return super().generate(request)

        @hookimpl
        def score_logprobs(self, request: Any) -> Any:
            if self.armed and len(request.sequences) > 2:
                gate(None)
            return super().score_logprobs(request)

    plugin = Slow(concurrent_calls=concurrent)
    backend = Backend.from_plugin(plugin, "fake")
    watch(backend)
    plugin.armed = True
    update = threading.Thread(target=backend.update_weights, args=({},))
    update.start()
    gate.wait_for_call()
    other = backend.submit_generate([[1]], SHORT)
    assert not asked.wait(0.2)
    gate.opened.set()
    update.join(10)
    assert other.result(10).weight_versions == ("1",)


@pytest.mark.parametrize("when", ["drain", "abort"])
def test_it_works_behind_a_batcher_with_requests_waiting(when: When) -> None:
    opened = corelm.get_backend("transformers", tiny_model(), tokenizer=tiny_tokenizer(), canary=True)
    other = tiny_model(seed=1)
    with DynamicBatcher(opened) as backend:
        waiting = [backend.submit_generate([[5, 6, n]], {"max_new_tokens": 12}) for n in range(7, 12)]
        assert backend.update_weights(other.state_dict(), when=when, expect=probe_scores(other)) == "1"
        waiting += [backend.submit_generate([[5, 6, n]], {"max_new_tokens": 2}) for n in range(7, 12)]
        results = [each.result(60) for each in waiting]
        assert all(result.weight_versions in (("0",), ("1",)) for result in results)
        assert all(result.weight_versions == ("1",) for result in results[5:])
        looks(backend).look(expect=probe_scores(other).to_dict())
        with pytest.raises(StaleWeightsError):
            backend.weights_changed(expect=probe_scores(tiny_model()))
        assert backend.health()


def test_an_update_that_ends_the_answers_of_others_may_end_the_canarys() -> None:
    """A second update without draining waits, and aborts again and again whatever is being sampled: also the canary."""
    with corelm.get_backend("transformers", tiny_model(), tokenizer=tiny_tokenizer(), canary=True) as backend:
        states = [tiny_model(seed=seed).state_dict() for seed in (1, 2)]
        errors: list[BaseException] = []

        def update(state: dict[str, Tensor]) -> None:
            try:
                for _ in range(3):
                    backend.update_weights(state, when="abort")
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=update, args=(state,)) for state in states]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors and backend.weight_version == "6"


def test_a_canary_that_gets_no_answer_ends_the_update_within_the_timeout() -> None:
    gate = Gate()

    class Stuck(Fake):
        loaded = False

        @hookimpl
        def generate(self, request: Any) -> Any:
            if self.loaded:
                gate(None)
            return super().generate(request)

        @hookimpl
        def update_weights(self, request: Any) -> bool:
            self.loaded = True
            return True

    backend = Backend.from_plugin(Stuck(), "fake", timeout=0.3)
    watch(backend)
    with pytest.raises(BackendTimeoutError):
        backend.update_weights({}, "mine")
    gate.opened.set()
    assert backend.weight_version == "1"
    backend.close()


# What it needs -------------------------------------------------------------------------------------------------------


def test_expect_without_a_canary_is_refused_before_anything_is_loaded() -> None:
    with corelm.get_backend("toy") as backend:
        found = probe_scores(backend)
        for call in (
            lambda: backend.update_weights(table(0), expect=found),
            lambda: backend.weights_changed(expect=found),
        ):
            with pytest.raises(InvalidRequestError) as caught:
                call()
            assert caught.value.field == "expect" and backend.weight_version == "0"


NOT_COMPARED: list[Any] = [
    3,
    "scores",
    {},
    {"probes": [[1, 2]], "logprobs": [[-1.0]], "dtype": None, "version": 3},
    {"probes": [[1, 2]], "logprobs": [[-1.0, -2.0]], "dtype": None},
    {"probes": [[1, 2]], "logprobs": [[float("nan")]], "dtype": None},
    {"probes": [[1, 2]], "logprobs": [["x"]], "dtype": None},
    {"probes": [[1, -2]], "logprobs": [[-1.0]], "dtype": None},
    {"probes": [[1, 999]], "logprobs": [[-1.0]], "dtype": None},
    {"probes": [], "logprobs": [], "dtype": None},
    {"probes": 3, "logprobs": [], "dtype": None},
    {"probes": [[1, 2]], "logprobs": [[-1.0]], "dtype": 3},
]


def test_what_cannot_be_compared_is_refused_before_anything_is_loaded(toy: Backend) -> None:
    def update(expect: Any) -> None:
        toy.update_weights(table(0), expect=expect)

    for expect in NOT_COMPARED:
        for call in (update, looks(toy).look):
            with pytest.raises(InvalidRequestError) as caught:
                call(expect)
                pytest.fail(f"{expect} was taken")
            assert caught.value.field == "expect" and toy.weight_version == "0", expect


def test_an_illegal_option_is_refused_before_the_engine_is_opened() -> None:
    for canary in (3, "yes", {"tolerance": 1}):
        with pytest.raises(InvalidRequestError) as caught:
            corelm.get_backend("toy", canary=canary)
            pytest.fail(f"{canary} was taken")
        assert caught.value.field == "canary", canary
    with pytest.raises(InvalidRequestError, match="tolerance"):
        Canary(tolerance=-1.0)


def test_an_engine_that_cannot_score_is_sampled_from() -> None:
    class Alone(ToyBackend):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.capabilities = corelm.Capabilities(
                vocab_size=260,
                max_context=512,
                sampling={"temperature": (0.0, 2.0)},
                generation_modes=frozenset({"raw"}),
                update_weights=True,
            )

    plugin = Alone.open(Bigram(table(0)["table"]))
    with Backend.from_plugin(plugin, "alone") as backend:
        watch(backend)
        assert backend.update_weights(table(1)) == "1"
        looks(backend).look()
        with pytest.raises(CapabilityError):
            backend.update_weights(table(1), expect=ProbeScores(((1, 2),), ((-1.0,),)))
        assert backend.weight_version == "1"
        plugin.model.table.data.copy_(table(2)["table"])
        with pytest.raises(StaleWeightsError):
            looks(backend).look()


def test_an_engine_that_contradicts_itself_is_not_opened_and_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Any] = []

    class Lying(ToyBackend):
        @hookimpl
        def generate(self, request: Any) -> Any:
            result = super().generate(request)
            assert result.logprobs is not None
            result.logprobs.values.mul_(2.0).sub_(1.0)
            return result

        @hookimpl
        def close(self, request: Any) -> bool:
            closed.append(request)
            return True

    info = next(each for each in corelm.list_backends() if each.name == "toy")
    monkeypatch.setattr("corelm.opening.open_plugin", lambda *args: (Lying.open(), info))
    with pytest.raises(StaleWeightsError):
        corelm.get_backend("toy", canary=True)
    assert len(closed) == 1


def test_an_engine_that_shows_nothing_of_its_weights_is_refused() -> None:
    blind = Backend.from_plugin(Fake(score=False, sampling={"temperature": (0.5, 2.0)}), "blind")
    with pytest.raises(CapabilityError):
        watch(blind)
    assert blind.engine.listener is None


def test_probes_fit_every_model() -> None:
    for vocab_size, max_context in [(1, 1), (2, 2), (3, 5), (16, 12), (260, 40), (151936, None)]:
        backend = Backend.from_plugin(Fake(vocab_size=vocab_size, max_context=max_context), "fake")
        watch(backend)
        longest = max(len(row) for request in backend.engine.plugin.requests for row in _rows(request))
        assert longest <= (max_context or 152), vocab_size
        looks(backend).look()


def _rows(request: Any) -> list[list[int]]:
    rows: list[list[int]] = (request.prompts if hasattr(request, "prompts") else request.sequences).tolist()
    return rows
