"""The sampling parameters that the server gets, and those refused because it would change them."""

from __future__ import annotations

from typing import Any

import pytest

from corelm import SamplingParams
from corelm.errors import CapabilityError, InvalidRequestError
from helpers.each import case
from helpers.tiny_models import tiny_tokenizer
from sglang_backend.sampling import parameters, safe_stops

EOS = frozenset({2})


def sent_parameters(stop_ids: frozenset[int] = EOS, seed: int | None = None, **sampling: Any) -> dict[str, Any]:
    params = SamplingParams(**sampling)
    return parameters(
        params,
        max_new_tokens=9,
        seed=seed,
        stop_ids=stop_ids,
        eos_token_ids=EOS,
        vocab_size=512,
        stop=safe_stops(params, tiny_tokenizer()),
    )


def test_defaults_are_sent_explicitly():
    assert sent_parameters() == {
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


def test_values_are_passed_on():
    found = sent_parameters(
        top_p=0.9, min_p=0.1, temperature=0.7, presence_penalty=1.0, frequency_penalty=-1.0, stop=("\n", "0")
    )
    assert {name: found[name] for name in ("top_p", "min_p", "temperature")} == {
        "top_p": 0.9,
        "min_p": 0.1,
        "temperature": 0.7,
    }
    assert (found["presence_penalty"], found["frequency_penalty"], found["stop"]) == (1.0, -1.0, ["\n", "0"])


def test_a_seed_is_sent_only_if_given():
    made = parameters(
        SamplingParams(), max_new_tokens=9, seed=2**62, stop_ids=EOS, eos_token_ids=EOS, vocab_size=512, stop=()
    )
    assert made["sampling_seed"] == 2**62
    assert "sampling_seed" not in sent_parameters()


def test_numbers_too_large_for_the_scheduler_are_clamped():
    assert sent_parameters(top_k=2**31 - 1)["top_k"] == 512
    assert sent_parameters(top_k=7)["top_k"] == 7
    assert sent_parameters(min_new_tokens=2**31 - 1, max_new_tokens=None)["min_new_tokens"] == 9


def test_a_seeded_row_asks_for_the_whole_vocabulary_so_that_it_is_always_drawn_in_the_same_order() -> None:
    assert sent_parameters(seed=3)["top_k"] == 512
    assert sent_parameters(seed=3, top_k=7)["top_k"] == 7
    assert sent_parameters()["top_k"] == -1


def test_greedy_decoding_sends_no_truncation():
    found = sent_parameters(temperature=0.0, top_k=5, top_p=0.5, min_p=0.5)
    assert (found["temperature"], found["top_k"], found["top_p"], found["min_p"]) == (0.0, -1, 1.0, 0.0)


def test_the_server_looks_for_stop_ids_only_if_eos_is_one_of_them():
    for stop_ids, ignored, ids in [
        (frozenset({2}), False, [2]),
        (frozenset({2, 7}), False, [2, 7]),
        # EOS does not end these answers, so the server may not look for it.
        (frozenset({7}), True, []),
        (frozenset(), True, []),
    ]:
        with case(stop_ids, ignored, ids):
            found = sent_parameters(stop_ids)
            assert (found["ignore_eos"], found["stop_token_ids"]) == (ignored, ids)


def test_stop_strings_are_held_back_or_limited_where_the_server_requires_it():
    assert sent_parameters(stop=("\n",), min_new_tokens=3)["stop"] == []
    assert len(sent_parameters(stop=tuple(map(str, range(64))))["stop"]) == 32


def test_a_stop_string_that_may_share_characters_with_a_special_token_is_not_sent():
    """SGLang would find it in a text that shows special tokens."""
    for stop in ["im_end", "<", ">", "e", "\n<|im", "|>\n", "<|im_end|>", "a<|im_end|>b"]:
        with case(stop):
            assert "<|im_end|>" in tiny_tokenizer().all_special_tokens
            assert sent_parameters(stop=(stop, "\n\n"))["stop"] == ["\n\n"]
            assert sent_parameters(stop=(stop, "\n\n"), skip_special_tokens=False)["stop"] == [stop, "\n\n"]


def test_min_new_tokens_is_sent_only_if_an_id_ends_the_answer():
    assert sent_parameters(frozenset(), min_new_tokens=3)["min_new_tokens"] == 0
    assert sent_parameters(min_new_tokens=3)["min_new_tokens"] == 3


def test_parameters_that_would_give_another_distribution_are_refused():
    for stop_ids, sampling, capability in [
        (EOS, {"top_k": 5, "top_p": 0.9}, "top_p"),
        (frozenset({7}), {"min_new_tokens": 2}, "min_new_tokens"),
    ]:
        with case(stop_ids, sampling, capability):
            with pytest.raises(CapabilityError) as caught:
                sent_parameters(stop_ids, **sampling)
            assert caught.value.capability == capability


def test_a_temperature_that_would_become_greedy_is_refused():
    assert sent_parameters(temperature=1e-6)["temperature"] == 1e-6
    with pytest.raises(InvalidRequestError) as caught:
        sent_parameters(temperature=1e-7)
    assert caught.value.field == "temperature"


def test_engine_kwargs_are_passed_on():
    assert sent_parameters(engine_kwargs={"regex": "[ab]*"})["regex"] == "[ab]*"


def test_engine_kwargs_that_corelm_sets_are_refused():
    for name in ["temperature", "n", "max_tokens", "sampling_seed", "stop_regex", "beam_width"]:
        with case(name):
            with pytest.raises(InvalidRequestError) as caught:
                sent_parameters(engine_kwargs={name: 1})
            assert caught.value.field == "engine_kwargs"
