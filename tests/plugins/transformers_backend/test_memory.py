"""Memory: how many rows are decoded at a time on a GPU, what is said when it is full, and what `close` gives back."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import corelm
from corelm import SamplingParams
from corelm.errors import EngineError
from corelm.spec import Ragged
from helpers import oracle
from helpers.plain_forward import Open, cache_in
from helpers.tiny_models import CONTEXT, VOCAB, tiny_model, tiny_tokenizer
from transformers_backend.continuation import CachedRows
from transformers_backend.engine import CausalLM
from transformers_backend.memory import CacheBytes, limits_within, measured_cache

FOUR = SamplingParams(max_new_tokens=4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a saved model, whose head is tied, and its tokenizer."""
    tiny_model("qwen2-tied").save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


# How many rows are decoded at a time ----------------------------------------------------------------------------------


def _measured(model: Any) -> tuple[CausalLM, CacheBytes]:
    engine = CausalLM(model, model)
    with engine.evaluating():
        found = measured_cache(engine)
    assert found is not None
    return engine, found


def test_no_row_takes_more_than_was_measured() -> None:
    for family in ("qwen2", "gemma2", "gpt2"):
        engine, found = _measured(tiny_model(family))
        for length in (20, 60):
            with engine.evaluating():
                cache = CachedRows(engine, Ragged.from_list([torch.arange(length)])).cache
            taken = sum(states.nbytes for layer in cache.layers for states in (layer.keys, layer.values))
            assert found.row + found.token * length >= taken > 0, (family, length)
    # Keys and values of two layers, two heads of 16 float32 each.
    assert _measured(tiny_model("qwen2"))[1] == CacheBytes(row=0, token=2 * 2 * 2 * 16 * 4)
    # A recurrent state counts for the row and not for its tokens.
    assert _measured(tiny_model("mamba"))[1].token == 0


def test_states_that_a_layer_keeps_in_a_list_count() -> None:
    model = tiny_model("qwen2")
    engine, plain = CausalLM(model, model), model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        cache_in(kwargs).layers[0].states = [torch.zeros(25), torch.zeros(25)]
        return out

    model.model.forward = forward
    with engine.evaluating():
        assert measured_cache(engine) == CacheBytes(row=200, token=512)


def test_more_free_memory_decodes_more_tokens_and_little_memory_one() -> None:
    engine, cache = _measured(tiny_model())
    few, many = (limits_within(free, engine, cache, 100) for free in (2**28, 2**32))
    assert many.tokens == 16 * few.tokens
    # What the cache alone takes fits into half of the memory.
    assert few.tokens * cache.token < 2**27
    # A row of one token still takes its logits.
    assert few.row_tokens * 2**27 / few.tokens >= 4 * VOCAB
    assert limits_within(0, engine, cache, 100).tokens == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_cuda_all_rows_of_a_call_share_a_batch(open_model: Open) -> None:
    backend = open_model(tiny_model().cuda())
    before = torch.cuda.memory_reserved()
    prompts = [[3 + row % 50] * 20 for row in range(1024)]
    assert len(backend.generate(prompts, sampling=SamplingParams(max_new_tokens=CONTEXT - 20)).ids) == 1024
    assert torch.cuda.max_memory_reserved() - before < torch.cuda.get_device_properties(0).total_memory / 2


# A full memory --------------------------------------------------------------------------------------------------------


def test_a_full_memory_names_the_option(open_model: Open) -> None:
    model = tiny_model()
    prompts = [[3, 4, 5 + row] for row in range(6)]

    def fill(module: Any, args: Any, kwargs: Any) -> None:
        if len(kwargs["input_ids"]) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")

    model.register_forward_pre_hook(fill, with_kwargs=True)
    with pytest.raises(
        EngineError, match=r"Tried to allocate 2\.00 GiB\. Open the backend with a smaller max_batch_"
    ) as caught:
        open_model(model).generate(prompts, sampling=FOUR)
    assert caught.value.usable is True
    assert len(open_model(model, max_batch_tokens=28).generate(prompts, sampling=FOUR).ids) == 6


# Closing --------------------------------------------------------------------------------------------------------------


def test_close_frees_a_model_that_was_loaded_here_cycles_included(folder: Path) -> None:
    backend = corelm.get_backend("transformers", folder, device="cpu")
    backend.generate([[3, 4, 5], [4, 5]], sampling=FOUR)
    backend.score_logprobs([[3, 4, 5, 6]])
    model = backend.engine.plugin.engine.module
    model.hooks_of_a_library = [model]
    left = [weakref.ref(each) for each in (model, *model.parameters())]
    del model
    gc.disable()
    try:
        backend.close()
        assert [ref() for ref in left if ref() is not None] == []
    finally:
        gc.enable()
    assert backend.closed


def test_close_leaves_the_callers_model_alone() -> None:
    model = tiny_model()
    backend = corelm.get_backend("transformers", model, tokenizer=tiny_tokenizer())
    found = backend.score_logprobs([[3, 4, 5, 6]]).logprobs.values
    backend.close()
    torch.testing.assert_close(found, oracle.logprobs(model, [3, 4, 5, 6]), rtol=0, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_cuda_nothing_stays_reserved_after_close(folder: Path) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    backend = corelm.get_backend("transformers", folder, device="cuda")
    backend.generate([[3, 4, 5], [4, 5]], sampling=FOUR)
    backend.close()
    assert torch.cuda.memory_reserved() <= before


# Several devices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offloaded", ["first", pytest.param("last", marks=pytest.mark.nightly)])
def test_a_model_with_offloaded_layers_samples_and_scores(folder: Path, tmp_path: Path, offloaded: str) -> None:
    ends = ("disk", "cpu") if offloaded == "first" else ("cpu", "disk")
    places = dict(zip(("model.layers.0", "model.layers.1"), ends, strict=True))
    places |= {"model.embed_tokens": ends[0], "lm_head": ends[0], "model.norm": ends[1], "model.rotary_emb": "cpu"}
    options = {"device_map": places, "offload_folder": str(tmp_path / "offloaded")}
    model = tiny_model("qwen2-tied")
    with corelm.get_backend("transformers", folder, model_kwargs=options) as backend:
        answers = backend.generate([[3, 4, 5], [4, 5]], sampling=FOUR)
        sequences = [[3, 4, 5, *answers.ids.tolist()[0]], [4, 5, *answers.ids.tolist()[1]]]
        found = backend.score_logprobs(sequences).logprobs.split()
    for row, logprobs in zip(sequences, found, strict=True):
        torch.testing.assert_close(logprobs, oracle.logprobs(model, row), rtol=0, atol=1e-5)
