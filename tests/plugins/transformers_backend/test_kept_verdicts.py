"""What trial rows showed is kept on disk, for models that run no code but that of libraries."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM, RobertaConfig, RobertaForCausalLM
from transformers.models.llama import modeling_llama

from helpers.peft_models import with_lora
from helpers.plain_forward import PROMPTS, SIZES, Forwards, Open, assert_scores, check, wide
from helpers.tiny_models import tiny_model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CORELM_CACHE", str(tmp_path))
    return tmp_path / "verdicts"


@pytest.fixture
def forwards(open_model: Open) -> Callable[..., int]:
    """Return a function that opens a model and returns how many forward passes its first calls take."""

    def count(model: Any, **options: Any) -> int:
        backend = open_model(model, **options)
        with Forwards() as passes:
            backend.score_logprobs(PROMPTS)
            backend.generate(PROMPTS, {"max_new_tokens": 4, "ignore_eos": True})
        if model.dtype == torch.float32:
            check(backend, model)
        return passes.count

    return count


def test_the_second_to_open_a_model_makes_fewer_forwards(folder: Path, forwards: Callable[..., int]) -> None:
    first = forwards(tiny_model("llama"))
    kept = [*folder.iterdir()]
    assert forwards(tiny_model("llama")) < first
    # Another seed: the rows of the call are compared with the plain forward of these weights.
    assert forwards(tiny_model("llama", seed=1)) < first
    assert [*folder.iterdir()] == kept and len(kept) == 1


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[1]", b'{"file": 1}', b"null"])
def test_a_damaged_file_is_ignored_and_written_anew(folder: Path, forwards: Callable[..., int], text: bytes) -> None:
    first = forwards(tiny_model("llama"))
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(text)
    assert forwards(tiny_model("llama")) == first
    assert file.read_bytes() == whole
    # The file of another model is no better, nor is a folder.
    file.write_text(json.dumps(json.loads(whole) | {"file": "other.json"}))
    assert forwards(tiny_model("llama")) == first
    file.unlink()
    file.mkdir()
    assert forwards(tiny_model("llama")) == first


def test_another_model_is_not_taken_for_the_same(folder: Path, forwards: Callable[..., int]) -> None:
    forwards(tiny_model("llama"))
    others = (
        lambda: tiny_model("llama", num_hidden_layers=3),
        lambda: tiny_model("llama").to(torch.bfloat16),
        lambda: tiny_model("llama", attn_implementation="eager"),
        lambda: tiny_model("qwen2"),
    )
    for number, make in enumerate(others):
        forwards(make())
        assert len([*folder.iterdir()]) == number + 2
    forwards(tiny_model("llama"), fast=False)
    assert len([*folder.iterdir()]) == len(others) + 2


def hooked(model: Any) -> Any:
    model.model.layers[0].register_forward_hook(lambda *given: None)
    return model


def replaced(model: Any) -> Any:
    attention = model.model.layers[0].self_attn
    attention.forward = functools.partial(attention.forward)
    return model


class Own(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Own(tiny_model("llama").config).eval(),
        lambda: with_lora(tiny_model("llama"), "q_proj"),
        lambda: hooked(tiny_model("llama")),
        lambda: replaced(tiny_model("llama")),
    ],
    ids=["own code", "adapter", "hook", "replaced forward"],
)
def test_nothing_is_kept_of_a_model_with_other_code(folder: Path, open_model: Open, make: Callable[[], Any]) -> None:
    model = make()
    check(open_model(model), model)
    assert not folder.exists()


def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self.replaced(*args, **kwargs)


@pytest.mark.parametrize("where", ["class", "module", "class, under the module's name", "class, under another's name"])
def test_code_that_is_replaced_for_a_whole_class_is_tried(
    folder: Path, forwards: Callable[..., int], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    first, attention, mask = (
        forwards(tiny_model("llama")),
        modeling_llama.LlamaAttention,
        modeling_llama.create_causal_mask,
    )
    monkeypatch.setattr(attention, "replaced", attention.forward, raising=False)
    names = vars(modeling_llama) if where == "class, under the module's name" else {"__name__": "statistics"}
    if where == "module":
        monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **given: mask(**given))
    elif where == "class":
        monkeypatch.setattr(attention, "forward", replacement)
    else:
        exec("from __future__ import annotations\n" + inspect.getsource(replacement), names)
        monkeypatch.setattr(attention, "forward", names.pop("replacement"))
    assert forwards(tiny_model("llama")) == first
    assert len([*folder.iterdir()]) == 1


def test_a_way_that_fails_is_not_tried_again(folder: Path, open_model: Open, caplog: pytest.LogCaptureFixture) -> None:
    """A cache of windows of one token has lost what the next token needs. A beam search tries all of it before."""
    counts = []
    for _ in range(2):
        caplog.clear()
        backend = open_model(wide(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=1))))
        with Forwards() as passes:
            backend.generate(PROMPTS[:1], {"max_new_tokens": 4, "num_beams": 2, "temperature": 0.0}, logprobs="none")
        counts.append(passes.count)
        told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(told) == 1 and "without a cache" in told[0] and "cached rows of 8 tokens" in told[0]
    assert counts[1] < counts[0], counts


def test_what_must_not_be_given_to_a_model_is_kept(folder: Path, forwards: Callable[..., int]) -> None:
    """It counts positions in its own way, so it must not be given any."""
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    config = RobertaConfig(**sizes | {"is_decoder": True, "max_position_embeddings": 130, "pad_token_id": 1})
    first = forwards(wide(RobertaForCausalLM(config)))
    assert forwards(wide(RobertaForCausalLM(config))) < first


def test_weights_that_change_are_tried_without_the_disk(folder: Path, open_model: Open) -> None:
    open_model(tiny_model("llama")).score_logprobs(PROMPTS)
    model = tiny_model("llama")
    backend, counts = open_model(model), []
    for change in (
        lambda: None,
        lambda: backend.update_weights(tiny_model("llama", seed=1).state_dict()),
        lambda: torch.nn.init.normal_(model.lm_head.weight),
    ):
        change()
        with Forwards() as passes:
            assert_scores(backend, model, PROMPTS, atol=2e-5)
        counts.append(passes.count)
    assert counts[0] < min(counts[1:]), counts


def test_where_nothing_can_be_kept_a_model_runs_as_well(
    open_model: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    (tmp_path / "file").write_text("")
    for name in ("", str(tmp_path / "file")):
        monkeypatch.setenv("CORELM_CACHE", name)
        check(open_model(model), model)
    monkeypatch.delenv("CORELM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check(open_model(model), model)
    assert len([*(tmp_path / "cache" / "corelm" / "verdicts").iterdir()]) == 1
