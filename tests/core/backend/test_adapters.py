"""Adapters: named in each call, loaded and replaced on their own, and part of the label of every row."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from corelm import Backend, DynamicBatcher, LLMPolicy, hookimpl
from corelm.batching import Limits
from corelm.errors import CapabilityError, EngineError, InvalidRequestError
from corelm.kl import RetrieveKL
from corelm.spec import GenerateRequest, WeightsStateRequest
from corelm_testing.toy import ToyBackend
from helpers.adapter_toys import ADD, CONFIG, OTHER, AdapterToy, true_scores
from helpers.each import each
from helpers.refusals import refused

ROWS = [[5, 6, 7, 8], [9, 10, 11]]


@pytest.fixture
def toy() -> AdapterToy:
    return AdapterToy.of_table()


@pytest.fixture
def backend(toy: AdapterToy) -> Iterator[Backend]:
    with Backend.from_plugin(toy, "toy") as backend:
        yield backend


def load(backend: Backend, name: str, table: torch.Tensor = ADD, **options: Any) -> str:
    return backend.load_adapter(name, {"added": table}, **{"config": CONFIG, **options})


def assert_scores(backend: Backend, adapter: Any, added: Any, label: str) -> None:
    found = backend.score_logprobs(ROWS, adapter=adapter)
    for row, scores in zip(ROWS, found.logprobs.tolist(), strict=True):
        assert scores[1:] == pytest.approx(true_scores(row, added), abs=1e-4)
    assert found.weight_versions == (label,) * 2 and found.adapter == adapter


def test_each_call_names_its_adapter(backend: Backend) -> None:
    assert load(backend, "one") == "1" and load(backend, "two", OTHER, version="step-7") == "step-7"
    assert backend.adapters == {"one": "1", "two": "step-7"} and backend.weight_version == "0"
    assert_scores(backend, "one", ADD, "0+one@1")
    assert_scores(backend, "two", OTHER, "0+two@step-7")
    assert_scores(backend, False, 0.0, "0+none")
    assert_scores(backend, None, 0.0, "0")


def test_an_adapter_is_replaced_by_loading_it_again(backend: Backend, toy: AdapterToy) -> None:
    load(backend, "one")
    # The configuration is that of the adapter that is replaced.
    assert backend.load_adapter("one", {"added": OTHER}) == "2"
    assert_scores(backend, "one", OTHER, "0+one@2")
    assert toy.asked[-2].adapter_config == CONFIG
    backend.unload_adapter("one")
    assert backend.adapters == {}
    with refused(InvalidRequestError, field="adapter"):
        backend.score_logprobs(ROWS, adapter="one")
    with refused(InvalidRequestError, field="adapter"):
        backend.unload_adapter("one")
    with pytest.raises(InvalidRequestError, match=r"config: .*config="):
        backend.load_adapter("one", {"added": OTHER})
    assert load(backend, "one") == "3"


class Wrapping(AdapterToy):
    """Its state changes with its adapters, as that of a model does which PEFT has wrapped."""

    @hookimpl
    def weights_state(self, request: WeightsStateRequest) -> Any:
        return ToyBackend.weights_state(self, request), len(self.added)


@each("fault", [RuntimeError("disk full"), InvalidRequestError("too large", field="weights")])
def test_a_failed_load_leaves_the_label_of_the_base_weights(fault: Exception) -> None:
    toy = Wrapping.of_table()
    with Backend.from_plugin(toy, "toy") as backend:
        assert_scores(backend, None, 0.0, "0")
        toy.fault = fault
        with pytest.raises((EngineError, InvalidRequestError)):
            load(backend, "one")
        assert_scores(backend, False, 0.0, "0+none")
        assert backend.weight_version == "0"


@pytest.mark.parametrize("adapter", ["", " ", "a@b", "a+b", "a/b", "a\nb", True, 3, ["one"]])
def test_what_is_no_name_is_refused(backend: Backend, adapter: Any) -> None:
    with refused(InvalidRequestError, field="adapter"):
        backend.score_logprobs(ROWS, adapter=adapter)
    with pytest.raises(InvalidRequestError):
        LLMPolicy(backend, adapter=adapter)


def test_what_is_no_adapter_is_refused(backend: Backend, tmp_path: Path) -> None:
    for weights, field in ((3, "weights"), (torch.nn.Linear(2, 2), "weights"), ({"added": ADD}, "config")):
        with pytest.raises(InvalidRequestError) as caught:
            backend.load_adapter("one", weights)  # type: ignore[arg-type]
        assert caught.value.field == field
    with refused(InvalidRequestError, field="config"):
        backend.load_adapter("one", tmp_path, config=CONFIG)
    with refused(InvalidRequestError, field="config"):
        backend.load_adapter("one", {"added": ADD}, config=3)


def test_an_engine_without_adapters_refuses_them() -> None:
    with Backend.from_plugin(ToyBackend.open(), "toy") as backend:
        for adapter in ("one", False):
            for call in (backend.generate, backend.score_logprobs):
                with refused(CapabilityError, capability="adapters"):
                    call(ROWS, adapter=adapter)
        with pytest.raises(CapabilityError):
            load(backend, "one")
        with pytest.raises(CapabilityError):
            backend.unload_adapter("one")


def test_only_requests_with_one_adapter_share_a_call(backend: Backend, toy: AdapterToy) -> None:
    load(backend, "one")
    with DynamicBatcher(backend, Limits(min_batch_size=2, batching_timeout=60.0)) as batcher:
        wanted = [None, "one", False] * 2
        sampling = {"max_new_tokens": 4, "ignore_eos": True}
        futures = [batcher.submit_generate([ROWS[0]], sampling, adapter=each) for each in wanted]
        for adapter, future in zip(wanted, futures, strict=True):
            answer = future.result()
            scores = true_scores([ROWS[0][-1], *answer.ids.tolist()[0]], ADD if adapter else 0.0)
            assert answer.logprobs.tolist()[0] == pytest.approx(scores, abs=1e-4) and answer.adapter == adapter
        assert batcher.load_adapter("one", {"added": OTHER}) == "2"
        assert_scores(batcher, "one", OTHER, "0+one@2")
        batcher.unload_adapter("one")
        assert backend.adapters == {}
    requests = [each for each in toy.asked if isinstance(each, GenerateRequest)]
    assert sorted(len(each.prompts) for each in requests) == [2, 2, 2]


def test_the_reference_of_a_policy_is_itself_without_its_adapter(backend: Backend) -> None:
    load(backend, "one")
    sampling = {"max_new_tokens": 6, "ignore_eos": True}
    policy = LLMPolicy(backend, input_mode="tokens", adapter="one", pad_output=True, sampling_params=sampling)
    td = policy(TensorDict(tokens=torch.tensor([[5, 6], [7, 8]]), batch_size=[2]))
    assert td["log_probs"].provenance.weight_version == "0+one@1"
    RetrieveKL(policy.replace(adapter=False), add_to_reward=False)(td)
    assert td["ref_log_probs"].provenance.adapter is False
    for row in range(2):
        ids = td["tokens"].full[row].tolist()
        own, reference = true_scores(ids, ADD)[1:], true_scores(ids)[1:]
        kl = [one - other for one, other in zip(own, reference, strict=True)]
        assert td["kl_penalty"][row][2:].tolist() == pytest.approx(kl, abs=1e-4)
