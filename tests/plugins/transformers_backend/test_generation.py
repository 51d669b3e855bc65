"""Generation, fast and plain: what is sampled, with which log-probability, and when it ends."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

from corelm import Backend, Ragged
from corelm.backend.arguments import answer_seeds
from corelm.errors import CapabilityError, EngineError
from helpers import oracle
from helpers.oracle import close, first_greedy_id
from helpers.plain_forward import Open, assert_answers, assert_scores
from helpers.tiny_models import random_rows, tiny_model, tiny_tokenizer

PAD, EOS = 0, 2


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.nightly)], ids=["fast", "plain"])
def fast(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


# Log-probabilities --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", pytest.param("eager", marks=pytest.mark.nightly)])
def test_one_batch_of_very_different_lengths_with_pads_inside(open_model: Open, implementation: str) -> None:
    model = tiny_model()
    model.set_attn_implementation(implementation)
    tokenizer = tiny_tokenizer().__class__(
        tokenizer_object=tiny_tokenizer().backend_tokenizer, eos_token="<|endoftext|>"
    )
    tokenizer.pad_token = tokenizer.eos_token
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == PAD
    prompts = [*random_rows(1, 300, 17), [PAD] * 5, [PAD], [9, PAD, PAD, 31, PAD], [EOS]]
    out = open_model(model, tokenizer=tokenizer).generate(prompts, {"max_new_tokens": 10, "seed": 1})
    assert out.mode == "raw" and out.temperature == 1.0 and out.support == "full"
    assert_answers(out, model, prompts)


def test_an_answer_may_be_a_stop_id_only(open_model: Open) -> None:
    model = tiny_model()
    prompts = random_rows(7, 60, 2)
    stop = first_greedy_id(model, prompts)
    out = open_model(model).generate(
        prompts, {"max_new_tokens": 6, "temperature": 0, "stop_token_ids": [stop], "ignore_eos": True}
    )
    assert out.ids.tolist()[0] == [stop] and out.finish_reasons[0] == "stop"
    for prompt, answer, found, reason in zip(
        prompts, out.ids.tolist(), out.logprobs.split(), out.finish_reasons, strict=True
    ):
        assert stop not in answer[:-1] and (reason == "stop") == (answer[-1] == stop)
        assert len(answer) == 6 or reason == "stop"
        close(found, oracle.answer_logprobs(model, prompt, answer))


def processed(logits: Tensor, seen: list[int], answer: list[int], s: dict[str, float]) -> Tensor:
    """Return log-probs [V] of the distribution sampled from, entry by entry, from the parameters' definitions."""
    logits = logits.double().clone()
    for token in set(seen + answer):
        value, penalty = float(logits[token]), s.get("repetition_penalty", 1.0)
        logits[token] = value / penalty if value > 0 else value * penalty
    for token in set(answer):
        logits[token] -= s.get("presence_penalty", 0) + s.get("frequency_penalty", 0) * answer.count(token)
    logits /= s.get("temperature", 1.0)
    order = logits.argsort(descending=True)
    order = order[: s.get("top_k", len(order))]
    mass = logits[order].softmax(-1)
    order = order[: 1 + int((mass.cumsum(-1) < s.get("top_p", 1.0)).sum())]
    order = order[logits[order].exp() >= s.get("min_p", 0.0) * logits[order[0]].exp()]
    out = torch.full_like(logits, -math.inf)
    out[order] = logits[order].log_softmax(-1)
    return out


PROCESSED: list[dict[str, float]] = [
    {"temperature": 0.6},
    {"top_k": 7},
    {"top_p": 0.7, "temperature": 1.4},
    {"min_p": 0.2},
    {"repetition_penalty": 1.8},
    {"presence_penalty": 1.0, "frequency_penalty": 0.7},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3, "presence_penalty": -0.5},
]


