"""Wrong options are refused before vLLM starts; right ones reach it."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from vllm.engine.arg_utils import AsyncEngineArgs

import corelm
from corelm import Backend
from corelm.errors import CapabilityError, EngineError, InvalidRequestError
from engines.vllm.conftest import SMALL
from engines.vllm.engine_access import sync_engine
from helpers.capability_tables import assert_page_says
from helpers.processes import wait_until
from helpers.tiny_models import tiny_tokenizer
from vllm_backend.capabilities import read_model

Open = Callable[..., Backend]


@pytest.mark.parametrize(
    ("options", "field", "hint"),
    [
        ({"max_modle_len": 64}, "max_modle_len", "did you mean 'max_model_len'"),
        ({"max_context": 64}, "max_context", "max_model_len"),
        ({"api_key": "k"}, "api_key", "needs base_url"),
        ({"engine": "ray"}, "engine", "'async' or 'sync'"),
    ],
)
def test_wrong_options_are_named(tiny_folder: Path, options: dict[str, Any], field: str, hint: str) -> None:
    with pytest.raises(InvalidRequestError, match=hint) as caught:
        corelm.get_backend("vllm", tiny_folder, **options)
    assert caught.value.field == field


def test_the_engine_says_what_it_runs_in_and_on(shared: Backend) -> None:
    assert shared.info == {"model": "float32 on cpu"}


def test_opening_without_a_model_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="base_url") as caught:
        corelm.get_backend("vllm")
    assert caught.value.field == "model"


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits", "cooked"])
def test_modes_that_do_not_return_log_probs_are_refused(tiny_folder: Path, mode: str) -> None:
    with pytest.raises(CapabilityError, match=mode):
        corelm.get_backend("vllm", tiny_folder, logprobs_mode=mode)


@pytest.mark.parametrize(
    ("options", "offered"),
    [({}, True), ({"max_logprobs": 0}, False), ({"logits_processors": ["a_module:AProcessor"]}, True)],
)
def test_the_most_probable_ids_are_offered_only_if_vllm_returns_them(
    tiny_folder: Path, options: dict[str, Any], offered: bool
) -> None:
    config = AsyncEngineArgs(model=str(tiny_folder), **SMALL, **options).create_engine_config()
    capabilities = read_model(config, tiny_tokenizer(), abort=True, concurrent_calls=True).capabilities
    assert capabilities.argmax is offered and capabilities.score


@pytest.mark.parametrize("engine", ["async", "sync"])
def test_a_model_that_vllm_cannot_open_is_an_engine_error(tmp_path: Path, engine: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineError) as caught:
        corelm.get_backend("vllm", tmp_path, engine=engine)
    assert caught.value.usable is False
    with pytest.raises(InvalidRequestError, match="model: there is no file or folder"):
        corelm.get_backend("vllm", tmp_path / "nothing here", engine=engine)


@pytest.mark.parametrize("engine", [pytest.param("async", marks=pytest.mark.nightly), "sync"])
def test_ctrl_c_ends_the_wait_for_an_engine_that_is_starting(open_vllm: Open, engine: str) -> None:
    others, children = set(threading.enumerate()), multiprocessing.active_children()

    def own() -> bool:
        return any(each.name.startswith("vllm") and each not in others for each in threading.enumerate())

    def waits() -> bool:
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        while frame.f_code.co_name != "done_within" and frame.f_back is not None:
            frame = frame.f_back
        return frame.f_code.co_name == "done_within"

    def interrupt() -> None:
        assert wait_until(lambda: own() and waits(), 120.0)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            open_vllm(engine=engine)
        # Nobody waits for vLLM, which cannot be ended while it starts.
        assert own()
        interrupting.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert wait_until(lambda: not own(), 120.0)
    assert not [each for each in multiprocessing.active_children() if each not in children]
    # A process can hold one such engine, and the discarded one is gone.
    with open_vllm(engine="sync") as backend:
        assert backend.health()


def test_opening_leaves_the_random_states_of_the_process_alone(open_vllm: Open) -> None:
    def drawn() -> tuple[int, float, float]:
        return int(torch.randint(2**62, ())), random.random(), float(numpy.random.random())

    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    expected = drawn()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])
    # The synchronous mode runs the engine in this process, and vLLM seeds its generators.
    open_vllm(engine="sync").close()
    assert drawn() == expected


def test_engine_arguments_and_tokenizers_reach_the_engine(open_vllm: Open, tiny_folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    with open_vllm(engine="sync", max_model_len=64, max_num_seqs=3, tokenizer=tokenizer) as backend:
        assert backend.capabilities.max_context == 64 and backend.tokenizer is tokenizer
        assert sync_engine(backend).llm.vllm_config.scheduler_config.max_num_seqs == 3
    with open_vllm(engine="sync", tokenizer=str(tiny_folder), skip_tokenizer_init=True) as backend:
        # vLLM decodes no text then, so it cannot find stop strings.
        assert "stop" not in backend.capabilities.sampling
        assert backend.tokenizer.get_vocab() == tokenizer.get_vocab()
        assert backend.generate([[5, 6]], {"max_new_tokens": 3, "ignore_eos": True}).ids.lengths.tolist() == [3]


@pytest.mark.parametrize("mode", [pytest.param("async", marks=pytest.mark.nightly), "sync"])
def test_the_gpus_that_were_named_reach_vllm(tiny_folder: Path, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM's own rule is that they count the devices which this process sees; on a CPU they are nodes of memory.
    with pytest.raises(InvalidRequestError, match="numbers of GPUs"):
        corelm.get_backend("vllm", tiny_folder, devices=[0, 0], engine=mode)
    with corelm.get_backend("vllm", tiny_folder, **SMALL, devices="0", engine=mode) as backend:
        llm = backend.engine.plugin.llm
        assert llm.vllm_config.parallel_config.assigned_physical_gpu_ids == [0]
        assert backend.generate([[5]], {"max_new_tokens": 1}).ids.lengths.tolist() == [1]


@pytest.mark.nightly
def test_a_cpu_offers_no_sleep_and_says_so(tiny_folder: Path) -> None:
    with pytest.raises(EngineError, match="Sleep mode is not supported"):
        corelm.get_backend("vllm", tiny_folder, **SMALL, enable_sleep_mode=True)
    with (
        corelm.get_backend("vllm", tiny_folder, **SMALL) as backend,
        pytest.raises(CapabilityError, match="lacks sleep_levels"),
    ):
        backend.sleep()


def test_the_page_of_the_engines_says_what_vllm_declares(shared: Backend) -> None:
    assert_page_says("vllm", shared, besides=["weight_stream"])
