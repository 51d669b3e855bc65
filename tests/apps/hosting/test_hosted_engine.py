"""An engine in another process answers as it would in this one, and fails as it would."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from tensordict import TensorDict

import corelm
from apps.hosting.conftest import wait_for_calls
from corelm import Backend, History, LLMPolicy
from corelm.errors import (
    BackendClosedError,
    BackendTimeoutError,
    CapabilityError,
    EngineError,
    InvalidRequestError,
)
from corelm.spec import BackendSpec
from corelm_fleet.hosting.engine import HostedEngine
from corelm_fleet.hosting.packing import HostTraceback
from corelm_testing.toy import ToyBackend
from helpers import oracle

Open = Callable[..., Backend]


@pytest.fixture(scope="module")
def toy() -> Backend:
    return corelm.get_backend("toy")


# The same answers -----------------------------------------------------------------------------------------------------


def test_answers_and_scores_are_those_of_the_engine_in_process(toy: Backend, toy_host: Backend) -> None:
    prompts, sampling = [[72, 101], [87]], {"max_new_tokens": 12, "seed": 3, "num_samples": 2, "temperature": 0.7}
    one, other = (each.generate(prompts, sampling, logprobs="processed") for each in (toy, toy_host))
    assert one.ids.tolist() == other.ids.tolist() and one.logprobs is not None and other.logprobs is not None
    assert torch.equal(one.logprobs.values, other.logprobs.values)
    assert (one.finish_reasons, one.mode, one.temperature) == (other.finish_reasons, other.mode, other.temperature)
    rows = [[72, 101, 108], [87, 104]]
    first, second = (each.score_logprobs(rows, return_logits=True, return_argmax=True) for each in (toy, toy_host))
    assert torch.equal(first.logprobs.values, second.logprobs.values)
    assert first.logits is not None and second.logits is not None
    assert torch.equal(first.logits.values, second.logits.values)


def test_the_engine_says_why_it_lacks_something(obedient: Open) -> None:
    with pytest.raises(CapabilityError, match="lacks adapters: it is a toy; buy a bigger one") as refusal:
        obedient().unload_adapter("policy")
    assert refusal.value.capability == "adapters"


def test_gradients_stay_in_the_process(toy: Backend, toy_host: Backend) -> None:
    assert toy.capabilities.gradients and not toy_host.capabilities.gradients
    with pytest.raises(CapabilityError) as lack:
        toy_host.score_logprobs([[1, 2]], grad=True)
    assert lack.value.capability == "gradients"


def test_every_hook_is_carried_or_has_a_reason_not_to_be() -> None:
    # Why a host does not ask the process for these is said at HostedEngine.
    elsewhere = {"tokenize", "to_containers", "weights_state"}
    hooks = {name for name, value in vars(BackendSpec).items() if hasattr(value, "corelm_spec")}
    carried = {name for name, value in vars(HostedEngine).items() if hasattr(value, "corelm_impl")}
    assert carried | elsewhere == hooks and not carried & elsewhere


def test_a_batch_of_chats_takes_a_fixed_number_of_requests(toy_host: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    connection = toy_host.engine.plugin.host.connection
    call = type(connection).call
    monkeypatch.setattr(
        type(connection), "call", lambda self, what, *rest: asked.append(what.name) or call(self, what, *rest)
    )
    policy = LLMPolicy(toy_host, sampling_params={"max_new_tokens": 2}, chat_template="chatml")
    counts = []
    for rows in (2, 20):
        del asked[:]
        chats = [
            [{"role": "user", "content": f"number {n}"}, {"role": "assistant", "content": "x"}] * 3 for n in range(rows)
        ]
        policy(TensorDict(history=History.from_chats([[*c, {"role": "user", "content": "y"}] for c in chats])), seed=1)
        counts.append(len(asked))
    # The first call also asks for texts that are then remembered.
    assert counts[1] <= counts[0] <= 12, asked


def test_a_chat_template_that_is_set_here_is_used_there(model_host: Backend) -> None:
    tokenizer = model_host.tokenizer
    before = tokenizer.chat_template
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    try:
        policy = LLMPolicy(model_host, sampling_params={"max_new_tokens": 1})
        result = policy(TensorDict(history=History.from_chats([[{"role": "user", "content": "a"}]])), seed=0)
    finally:
        tokenizer.chat_template = before
    assert result["text"].prompt[0] == "<a>"
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id


def test_an_update_reaches_an_engine_that_is_sampling(model_host: Backend, tiny_model: Path) -> None:
    """The answer is long enough that it is still being sampled when the update comes, after its first token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype="float32")
    new = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    assert model_host.capabilities.updates_in_flight
    with model_host.stream([[5, 6, 7]], {"max_new_tokens": 200, "ignore_eos": True}) as stream:
        next(stream)
        assert model_host.update_weights(new, "zeros", when="now") == "zeros"
        list(stream)
    made = stream.result
    assert made is not None and made.version_runs is not None, "the update has waited for the answer"
    ((_, (version, first)),) = made.version_runs
    assert version == "zeros" and 0 < first < 200
    assert made.logprobs is not None
    # With weights of 0 every id is equally probable.
    flat = torch.full((200 - first,), -math.log(model_host.capabilities.vocab_size))
    torch.testing.assert_close(made.logprobs.values[first:], flat, rtol=0, atol=1e-4)
    before = oracle.answer_logprobs(model, [5, 6, 7], made.ids.tolist()[0])[:first]
    torch.testing.assert_close(made.logprobs.values[:first], before, rtol=0, atol=1e-4)
    assert model_host.generate([[5]], {"max_new_tokens": 2}).weight_versions == ("zeros",)
    model_host.update_weights(model.state_dict(), "0")