def test_processed_logprobs_are_those_of_the_distribution_sampled_from(
    open_model: Open, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model()
    backend = open_model(model)
    for sampling in PROCESSED:
        _check_processed(backend, model, sampling)
    # Numbers that differ from the plain forward are not returned, but the rows are decoded again in a slower way.
    assert "get other numbers" not in caplog.text


def _check_processed(backend: Backend, model: Any, sampling: dict[str, float]) -> None:
    # The padding before short prompts (id 0) must not count as seen. Many stop ids make rows leave the batch early.
    prompts = random_rows(40, 2, 11, 5, 23, 1)
    out = backend.generate(
        prompts, {**sampling, "max_new_tokens": 12, "seed": 3, "stop_token_ids": range(1, 60)}, logprobs="processed"
    )
    assert len(set(out.ids.lengths.tolist())) > 2
    assert out.mode == "processed" and out.temperature == sampling.get("temperature", 1.0)
    assert out.support == ("truncated" if sampling.keys() & {"top_k", "top_p", "min_p"} else "full")
    for prompt, answer, found in zip(prompts, out.ids.tolist(), out.logprobs.split(), strict=True):
        table = oracle.next_logits(model, prompt + answer[:-1])[len(prompt) - 1 :]
        expected = [processed(table[t], prompt, answer[:t], sampling)[token] for t, token in enumerate(answer)]
        # A low temperature enlarges how far the two forwards round apart.
        atol = 1e-5 / min(1.0, sampling.get("temperature", 1.0))
        torch.testing.assert_close(
            found.double(), torch.stack(expected), rtol=0, atol=atol, msg=lambda m: f"{sampling}: {m}"
        )


def test_greedy_is_the_argmax_step_by_step(open_model: Open) -> None:
    model = tiny_model()
    prompts = random_rows(25, 3)
    out = open_model(model).generate(
        prompts, {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}, logprobs="processed"
    )
    assert out.temperature == 0.0 and not out.logprobs.values.any()
    for prompt, answer in zip(prompts, out.ids.tolist(), strict=True):
        assert answer == oracle.next_logits(model, prompt + answer[:-1])[len(prompt) - 1 :].argmax(-1).tolist()


def test_bfloat16_on_the_cpu(open_model: Open) -> None:
    model = tiny_model().to(torch.bfloat16)
    prompts = random_rows(40, 2, 11)
    out = open_model(model).generate(prompts, {"max_new_tokens": 8, "seed": 3})
    assert out.logprobs.values.dtype == torch.float32
    assert_answers(out, model, prompts, atol=0.15)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda(open_model: Open) -> None:
    model = tiny_model().to("cuda")
    prompts = random_rows(1, 40, 3)
    out = open_model(model).generate(prompts, {"max_new_tokens": 8, "seed": 3})
    assert out.ids.values.device.type == "cpu"
    assert_answers(out, model, prompts, atol=1e-3)


# Seeds and other rows -----------------------------------------------------------------------------------------------


def test_an_answer_depends_on_its_prompt_and_seed_only(open_model: Open) -> None:
    prompts, seeds = random_rows(5, 33, 1, 12), answer_seeds(4, range(4))
    sampling = {"max_new_tokens": 20, "top_p": 0.95}
    backend, frugal = open_model(tiny_model()), open_model(tiny_model(), max_batch_tokens=50)
    together = backend.generate(prompts, sampling, seeds=seeds)
    order = [2, 0, 3, 1]
    shuffled = backend.generate([prompts[i] for i in order], sampling, seeds=seeds[order])
    apart = frugal.generate(prompts, sampling, seeds=seeds)
    alone = backend.generate(prompts[1:2], sampling, seeds=seeds[1:2])
    assert shuffled.ids.tolist() == [together.ids.tolist()[i] for i in order]
    assert apart.ids.tolist() == together.ids.tolist()
    assert alone.ids.tolist() == together.ids.tolist()[1:2]
    close(apart.logprobs.values, together.logprobs.values)
    other = backend.generate(prompts, sampling, seeds=answer_seeds(5, range(4)))
    assert other.ids.tolist() != together.ids.tolist()


def test_answers_to_one_prompt_share_its_prefill_and_stay_the_same(open_model: Open) -> None:
    model, prompts = tiny_model(), random_rows(30, 4, 30)
    read: list[tuple[int, ...]] = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: read.append(tuple(args[0].shape)))
    sampling, seeds = {"max_new_tokens": 10, "ignore_eos": True}, answer_seeds(1, range(3), 4)
    backend = open_model(model)
    # The self-test comes before the first answer.
    backend.generate(prompts, {**sampling, "num_samples": 4}, seeds=seeds)
    read.clear()
    out = backend.generate(prompts, {**sampling, "num_samples": 4}, seeds=seeds)
    assert read[0] == (3, 30) and read[1] == (12, 1)
    rows = Ragged.from_list(prompts).repeat(4).tolist()
    assert_answers(out, model, rows)
    for row, (prompt, answer, found) in enumerate(zip(rows, out.ids.tolist(), out.logprobs.split(), strict=True)):
        single = backend.generate([prompt], sampling, seeds=seeds[row : row + 1])
        assert single.ids.tolist() == [answer]
        close(found, single.logprobs.values)


# The caller's model -----------------------------------------------------------------------------------------------


def test_the_models_generation_config_supplies_eos_and_nothing_else(open_model: Open) -> None:
    model, prompts = tiny_model(), random_rows(5, 20)
    sampling = {"max_new_tokens": 12, "seed": 7}
    plain = open_model(model).generate(prompts, sampling)
    config = model.generation_config
    config.temperature, config.top_k, config.max_length, config.repetition_penalty = 0.01, 1, 3, 9.0
    config.forced_bos_token_id, config.suppress_tokens = 7, list(range(100, 500))
    assert open_model(model).generate(prompts, sampling).ids.tolist() == plain.ids.tolist()
    config.eos_token_id = [PAD, 5, 10**6]
    assert open_model(model).capabilities.eos_token_ids == {PAD, 5, EOS}


