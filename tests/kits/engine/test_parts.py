"""Small parts that plugins share: GPUs, dtypes, EOS ids, the hub, weight groups and deadlines."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants

from corelm.errors import BackendTimeoutError, InvalidRequestError
from corelm.spec import Deadline, opening_within
from corelm_engine_kit import WeightGroup, device_numbers, eos_token_ids, hub_options, torch_dtype, visible_devices
from helpers.each import each
from helpers.http_server import FaultServer, json_reply
from helpers.processes import free_port


def test_numbers_are_read_from_what_people_type() -> None:
    for given in ([0, 3], (0, 3), "0,3", "0, 3", range(0, 6, 3), ["0", "3"]):
        assert device_numbers(given) == [0, 3], given
    assert device_numbers(3) == [3]


def test_anything_else_is_refused() -> None:
    for given in ([], "", "cuda:0", [0, 0], -1, [True], 1.5, ["0", None], {}):
        with pytest.raises(InvalidRequestError) as caught:
            pytest.fail(f"{given!r} was read: {device_numbers(given)}")
        assert caught.value.field == "devices"


def test_numbers_count_the_gpus_that_this_process_sees() -> None:
    uuids = {"CUDA_VISIBLE_DEVICES": "GPU-aa, GPU-bb"}
    assert visible_devices([1, 0], uuids) == "GPU-bb,GPU-aa"
    assert visible_devices(2, {"CUDA_VISIBLE_DEVICES": "4,5,6"}) == "6"
    assert visible_devices([2], {}) == "2"
    for seen in ("4,5", ""):
        with pytest.raises(InvalidRequestError, match=f"this process sees {len(seen.split(',')) if seen else 0} GPUs"):
            visible_devices([2], {"CUDA_VISIBLE_DEVICES": seen})


@each("name, meant", [("half", "float16"), ("float", "float32"), ("double", "float64")])
def test_torchs_own_short_names_of_dtypes_are_dtypes(name: str, meant: str) -> None:
    assert torch_dtype(name) is torch_dtype(f"torch.{name}") is getattr(torch, meant)


# EOS ids --------------------------------------------------------------------------------------------------------------


def test_every_source_adds_its_ids():
    generation, tokenizer = SimpleNamespace(eos_token_id=[2, 7]), SimpleNamespace(eos_token_id=3)
    assert eos_token_ids(generation, {"eos_token_id": 5}, tokenizer, vocab_size=10) == {2, 3, 5, 7}
    assert eos_token_ids(1, [4, 6], frozenset({8}), vocab_size=10) == {1, 4, 6, 8}


def test_a_source_may_name_none():
    unset = SimpleNamespace(eos_token_id=None)
    assert eos_token_ids(None, {}, {"eos_token_id": None}, unset, object(), vocab_size=10) == frozenset()


def test_ids_outside_the_vocabulary_are_left_out():
    assert eos_token_ids([-1, 0, 9, 10, 50256], vocab_size=10) == {0, 9}


# A hub that does not answer is asked once -----------------------------------------------------------------------------


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")


@pytest.mark.usefixtures("no_hub")
def test_without_a_hub_only_files_of_this_machine_are_read() -> None:
    assert hub_options("some/model") == {"local_files_only": True}


@pytest.mark.usefixtures("no_hub")
def test_a_path_needs_no_hub(tmp_path: Path) -> None:
    assert hub_options(str(tmp_path)) == hub_options(tmp_path) == hub_options(None) == {}


@pytest.mark.usefixtures("no_hub")
def test_a_hub_that_is_switched_off_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub_options("some/model") == {}


@pytest.mark.parametrize("status", [200, 404, 500])
def test_a_hub_that_answers_is_used(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    with FaultServer(lambda request: json_reply({}, status)) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        assert hub_options("some/model") == {}
        assert len(hub.requests) <= 1


# Where a server joins the process that sends it weights ---------------------------------------------------------------


def test_the_port_is_the_given_one_or_a_free_one() -> None:
    assert WeightGroup("10.0.0.5", 29600).address() == ("10.0.0.5", 29600)
    host, port = WeightGroup("10.0.0.5").address()
    with socket.socket() as own:
        own.bind(("", port))
    assert host == "10.0.0.5"


def test_the_option_may_be_a_host_alone() -> None:
    assert WeightGroup.given("trainer") == WeightGroup("trainer") == WeightGroup.given(WeightGroup("trainer"))
    assert WeightGroup.given(None) is None


def test_anything_else_is_refused_before_a_server_waits_for_it() -> None:
    for wrong in ("", " trainer", "tcp://trainer:1", "trainer:29600", 29600, ("trainer", 1), True):
        with pytest.raises(InvalidRequestError, match=r"WeightGroup\('10\.0\.0\.5', port=29600\)") as caught:
            pytest.fail(f"{wrong!r} was read: {WeightGroup.given(wrong)}")
        assert caught.value.field == "weight_group"
    for port in (0, 65536, "29600", True):
        with pytest.raises(InvalidRequestError) as caught:
            pytest.fail(f"{port!r} was read: {WeightGroup('trainer', port)}")
        assert caught.value.field == "weight_group.port"


# How much time a call has left ----------------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_time_left_shrinks_until_it_is_over():
    clock = Clock()
    deadline = Deadline(2.0, clock)
    assert deadline.left() == 2.0
    clock.now += 1.5
    deadline.check()
    assert deadline.left() == 0.5
    assert not deadline.is_over()
    clock.now += 0.5
    for ask in (deadline.left, deadline.check):
        with pytest.raises(TimeoutError, match="not done within the timeout; allow more time"):
            ask()
    assert deadline.is_over()


def test_a_call_without_a_timeout_has_no_end():
    clock = Clock()
    deadline = Deadline(None, clock)
    clock.now = 1e9
    deadline.check()
    assert deadline.left() is None and not deadline.is_over()


def test_opening_blames_its_own_timeout_only_if_that_has_passed():
    passed = r"open_timeout=1e-09 passed while opening an engine: not done"
    with pytest.raises(BackendTimeoutError, match=passed), opening_within(1e-9, "an engine") as deadline:
        deadline.check()
    hangs = BackendTimeoutError("GET /health: the server hangs; nothing was sent or received for 5 s")
    with pytest.raises(BackendTimeoutError) as caught, opening_within(300.0, "an engine"):
        raise hangs
    assert caught.value is hangs and str(hangs).startswith("GET /health")
