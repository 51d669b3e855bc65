"""Packed rows and shared starts give the same numbers as each row alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tensordict import TensorDict
from torch import nn

from corelm import LLMPolicy, Text
from corelm.errors import EngineError
from helpers import oracle
from helpers.plain_forward import ForwardPasses, Open, assert_same_gradients, assert_scores, gradients
from helpers.scoring_path import PACKED, scoring_path
from helpers.tiny_models import random_rows, tiny_model
from transformers_backend.scoring import ScoringPath


def family(prompt: int, *answers: int, seed: int = 100) -> list[list[int]]:
    """Return rows with a common start of `prompt` ids."""
    (start,) = random_rows(prompt, seed=seed)
    return [start + answer for answer in random_rows(*answers, seed=seed + 1)]


# The numbers ----------------------------------------------------------------------------------------------------------


def test_ragged_rows_some_with_a_common_start(open_model: Open) -> None:
    model, seed = tiny_model(), 0
    rows = [*random_rows(30, 1, 200, 2, seed=seed), *family(40, 5, 9, 0, 1), *family(90, 30, 2, seed=9)]
    backend = open_model(model)
    assert_scores(backend, model, rows)
    # The last tokens are not read, and each prompt is read with its first answer only.
    assert scoring_path(backend).layout == PACKED and scoring_path(backend).shared == 40 + 40 + 39 + 90
    assert_scores(backend, model, rows, score_from=[max(1, len(ids) - 4) for ids in rows])


def test_rows_that_branch_more_than_once(open_model: Open) -> None:
    model = tiny_model()
    first, second = family(40, 20, 20)
    rows = [first, *(first + tail for tail in random_rows(8, 9, 30, seed=5)), [*second, 7], [*second, 8], first, first]
    backend = open_model(model)
    assert_scores(backend, model, rows)
    assert scoring_path(backend).shared > 5 * 40


def test_the_prompt_of_several_completions_is_read_once(open_model: Open) -> None:
    backend = open_model(tiny_model())
    prompt = "What is the name of the little cat that sits on the mat by the sea? The answer is"
    choices = [" Pip.", " the sea.", " a small bird.", " not known."]
    td = TensorDict({"text": Text(prompt=[prompt], response=[choices], batch_size=(1,))}, batch_size=1)
    out = LLMPolicy(backend, input_mode="text", generate=False, inplace=False)(td)
    assert scoring_path(backend).shared >= 3 * (len(backend.tokenize(prompt).ids.values) - 1)
    for choice, log_probs in zip(choices, out["log_probs"].response[0], strict=True):
        alone = backend.score_logprobs(backend.tokenize(prompt + choice).ids).logprobs.values[-len(log_probs) :]
        torch.testing.assert_close(log_probs, alone, rtol=0, atol=1e-5)


def test_positions_that_repeat_as_many_as_they_skip(open_model: Open) -> None:
    """From the first to the last there are as many as if they followed one another."""
    model, (start,) = tiny_model(), random_rows(20, seed=3)
    backend, rows = open_model(model), [[*start, 5, 9], [*start, 6, 7, 8], [*start, 7, 1, 2]]
    assert_scores(backend, model, rows, score_from=[20, 22, 20])
    assert scoring_path(backend) == ScoringPath("tiled", PACKED, 40)


def test_a_common_start_is_scored_once(open_model: Open) -> None:
    model, rows = tiny_model(), family(64, 8, 8, 8, 8)
    backend, seen = open_model(model), []
    out = backend.score_logprobs(rows)
    starts = [row[:64] for row in out.logprobs.split()]
    assert all(torch.equal(start, starts[0]) for start in starts)
    model.get_output_embeddings().register_forward_hook(lambda module, args, out: seen.append(out[..., 0].numel()))
    # The hook makes the model another one for the self-test.
    backend.score_logprobs(rows)
    seen.clear()
    backend.score_logprobs(rows)
    # The extra one is the column that the head gets while the body reads.
    assert scoring_path(backend).head == "sliced" and sum(seen) == 63 + 4 * 8 + 1
    assert_scores(backend, model, rows)


def test_a_start_too_short_to_pay_is_read_for_every_row(open_model: Open) -> None:
    model, backend = tiny_model(), open_model(tiny_model())
    for rows in (family(8, 20, 20), family(20, 400, 400)):
        assert_scores(backend, model, rows)
        assert scoring_path(backend).shared == 0


@pytest.mark.parametrize(
    ("name", "window"),
    [("qwen2", 3), ("mixtral", 8), ("qwen2", 64), ("mixtral", 4096)],
)
def test_a_sliding_window_shorter_and_longer_than_the_rows(open_model: Open, name: str, window: int) -> None:
    extra = {"use_sliding_window": True, "max_window_layers": 1} if name == "qwen2" else {}
    model = tiny_model(name, sliding_window=window, **extra)
    rows = [*random_rows(30, 2, 70), *family(40, 5, 9, 20)]
    backend = open_model(model)
    assert_scores(backend, model, rows)
    assert scoring_path(backend).layout == PACKED and scoring_path(backend).shared == 80
    unbound = type(model)(model.config.__class__(**model.config.to_dict() | {"sliding_window": 4096})).eval()
    unbound.load_state_dict(model.state_dict())
    # A window shorter than the rows changes the log-probs, so the checks above would notice one that was ignored.
    differs = float((oracle.logprobs(unbound, rows[2]) - oracle.logprobs(model, rows[2])).abs().max()) > 0.01
    assert differs == (window < 70)


def test_packs_are_not_longer_than_the_limit_and_rows_that_are_equal_are_read_once(open_model: Open) -> None:
    model = tiny_model()
    rows = [*family(10, 7, 3, 5), *random_rows(*range(3, 30, 2)), *family(25, 6, 2, seed=3), *random_rows(40, 40, 40)]
    backend = open_model(model, max_batch_tokens=64)
    backend.score_logprobs(rows)
    passes = ForwardPasses(model)
    backend.score_logprobs(rows)
    passes.clear()
    backend.score_logprobs(rows)
    assert max(count * columns for count, columns in passes) <= 64 and len(passes) < len(rows) / 2
    assert_scores(backend, model, rows)
    equal = open_model(model)
    equal.score_logprobs([rows[-1]] * 5)
    passes.clear()
    equal.score_logprobs([rows[-1]] * 5)
    assert sum(count * columns for count, columns in passes) == 39


def test_a_row_does_not_depend_on_the_other_rows(open_model: Open) -> None:
    """Nothing leaks between rows or from later tokens; only rounding may differ."""
    model = tiny_model()
    backend, (ids, other, third) = open_model(model), random_rows(40, 30, 50)
    alone = backend.score_logprobs([ids]).logprobs.values
    for others in ([other], [third, other], [ids[:20] + other, third], [ids + other]):
        for grad in (False, True):
            out = backend.score_logprobs([*others, ids], grad=grad)
            torch.testing.assert_close(out.logprobs.split()[-1].detach(), alone, rtol=0, atol=5e-6)


def test_gradients_flow_through_a_shared_start(open_model: Open) -> None:
    model = tiny_model()
    rows = [*family(40, 5, 9, 20), *random_rows(12, 30)]
    backend = open_model(model)
    out = backend.score_logprobs(rows, temperature=0.8, grad=True)
    assert scoring_path(backend) == ScoringPath("tiled", PACKED, shared=80)
    weights = [torch.linspace(-1, 2, len(ids) - 1) for ids in rows]
    found = gradients(model, sum((w * row[1:]).sum() for w, row in zip(weights, out.logprobs.split(), strict=True)))
    loss = torch.zeros(())
    for ids, weight in zip(rows, weights, strict=True):
        table = (oracle.own_logits(model, ids)[:-1] / 0.8).log_softmax(-1)
        loss = loss + (weight * table[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]).sum()
    assert_same_gradients(found, gradients(model, loss))


# When not to ----------------------------------------------------------------------------------------------------------


def test_layers_that_run_again_in_backward_are_not_packed(open_model: Open) -> None:
    model = tiny_model().train()
    rows = [*family(40, 5, 9), *random_rows(12)]
    expected = {}
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        backend = open_model(model)
        out = backend.score_logprobs(rows, grad=True)
        assert scoring_path(backend).layout == ("padded" if checkpointing else PACKED)
        model.zero_grad()
        out.logprobs.values.sum().backward()
        for name, parameter in model.named_parameters():
            wanted = expected.setdefault(name, parameter.grad.clone())
            torch.testing.assert_close(
                parameter.grad, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max() + 1), msg=name
            )
    # Without gradients no layer runs again.
    backend.score_logprobs(rows)
    assert scoring_path(backend).layout == PACKED


def test_an_undetected_checkpointed_layer_fails_instead_of_being_wrong(open_model: Open) -> None:
    from torch.utils.checkpoint import checkpoint

    model = tiny_model().train()
    layer = model.model.layers[0]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)
    out = open_model(model).score_logprobs(random_rows(12, 20), grad=True)
    with pytest.raises(RuntimeError):
        out.logprobs.values.sum().backward()


def test_dropout_is_not_shared(open_model: Open) -> None:
    rows = family(40, 5, 9)
    model = tiny_model("qwen2", attention_dropout=0.1).train()
    backend = open_model(model)
    with torch.random.fork_rng():
        backend.score_logprobs(rows, grad=True)
        assert scoring_path(backend) == ScoringPath("tiled", PACKED, shared=0)
        backend.score_logprobs(rows)
        assert scoring_path(backend).shared == 40
        model = tiny_model("gpt2").train()
        backend = open_model(model)
        backend.score_logprobs(rows, grad=True)
    # GPT-2 has dropout modules, 0.1 by default.
    assert scoring_path(backend).shared == 0


@pytest.mark.parametrize("name", ["eager", "flash"])
def test_an_attention_chosen_by_the_user_is_kept(open_model: Open, name: str) -> None:
    model = tiny_model()
    called = []
    if name == "eager":
        model.set_attn_implementation("eager")
    else:
        transformers.AttentionInterface.register(
            "mine", lambda *args, **kwargs: called.append(1) or sdpa(*args, **kwargs)
        )
        transformers.AttentionMaskInterface.register("mine", transformers.AttentionMaskInterface()["sdpa"])
        sdpa = transformers.AttentionInterface()["sdpa"]
        model.set_attn_implementation("mine")
    backend, rows = open_model(model), random_rows(30, 12)
    assert_scores(backend, model, rows)
    assert scoring_path(backend).layout == "padded" and bool(called) == (name == "flash")


def test_the_model_is_restored_after_success_and_failure(open_model: Open) -> None:
    model, rows = tiny_model(), random_rows(30, 12)
    backend = open_model(model)
    before = dict(vars(model.config))
    assert_scores(backend, model, rows)
    assert vars(model.config) == before
    expected = oracle.logprobs(model, rows[0])

    def fail(*args: Any) -> None:
        if model.config._attn_implementation == "sdpa":
            return
        raise torch.OutOfMemoryError("out of memory, on purpose")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(EngineError, match="on purpose"):
        backend.score_logprobs(rows)
    handle.remove()
    assert vars(model.config) == before and model.config._attn_implementation == "sdpa"
    assert torch.equal(oracle.logprobs(model, rows[0]), expected)
    assert_scores(backend, model, rows)


def test_a_model_that_mixes_positions_elsewhere_is_padded(open_model: Open) -> None:
    """Its attention could be packed, but its layers would mix neighbouring rows."""
    model = tiny_model()
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x + nn.functional.pad(x, (0, 0, 1, -1)))
    backend = open_model(model)
    assert_scores(backend, model, [*random_rows(30, 2, 12), *family(40, 5, 9)])
    assert scoring_path(backend).layout == "padded"


def test_short_floats_are_packed_and_tiled(open_model: Open) -> None:
    model, rows = tiny_model().bfloat16(), [*random_rows(30, 12), *family(40, 5, 9)]
    backend = open_model(model)
    found = backend.score_logprobs(rows).logprobs.split()
    assert scoring_path(backend) == ScoringPath("tiled", PACKED, shared=40)
    for ids, one in zip(rows, found, strict=True):
        torch.testing.assert_close(one, oracle.logprobs(model, ids), rtol=0, atol=0.3)


def test_a_context_of_a_few_tokens(open_model: Open) -> None:
    model = tiny_model("gpt2", max_position_embeddings=8)
    backend = open_model(model)
    assert_scores(backend, model, random_rows(8, 3))
    assert scoring_path(backend).layout == PACKED
