"""What users of other libraries type, and that the message tells them what to type instead."""

import re

import pytest
import torch
from tensordict import TensorDict
from transformers import GenerationConfig

import corelm
from corelm import LLMPolicy, SamplingParams
from corelm.errors import InvalidRequestError
from helpers.each import each
from helpers.refusals import refused
from helpers.toy_prompts import SAMPLING

IDS = torch.tensor([[72, 105]])


@each(
    "given, mode",
    [
        *((["Hello"], "text"), ("Hello", "text"), ({"text": ["Hello"]}, "text"), ({"input_ids": IDS}, "text")),
        *(([{"role": "user", "content": "Hi"}], "history"), (IDS, "tokens")),
    ],
)
def test_an_input_that_is_not_a_tensordict_is_refused_with_the_call_to_make(backend, given, mode):
    with refused(InvalidRequestError, field="tensordict"):
        LLMPolicy(backend, input_mode=mode)(given)


@each(
    "name, said",
    [
        ("top_logprobs_num", "top_logprobs=k"),
        ("logprobs", "log_probs_mode"),
        ("until", "give stop"),
        ("pad_token_id", "leave it out"),
        ("eos_token_id", "stop_token_ids"),
        ("prompt_logprobs", "generate=False"),
        ("stream", "policy.stream"),
    ],
)
def test_parameters_of_other_libraries_are_refused_everywhere_with_what_to_do(backend, name, said):
    for sampling in ({name: 1}, {"engine_kwargs": {name: 1}}):
        with pytest.raises(InvalidRequestError, match=said):
            LLMPolicy(backend, sampling_params=sampling)
    with refused(InvalidRequestError, field=name):
        SamplingParams(**{name: 1})
    with pytest.raises(TypeError, match=said):
        LLMPolicy(backend, **{name: 1})


def test_options_of_a_policy_are_no_sampling_parameters(backend):
    for sampling in ({"top_logprobs": 2}, {"engine_kwargs": {"top_logprobs": 2}}):
        with pytest.raises(InvalidRequestError, match="its option top_logprobs=k"):
            LLMPolicy(backend, sampling_params=sampling)
    with pytest.raises(InvalidRequestError, match=r'sampling_params=\{"top_k": 5\}'):
        LLMPolicy(backend, top_k=5)


def test_our_own_parameters_are_refused_in_engine_kwargs(backend):
    with pytest.raises(InvalidRequestError, match="give num_beams=2 next to it"):
        LLMPolicy(backend, sampling_params={"engine_kwargs": {"num_beams": 2}})
    with pytest.raises(InvalidRequestError, match="give max_new_tokens=3 next to it"):
        SamplingParams(engine_kwargs={"max_tokens": 3})


@each(
    "config, read",
    [
        ({"max_new_tokens": 3}, {"max_new_tokens": 3, "temperature": 0}),
        ({"temperature": 0.7, "top_p": 0.9, "do_sample": False, "num_return_sequences": 1}, {"temperature": 0}),
        ({"do_sample": True, "temperature": 0.7}, {"temperature": 0.7, "top_k": 50}),
        ({"do_sample": True, "top_k": 0, "min_p": 0.1, "num_return_sequences": 2}, {"min_p": 0.1, "num_samples": 2}),
        ({"eos_token_id": [2, 3], "pad_token_id": 0, "stop_strings": "x"}, {"stop": "x", "stop_token_ids": [2, 3]}),
        ({"max_length": 9, "max_new_tokens": 4, "use_cache": False, "no_repeat_ngram_size": 0}, {"max_new_tokens": 4}),
        ({"num_beams": 2, "length_penalty": 0.5}, {"num_beams": 2, "length_penalty": 0.5}),
        ({"length_penalty": 0.5, "typical_p": 1.0}, {}),
    ],
)
def test_a_generation_config_is_read_as_generate_reads_it(backend, config, read):
    policy = LLMPolicy(backend, sampling_params=GenerationConfig(**config), return_log_probs=False)
    assert policy.options.sampling == SamplingParams.make({"do_sample": config.get("do_sample", False)} | read)


@each(
    "config, field",
    [
        ({"max_length": 9}, "max_length"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
        ({"typical_p": 0.5, "do_sample": True}, "typical_p"),
        ({"num_beams": 2, "do_sample": True}, "num_beams"),
    ],
)
def test_a_field_of_a_generation_config_without_an_equal_is_refused(backend, config, field):
    with refused(InvalidRequestError, field=field):
        LLMPolicy(backend, sampling_params=GenerationConfig(**config))


@each(
    "name, said",
    [
        ("generate_kwargs", "give the policy sampling_params="),
        ("history_key", "give keys={'history': …}"),
        ("tokens_key", "give keys={'tokens': …}"),
        ("tokenizer", "give it to get_backend"),
        ("response_format", "extra_body="),
        ("device_map", "model_kwargs={'device_map': …}"),
        ("token", "HF_TOKEN"),
        ("allowed_token_ids", "engine_kwargs': {'allowed_token_ids': …}"),
        ("num_generations", "give num_samples"),
        ("tools", "template_kwargs={'tools': […]}"),
    ],
)
def test_a_name_of_another_library_gets_an_exact_answer(backend, name, said):
    """Some of these names are spelt like one of ours that means something else."""
    with pytest.raises(TypeError, match=re.escape(said)) as error:
        LLMPolicy(backend, **{name: 1})
    assert "did you mean" not in str(error.value)
    with pytest.raises(InvalidRequestError, match=re.escape(said)):
        SamplingParams.make({name: 1})
    if name != "tokenizer":
        with pytest.raises(InvalidRequestError, match=re.escape(said)):
            corelm.get_backend("toy", **{name: 1})


def test_a_sampling_parameter_given_as_an_option_is_named_with_the_dict_to_pass(backend):
    with pytest.raises(TypeError, match=r"give sampling_params=\{'max_new_tokens': 4\}"):
        LLMPolicy(backend, max_new_tokens=4)
    policy = LLMPolicy(backend, sampling_params={"max_new_tokens": 3})
    with pytest.raises(TypeError, match=r"give sampling_params=\{'max_new_tokens': 3, 'temperature': 0.5\}"):
        policy.replace(temperature=0.5)
    with pytest.raises(TypeError, match="did you mean 'pad_output'"):
        LLMPolicy(backend, pad_outputs=True)
    with pytest.raises(TypeError, match="get_backend"):
        LLMPolicy(backend, tensor_parallel_size=2)


def test_a_compiled_policy_is_refused_in_one_sentence(backend):
    policy, td = LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING), TensorDict(text=["Hi"])
    with refused(InvalidRequestError, field="policy"):
        torch.compile(policy, backend="eager")(td)
    # With fullgraph, Dynamo raises our error, or one of its own that repeats it.
    with refused((InvalidRequestError, RuntimeError), field="policy"):
        torch.compile(policy, backend="eager", fullgraph=True)(td)
    with refused(InvalidRequestError, field="policy"):
        policy.compile()
