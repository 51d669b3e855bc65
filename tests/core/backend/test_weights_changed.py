"""Weights that their owner changes: noticed where the engine tells its weights' state, and announced by the owner."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import peft
import pytest
import torch
from tensordict import TensorDict
from torch import nn

import corelm
from corelm import Backend, DynamicBatcher, LLMPolicy, hookimpl
from corelm.errors import BackendClosedError, EngineError, InvalidRequestError
from corelm.spec import GenerateResult, WeightsStateRequest
from corelm_testing.toy import Bigram
from helpers.batching_fakes import SEEDED, GatedEngine, hold_one, ids, open_batcher, wait_until
from helpers.each import each
from helpers.fakes import SHORT, Fake, fake, sent
from helpers.refusals import refused
from helpers.tiny_models import tiny_model, tiny_tokenizer


class Watched(Fake):
    """Tells the state of its weights, which a test changes by assigning `state`."""

    state: Any = 0

    @hookimpl
    def weights_state(self, request: WeightsStateRequest) -> Any:
        return self.state


def watched(**capabilities: Any) -> tuple[Watched, Backend]:
    engine = Watched(**capabilities)
    return engine, Backend.from_plugin(engine, "watched")


@each("batched", [False, True])
def test_a_model_trained_in_place_gets_a_new_version(batched):
    opened = corelm.get_backend("toy")
    with DynamicBatcher(opened) if batched else opened as backend:
        table = opened.engine.plugin.model.table
        optimizer = torch.optim.SGD([table], lr=0.1)
        versions = []
        for _ in range(3):
            versions.append(backend.generate([[65, 66]], SHORT).weight_versions)
            versions.append(backend.score_logprobs([[65, 66]]).weight_versions)
            (-backend.score_logprobs([[65, 66]], grad=True).logprobs.values.sum()).backward()
            optimizer.step()
        assert versions == [("0",), ("0",), ("1",), ("1",), ("2",), ("2",)]
        assert backend.weight_version == "3"


def test_labels_count_from_the_one_that_a_caller_gave():
    with corelm.get_backend("toy") as backend:
        backend.weights_changed("step-1")
        td = LLMPolicy(backend, input_mode="text", sampling_params=SHORT)(TensorDict(text=["Hi"]))
        for _ in range(6):
            with torch.no_grad():
                backend.engine.plugin.model.table.add_(1.0)
            backend.score_logprobs([[65, 66]])
        assert backend.weight_version == "step-1+6"
        assert corelm.staleness(td, backend.weight_version).full[0].max() == 6


def test_the_version_is_that_of_the_weights_and_not_the_number_of_changes():
    engine, backend = watched()
    found = []
    # As with an adapter that is switched off for a reference model, and on again.
    for engine.state in ("on", "off", "on", "off", "trained", "off"):
        found += backend.score_logprobs([[3, 4]]).weight_versions
    assert found == ["0", "1", "0", "1", "2", "1"]


def test_the_weights_of_the_first_call_are_version_0():
    engine, backend = watched()
    engine.state = "trained before the first call"
    assert backend.generate([[3]], SHORT).weight_versions == ("0",)


@each("hook", ["generate", "score_logprobs"])
@each("batched", [False, True])
def test_a_call_during_which_the_weights_change_fails(batched, hook):
    engine, backend = watched()
    if batched:
        backend = DynamicBatcher(backend)
    call = {
        "generate": lambda: backend.generate([[3]], SHORT),
        "score_logprobs": lambda: backend.score_logprobs([[3, 4]]),
    }[hook]

    def train(batch: GenerateResult) -> GenerateResult:
        engine.state += 1
        return batch

    with backend:
        engine.bend = train
        with pytest.raises(EngineError, match="changed during the call") as caught:
            call()
        assert caught.value.usable and hook in str(caught.value)
        engine.bend = lambda batch: batch
        assert call().weight_versions == ("1",)


def test_a_call_that_fails_because_the_weights_changed_may_be_retried():
    engine = Watched()
    engine.state = 0

    def train_once(batch: GenerateResult) -> GenerateResult:
        engine.state = 1
        return batch

    engine.bend = train_once
    backend = Backend.from_plugin(engine, "watched", retry=2)
    assert backend.generate([[3]], SHORT).weight_versions == ("1",)


def test_the_owner_says_that_the_weights_have_changed():
    backend = fake()
    assert backend.weights_changed() == "1"
    (request,) = sent(backend)
    assert request.by_owner and request.version == "1" and request.when == "drain"
    assert backend.weights_changed(version="step-9") == "step-9" == backend.weight_version
    assert backend.generate([[3]], SHORT).weight_versions == ("step-9",)
    with refused(InvalidRequestError, field="version"):
        backend.weights_changed(3)


def test_an_engine_without_weight_updates_gets_the_label_only():
    backend = fake(update_weights=False)
    assert backend.weights_changed() == "1" and sent(backend) == []
    assert backend.generate([[3]], SHORT).weight_versions == ("1",)
    backend.close()
    with pytest.raises(BackendClosedError):
        backend.weights_changed()


@each("update_weights", [False, True])
def test_the_owner_waits_for_the_calls_before(update_weights):
    engine = GatedEngine(permits=0, update_weights=update_weights)
    with open_batcher(engine) as batcher, ThreadPoolExecutor(2) as pool:
        first = hold_one(engine, batcher)
        change = pool.submit(batcher.weights_changed)
        wait_until(lambda: batcher.state().queued == 1)
        later = batcher.submit_generate([[4]], SEEDED)
        assert not change.done()
        engine.free()
        assert change.result(20) == "1"
        assert ids(first) and first.result().weight_versions == ("0",)
        assert later.result(20).weight_versions == ("1",)


def test_a_thread_that_looks_late_does_not_bring_back_the_label_of_older_weights():
    """A monitor is held up after it has read the state; then the owner trains the model, and a call looks."""
    read, go_on = threading.Event(), threading.Event()

    class Slow(Watched):
        monitor: threading.Thread | None = None

        @hookimpl
        def weights_state(self, request: WeightsStateRequest) -> Any:
            found = self.state
            if threading.current_thread() is self.monitor:
                read.set()
                assert go_on.wait(30)
            return found

    engine = Slow()
    backend = Backend.from_plugin(engine, "watched")
    assert backend.weight_version == "0"
    engine.monitor = threading.Thread(target=lambda: backend.weight_version)
    engine.monitor.start()
    assert read.wait(30)
    engine.state = "trained"
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(backend.generate, [[3]], SHORT)
        with pytest.raises(TimeoutError):
            call.result(0.2)
        go_on.set()
        engine.monitor.join(30)
        assert call.result(30).weight_versions == ("1",) and backend.weight_version == "1"


def test_a_change_that_another_call_noticed_fails_the_call_even_if_it_was_taken_back():
    inside, go_on = threading.Event(), threading.Event()

    def wait(batch: GenerateResult) -> GenerateResult:
        inside.set()
        assert go_on.wait(30)
        return batch

    engine, backend = watched(concurrent_calls=True)
    engine.bend = wait
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(backend.generate, [[3]], SHORT)
        assert inside.wait(30)
        engine.state, engine.bend = 1, lambda batch: batch
        assert backend.score_logprobs([[3, 4]]).weight_versions == ("1",)
        engine.state = 0
        go_on.set()
        with pytest.raises(EngineError, match="changed during the call"):
            call.result(30)


# `backend.runs(model)`: whether training a model object in place changes the weights ----------------------------------


@pytest.fixture
def model():
    return tiny_model()


@pytest.fixture
def backend(model):
    with corelm.get_backend("transformers", model, tokenizer=tiny_tokenizer()) as opened:
        yield opened


class Wrapper(nn.Module):
    """A wrapper as those of trainers."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def test_the_object_that_it_was_opened_with(backend, model):
    assert backend.runs(model) and backend.weight_version == "0"
    # What it is for: the engine notices the trainer's step.
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    assert backend.weight_version == "1"


def test_wrappers_of_that_object(backend, model):
    assert backend.runs(Wrapper(model))
    assert backend.runs(peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])))


def test_no_other_model(backend):
    assert not backend.runs(tiny_model()) and not backend.runs(nn.Linear(2, 2)) and not backend.runs(nn.Identity())


def test_any_engine_that_tells_the_state_of_its_weights():
    model = Bigram.of_talk()
    with corelm.get_backend("toy", model) as toy:
        assert toy.runs(model) and not toy.runs(Bigram.of_talk())