# Failures -------------------------------------------------------------------------------------------------------------


def test_failures_are_those_of_the_engine(steady: Backend) -> None:
    backend = steady
    with pytest.raises(EngineError, match="hook generate: ValueError: no such luck") as failure:
        backend.generate([[1]], {"max_new_tokens": 2})
    assert isinstance(failure.value.__cause__, ValueError)
    assert isinstance(failure.value.__cause__.__cause__, HostTraceback)
    assert "obedient_plugin.py" in str(failure.value.__cause__.__cause__)
    with pytest.raises(InvalidRequestError) as refusal:
        backend.generate([[2]], {"max_new_tokens": 2})
    assert (refusal.value.field, refusal.value.problems) == ("prompts", {0: "odd"})
    with pytest.raises(EngineError):
        backend.generate([[3]], {"max_new_tokens": 2})
    with pytest.raises(EngineError, match="SystemExit: an engine gave up"):
        backend.generate([[7]], {"max_new_tokens": 2})
    assert len(backend.generate([[20]], {"max_new_tokens": 2}).ids) == 1


def test_one_call_at_a_time_enters_the_engine(steady: Backend) -> None:
    with pytest.raises(BackendTimeoutError):
        steady.generate([[9]], {"max_new_tokens": 2}, timeout=0.1)
    # The host still works on the first call. It would refuse a second one at once.
    futures = [steady.submit_generate([[20 + n]], {"max_new_tokens": 2}) for n in range(8)]
    assert [len(future.result(30).ids) for future in futures] == [1] * 8


def test_timeouts_aborts_and_cancels_reach_the_engine(obedient: Open) -> None:
    backend = obedient("concurrent")
    with pytest.raises(BackendTimeoutError, match="too slow"):
        backend.generate([[6]], {"max_new_tokens": 2}, timeout=0.2)
    assert len(backend.generate([[20]], {"max_new_tokens": 2}).ids) == 1
    log = backend.engine.plugin.host.log
    future = backend.submit_generate([[5]], {"max_new_tokens": 2}, request_ids=["a"])
    wait_for_calls(log)
    backend.abort(["a"])
    assert len(future.result(10).ids) == 1
    future = backend.submit_generate([[5]], {"max_new_tokens": 2})
    wait_for_calls(log, 2)
    future.cancel()
    backend.close()


