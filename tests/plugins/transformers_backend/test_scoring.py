"""Scoring, fast and plain: ragged rows, partial rows, temperatures, logits, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corelm.errors import BackendTimeoutError, EngineError
from helpers import oracle
from helpers.plain_forward import Open, assert_scores, own_loss
from helpers.tiny_models import random_rows, tiny_model

ROWS = [*random_rows(30, 1, 200, 2, 57), [0, 0, 0, 0], [2, 0, 2]]


@pytest.fixture(params=[True, False], ids=["fast", "plain"])
def fast(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_every_token_but_the_first_is_scored(open_model: Open) -> None:
    model = tiny_model()
    for max_batch_tokens, temperature in ((1, 1.0), (256, 0.5), (32768, 1.0)):
        backend = open_model(model, max_batch_tokens=max_batch_tokens)
        out = assert_scores(backend, model, ROWS, temperature=temperature)
        assert (out.mode, out.temperature) == ("raw" if temperature == 1.0 else "processed", temperature)
        for ids, scored in zip(ROWS, out.scored.split(), strict=True):
            assert scored.tolist() == [False] + [True] * (len(ids) - 1)


def test_a_call_with_nothing_to_score_does_not_run_the_model(open_model: Open) -> None:
    model = tiny_model()
    backend = open_model(model)
    model.register_forward_pre_hook(lambda *args: pytest.fail("the model was called"))
    out = backend.score_logprobs([[5], [6, 7]], score_from=[1, 2], return_logits=True, grad=True)
    assert out.logprobs.values.tolist() == [0.0] * 3 and not out.scored.values.any() and not out.logits.values.any()


def test_logits_are_in_the_models_scale_and_zero_where_nothing_is_scored(open_model: Open) -> None:
    model = tiny_model("granite")
    out = open_model(model).score_logprobs(ROWS, temperature=0.5, score_from=[20] * len(ROWS), return_logits=True)
    for ids, logits in zip(ROWS, out.logits.split(), strict=True):
        torch.testing.assert_close(logits[20:], oracle.next_logits(model, ids)[19:-1], rtol=0, atol=1e-4)
        assert not logits[:20].any()


def test_gradients_flow_through_temperature_and_logits_alike(open_model: Open) -> None:
    model, ids = tiny_model(), ROWS[0]
    out = open_model(model).score_logprobs([ids, ROWS[4]], temperature=0.5, return_logits=True, grad=True)
    weight = model.get_input_embeddings().weight
    (found,) = torch.autograd.grad(out.logprobs.values.sum(), weight, retain_graph=True)
    table = (out.logits.values / 0.5).log_softmax(-1)
    tokens = torch.tensor([*ids, *ROWS[4]])
    chosen = table.gather(-1, tokens[:, None])[:, 0][out.scored.values]
    (through_logits,) = torch.autograd.grad(chosen.sum(), weight)
    (expected,) = torch.autograd.grad(own_loss(model, [ids, ROWS[4]], 0.5), weight)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(through_logits, expected, rtol=1e-4, atol=1e-3)


def dropout_model() -> Any:
    model = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).train()
    model.transformer.h[0].eval()
    return model


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_without_gradients_dropout_is_off_and_the_mode_is_restored(open_model: Open) -> None:
    model = dropout_model()
    before, out = modes(model), assert_scores(open_model(model), model, ROWS)
    assert modes(model) == before and not out.logprobs.values.requires_grad


def test_with_gradients_the_model_runs_in_its_own_mode(open_model: Open) -> None:
    model = dropout_model()
    before, backend = modes(model), open_model(model)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        with pytest.warns(UserWarning, match="in train mode and has dropout.* call model.eval") as warned:
            first, second = (backend.score_logprobs(ROWS, grad=True).logprobs.values for _ in range(2))
    assert [one.filename for one in warned] == [__file__], "said once, at the call"
    assert first.requires_grad and modes(model) == before
    assert float((first - second).detach().abs().max()) > 0.1


@pytest.mark.filterwarnings("error")
def test_a_call_with_dropout_is_not_lost_where_warnings_are_errors(
    open_model: Open, caplog: pytest.LogCaptureFixture
) -> None:
    model = dropout_model().eval()
    backend = open_model(model)
    for train in (False, True, True):
        assert backend.score_logprobs(ROWS, grad=True).logprobs.values.requires_grad
        model.train(train)
    assert ["train mode and has dropout" in message for message in caplog.messages] == [True], "logged once"


@pytest.mark.filterwarnings("error")
def test_a_model_without_dropout_or_in_eval_mode_is_not_warned_about(open_model: Open) -> None:
    for model in (tiny_model().train(), dropout_model().eval()):
        assert open_model(model).score_logprobs(ROWS, grad=True).logprobs.values.requires_grad


def test_the_model_is_restored_after_a_failure(open_model: Open) -> None:
    model = dropout_model()
    backend, before = open_model(model), modes(model)
    backend.score_logprobs([[5, 6]])
    expected = oracle.logprobs(model, ROWS[0])

    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError("out of memory, on purpose")

    handle = model.get_output_embeddings().register_forward_hook(fail)
    for grad in (False, True):
        with pytest.raises(EngineError, match="on purpose"):
            backend.score_logprobs(ROWS, grad=grad)
    handle.remove()
    assert modes(model) == before
    # The model's own forward is restored.
    close(oracle.logprobs(model, ROWS[0]), expected)
    close(backend.score_logprobs(ROWS[:1]).logprobs.values, expected)


def test_bfloat16_is_reduced_in_float32(open_model: Open) -> None:
    model = tiny_model().to(torch.bfloat16)
    out = open_model(model).score_logprobs(ROWS)
    assert out.logprobs.values.dtype == torch.float32
    for ids, found in zip(ROWS, out.logprobs.split(), strict=True):
        torch.testing.assert_close(found, oracle.logprobs(model, ids), rtol=0, atol=0.15)
        # A float32 softmax over one row's logits; a bfloat16 one would round the result to three digits.
    assert float((out.logprobs.values - out.logprobs.values.bfloat16().float()).abs().max()) > 0


def test_results_are_never_inference_tensors(open_model: Open) -> None:
    backend = open_model(tiny_model())
    with torch.inference_mode():
        out = backend.score_logprobs(ROWS, return_logits=True)
    assert not any(part.values.is_inference() for part in (out.logprobs, out.scored, out.logits))


def test_a_call_that_takes_too_long_raises_a_timeout(open_model: Open) -> None:
    with pytest.raises(BackendTimeoutError):
        open_model(tiny_model()).score_logprobs(ROWS, timeout=1e-9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda(open_model: Open) -> None:
    model = tiny_model().to("cuda")
    backend = open_model(model)
    assert backend.score_logprobs(ROWS, device="cuda").logprobs.values.is_cuda
    out = backend.score_logprobs(ROWS)
    for ids, found in zip(ROWS, out.logprobs.split(), strict=True):
        torch.testing.assert_close(found, oracle.logprobs(model, ids), rtol=0, atol=1e-3)
