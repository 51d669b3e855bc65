"""LoRA adapters on a real server, which a stand-in lets load them on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import corelm
from corelm import Backend
from corelm.errors import CapabilityError, InvalidRequestError
from engines.sglang_on_cpu import LORA_ARGUMENTS, LORA_ENVIRONMENT
from helpers import oracle
from helpers.lora import lora, merged, save
from helpers.tiny_models import random_rows, tiny_model

ROWS = random_rows(3, 40, 33)
BASE = tiny_model()
ONE, TWO = lora(BASE), lora(BASE, seed=1, rank=4)
WIDE = lora(BASE, seed=2, targets=["q_proj", "k_proj", "v_proj", "gate_proj", "down_proj"])
MODELS = {"one": merged(tiny_model(), ONE[0]), "two": merged(tiny_model(), TWO[0]), None: tiny_model()}


@pytest.fixture(scope="module")
def backend(launch: Callable[..., Backend], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    folder = save(*TWO, tmp_path_factory.mktemp("lora") / "two")
    with launch(env=LORA_ENVIRONMENT, **LORA_ARGUMENTS, lora_paths=f"started={folder}") as backend:
        yield backend


def assert_is(backend: Backend, adapter: Any, model: Any, label: str) -> None:
    scored = backend.score_logprobs(ROWS, adapter=adapter)
    for ids, found in zip(ROWS, scored.logprobs.split(), strict=True):
        torch.testing.assert_close(found, oracle.logprobs(model, ids), rtol=0, atol=1e-4)
    out = backend.generate(ROWS, {"max_new_tokens": 8, "ignore_eos": True}, adapter=adapter)
    for prompt, answer, found in zip(ROWS, out.ids.tolist(), out.logprobs.split(), strict=True):
        torch.testing.assert_close(found, oracle.answer_logprobs(model, prompt, answer), rtol=0, atol=1e-4)
    assert scored.weight_versions == out.weight_versions == (label,) * len(ROWS)


def test_an_adapter_is_replaced_and_its_cached_blocks_are_not_read(backend: Backend) -> None:
    for version, (name, adapter) in enumerate((("one", ONE), ("two", TWO), ("one", ONE))):
        backend.load_adapter("policy", adapter[0], config=adapter[1], version=str(version))
        for _ in range(2):
            assert_is(backend, "policy", MODELS[name], f"0+policy@{version}")
    assert_is(backend, False, MODELS[None], "0+none")
    assert_is(backend, "started", MODELS["two"], "0+started@0")
    # SGLang keeps one buffer for queries, keys and values, and one for both matrices of a gate.
    backend.load_adapter("policy", WIDE[0], config=WIDE[1], version="wide")
    assert_is(backend, "policy", merged(tiny_model(), WIDE[0]), "0+policy@wide")
    backend.unload_adapter("policy")
    with pytest.raises(InvalidRequestError, match="there is no 'policy'"):
        backend.score_logprobs(ROWS, adapter="policy")


def test_the_scale_of_rslora_is_honoured(backend: Backend) -> None:
    state, config = ONE
    backend.load_adapter("scaled", state, config={**config, "use_rslora": True}, version="1")
    # Scaled by lora_alpha / sqrt(r) instead of lora_alpha / r, which is 1 here.
    up = {name: value * (config["r"] ** 0.5 if "lora_B" in name else 1) for name, value in state.items()}
    assert_is(backend, "scaled", merged(tiny_model(), up), "0+scaled@1")


def test_what_does_not_fit_is_refused(backend: Backend, tmp_path: Path) -> None:
    backend.load_adapter("one", ONE[0], config=ONE[1], version="2")
    deep = lora(tiny_model(num_hidden_layers=3))
    bad: list[tuple[Any, type[Exception], str]] = [
        (lora(BASE, rank=16), InvalidRequestError, "max_lora_rank=16"),
        (lora(tiny_model(hidden_size=32, num_attention_heads=2)), InvalidRequestError, "for a weight that is"),
        (deep, InvalidRequestError, "belongs to no layer"),
        (lora(BASE, targets=["o_proj"]), InvalidRequestError, "incompatible with"),
        (lora(BASE, targets=["k_proj"]), InvalidRequestError, "also needs q_proj, v_proj"),
        (lora(BASE, targets=["q_proj"]), InvalidRequestError, "also needs v_proj"),
        (lora(BASE, targets=["up_proj"]), InvalidRequestError, "also needs gate_proj"),
        ((ONE[0], {**ONE[1], "alpha_pattern": {"q_proj": 99}}), InvalidRequestError, "alpha_pattern"),
        (({**ONE[0], "no.such.parameter": torch.zeros(3)}, ONE[1]), InvalidRequestError, "not a matrix of a LoRA"),
        ((ONE[0], {**ONE[1], "peft_type": "IA3"}), CapabilityError, "LoRA adapters only"),
    ]
    for (state, config), kind, says in bad:
        with pytest.raises(kind, match=says):
            backend.load_adapter("one", state, config=config)
    with pytest.raises(InvalidRequestError, match="no readable adapter"):
        backend.load_adapter("one", tmp_path)
    with pytest.raises(InvalidRequestError, match="was started with 'started'"):
        backend.load_adapter("started", ONE[0], config=ONE[1])
    assert_is(backend, "one", MODELS["one"], "0+one@2")


def test_a_server_behind_a_url_reads_folders(backend: Backend, tmp_path: Path) -> None:
    server = backend.engine.plugin.launched
    with corelm.get_backend("sglang", base_url=server.base_url, api_key=server.api_key) as other:
        other.load_adapter("mine", save(*ONE, tmp_path), version="a")
        assert_is(other, "mine", MODELS["one"], "0+mine@a")
        with pytest.raises(CapabilityError, match="behind a URL"):
            other.load_adapter("mine", ONE[0], config=ONE[1])
        other.unload_adapter("mine")
