"""Every way to run a model is tried against its own plain forward, and what differs is not used.

The oracle is `helpers.oracle`: the plain forward of one row in float32. `tests/families` sweeps all model types.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from transformers import (
    Llama4ForCausalLM,
    Llama4TextConfig,
    MistralConfig,
    MistralForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
)

from corelm import LLMPolicy
from corelm.backend.prepared_call import prepare_generation
from corelm.errors import BackendTimeoutError, CapabilityError
from helpers import oracle
from helpers.plain_forward import PROMPTS, SIZES, Open, check, decoder, spoil_cache_after, wide
from helpers.streaming_fakes import Terminal
from helpers.tiny_models import random_rows, tiny_model


@pytest.fixture(params=[True, False], ids=["fast", "plain"])
def fast(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def llama4() -> Any:
    """Return a model that takes the temperature of a position from its column, so left padding changes it."""
    config = Llama4TextConfig(
        **SIZES | {"num_hidden_layers": 4},
        intermediate_size_mlp=64,
        num_local_experts=2,
        num_experts_per_tok=1,
        head_dim=8,
        floor_scale=24,
    )
    return wide(Llama4ForCausalLM(config))


def test_columns_that_a_model_takes_for_positions(open_model: Open) -> None:
    model = llama4()
    backend = open_model(model)
    check(backend, model)
    assert decoder(backend).way == "cached"


def test_columns_beyond_the_longest_row(open_model: Open) -> None:
    """The long prompt has a short answer and the short one a long answer, so no row is as long as the batch is wide."""
    model = llama4()
    backend = open_model(model)
    long, short = PROMPTS[0][:15], PROMPTS[0][5:8]
    # Agrees: 20 columns.
    backend.generate([long, PROMPTS[0][:12]], {"max_new_tokens": 5}, seeds=[1, 2])
    assert decoder(backend).way == "cached and padded"
    first = backend.generate([long], {"max_new_tokens": 20}, seeds=[1]).ids.tolist()[0]
    stop = {"stop_token_ids": [first[1]], "max_new_tokens": 20}
    found = backend.generate([long, short], stop, seeds=[1, 2])
    assert found.ids.lengths.tolist() == [2, 20] and found.logprobs is not None
    expected = oracle.logprobs(model, [*short, *found.ids.tolist()[1]])[3:]
    torch.testing.assert_close(found.logprobs.split()[1], expected, rtol=0, atol=2e-5)


def test_a_bar_does_not_keep_a_batch_from_being_decoded_again(
    open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen2")
    spoil_cache_after(model, 24)
    sampling = {"max_new_tokens": 12, "ignore_eos": True}
    policy = LLMPolicy(open_model(model), input_mode="tokens", sampling_params=sampling)
    monkeypatch.setattr(sys, "stderr", Terminal())
    prompts = [PROMPTS[0][:20], PROMPTS[0][::-1][:20]]
    result = policy(TensorDict(tokens=torch.tensor(prompts)), seed=1, progress=True)
    assert "2/2" in sys.stderr.getvalue()  # type: ignore[attr-defined]
    for prompt, answer, found in zip(prompts, result["tokens"].response, result["log_probs"].response, strict=True):
        expected = oracle.logprobs(model, [*prompt, *answer.tolist()])[len(prompt) :]
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_answers_are_counted_as_they_end(open_model: Open) -> None:
    backend, counted = open_model(tiny_model()), dict[int, int]()
    sampling = {"max_new_tokens": 12, "num_samples": 2, "seed": 3}
    call = prepare_generation(backend.engine, PROMPTS[:3], sampling, on_answer=counted.__setitem__)
    assert counted == dict(enumerate(backend.run(call).ids.lengths.tolist()))


def test_a_way_that_one_batch_refutes_is_not_used_for_the_next(
    open_model: Open, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("qwen2")
    spoil_cache_after(model, 24)
    # A batch is one row: 20 and 12 tokens.
    backend = open_model(model, max_batch_tokens=32)
    prompts = [*PROMPTS[:1] * 2, PROMPTS[0][::-1]]
    made = backend.generate(prompts, {"max_new_tokens": 12}, seeds=[1, 2, 3])
    assert made.logprobs is not None
    for prompt, answer, found in zip(prompts, made.ids.tolist(), made.logprobs.split(), strict=True):
        expected = oracle.logprobs(model, [*prompt, *answer])[len(prompt) :]
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert caplog.text.count("get other numbers") == 1


def test_columns_that_a_model_takes_for_positions_in_a_pack(open_model: Open) -> None:
    """No row is long, but the rows of a pack together are."""
    model = tiny_model("llama")
    plain = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        columns = torch.arange(out.last_hidden_state.shape[1], device=model.device)
        out.last_hidden_state = out.last_hidden_state * (1 + 0.2 * (columns >= 100))[:, None]
        return out

    model.model.forward = forward
    rows = random_rows(*[15] * 20)
    backend = open_model(model)
    backend.score_logprobs(rows[:2])
    for row, found in zip(rows, backend.score_logprobs(rows).logprobs.split(), strict=True):
        torch.testing.assert_close(found, oracle.logprobs(model, row), rtol=0, atol=2e-5)


def test_a_difference_as_large_as_a_defect_is_not_rounding_in_bfloat16(open_model: Open) -> None:
    model = tiny_model("qwen2").to(torch.bfloat16)
    plain = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        if kwargs.get("past_key_values") is not None and out.last_hidden_state.shape[1] == 1:
            out.last_hidden_state = out.last_hidden_state + 0.06 * out.last_hidden_state.roll(1, -1)
        return out

    model.model.forward = forward
    backend = open_model(model)
    backend.generate(PROMPTS, {"max_new_tokens": 4})
    assert decoder(backend).way == "uncached"


@pytest.mark.parametrize("name", ["qwen2", "llama", "mixtral", "granite"])
def test_rounding_in_bfloat16_keeps_the_fast_ways(open_model: Open, name: str) -> None:
    """Also where rounding makes a router choose another expert at single positions.

    How sums are rounded depends on where tensors lie in memory. So a router may choose other experts at so many
    positions that a way is refused, which is safe and slow; it must not be so everywhere.
    """

    def way(model: nn.Module) -> str | None:
        backend = open_model(model)
        backend.generate(PROMPTS, {"max_new_tokens": 12})
        return decoder(backend).way

    models = [tiny_model(name, num_hidden_layers=12).to(torch.bfloat16) for _ in range(4)]
    assert "cached and padded" in map(way, models)


def test_positions_that_a_model_counts_in_its_own_way(open_model: Open) -> None:
    sizes = SIZES | {"is_decoder": True, "max_position_embeddings": 130, "pad_token_id": 1}
    sizes.pop("num_key_value_heads")
    model = wide(RobertaForCausalLM(RobertaConfig(**sizes)))
    backend = open_model(model)
    check(backend, model)
    # model.generate gives positions from 0.
    with pytest.raises(CapabilityError, match="counts itself; drop num_beams"):
        backend.generate(PROMPTS, {"max_new_tokens": 3, "num_beams": 2, "temperature": 0.0}, logprobs="none")


def test_a_window_of_one_token(open_model: Open) -> None:
    model = wide(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=1)))
    backend = open_model(model)
    check(backend, model)
    assert decoder(backend).way is not None and decoder(backend).way.startswith("uncached")


def test_a_cached_step_that_differs_from_a_full_forward(open_model: Open) -> None:
    model = tiny_model("qwen2")
    plain = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        past = kwargs.get("past_key_values")
        if past is not None and kwargs["input_ids"].shape[1] == 1:
            out.last_hidden_state = out.last_hidden_state * 1.001
        return out

    model.model.forward = forward
    backend = open_model(model)
    check(backend, model)
    assert decoder(backend).way == "uncached"


def test_beams_use_no_cache_if_cached_steps_differ_at_their_length(open_model: Open) -> None:
    model, sound = tiny_model("qwen2"), tiny_model("qwen2")
    spoil_cache_after(model, 24)
    search = {"max_new_tokens": 20, "num_beams": 3, "temperature": 0.0}
    expected = open_model(sound).generate(PROMPTS, search, logprobs="none").ids.tolist()
    assert open_model(model).generate(PROMPTS, search, logprobs="none").ids.tolist() == expected


def test_a_timeout_ends_a_search_for_beams(open_model: Open) -> None:
    backend = open_model(tiny_model("qwen2", max_position_embeddings=4096))
    search = {"max_new_tokens": 4000, "num_beams": 4, "temperature": 0.0, "ignore_eos": True}
    started = time.monotonic()
    with pytest.raises(BackendTimeoutError):
        backend.generate(PROMPTS[:1], search, logprobs="none", timeout=0.5)
    # The whole search takes minutes.
    assert time.monotonic() - started < 20
    assert len(backend.generate(PROMPTS[:1], {"max_new_tokens": 1}).ids) == 1


def test_beams_use_no_cache_if_cached_steps_differ(open_model: Open, caplog: pytest.LogCaptureFixture) -> None:
    """Both models have the same full forward, so they have the same best beam."""
    model, sound = tiny_model("qwen2"), tiny_model("qwen2")
    plain = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        if kwargs.get("past_key_values") is not None and out.last_hidden_state.shape[1] == 1:
            out.last_hidden_state = -out.last_hidden_state
        return out

    model.model.forward = forward
    search = {"max_new_tokens": 6, "num_beams": 3, "temperature": 0.0}
    expected = open_model(sound).generate(PROMPTS, search, logprobs="none").ids.tolist()
    assert open_model(model).generate(PROMPTS, search, logprobs="none").ids.tolist() == expected
    # A way that fails on the trial rows is slower from then on, so it is told as well.
    assert "cached rows of 14 tokens get other numbers" in caplog.text


def test_a_difference_that_begins_at_a_length_is_found_on_the_callers_own_rows(
    open_model: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """Short rows use the fast way before and after."""
    model = tiny_model("qwen2")
    spoil_cache_after(model, 24)
    backend = open_model(model)
    short = [prompt[:3] for prompt in PROMPTS]
    backend.generate(short, {"max_new_tokens": 4})
    assert decoder(backend).way == "cached"
    check(backend, model)
    backend.generate(PROMPTS[:1], {"max_new_tokens": 12})
    assert decoder(backend).way == "uncached"
    assert "get other numbers than the model's own forward of one row" in caplog.text
    backend.generate(short, {"max_new_tokens": 4})
    assert decoder(backend).way == "cached"


# How large a difference is rounding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [6e-6, 1e-2])
def test_the_noise_of_a_wide_pass_counts_as_rounding_up_to_a_limit(
    open_model: Open, monkeypatch: pytest.MonkeyPatch, wide: float
) -> None:
    """An H100 sums half a row as it sums the whole, but not a pack of rows, so rows were no longer packed there."""
    model = tiny_model()
    plugin = open_model(model).engine.plugin
    read = plugin.engine.plain_logits

    def plain(ids: torch.Tensor, last: int | None = None) -> torch.Tensor:
        logits = read(ids, last)
        generator = torch.Generator(logits.device).manual_seed(0)
        noise = torch.randn(logits.shape, generator=generator, device=logits.device)
        return logits + wide * noise if len(ids) > 14 else logits

    monkeypatch.setattr(plugin.engine, "plain_logits", plain)
    plugin.self_test.begin(lambda: None)
    verdict = plugin.self_test._now
    limit = 32 * torch.finfo(torch.float32).eps * verdict.scale
    assert not verdict.refusal
    # Without the wide pass the noise of this model is 0 to 2e-6.
    assert 0.6 * min(wide, limit) < verdict.noise <= limit
