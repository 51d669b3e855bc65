"""The head in tiles: right for every kind of head, small, and not used if a head is more than a matrix product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CohereForCausalLM, Qwen2ForCausalLM

from corelm import Backend
from helpers import oracle
from helpers.scoring_path import scoring_path
from helpers.tiny_models import DEVICE, random_rows, tiny_model

Open = Callable[..., Backend]
ROWS = random_rows(30, 2, 64, 9)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest result of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for part in out if isinstance(out, tuple | list) else [out]:
            if isinstance(part, Tensor):
                self.elements = max(self.elements, part.numel())
        return out


@pytest.mark.skipif(DEVICE != "cpu", reason="a tile on a GPU has more elements than these logits")
@pytest.mark.parametrize("grad", [False, True])
def test_nothing_is_as_large_as_the_logits(open_model: Open, grad: bool) -> None:
    model = tiny_model(vocab_size=20_000, num_hidden_layers=1)
    backend, rows = open_model(model), random_rows(*[300] * 5, vocab=20_000)
    backend.score_logprobs(rows[:1])
    with Largest() as largest:
        out = backend.score_logprobs(rows, grad=grad, return_argmax=True)
        if grad:
            out.logprobs.values.sum().backward()
    # A tile, or the weights themselves, is the largest.
    assert largest.elements <= max(1024 * 1024, 20_000 * 64) < 1495 * 20_000 / 10
    if not grad:
        torch.testing.assert_close(out.logprobs.split()[3], oracle.logprobs(model, rows[3]), rtol=0, atol=1e-5)


def test_gradients_of_one_row_keep_no_copy_of_states(open_model: Open) -> None:
    model, row = tiny_model(), torch.tensor(random_rows(300)[0])
    backend = open_model(model)
    backend.score_logprobs([row])
    read = model.get_decoder()
    states, kept_by_body = kept_bytes(
        lambda: read(input_ids=row[None, :-1].to(DEVICE), use_cache=False).last_hidden_state
    )
    logprobs, kept = kept_bytes(lambda: backend.score_logprobs([row], grad=True).logprobs.values)
    # The head's gradients need its weight and the states.
    needed = kept_by_body + model.get_output_embeddings().weight.nbytes + states.nbytes
    assert logprobs.requires_grad and needed <= kept < needed + states.nbytes / 4


def kept_bytes(work: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """Return what `work` returns, and the bytes of the memory that is kept for its gradients."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = work()
    return out, sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}.values())


def test_only_wanted_positions_reach_the_head(open_model: Open) -> None:
    model, rows, start = tiny_model(), random_rows(30, 1, 200, 2, 57), [25, 1, 190, 2, 1]
    backend = open_model(model)
    seen: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda module, args, out: seen.append(out[..., 0].numel()))
    # The self-test tries rows of these lengths first.
    backend.score_logprobs(rows, score_from=start)
    seen.clear()
    out = backend.score_logprobs(rows, score_from=start)
    # While the body reads a batch, the head gets one column of it.
    scored_tokens = sum(max(0, len(ids) - first) for ids, first in zip(rows, start, strict=True))
    assert sum(seen) <= scored_tokens + len(rows)
    for ids, first, found, scored in zip(rows, start, out.logprobs.split(), out.scored.split(), strict=True):
        assert scored.tolist() == [t >= first for t in range(len(ids))]
        torch.testing.assert_close(found, oracle.logprobs(model, ids) * scored, rtol=0, atol=1e-5)


def test_a_large_vocabulary_is_scored_in_slices(open_model: Open) -> None:
    model = tiny_model("qwen2-tied", vocab_size=300_000, hidden_size=32, num_hidden_layers=1)
    (ids,) = random_rows(150, vocab=300_000)
    backend, seen = open_model(model), []
    expected = oracle.logprobs(model, ids)
    model.get_output_embeddings().register_forward_hook(lambda module, args, out: seen.append(out.numel()))
    found = backend.score_logprobs([ids]).logprobs.values
    assert max(seen) * 4 <= 2**27 < (len(ids) - 1) * 300_000 * 4
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


# Heads that are more than a matrix product ---------------------------------------------------------------------------


def scores_are_right(backend: Backend, model: nn.Module) -> bool:
    found = backend.score_logprobs(ROWS).logprobs.split()
    return all(
        torch.allclose(one, oracle.logprobs(model, ids), rtol=0, atol=1e-5)
        for ids, one in zip(ROWS, found, strict=True)
    )


def test_a_hook_on_the_head_is_called_until_it_is_removed(open_model: Open) -> None:
    model = tiny_model()
    backend = open_model(model)
    assert scores_are_right(backend, model) and scoring_path(backend).head == "tiled"
    handle = model.get_output_embeddings().register_forward_hook(lambda module, args, out: out * 1.5)
    assert scores_are_right(backend, model) and scoring_path(backend).head == "sliced"
    handle.remove()
    assert scores_are_right(backend, model) and scoring_path(backend).head == "tiled"


def test_a_hook_on_the_model_is_noticed(open_model: Open) -> None:
    model = tiny_model()
    backend = open_model(model)
    assert scores_are_right(backend, model) and scoring_path(backend).head == "tiled"

    def double(module: Any, args: Any, out: Any) -> Any:
        out.logits = out.logits.tanh()
        return out

    model.register_forward_hook(double)
    assert scores_are_right(backend, model) and scoring_path(backend).head == "sliced"


