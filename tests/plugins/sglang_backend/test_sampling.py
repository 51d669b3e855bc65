"""Sampling parameters as the server is given them, and what is refused because it would do something else."""

from __future__ import annotations

from typing import Any

import pytest

from corelm import SamplingParams
from corelm.errors import CapabilityError, InvalidRequestError
from sglang_backend.sampling import parameters

EOS = frozenset({2})


def sent(stop_ids: frozenset[int] = EOS, **sampling: Any) -> dict[str, Any]:
    return parameters(
        SamplingParams(**sampling), max_new_tokens=9, seed=None, stop_ids=stop_ids, eos_token_ids=EOS, vocab_size=512
    )


def test_defaults_are_said_since_a_server_may_have_others():
    assert sent() == {
        "n": 1,
        "max_new_tokens": 9,
        "min_new_tokens": 0,
        "temperature": 1.0,
        "top_k": -1,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": [],
        "stop_token_ids": [2],
        "ignore_eos": False,
        "skip_special_tokens": True,
    }


def test_what_is_asked_for_is_sent():
    found = sent(top_p=0.9, min_p=0.1, temperature=0.7, presence_penalty=1.0, frequency_penalty=-1.0, stop=("a", "b"))
    assert {name: found[name] for name in ("top_p", "min_p", "temperature")} == {
        "top_p": 0.9,
        "min_p": 0.1,
        "temperature": 0.7,
    }
    assert (found["presence_penalty"], found["frequency_penalty"], found["stop"]) == (1.0, -1.0, ["a", "b"])


def test_a_seed_is_sent_where_there_is_one():
    made = parameters(SamplingParams(), max_new_tokens=9, seed=2**62, stop_ids=EOS, eos_token_ids=EOS, vocab_size=512)
    assert made["sampling_seed"] == 2**62
    assert "sampling_seed" not in sent()


def test_a_number_that_the_scheduler_cannot_hold_is_as_large_as_it_matters():
    assert sent(top_k=2**40)["top_k"] == 512
    assert sent(top_k=7)["top_k"] == 7
    assert sent(min_new_tokens=2**40, max_new_tokens=None)["min_new_tokens"] == 9


def test_greedy_decoding_cuts_nothing_off():
    found = sent(temperature=0.0, top_k=5, top_p=0.5, min_p=0.5)
    assert (found["temperature"], found["top_k"], found["top_p"], found["min_p"]) == (0.0, -1, 1.0, 0.0)


@pytest.mark.parametrize(
    ("stop_ids", "ignored", "ids"),
    [
        (frozenset({2}), False, [2]),
        (frozenset({2, 7}), False, [2, 7]),
        # The server would end these at its EOS, or at none of them.
        (frozenset({7}), True, []),
        (frozenset(), True, []),
    ],
)
def test_the_server_ends_an_answer_by_id_where_it_ends_the_right_ones(stop_ids, ignored, ids):
    found = sent(stop_ids)
    assert (found["ignore_eos"], found["stop_token_ids"]) == (ignored, ids)


def test_the_server_looks_for_no_stop_string_that_it_would_find_too_early():
    assert sent(stop=("a",), min_new_tokens=3)["stop"] == []
    assert len(sent(stop=tuple(map(str, range(99))))["stop"]) == 32


def test_no_least_length_is_said_where_no_id_ends_an_answer():
    assert sent(frozenset(), min_new_tokens=3)["min_new_tokens"] == 0
    assert sent(min_new_tokens=3)["min_new_tokens"] == 3


@pytest.mark.parametrize(
    ("stop_ids", "sampling", "capability"),
    [
        (EOS, {"top_k": 5, "top_p": 0.9}, "top_p"),
        (frozenset({7}), {"min_new_tokens": 2}, "min_new_tokens"),
    ],
)
def test_what_would_be_another_distribution_is_refused(stop_ids, sampling, capability):
    with pytest.raises(CapabilityError) as caught:
        sent(stop_ids, **sampling)
    assert caught.value.capability == capability


def test_a_temperature_that_would_be_taken_for_0_is_refused():
    assert sent(temperature=1e-6)["temperature"] == 1e-6
    with pytest.raises(InvalidRequestError) as caught:
        sent(temperature=1e-7)
    assert caught.value.field == "temperature"


def test_the_engines_own_arguments_are_passed_on():
    assert sent(engine_kwargs={"regex": "[ab]*"})["regex"] == "[ab]*"


@pytest.mark.parametrize("name", ["temperature", "n", "max_tokens", "sampling_seed", "stop_regex", "beam_width"])
def test_what_is_settled_already_is_refused(name):
    with pytest.raises(InvalidRequestError) as caught:
        sent(engine_kwargs={name: 1})
    assert caught.value.field == "engine_kwargs"
