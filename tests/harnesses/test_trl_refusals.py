"""What a rollout for TRL refuses: settings under which log-probs would mean something else, and missing parts."""

from dataclasses import replace

import pytest

from corelm import Backend, LLMPolicy
from corelm.errors import CapabilityError, InvalidRequestError
from corelm_interop.trl import GRPORollout
from corelm_testing.toy import ToyBackend
from helpers.tiny_models import tiny_model
from helpers.trl_runs import QUESTIONS, TEMPERATURE, make_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:You are using '(rollout_func|environment_factory)':UserWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]


@pytest.mark.parametrize(
    ("changes", "field", "advice"),
    [
        ({"top_p": 0.9}, "top_p", r"pass GRPOConfig\(top_p=1.0\)"),
        ({"top_k": 5}, "top_k", r"pass GRPOConfig\(top_k=0\)"),
        ({"min_p": 0.1}, "min_p", r"pass GRPOConfig\(min_p=None\)"),
        ({"repetition_penalty": 1.1}, "repetition_penalty", r"pass GRPOConfig\(repetition_penalty=1.0\)"),
        ({"generation_kwargs": {"presence_penalty": 1.0}}, "presence_penalty", "leave it out of .*generation_kwargs"),
        ({"generation_kwargs": {"min_tokens": 2}}, "min_new_tokens", "leave it out of .*generation_kwargs"),
        ({"generation_kwargs": {"n": 2}}, "num_samples", "leave it out of .*generation_kwargs"),
        ({"generation_kwargs": {"top_a": 2}}, "top_a", "did you mean"),
        ({"temperature": 0.0}, "temperature", "must be above 0"),
        ({"vllm_structured_outputs_regex": "[0-9]+"}, "vllm_structured_outputs_regex", "leave it out"),
        ({"loss_type": "vespo"}, "vllm_importance_sampling_mode", 'mode="token_truncate"'),
    ],
)
def test_a_config_whose_log_probs_would_mean_something_else_is_refused(tmp_path, backend, changes, field, advice):
    trainer = make_trainer(tiny_model(), GRPORollout(backend), tmp_path, **changes)
    with pytest.raises(InvalidRequestError, match=advice) as error:
        trainer.train()
    assert error.value.field == field


@pytest.mark.parametrize(
    ("sampling", "field", "advice"),
    [
        ({}, "temperature", r'sampling_params=\{"temperature": 0.7\}, or GRPOConfig\(temperature=1.0\)'),
        ({"temperature": TEMPERATURE, "top_p": 0.9}, "top_p", "leave it out of the policy's sampling_params"),
        ({"temperature": TEMPERATURE, "frequency_penalty": 1.0}, "frequency_penalty", "leave it out of the policy's"),
    ],
)
def test_a_policy_whose_log_probs_would_mean_something_else_is_refused(tmp_path, backend, sampling, field, advice):
    trainer = make_trainer(tiny_model(), GRPORollout(LLMPolicy(backend, sampling_params=sampling)), tmp_path)
    with pytest.raises(InvalidRequestError, match=advice) as error:
        trainer.train()
    assert error.value.field == field


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"generate": False}, "generate"),
        ({"num_samples": 2}, "num_samples"),
        ({"log_probs_key": "mine"}, "keys"),
        ({"input_key": "query"}, "keys"),
        ({"on_error": "skip"}, "on_error"),
    ],
)
def test_a_policy_that_does_not_answer_prompts_is_refused_at_once(backend, options, field):
    with pytest.raises(InvalidRequestError) as error:
        GRPORollout(LLMPolicy(backend, **options))
    assert error.value.field == field


def test_a_vllm_of_trl_itself_is_refused(tmp_path, backend):
    trainer = make_trainer(tiny_model(), GRPORollout(backend), tmp_path)
    # What GRPOConfig(use_vllm=True) does where vLLM is installed.
    trainer.use_vllm = True
    with pytest.raises(InvalidRequestError, match="leave use_vllm out") as error:
        trainer.rollout_func(QUESTIONS, trainer)
    assert error.value.field == "use_vllm" and not hasattr(trainer, "vllm_generation")


def test_an_engine_that_loads_no_weights_says_what_to_type(tmp_path):
    toy = ToyBackend.open()
    toy.capabilities = replace(toy.capabilities, update_weights=False)
    with Backend.from_plugin(toy, "toy") as backend:
        trainer = make_trainer(tiny_model(), GRPORollout(backend), tmp_path)
        with pytest.raises(CapabilityError, match='push_weights="never"') as error:
            trainer.train()
        assert error.value.capability == "update_weights"
