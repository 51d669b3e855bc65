"""The head in tiles: right for every kind of head, small, and not used if a head is more than a matrix product."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import FalconH1Config, FalconH1ForCausalLM, Qwen2ForCausalLM

from corelm import Backend, Ragged
from corelm.errors import EngineError
from helpers import oracle
from helpers.peft_models import with_lora
from helpers.plain_forward import Open, assert_scores
from helpers.scoring_path import scoring_path
from helpers.tiny_models import DEVICE, random_rows, tiny_model
from transformers_backend.fast.tiles import LogitTiles

ROWS = random_rows(30, 2, 64, 9)
#: More than a tile of few positions is wide.
VOCAB = 5_000
LARGE_ROWS = random_rows(14, 20, vocab=VOCAB)


def large(family: str = "qwen2", vocab: int = VOCAB, **config: Any) -> Any:
    return tiny_model(family, vocab_size=vocab, num_hidden_layers=1, initializer_range=0.05, **config)


# Memory ---------------------------------------------------------------------------------------------------------------


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
def test_nothing_is_as_large_as_the_logits(open_model: Open) -> None:
    vocab = 20_000
    model, rows = tiny_model(vocab_size=vocab, num_hidden_layers=1), random_rows(*[300] * 4, vocab=vocab)
    backend, total = open_model(model), sum(map(len, rows))
    ids = torch.arange(0, vocab, 1000).repeat(total, 1)
    cases: dict[str, dict[str, Any]] = {
        "whole": {"return_argmax": True},
        "support": {"support": [[sorted({token, 5, 9_000, 19_000}) for token in row] for row in rows]},
        "top_k": {"top_k": 20},
        "top_ids": {"top_ids": Ragged(ids, torch.full((len(rows),), 300))},
    }
    for name, options in cases.items():
        for grad in (False, True) if name == "whole" else (True,):
            # The trials come first.
            backend.score_logprobs([row[:20] for row in rows[:1]])
            with Largest() as largest:
                out = backend.score_logprobs(rows, grad=grad, **options)
                if grad:
                    (out.logprobs.values if out.tail_log_mass is None else out.tail_log_mass.values).sum().backward()
            assert scoring_path(backend).head == "tiled", name
            # A tile, or the weights themselves, is the largest.
            assert largest.elements <= max(1024 * 1024, vocab * 64) < total * vocab / 10, (name, grad)
    assert_scores(backend, model, rows[:1])


def kept_bytes(work: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """Return what `work` returns, and the bytes of the memory that is kept for its gradients."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = work()
    return out, sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}.values())


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


def test_no_logits_are_kept_for_backward_under_autocast(open_model: Open) -> None:
    vocab = 20_000
    model, rows = tiny_model(vocab_size=vocab, num_hidden_layers=1), random_rows(*[200] * 5, vocab=vocab)
    backend, kept = open_model(model), {}
    for short in (None, torch.bfloat16):
        with torch.autocast(DEVICE, dtype=short, enabled=short is not None):
            _, kept[short] = kept_bytes(lambda: backend.score_logprobs(rows, grad=True).logprobs.values)
    # The model's own body keeps more under autocast: its states in float32 and in bfloat16.
    assert kept[torch.bfloat16] <= 1.5 * kept[None] < 1000 * vocab


def test_only_wanted_positions_reach_the_head(open_model: Open) -> None:
    model, rows, start = tiny_model(), random_rows(30, 1, 200, 2, 57), [25, 1, 190, 2, 1]
    backend = open_model(model)
    seen: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda module, args, out: seen.append(out[..., 0].numel()))
    # The self-test tries rows of these lengths first.
    backend.score_logprobs(rows, score_from=start)
    seen.clear()
    out = assert_scores(backend, model, rows, score_from=start)
    by_us = sum(seen[: len(seen) - sum(len(row) > 1 for row in rows)])
    # While the body reads a batch, the head gets one column of it.
    assert by_us <= sum(max(0, len(ids) - first) for ids, first in zip(rows, start, strict=True)) + len(rows)
    for ids, first, scored in zip(rows, start, out.scored.tolist(), strict=True):
        assert scored == [t >= first for t in range(len(ids))]


@pytest.mark.nightly
def test_a_large_vocabulary_is_scored_in_slices(open_model: Open) -> None:
    model = tiny_model("qwen2-tied", vocab_size=300_000, hidden_size=32, num_hidden_layers=1)
    (ids,) = random_rows(150, vocab=300_000)
    backend, seen = open_model(model), []
    model.get_output_embeddings().register_forward_hook(lambda module, args, out: seen.append(out.numel()))
    found = backend.score_logprobs([ids]).logprobs.values
    assert max(seen) * 4 <= 2**27 < (len(ids) - 1) * 300_000 * 4
    torch.testing.assert_close(found, oracle.logprobs(model, ids), rtol=0, atol=1e-5)


