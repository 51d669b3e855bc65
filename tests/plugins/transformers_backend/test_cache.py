"""A step writes into buffers, which hold what a cache that grows would hold while rows end one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from corelm import Ragged
from helpers import oracle
from helpers.plain_forward import Open, cache_in
from helpers.tiny_models import DEVICE, random_rows, tiny_model
from transformers_backend.buffers import Buffers
from transformers_backend.continuation import CachedRows
from transformers_backend.engine import CausalLM


@pytest.mark.parametrize("family", ["qwen2", "gemma2", pytest.param("bloom", marks=pytest.mark.nightly)])
def test_rows_that_end_one_by_one_over_a_long_answer(
    family: str, open_model: Open, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompts = tiny_model(family), random_rows(20, 3, 7)
    sampling = {"max_new_tokens": 120, "num_samples": 4, "seed": 2, "stop_token_ids": range(10, 14)}
    out = open_model(model).generate(prompts, sampling)
    found = out.ids.tolist()
    assert len({len(answer) for answer in found}) > 4 and max(map(len, found)) > 80
    for row, (answer, logprobs) in enumerate(zip(found, out.logprobs.split(), strict=True)):
        expected = oracle.answer_logprobs(model, prompts[row // 4], answer)
        torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=1e-5)
    # Numbers that differ are not returned, but the rows are decoded again without a cache.
    assert "get other numbers" not in caplog.text


class Inputs:
    """Notes address and shape of every tensor that the model is given in a step of decoding, its cache included."""

    def __init__(self, model: Any) -> None:
        self.steps: list[dict[str, tuple[int, torch.Size]]] = []
        model.model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, module: object, args: object, given: dict[str, Any]) -> None:
        if given["input_ids"].shape[1] > 1:
            return
        found = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        for number, layer in enumerate(cache_in(given).layers):
            found |= {f"{name} {number}": value for name, value in vars(layer).items() if torch.is_tensor(value)}
        self.steps.append({name: (value.data_ptr(), value.shape) for name, value in found.items()})


@pytest.mark.parametrize("lengths", [(20, 20, 20), (20, 3, 7)])
@pytest.mark.parametrize(("fast", "autocast"), [(True, False), (False, False), (True, True)])
def test_what_the_model_is_given_keeps_address_and_shape_until_a_block_ends(
    lengths: tuple[int, ...], fast: bool, autocast: bool, open_model: Open
) -> None:
    model = tiny_model()
    backend, inputs, prompts = open_model(model, fast=fast), Inputs(model), random_rows(*lengths)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        backend.generate(prompts, {"max_new_tokens": 2})
        inputs.steps.clear()
        backend.generate(prompts, {"max_new_tokens": 60, "ignore_eos": True})
    first, later = inputs.steps[0], inputs.steps[44]
    # 20 columns of the prompts, and 44 until the first buffer of 64 is full.
    assert inputs.steps[:44] == [first] * 44 and inputs.steps[44:] == [later] * 15
    names = {"input_ids", "attention_mask", "position_ids"}
    for number in range(2):
        names |= {f"{name} {number}" for name in ("keys", "values", "cumulative_length")}
    assert first.keys() == names and first["keys 0"][1][2] == 64 == first["attention_mask"][1][1]
    assert later["keys 0"][1][2] == 128


def test_rows_that_leave_change_the_shapes_once(open_model: Open) -> None:
    model, prompts = tiny_model(), random_rows(20, 3)
    backend, inputs = open_model(model), Inputs(model)
    sampling: dict[str, Any] = {"max_new_tokens": 16, "seed": 1, "ignore_eos": True}
    long, short = backend.generate(prompts, sampling).ids.tolist()
    place = next(at for at in range(2, 12) if short[at] not in [*long, *short[:at]])
    sampling["stop_token_ids"] = [short[place]]
    inputs.steps.clear()
    assert backend.generate(prompts, sampling).ids.lengths.tolist() == [16, place + 1]
    rows = [step["input_ids"][1][0] for step in inputs.steps]
    assert rows == [2] * place + [1] * (15 - place)
    assert inputs.steps == [inputs.steps[0]] * place + [inputs.steps[-1]] * (15 - place)


def test_a_model_that_reads_no_buffers_of_fixed_shapes_gets_a_cache_that_grows(
    open_model: Open, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes all columns of a layer for columns of the past, as a model that makes its mask itself may do."""
    model, prompts = tiny_model(), random_rows(20, 3)

    def unmask(module: object, args: object, given: dict[str, Any]) -> tuple[object, dict[str, Any]]:
        if given["hidden_states"].shape[1] == 1 and given["attention_mask"] is not None:
            given["attention_mask"] = torch.ones_like(given["attention_mask"])
        return args, given

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(unmask, with_kwargs=True)
    inputs, backend = Inputs(model), open_model(model)
    out = backend.generate(prompts[:1], {"max_new_tokens": 5, "ignore_eos": True})
    expected = oracle.answer_logprobs(model, prompts[0], out.ids.tolist()[0])
    torch.testing.assert_close(out.logprobs.values, expected, rtol=1e-6, atol=1e-5)
    assert backend.engine.plugin.decoder.info == "cached" and "get other numbers" not in caplog.text
    assert [step["keys 0"][1][2] for step in inputs.steps[-4:]] == [20, 21, 22, 23]


def test_a_step_that_fails_counts_no_column() -> None:
    model = tiny_model()
    engine = CausalLM(model, model)
    with engine.evaluating():
        rows = CachedRows(engine, Ragged.from_list(random_rows(5, 5)))
        rows.append(torch.tensor([3, 4]))

        def broken(*args: Any) -> None:
            raise ValueError("not today")

        with model.model.register_forward_pre_hook(broken), pytest.raises(ValueError, match="not today"):
            rows.append(torch.tensor([3, 4]))
    assert rows.columns == 6


def test_states_are_not_made_narrower_than_the_model_made_them() -> None:
    """Wider ones are as good: autocast makes values narrower than keys, and a cache holds both in one dtype."""
    states = {dtype: torch.ones(1, 1, 1, 2, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    wide, narrow = (Buffers(each, each, 4, torch.tensor(1)) for each in states.values())
    assert wide.update(*[states[torch.bfloat16]] * 2)[0].dtype == torch.float32
    with pytest.raises(AssertionError):
        narrow.update(*[states[torch.float32]] * 2)
