"""A policy completes answers that it has returned before, whatever their layout."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack

import corelm
from corelm import LLMPolicy
from corelm.errors import InvalidRequestError, MissingKeyError, ProvenanceMismatchError
from corelm.policy.options import PolicyOptions
from helpers import oracle
from helpers.each import each
from helpers.refusals import refused
from helpers.tiny_models import random_rows, tiny_model, tiny_tokenizer
from transformers_backend import TransformersBackend

PROMPTS = random_rows(7, 12)
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def prompts() -> TensorDict:
    return TensorDict(tokens=corelm.Tokens.from_rows(prompt=PROMPTS), batch_size=[2])


@pytest.fixture(scope="module")
def backend() -> Any:
    engine = TransformersBackend.open(tiny_model(), tokenizer=tiny_tokenizer())
    with corelm.Backend.from_plugin(engine, "transformers") as opened:
        yield opened


def policy(backend: Any, tokens: int, **options: Any) -> LLMPolicy:
    sampling = {**GREEDY, "max_new_tokens": tokens, **options.pop("sampling", {})}
    return LLMPolicy(backend, PolicyOptions(input_mode="tokens", sampling_params=sampling, **options))


@each("pad_output", [True, False])
@each("num_samples", [None, 2])
def test_answers_go_on_as_if_they_had_never_stopped(backend: Any, pad_output: bool, num_samples: int | None) -> None:
    options = {"pad_output": pad_output, "num_samples": num_samples, "top_logprobs": 3, "return_support": True}
    whole = policy(backend, 12, **options)(prompts())
    part = policy(backend, 5, **options)(prompts())
    made = policy(backend, 12, **options).resume(prompts(), part)
    assert made.batch_size == whole.batch_size
    for key in (("tokens", "full"), ("tokens", "response"), ("log_probs", "top_ids"), ("masks", "all_response_mask")):
        assert corelm.ragged(made, key).tolist() == corelm.ragged(whole, key).tolist(), key
    for key in (("log_probs", "full"), ("log_probs", "top_log_probs"), ("log_probs", "tail_log_mass")):
        one, other = corelm.ragged(made, key).values, corelm.ragged(whole, key).values
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    assert corelm.token_sets(made).tolist() == corelm.token_sets(whole).tolist()
    assert made["text"].response == whole["text"].response
    assert made["log_probs"].provenance == whole["log_probs"].provenance


def test_old_tokens_keep_their_version() -> None:
    new = tiny_model(seed=1)
    engine = TransformersBackend.open(tiny_model(), tokenizer=tiny_tokenizer())
    with corelm.Backend.from_plugin(engine, "transformers") as backend:
        part = policy(backend, 5)(prompts())
        backend.update_weights(new.state_dict())
        made = policy(backend, 12).resume(prompts(), part)
    assert made["log_probs"].provenance.version_runs == (("0", 0), ("1", 5))
    rows = zip(PROMPTS, corelm.ragged(made, ("tokens", "response")).tolist(), strict=True)
    for row, (prompt, answer) in enumerate(rows):
        by_old, by_new = (oracle.answer_logprobs(model, prompt, answer) for model in (tiny_model(), new))
        found = corelm.ragged(made, ("log_probs", "response")).split()[row]
        torch.testing.assert_close(found, torch.cat([by_old[:5], by_new[5:]]), rtol=0, atol=1e-4)


def test_what_does_not_belong_together_is_refused(backend: Any) -> None:
    part = policy(backend, 5)(prompts())
    with refused(InvalidRequestError, field="continue_from", rows=(1,)):
        policy(backend, 12).resume(
            TensorDict(tokens=corelm.Tokens.from_rows(prompt=[PROMPTS[0], PROMPTS[0]]), batch_size=[2]), part
        )
    with refused(InvalidRequestError, field="continue_from"):
        policy(backend, 12, num_samples=2).resume(prompts(), part)
    with refused(MissingKeyError, field="continue_from"):
        policy(backend, 12).resume(prompts(), part.exclude("finish_reason"))
    with refused(MissingKeyError, field="continue_from"):
        policy(backend, 12).resume(prompts(), part.exclude("tokens"))
    with pytest.raises(ProvenanceMismatchError, match="'mode': 'raw'"):
        policy(backend, 12, log_probs_mode="processed", sampling={"temperature": 0.5}).resume(prompts(), part)
    with refused(InvalidRequestError, field="continue_from"):
        policy(backend, 12).resume(prompts(), [1])  # type: ignore[arg-type]
    for found in (part, None):
        with refused(InvalidRequestError, field="generate"):
            policy(backend, 12, generate=False).resume(prompts(), found)  # type: ignore[arg-type]


def test_answers_of_several_adapters_do_not_go_on_under_the_label_of_one(backend: Any) -> None:
    one, other = policy(backend, 5, pad_output=False)(prompts()).unbind(0)
    assert policy(backend, 12).resume(prompts(), lazy_stack([one, other]))["log_probs"].provenance.adapter is None
    other["log_probs"].provenance = replace(other["log_probs"].provenance, adapter="one")
    with pytest.raises(ProvenanceMismatchError, match="several distributions"):
        policy(backend, 12).resume(prompts(), lazy_stack([one, other]))