# What changes between two calls ---------------------------------------------------------------------------------------


def check(backend: Backend, model: nn.Module, head: str | None = None, rows: list[list[int]] = LARGE_ROWS) -> None:
    """Compare scores with the oracle, without gradients and with them."""
    for grad in (False, True):
        # A scale of 5 makes logits of 50, whose rounding is larger.
        assert_scores(backend, model, rows, grad=grad, atol=4e-5 if grad else 2e-5)
    assert head is None or scoring_path(backend).head == head


def hooked(model: Any) -> None:
    model.model.register_forward_hook(lambda module, args, out: type(out)(last_hidden_state=2 * out.last_hidden_state))


def patched(model: Any) -> None:
    forward = model.model.forward
    model.model.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def replaced(model: Any) -> None:
    model.lm_head = nn.Linear(model.config.hidden_size, VOCAB, device=model.device)


def strided(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.randn(VOCAB, 2, device=DEVICE)[:, 0])


def expanded(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.full((1,), 0.1, device=DEVICE).expand(VOCAB))


def of_body(model: Any) -> None:
    model.model.lm_head_multiplier /= 2


def called_otherwise(model: Any) -> None:
    class Doubled(type(model)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            output = super().__call__(*args, **kwargs)
            output.logits = 2 * output.logits
            return output

    model.__class__ = Doubled


def ruling_out(model: Any) -> None:
    forward = model.forward

    def ruling(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = out.logits.index_fill(-1, torch.arange(8), -1e4)
        return out

    model.forward = ruling


def falcon() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    mamba = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return FalconH1ForCausalLM(
            FalconH1Config(vocab_size=VOCAB, num_hidden_layers=1, initializer_range=0.2, **sizes, **mamba)
        ).eval()


#: family, what changes, and how the head is used after that.
CHANGES: dict[str, tuple[str, Callable[[Any], object], str | None]] = {
    "a scale": ("cohere", lambda model: setattr(model, "logit_scale", 3.0), "tiled"),
    "a scale of NumPy": ("cohere", lambda model: setattr(model, "logit_scale", np.float32(5)), "tiled"),
    "a cap": ("gemma2", lambda model: setattr(model.config, "final_logit_softcapping", 0.5), "tiled"),
    "a scale in the configuration": ("granite", lambda model: setattr(model.config, "logits_scaling", 1.0), "tiled"),
    "a factor of the body": ("falcon_h1", of_body, None),
    "a hook on the body": ("qwen2", hooked, "tiled"),
    "another forward of the body": ("qwen2", patched, "tiled"),
    "another head": ("qwen2", replaced, "tiled"),
    "a pruned head": ("qwen2", lambda model: prune.l1_unstructured(model.lm_head, "weight", 0.3), None),
    "a normed head": ("qwen2", lambda model: nn.utils.parametrizations.weight_norm(model.lm_head), None),
    "a strided bias": ("qwen2", strided, None),
    "a strided bias for another": ("phi-biased", strided, None),
    "an expanded bias": ("qwen2", expanded, None),
    "another call": ("qwen2", called_otherwise, None),
    "ids ruled out": ("qwen2", ruling_out, "sliced"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_two_calls_takes_effect(open_model: Open, name: str) -> None:
    family, change, head = CHANGES[name]
    model = falcon() if family == "falcon_h1" else large(family)
    backend = open_model(model)
    check(backend, model, "tiled")
    change(model)
    check(backend, model, head)


def test_a_factor_of_the_body_may_be_a_tensor_that_changes_in_place(open_model: Open) -> None:
    model = falcon()
    model.model.lm_head_multiplier = torch.tensor(float(model.model.lm_head_multiplier))
    backend = open_model(model)
    for _ in range(2):
        check(backend, model, None)
        model.model.lm_head_multiplier.mul_(2)


def test_a_hook_is_called_until_it_is_removed(open_model: Open) -> None:
    def tanh(module: Any, args: Any, out: Any) -> Any:
        if isinstance(out, Tensor):
            return out * 1.5
        if "logits" in out:
            out.logits = out.logits.tanh()
            return out
        return type(out)(last_hidden_state=out.last_hidden_state * 1.5)

    model = tiny_model()
    backend = open_model(model)
    for part, head in (("lm_head", "sliced"), ("", "sliced"), ("model", "tiled"), ("model.norm", "tiled")):
        assert_scores(backend, model, ROWS)
        assert scoring_path(backend).head == "tiled", part
        handle = model.get_submodule(part).register_forward_hook(tanh)
        assert_scores(backend, model, ROWS)
        assert scoring_path(backend).head == head, part
        handle.remove()
    everywhere = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: out * 1.5 if module is model.lm_head else None
    )
    try:
        assert_scores(backend, model, ROWS)
    finally:
        everywhere.remove()
    assert_scores(backend, model, ROWS)


def test_an_adapter_on_the_head_is_applied_and_one_on_the_body_keeps_the_tiles(open_model: Open) -> None:
    for targets, head in ((("q_proj", "lm_head"), "sliced"), (("q_proj",), "tiled")):
        model = with_lora(tiny_model(), *targets)
        backend = open_model(model)
        assert_scores(backend, model, ROWS)
        assert scoring_path(backend).head == head, targets


def test_tiles_that_fail_on_this_device_are_not_used(
    open_model: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*given: Any) -> Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(LogitTiles, "product", fails)
    model = large()
    backend = open_model(model)
    check(backend, model, "sliced")
    assert "the head is not used in tiles: RuntimeError: no such kernel" in caplog.text


@pytest.mark.parametrize("family", ["granite", "gemma2"])
def test_a_head_of_zeros_is_tiled_only_after_it_gets_weights(open_model: Open, family: str) -> None:
    model, new = tiny_model(family), tiny_model(family, seed=1)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    backend = open_model(model)
    backend.score_logprobs(ROWS)
    assert scoring_path(backend).head == "sliced"
    backend.update_weights(new.state_dict())
    assert_scores(backend, new, ROWS)
    assert scoring_path(backend).head == "tiled"


def test_a_scale_of_a_large_head_that_changes_is_noticed(open_model: Open) -> None:
    model = large("cohere", 40_000)
    backend = open_model(model)
    few, many = (random_rows(*lengths, vocab=40_000) for lengths in ((30, 12), (30, 64, 9)))
    # In the second round the formula found before is wrong.
    for model.logit_scale in (2.0, 3.0):
        # To compare it costs more than the model's own forward on few positions.
        for rows, expected in ((few, "sliced"), (many, "tiled")):
            assert_scores(backend, model, rows)
            assert scoring_path(backend).head == expected
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
    short = backend.score_logprobs([ids[:40]]).logprobs.values
    torch.testing.assert_close(short, found[:40])
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


def test_a_change_of_one_id_is_noticed(open_model: Open) -> None:
    rows = random_rows(40, 50, vocab=20_000)
    for one, shift in ((4000, 8.0), (4001, -torch.inf)):
        model = Shifted(tiny_model(vocab_size=20_000, num_hidden_layers=1).config).eval()
        backend = open_model(model)
        assert one not in rows[0] + rows[1]
        for added, expected in ((0.0, "tiled"), (shift, "sliced")):
            model.shift[one] = added
            assert_scores(backend, model, rows)
            assert scoring_path(backend).head == expected, (one, added)


def test_weights_written_in_place_take_effect(open_model: Open) -> None:
    model = large("cohere", 20_000)
    backend, rows = open_model(model), random_rows(40, 50, vocab=20_000)
    head = model.get_output_embeddings().weight
    for row, factor in ((slice(None), 2.0), (4001, 3.0), (slice(None), 0.5)):
        # Writing to `.data` changes no version counter. The scale goes the other way, so the logits nearly stay.
        head.data[row] *= factor
        model.logit_scale /= factor
        assert_scores(backend, model, rows)
        assert scoring_path(backend).head == "tiled"


@pytest.mark.parametrize("looks_alike", [True, False])
def test_a_forward_replaced_for_the_class_is_noticed(
    open_model: Open, monkeypatch: pytest.MonkeyPatch, looks_alike: bool
) -> None:
    """As libraries do that bring faster kernels for models of transformers."""
    model, forward, scales = large(), Qwen2ForCausalLM.forward, [1.0]

    def scaling(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.logits = scales[0] * output.logits
        return output

    backend = open_model(model)
    if not looks_alike:
        assert_scores(backend, model, LARGE_ROWS)
    monkeypatch.setattr(Qwen2ForCausalLM, "forward", functools.wraps(forward)(scaling) if looks_alike else scaling)
    for scales[0] in (1.0, 3.0):
        assert_scores(backend, model, LARGE_ROWS)


class Scaled(Qwen2ForCausalLM):
    """Scales its logits by a number in a place of its own."""

    scales = [1.0]  # noqa: RUF012

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * self.scales[0]
        return output


def test_code_that_is_not_of_transformers_is_tried_at_every_call(
    open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Scaled(large().config).eval()
    backend = open_model(model)
    for scale in (1.0, 1.0, 3.0):
        monkeypatch.setattr(Scaled, "scales", [scale])
        assert_scores(backend, model, LARGE_ROWS)


def test_logits_that_are_no_numbers_fail_with_the_row(open_model: Open) -> None:
    model = large()
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    with pytest.raises(EngineError, match="row 0: the logits are NaN"):
        open_model(model).score_logprobs(LARGE_ROWS)
