"""Every way to run a model is tried against its own plain forward, and what differs is not used.

The oracle is `helpers.oracle`: the plain forward of one row in float32. `tests/families` sweeps all model types. How a
model is run shows in its forward passes: rows that are decoded with a cache are read one column at a time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
)
from transformers.cache_utils import DynamicLayer

from corelm import Backend
from corelm.errors import CapabilityError
from helpers import oracle
from helpers.plain_forward import (
    PROMPTS,
    SIZES,
    ForwardPasses,
    Open,
    assert_answers,
    assert_scores,
    cache_in,
    check,
    spoil_cache_after,
    wide,
)
from helpers.scoring_path import PACKED, scoring_path
from helpers.tiny_models import random_rows, tiny_model
from transformers_backend import TransformersBackend


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.nightly)], ids=["fast", "plain"])
def fast(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def cached(backend: Backend, passes: ForwardPasses, prompts: Any = PROMPTS) -> bool | None:
    """Return whether these prompts are decoded with a cache: True for all rows together, None for some together."""
    sampling = {"max_new_tokens": 4, "ignore_eos": True}
    # Rows that were not tried are compared in this call.
    backend.generate(prompts, sampling)
    passes.clear()
    backend.generate(prompts, sampling)
    columns, rows = [each[1] for each in passes], max(each[0] for each in passes)
    if columns.count(1) < 3:
        return False
    return True if rows == len(prompts) else None


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


def test_weights_that_were_written_to_between_the_opening_and_the_first_call(open_model: Open) -> None:
    model = tiny_model()
    passes = ForwardPasses(model)
    backend = open_model(model)
    for parameter in model.parameters():
        # This shows in no counter.
        parameter.data.copy_(parameter.data.flip(0))
    assert cached(backend, passes) is True
    check(backend, model)


def test_columns_that_a_model_takes_for_positions(open_model: Open) -> None:
    model = llama4()
    passes = ForwardPasses(model)
    backend = open_model(model)
    check(backend, model)
    # Its columns differ from its positions beyond 24.
    assert cached(backend, passes, [[5, 6, 7, 8], [9, 8]]) is True
    assert cached(backend, passes, random_rows(40, 30)) is None


def test_columns_beyond_the_longest_row(open_model: Open) -> None:
    """The long prompt has a short answer and the short one a long answer, so no row is as long as the batch is wide."""
    model = llama4()
    backend = open_model(model)
    long, short = PROMPTS[0][:15], PROMPTS[0][5:8]
    # Agrees: 20 columns.
    backend.generate([long, PROMPTS[0][:12]], {"max_new_tokens": 5}, seeds=[1, 2])
    first = backend.generate([long], {"max_new_tokens": 20}, seeds=[1]).ids.tolist()[0]
    stop = {"stop_token_ids": [first[1]], "max_new_tokens": 20}
    found = backend.generate([long, short], stop, seeds=[1, 2])
    assert found.ids.lengths.tolist() == [2, 20] and found.logprobs is not None
    expected = oracle.logprobs(model, [*short, *found.ids.tolist()[1]])[3:]
    torch.testing.assert_close(found.logprobs.split()[1], expected, rtol=0, atol=2e-5)


def test_a_way_that_one_batch_refutes_is_not_used_for_the_next(
    open_model: Open, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("qwen2")
    spoil_cache_after(model, 24)
    # A batch is one row: 20 and 12 tokens.
    backend = open_model(model, max_batch_tokens=32)
    prompts = [*PROMPTS[:1] * 2, PROMPTS[0][::-1]]
    made = backend.generate(prompts, {"max_new_tokens": 12}, seeds=[1, 2, 3])
    assert_answers(made, model, prompts, atol=2e-5)
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
    assert_scores(backend, model, rows, atol=2e-5)


def test_a_difference_as_large_as_a_defect_is_not_rounding_in_bfloat16(open_model: Open) -> None:
    model = tiny_model("qwen2").to(torch.bfloat16)
    plain = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        if cache_in(kwargs) is not None and out.last_hidden_state.shape[1] == 1:
            out.last_hidden_state = out.last_hidden_state + 0.06 * out.last_hidden_state.roll(1, -1)
        return out

    model.model.forward = forward
    passes = ForwardPasses(model)
    assert cached(open_model(model), passes) is False


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("qwen2", "mixtral", "granite"))]
)
def test_rounding_in_bfloat16_keeps_the_fast_ways(open_model: Open, name: str) -> None:
    """Also where rounding makes a router choose another expert at single positions.

    How sums are rounded depends on where tensors lie in memory. So a router may choose other experts at so many
    positions that a way is refused, which is safe and slow; it must not be so everywhere.
    """

    models = (tiny_model(name, num_hidden_layers=12).to(torch.bfloat16) for _ in range(4))
    assert any(cached(open_model(model), ForwardPasses(model)) for model in models)


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
    passes = ForwardPasses(model)
    backend = open_model(model)
    check(backend, model)
    assert cached(backend, passes) is False


def test_a_cached_step_that_differs_from_a_full_forward(open_model: Open) -> None:
    model = tiny_model("qwen2")
    plain = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        past = cache_in(kwargs)
        if past is not None and kwargs["input_ids"].shape[1] == 1:
            out.last_hidden_state = out.last_hidden_state * 1.001
        return out

    model.model.forward = forward
    passes = ForwardPasses(model)
    backend = open_model(model)
    check(backend, model)
    assert cached(backend, passes) is False


def test_beams_use_no_cache_if_cached_steps_differ_at_their_length(open_model: Open) -> None:
    model, sound = tiny_model("qwen2"), tiny_model("qwen2")
    spoil_cache_after(model, 24)
    search = {"max_new_tokens": 20, "num_beams": 3, "temperature": 0.0}
    expected = open_model(sound).generate(PROMPTS, search, logprobs="none").ids.tolist()
    assert open_model(model).generate(PROMPTS, search, logprobs="none").ids.tolist() == expected


@pytest.mark.parametrize("every", [True, False], ids=["every cache", "only one that grows, as in a beam search"])
def test_beams_use_no_cache_if_cached_steps_differ(
    open_model: Open, caplog: pytest.LogCaptureFixture, every: bool
) -> None:
    """Both models have the same full forward, so they have the same best beam."""
    model, sound = tiny_model("qwen2"), tiny_model("qwen2")
    plain = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        past = cache_in(kwargs)
        spoilt = past is not None and (every or type(past.layers[0]) is DynamicLayer)
        if spoilt and past.get_seq_length() > 1 == out.last_hidden_state.shape[1]:
            out.last_hidden_state = -out.last_hidden_state
        return out

    model.model.forward = forward
    search = {"max_new_tokens": 6, "num_beams": 3, "temperature": 0.0}
    expected = open_model(sound).generate(PROMPTS, search, logprobs="none").ids.tolist()
    assert open_model(model).generate(PROMPTS, search, logprobs="none").ids.tolist() == expected
    assert "cached rows of 8 tokens get other numbers" in caplog.text


def test_a_difference_that_begins_at_a_length_is_found_on_the_callers_own_rows(
    open_model: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """Short rows use the fast way before and after."""
    model = tiny_model("qwen2")
    spoil_cache_after(model, 24)
    passes = ForwardPasses(model)
    backend, short = open_model(model), [prompt[:3] for prompt in PROMPTS]
    assert cached(backend, passes, short) is True
    check(backend, model)
    assert cached(backend, passes, random_rows(24, 24)) is False
    assert "get other numbers than the model's own forward of one row" in caplog.text
    assert cached(backend, passes, short) is True


# How large a difference is rounding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [6e-6, 1e-2])
def test_the_noise_of_a_wide_pass_counts_as_rounding_up_to_a_limit(open_model: Open, fast: bool, wide: float) -> None:
    """An H100 sums half a row as it sums the whole, but not a pack of rows, so rows were no longer packed there."""
    model = tiny_model()
    plain = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        states = out.last_hidden_state
        if states.shape[1] > 16:
            generator = torch.Generator(states.device).manual_seed(0)
            noise = torch.randn(states.shape, generator=generator, device=states.device)
            out.last_hidden_state = states + wide * noise
        return out

    model.model.forward = forward
    backend, rows = open_model(model), random_rows(5, 7, 9)
    backend.score_logprobs(rows)
    assert scoring_path(backend).layout == (PACKED if fast and wide < 1e-5 else "padded")


# What must not pass for rounding --------------------------------------------------------------------------------------


def _neighbour(states: Any, ids: Any, embed: Any) -> Any:
    return states + 1e-3 * states.roll(1, 0)


def _first_column(states: Any, ids: Any, embed: Any) -> Any:
    return states + 1e-3 * embed(ids[:, :1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("leak", [_neighbour, _first_column])
def test_a_thousandth_of_another_row_or_of_padding_is_not_rounding(open_model: Open, leak: Any, dtype: Any) -> None:
    model = tiny_model("llama").to(dtype)
    plain, embed = model.model.forward, model.model.embed_tokens.weight

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        ids = kwargs["input_ids"]
        if kwargs.get("attention_mask") is not None or len(ids) > 1:
            out.last_hidden_state = leak(out.last_hidden_state, ids, lambda some: embed[some])
        return out

    model.model.forward = forward
    assert cached(open_model(model), ForwardPasses(model)) is not True


def test_rows_of_one_length_among_others_are_decoded_again_if_they_differ(open_model: Open) -> None:
    """They are not padded, and decoding them without a mask is wrong beyond 24 tokens. Padded rows are right."""
    model = tiny_model("qwen2")
    plain = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        past = cache_in(kwargs)
        if past is not None and past.get_seq_length() > 24 and kwargs.get("attention_mask") is None:
            out.last_hidden_state = -out.last_hidden_state
        return out

    model.model.forward = forward
    prompts = [PROMPTS[0], PROMPTS[0][::-1], PROMPTS[0][:3]]
    # The two long prompts are one batch, and the short one is another.
    made = open_model(model, max_batch_tokens=64).generate(prompts, {"max_new_tokens": 12}, seeds=[1, 2, 3])
    assert_answers(made, model, prompts, atol=2e-5)


def test_a_way_is_kept_whose_rounding_is_that_of_the_plain_forward(open_model: Open) -> None:
    """One position of the row is a thousand times as sensitive as the others, as in real models."""
    model = tiny_model("llama")
    plain = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = plain(*args, **kwargs)
        states = out.last_hidden_state
        # Rounding is multiplied where the difference of two large numbers is taken.
        lost = (states * 3000.0 + 1.0) - states * 2999.0 - 1.0
        out.last_hidden_state = torch.where((kwargs["input_ids"] % 7 == 3)[..., None], lost, states)
        return out

    model.model.forward = forward
    assert cached(open_model(model), ForwardPasses(model)) is True


def test_the_first_calls_read_few_rows_more_than_later_ones(open_model: Open) -> None:
    """The plain forward of a trial row, and once more for its states; the trial rows together; and at most two own rows
    in the plain forward.
    """
    rows = random_rows(20, 33, 48, 40)
    for call in (
        lambda backend: backend.score_logprobs(rows),
        lambda backend: backend.generate(rows, {"max_new_tokens": 16, "ignore_eos": True}),
        lambda backend: backend.generate(rows[:1], {"max_new_tokens": 16, "ignore_eos": True}),
    ):
        model = tiny_model("llama")
        backend, passes = open_model(model), ForwardPasses(model)
        counts = []
        for _ in range(2):
            passes.clear()
            call(backend)
            counts.append(len(passes))
        assert counts[0] - counts[1] <= 5, counts


def test_a_way_that_is_new_after_some_steps_of_training_is_tried_with_the_present_weights(
    open_model: Open, fast: bool
) -> None:
    """After three changes of the weights nothing is tried anew but what never was."""
    model = tiny_model("llama")
    backend = open_model(model)
    for _ in range(3):
        backend.generate(PROMPTS, {"max_new_tokens": 2})
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
    assert_scores(backend, model, PROMPTS, atol=2e-5)
    assert backend.info["scoring"] == (PACKED if fast else "padded")


def test_decoding_without_a_cache_is_said_once_with_its_cause(
    open_model: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen2")
    plain = type(model).forward

    # It names its cache in a way that nobody knows.
    def forward(
        self: Any, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **rest: Any
    ) -> Any:
        return plain(self, input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **rest)

    model.forward = forward.__get__(model)
    backend = open_model(model)
    assert TransformersBackend.engine_warning() == ""
    facts = {"model": "float32 on cpu", "attention": "sdpa", "decoding": "uncached: its forward takes no cache"}
    assert backend.info == facts
    for _ in range(2):
        backend.generate(PROMPTS, {"max_new_tokens": 2})
    told = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1 and "its forward takes no cache" in told[0].getMessage()
    assert "4 times as long" in told[0].getMessage()
    facts = {"model": "float32 on cpu", "attention": "sdpa", "decoding": "uncached: its forward takes no cache"}
    assert backend.info == facts
    # As in a release of transformers that renames it.
    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    assert "without a cache" in TransformersBackend.engine_warning()