def dropout_model() -> Any:
    """Return a model with dropout everywhere, in train mode except for one layer, and with one frozen layer."""
    model = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).train()
    model.transformer.h[0].eval()
    model.transformer.h[1].requires_grad_(False)
    return model


def state_of(model: nn.Module) -> tuple[list[bool], list[bool]]:
    return [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]


def test_a_model_in_train_mode_answers_without_dropout_and_is_restored(open_model: Open) -> None:
    model, prompts = dropout_model(), random_rows(5, 20)
    before, backend = state_of(model), open_model(model)
    out = backend.generate(prompts, {"max_new_tokens": 8, "seed": 7})
    assert state_of(model) == before
    assert_answers(out, model, prompts)


def test_a_failing_step_is_reported_and_the_model_is_restored(open_model: Open) -> None:
    model, backend = (model := dropout_model()), open_model(model)
    before = state_of(model)

    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError("out of memory, on purpose")

    handle = model.get_output_embeddings().register_forward_hook(fail)
    with pytest.raises(EngineError, match="on purpose"):
        backend.generate([[5]], {"max_new_tokens": 2})
    assert state_of(model) == before
    handle.remove()
    assert backend.generate([[5]], {"max_new_tokens": 2}).ids.lengths.tolist() == [2]


def test_results_are_never_inference_tensors(open_model: Open) -> None:
    backend = open_model(tiny_model())
    with torch.inference_mode():
        out = backend.generate([[5, 6]], {"max_new_tokens": 3, "ignore_eos": True})
    assert not out.ids.values.is_inference() and not out.logprobs.values.is_inference()
    assert not out.logprobs.values.requires_grad


# Beams --------------------------------------------------------------------------------------------------------------


def test_a_beam_search_wide_enough_finds_the_likeliest_answer(open_model: Open) -> None:
    model = tiny_model(vocab_size=12)
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.max_length = 3
    prompts = [[3, 4, 5], [7]]
    sampling = {"num_beams": 12, "max_new_tokens": 2, "ignore_eos": True, "temperature": 1.0}
    out = open_model(model).generate(prompts, sampling, logprobs="none")
    assert out.logprobs is None and out.finish_reasons == ("length", "length")
    for prompt, answer in zip(prompts, out.ids.tolist(), strict=True):
        every = {
            (a, b): float(oracle.answer_logprobs(model, prompt, [a, b]).sum()) for a in range(12) for b in range(12)
        }
        assert tuple(answer) == max(every, key=lambda pair: every[pair])
    assert model.generation_config.repetition_penalty == 5.0


def test_beams_end_at_a_stop_id_and_keep_it(open_model: Open) -> None:
    model = tiny_model(vocab_size=12)
    prompts = [[3, 4, 5], [7]]
    stop = first_greedy_id(model, prompts)
    sampling = {"num_beams": 2, "max_new_tokens": 8, "temperature": 0, "stop_token_ids": [stop], "length_penalty": -8.0}
    out = open_model(model).generate(prompts, sampling, logprobs="none")
    assert out.ids.tolist()[0] == [stop] and out.finish_reasons[0] == "stop"


def test_parameters_without_effect_are_refused(open_model: Open) -> None:
    backend = open_model(tiny_model())
    for sampling in (
        {"num_beams": 2, "temperature": 0.7},
        {"num_beams": 2, "top_p": 0.5},
        {"num_beams": 2, "stop": "x"},
        {"engine_kwargs": {"no_repeat_ngram_size": 2}},
    ):
        with pytest.raises(CapabilityError):
            backend.generate([[5]], {"max_new_tokens": 2, **sampling}, logprobs="none")


def test_engine_kwargs_reach_transformers_generate(open_model: Open) -> None:
    sampling = {"num_beams": 2, "max_new_tokens": 12, "ignore_eos": True, "temperature": 0}
    backend = open_model(tiny_model(vocab_size=6))
    free = backend.generate([[5]], sampling, logprobs="none").ids.tolist()[0]
    held = backend.generate(
        [[5]], {**sampling, "engine_kwargs": {"no_repeat_ngram_size": 2}}, logprobs="none"
    ).ids.tolist()[0]
    pairs = list(zip([5, *held], held, strict=False))
    assert len(pairs) == len(set(pairs)) and held != free


def test_a_model_that_keeps_its_state_in_its_modules_generates_without_a_cache(open_model: Open) -> None:
    """With its cache, expanding a prompt to several answers, or dropping rows that ended, makes its log-probs wrong."""
    torch.manual_seed(0)
    config = RecurrentGemmaConfig(
        vocab_size=512,
        hidden_size=32,
        lru_width=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    model = RecurrentGemmaForCausalLM(config).eval()
    backend = open_model(model)
    rows = random_rows(9, 3, vocab=512)
    out = backend.generate(rows, {"max_new_tokens": 6, "num_samples": 2, "stop_token_ids": list(range(0, 512, 4))})
    assert_answers(out, model, [row for row in rows for _ in range(2)])
    assert_scores(backend, model, rows)
