"""Sampling parameters get vLLM's names, and those that vLLM would change are refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from corelm import SamplingParams
from corelm.errors import CapabilityError, InvalidRequestError
from corelm.spec import GenerateRequest
from helpers.each import case
from helpers.requests import generation
from vllm_backend.sampling import HONOURED, check_raw, parameters


def translated(**sampling: Any) -> dict[str, Any]:
    return parameters(SamplingParams(**sampling), frozenset({9, 2}), 12, 5)


def test_defaults_are_included_since_a_server_may_have_different_ones() -> None:
    assert translated() == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_tokens": 0,
        "max_tokens": 12,
        "stop": [],
        "stop_token_ids": [2, 9],
        "ignore_eos": True,
        "skip_special_tokens": True,
        "seed": 5,
    }


def test_values_are_passed_on_unchanged() -> None:
    given = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "stop": ["\n"],
        "skip_special_tokens": False,
    }
    assert translated(**given, min_new_tokens=3).items() >= (given | {"min_tokens": 3}).items()
    assert translated(min_p=0.1, top_k=5)["min_p"] == 0.1
    assert translated(engine_kwargs={"logit_bias": {3: 1.0}})["logit_bias"] == {3: 1.0}
    # JSON has only texts as keys. vLLM in process fails with them.
    assert translated(engine_kwargs={"logit_bias": {"3": 1}})["logit_bias"] == {3: 1.0}


def test_greedy_decoding_has_no_seed() -> None:
    assert translated(temperature=0.0)["seed"] is None


def test_a_temperature_that_vllm_would_raise_is_refused() -> None:
    for temperature in [1e-6, 0.005, 0.00999]:
        with case(temperature):
            with pytest.raises(InvalidRequestError) as caught:
                translated(temperature=temperature)
            assert caught.value.field == "temperature"
            assert translated(temperature=0.01)["temperature"] == 0.01


def test_min_p_and_top_p_together_are_refused() -> None:
    with pytest.raises(CapabilityError) as caught:
        translated(min_p=0.1, top_p=0.9)
    assert caught.value.capability == "min_p"


def test_engine_kwargs_that_repeat_a_parameter_are_refused() -> None:
    for name in ["temperature", "n", "max_tokens", "min_tokens", "seed", "logprobs", "stream"]:
        with case(name):
            with pytest.raises(InvalidRequestError) as caught:
                translated(engine_kwargs={name: 1})
            assert caught.value.field == "engine_kwargs"


def test_ranges_that_are_narrower_than_corelms() -> None:
    spans = {name: span for name, span in HONOURED.items() if span is not None}
    assert spans == {"temperature": (0.0, 2.0), "presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0)}


def test_raw_log_probs_that_a_field_may_change_are_refused() -> None:
    for name in ["structured_outputs", "response_format", "extra_args", "vllm_xargs", "a_new_field"]:
        with case(name):
            for logprobs, refused in (("raw", True), ("processed", False), ("none", False)):
                with pytest.raises(CapabilityError) if refused else nullcontext():
                    check_raw(request(logprobs, {name: {}}))


def test_raw_log_probs_under_fields_that_leave_them_alone() -> None:
    check_raw(request("raw", {"logit_bias": {}, "bad_words": [], "allowed_token_ids": [], "repetition_detection": {}}))
    check_raw(request("raw", {}))


def test_a_malformed_logit_bias_is_refused() -> None:
    for bias in [{"three": 1.0}, {3: "much"}, {3: None}, [3, 1.0], 3]:
        with case(bias):
            with pytest.raises(InvalidRequestError) as caught:
                translated(engine_kwargs={"logit_bias": bias})
            assert caught.value.field == "engine_kwargs"


def request(logprobs: Any, engine_kwargs: dict[str, Any]) -> GenerateRequest:
    return generation(logprobs=logprobs, engine_kwargs=engine_kwargs)