def test_an_adapter_on_the_head_is_applied(open_model: Open) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = peft.get_peft_model(tiny_model(), config).eval()
    backend = open_model(model)
    assert scores_are_right(backend, model) and scoring_path(backend).head == "sliced"


def test_an_adapter_on_the_body_only_keeps_the_tiles(open_model: Open) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = peft.get_peft_model(tiny_model(), config).eval()
    backend = open_model(model)
    assert scores_are_right(backend, model) and scoring_path(backend).head == "tiled"


def test_logits_are_made_if_they_are_requested(open_model: Open) -> None:
    backend = open_model(tiny_model())
    backend.score_logprobs(ROWS, return_logits=True)
    assert scoring_path(backend).head == "sliced"


@pytest.mark.parametrize("family", ["granite", "gemma2"])
def test_a_head_of_zeros_is_tiled_only_after_it_gets_weights(open_model: Open, family: str) -> None:
    model, new = tiny_model(family), tiny_model(family, seed=1)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    backend = open_model(model)
    backend.score_logprobs(ROWS)
    assert scoring_path(backend).head == "sliced"
    backend.update_weights(new.state_dict())
    assert scores_are_right(backend, new) and scoring_path(backend).head == "tiled"


def test_ids_ruled_out_by_the_model_prevent_tiles(open_model: Open) -> None:
    model = tiny_model()
    forward = model.forward

    def ruling_out(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = out.logits.index_fill(-1, torch.arange(8), -1e4)
        return out

    model.forward = ruling_out
    backend = open_model(model)
    assert scores_are_right(backend, model) and scoring_path(backend).head == "sliced"


class Recoded(CohereForCausalLM):
    """A model whose forward is not that of transformers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("recoded", [False, True])
def test_a_scale_that_changes_between_calls_is_noticed(open_model: Open, recoded: bool) -> None:
    model = tiny_model("cohere", vocab_size=40_000, num_hidden_layers=1, initializer_range=0.05)
    if recoded:
        model.__class__ = Recoded
    backend = open_model(model)
    few, many = (random_rows(*lengths, vocab=40_000) for lengths in ((30, 12), (30, 64, 9)))
    # In the second round the formula found before is wrong.
    for model.logit_scale in (2.0, 3.0):
        # Where only a comparison tells, it costs more than the model's own forward on few positions.
        for rows, expected in ((few, "sliced" if recoded else "tiled"), (many, "tiled")):
            found = backend.score_logprobs(rows).logprobs.split()
            assert scoring_path(backend).head == expected
            for ids, one in zip(rows, found, strict=True):
                torch.testing.assert_close(one, oracle.logprobs(model, ids), rtol=0, atol=1e-5)
    backend.score_logprobs(few, grad=True)
    assert scoring_path(backend).head == "tiled", "the logits must not be kept for gradients"


@pytest.mark.parametrize("family", ["cohere", "gemma2"])
def test_short_floats_of_a_scaled_head_are_always_rounded_alike(open_model: Open, family: str) -> None:
    """Few positions and many, with gradients and without, give the same log-prob. Otherwise the ratios of a policy to
    itself would not be 1.
    """
    heads = {"cohere": {"logit_scale": 1.625}, "gemma2": {"final_logit_softcapping": 30.0}}
    model = tiny_model(family, vocab_size=40_000, num_hidden_layers=1, **heads[family]).to(torch.bfloat16)
    backend, (ids,) = open_model(model), random_rows(100, vocab=40_000)
    found = backend.score_logprobs([ids]).logprobs.values
    assert scoring_path(backend).head == "tiled"
    torch.testing.assert_close(backend.score_logprobs([ids], grad=True).logprobs.values.detach(), found)
    few = backend.score_logprobs([ids], score_from=60).logprobs.values
    torch.testing.assert_close(few[60:], found[60:])


class Shifted(Qwen2ForCausalLM):
    """Adds something to its logits that is not part of the head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("shift", torch.zeros(config.vocab_size))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + self.shift
        return output


@pytest.mark.parametrize("shift", [8.0, -torch.inf])
@pytest.mark.parametrize("one", [4000, 4001])
def test_a_change_of_one_id_is_noticed(open_model: Open, one: int, shift: float) -> None:
    model = Shifted(tiny_model(vocab_size=20_000, num_hidden_layers=1).config).eval()
    backend, rows = open_model(model), random_rows(40, 50, vocab=20_000)
    assert one not in rows[0] + rows[1]
    for added, expected in ((0.0, "tiled"), (shift, "sliced")):
        model.shift[one] = added
        for ids, found in zip(rows, backend.score_logprobs(rows).logprobs.split(), strict=True):
            torch.testing.assert_close(found, oracle.logprobs(model, ids), rtol=0, atol=1e-5)
        assert scoring_path(backend).head == expected


def test_weights_written_in_place_take_effect(open_model: Open) -> None:
    model = tiny_model("cohere", vocab_size=20_000, num_hidden_layers=1, initializer_range=0.05)
    backend, rows = open_model(model), random_rows(40, 50, vocab=20_000)
    head = model.get_output_embeddings().weight
    for row, factor in ((slice(None), 2.0), (4001, 3.0), (slice(None), 0.5)):
        # Writing to `.data` changes no version counter. The scale goes the other way, so the logits nearly stay.
        head.data[row] *= factor
        model.logit_scale /= factor
        for ids, one in zip(rows, backend.score_logprobs(rows).logprobs.split(), strict=True):
            torch.testing.assert_close(one, oracle.logprobs(model, ids), rtol=0, atol=1e-5)
        assert scoring_path(backend).head == "tiled"
