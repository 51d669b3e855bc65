"""`PolicyOptions`: a policy's options as one value."""

from __future__ import annotations

import dataclasses

import pytest
from tensordict import TensorDict

from corelm import LLMPolicy, PolicyOptions
from corelm.errors import InvalidRequestError
from helpers.refusals import refused

SAMPLING = {"max_new_tokens": 3, "temperature": 0.0}


def test_options_and_keywords_say_the_same(backend):
    by_options = LLMPolicy(backend, PolicyOptions(input_mode="text", sampling_params=SAMPLING, num_samples=2))
    by_keywords = LLMPolicy(backend, input_mode="text", sampling_params=SAMPLING, num_samples=2)
    assert by_options.options == by_keywords.options
    td = TensorDict(text=["Hi"])
    assert by_options(td)["text"].response == by_keywords(td)["text"].response


def test_keywords_override_options(backend):
    policy = LLMPolicy(backend, PolicyOptions(input_mode="text", on_error="skip"), on_error="raise")
    assert policy.options == PolicyOptions(input_mode="text")


def test_options_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PolicyOptions().generate = False


def test_num_samples_has_one_home_wherever_it_was_given():
    options = PolicyOptions(sampling_params={"n": 4, **SAMPLING})
    assert options.num_samples == 4 and options == PolicyOptions(sampling_params=SAMPLING, num_samples=4)
    assert options.sampling.num_samples == 4 and options.writes_in_place is False
    assert options.replace(sampling_params=SAMPLING).num_samples is None
    with refused(InvalidRequestError, field="num_samples"):
        PolicyOptions(sampling_params={"n": 4}, num_samples=2)


def test_something_else_than_options_is_refused(backend):
    with refused(InvalidRequestError, field="options"):
        LLMPolicy(backend, {"input_mode": "text"})


def test_an_unknown_option_is_refused_with_those_that_exist(backend):
    with pytest.raises(TypeError, match=r"no option 'input_modes'.*input_mode"):
        LLMPolicy(backend, input_modes="text")
