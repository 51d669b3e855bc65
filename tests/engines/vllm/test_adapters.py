"""LoRA adapters in a real vLLM: named in each call, replaced while it runs, and never mixed in its caches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import corelm
from corelm import Backend
from corelm.errors import CapabilityError, InvalidRequestError
from engines.vllm.conftest import Open
from engines.vllm.launch import VLLMServerProcess
from helpers import oracle
from helpers.lora import lora, merged, save
from helpers.tiny_models import random_rows, tiny_model, tiny_tokenizer

ROWS = random_rows(3, 40, 33)
#: Of this family, vLLM's head takes adapters.
FAMILY = "llama"
BASE = tiny_model(FAMILY, hidden_size=128)
ONE, TWO, HEAD = lora(BASE), lora(BASE, seed=1, rank=4), lora(BASE, seed=2, targets=["q_proj", "lm_head"])


def plain(adapter: Any = None, seed: int = 0) -> Any:
    model = tiny_model(FAMILY, hidden_size=128, seed=seed)
    return model if adapter is None else merged(model, adapter[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vllm") / FAMILY
    plain().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=["async", pytest.param("sync", marks=pytest.mark.nightly)])
def backend(open_vllm: Open, folder: Path, request: pytest.FixtureRequest) -> Iterator[Backend]:
    with open_vllm(folder, engine=request.param, enable_lora=True, max_lora_rank=8, max_loras=2) as backend:
        yield backend


def assert_is(backend: Backend, adapter: Any, model: Any, label: str) -> None:
    scored = backend.score_logprobs(ROWS, adapter=adapter)
    for ids, found in zip(ROWS, scored.logprobs.split(), strict=True):
        torch.testing.assert_close(found, oracle.logprobs(model, ids), rtol=0, atol=1e-4)
    out = backend.generate(ROWS, {"max_new_tokens": 8, "ignore_eos": True, "seed": 0}, adapter=adapter)
    for prompt, answer, found in zip(ROWS, out.ids.tolist(), out.logprobs.split(), strict=True):
        torch.testing.assert_close(found, oracle.answer_logprobs(model, prompt, answer), rtol=0, atol=1e-4)
    assert scored.weight_versions == out.weight_versions == (label,) * len(ROWS)


def test_an_adapter_is_replaced_and_its_cached_blocks_are_not_read(backend: Backend, tmp_path: Path) -> None:
    backend.load_adapter("two", save(*TWO, tmp_path), version="1")
    # vLLM may read the folder again, and its owner may write another version there.
    save(*HEAD, tmp_path)
    for version, adapter in enumerate((ONE, HEAD, TWO, ONE)):
        backend.load_adapter("policy", adapter[0], config=adapter[1], version=str(version))
        assert_is(backend, "policy", plain(adapter), f"0+policy@{version}")
        assert_is(backend, "policy", plain(adapter), f"0+policy@{version}")
    assert_is(backend, False, plain(), "0+none")
    assert_is(backend, "two", plain(TWO), "0+two@1")
    backend.unload_adapter("policy")
    with pytest.raises(InvalidRequestError, match="there is no 'policy'"):
        backend.score_logprobs(ROWS, adapter="policy")


def test_new_base_weights_leave_the_adapters(backend: Backend) -> None:
    backend.load_adapter("one", ONE[0], config=ONE[1], version="2")
    other = plain(seed=1)
    backend.update_weights(other.state_dict(), version="other")
    assert_is(backend, False, other, "other+none")
    assert_is(backend, "one", merged(other, ONE[0]), "other+one@2")
    backend.update_weights(plain().state_dict(), version="0")
    assert_is(backend, "one", plain(ONE), "0+one@2")


def test_scales_of_rslora_and_of_single_layers_are_honoured(backend: Backend) -> None:
    state, config = ONE
    root = config["r"] ** 0.5
    for name, more, scale in (
        ("scaled", {"use_rslora": True}, lambda name: root),
        ("queries", {"alpha_pattern": {"q_proj": 2 * config["r"]}}, lambda name: 2.0 if "q_proj" in name else 1.0),
    ):
        backend.load_adapter(name, state, config={**config, **more}, version="1")
        up = {each: value * (scale(each) if "lora_B" in each else 1.0) for each, value in state.items()}
        assert_is(backend, name, merged(plain(), up), f"0+{name}@1")
        backend.unload_adapter(name)


def test_what_does_not_fit_is_refused(backend: Backend, tmp_path: Path) -> None:
    backend.load_adapter("one", ONE[0], config=ONE[1], version="3")
    large, wide = lora(BASE, rank=16), lora(tiny_model(FAMILY, hidden_size=64))
    deep = lora(tiny_model(FAMILY, hidden_size=128, num_hidden_layers=3))
    bad = [
        (large, InvalidRequestError, "max_lora_rank=16"),
        (wide, InvalidRequestError, "for a weight that is"),
        (deep, InvalidRequestError, "belongs to no layer"),
        (({}, ONE[1]), InvalidRequestError, "no tensors"),
        ((ONE[0], {**ONE[1], "peft_type": "IA3"}), CapabilityError, "LoRA adapters only"),
        ((ONE[0], {**ONE[1], "use_dora": True}), InvalidRequestError, "use_dora"),
    ]
    for (state, config), kind, says in bad:
        with pytest.raises(kind, match=says):
            backend.load_adapter("one", state, config=config)
    with pytest.raises(InvalidRequestError, match="no readable adapter"):
        backend.load_adapter("one", tmp_path)
    assert_is(backend, "one", plain(ONE), "0+one@3")


def test_an_engine_without_lora_says_how_to_open_it(shared: Backend) -> None:
    with pytest.raises(CapabilityError, match="README"):
        shared.load_adapter("one", ONE[0], config=ONE[1])


@pytest.mark.nightly
def test_a_server_loads_adapters_from_folders(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    one, two, large = (save(*each, tmp_path / str(n)) for n, each in enumerate((ONE, TWO, lora(BASE, rank=16))))
    options = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--lora-modules", f"sql={one}")
    with VLLMServerProcess(folder, tmp_path / "log", *options) as server:
        opening = {"base_url": server.url, "api_key": server.key}
        with corelm.get_backend("vllm", **opening) as backend:
            assert_is(backend, "sql", plain(ONE), "0+sql@0")
            backend.load_adapter("policy", two, version="a")
            assert_is(backend, "policy", plain(TWO), "0+policy@a")
            # The folder has another version now.
            save(*ONE, two)
            backend.load_adapter("policy", two, version="b")
            assert_is(backend, "policy", plain(ONE), "0+policy@b")
            assert_is(backend, False, plain(), "0+none")
            for weights, kind, says in (
                (large, InvalidRequestError, "rank 16"),
                (tmp_path, InvalidRequestError, "no readable adapter"),
                (tmp_path / "nothing", InvalidRequestError, "No adapter found"),
                (ONE[0], CapabilityError, "from a folder"),
            ):
                with pytest.raises(kind, match=says):
                    backend.load_adapter("policy", weights, **({"config": ONE[1]} if weights is ONE[0] else {}))
            with pytest.raises(InvalidRequestError, match="was started with 'sql'"):
                backend.load_adapter("sql", one)
            assert_is(backend, "policy", plain(ONE), "0+policy@b")
            backend.unload_adapter("policy")
            with pytest.raises(InvalidRequestError, match="there is no 'policy'; there are 'sql'"):
                backend.generate(ROWS, adapter="policy")
        with corelm.get_backend("vllm", "sql", **opening) as backend:
            assert_is(backend, None, plain(ONE), "0")
            assert_is(backend, False, plain(), "0+none")