def test_health_answers_while_a_call_runs(steady: Backend) -> None:
    log = steady.engine.plugin.host.log
    before = log.read_text()
    future = steady.submit_generate([[5]], {"max_new_tokens": 2}, request_ids=["a"])
    wait_for_calls(log, before.count("in a call") + 1)
    assert steady.health() and not future.done()
    assert log.read_text().count("asked for its health") > before.count("asked for its health")
    steady.abort(["a"])
    assert len(future.result(10).ids) == 1


def test_new_weights_reach_the_engine(steady: Backend) -> None:
    backend = steady
    table = ToyBackend.open().model.table.detach().clone()
    table[:] = 0.0
    table[:, 65] = 50.0
    assert backend.update_weights({"table": table}, "forty") == "forty"
    assert backend.generate([[20]], {"max_new_tokens": 3, "temperature": 0.0}).ids.tolist() == [[65, 65, 65]]
    with pytest.raises(CapabilityError) as lack:
        backend.update_weights("/nowhere")
    assert lack.value.capability == "update_weights"
    assert backend.weight_version == "forty"
    with pytest.raises(InvalidRequestError) as refusal:
        backend.update_weights({"table": torch.eye(3).to_sparse()})
    assert refusal.value.field == "weights" and "'table'" in str(refusal.value)
    assert backend.weight_version == "forty"
    assert len(backend.generate([[20]], {"max_new_tokens": 2}).ids) == 1


# The process ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("order", "signal"), [(4, "SIGKILL"), pytest.param(10, "SIGSEGV", marks=pytest.mark.nightly)])
def test_a_host_that_dies_fails_all_callers_at_once(obedient: Open, order: int, signal: str, logs: Path) -> None:
    backend = obedient("concurrent")
    waiting = [backend.submit_generate([[5]], {"max_new_tokens": 2}) for _ in range(4)]
    wait_for_calls(backend.engine.plugin.host.log, 4)
    with pytest.raises(EngineError, match=signal) as failure:
        backend.generate([[order]], {"max_new_tokens": 2})
    assert failure.value.usable is False
    if order == 4:
        assert "about to die" in str(failure.value), "the end of the log is missing"
    (log,) = logs.iterdir()
    assert str(log) in str(failure.value)
    for future in waiting:
        with pytest.raises(EngineError, match=signal):
            future.result(5)
    assert not backend.health()
    with pytest.raises(EngineError, match=signal):
        backend.generate([[20]], {"max_new_tokens": 2})
    backend.close()
    assert log.exists(), "the error names the log"


def test_a_host_that_is_stopped_is_given_up_at_the_timeout(obedient: Open) -> None:
    backend = obedient("concurrent")
    with pytest.raises(BackendTimeoutError):
        backend.generate([[8]], {"max_new_tokens": 2}, timeout=1.0)
    backend.engine.plugin.host.kill()
    with pytest.raises(EngineError):
        backend.generate([[20]], {"max_new_tokens": 2})


def test_close_closes_the_engine_and_leaves_nothing(obedient: Open, environment: dict[str, str]) -> None:
    backend = obedient()
    host, tokenizer = backend.engine.plugin.host, backend.tokenizer
    assert Path(f"/proc/{host.pid}").exists() and host.log.exists()
    backend.close()
    assert not Path(f"/proc/{host.pid}").exists() and not host.log.exists()
    assert Path(environment["CLOSED"]).read_text() == "closed "
    with pytest.raises(BackendClosedError):
        backend.generate([[20]])
    with pytest.raises(EngineError, match="the backend is closed"):
        len(tokenizer)


def test_a_backend_that_is_dropped_leaves_nothing(obedient: Open, environment: dict[str, str]) -> None:
    backend = corelm.get_backend("obedient", python=sys.executable, env=environment)
    pid = backend.engine.plugin.host.pid
    del backend
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()
