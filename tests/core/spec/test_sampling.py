"""SamplingParams: names, aliases and validation; and the seeds that core derives."""

import numpy as np
import pytest
import torch

from corelm.backend.arguments import answer_seeds
from corelm.errors import InvalidRequestError
from corelm.spec.sampling import ALIASES, SamplingParams
from helpers.each import each
from helpers.refusals import refused


@each("alias", sorted(ALIASES))
def test_an_alias_sets_the_field_it_stands_for(alias):
    value = {"stop": ["x"], "stop_token_ids": [3], "num_beams": 2, "repetition_penalty": 1.5}.get(ALIASES[alias], 7)
    made = SamplingParams.make({alias: value})
    assert made == SamplingParams.make({ALIASES[alias]: value})
    assert made != SamplingParams()


def test_two_names_for_one_parameter_must_agree():
    assert SamplingParams.make({"n": 2, "num_samples": 2}).num_samples == 2
    with pytest.raises(InvalidRequestError, match="n=2 and num_return_sequences=3") as error:
        SamplingParams.make({"n": 2, "num_return_sequences": 3})
    assert error.value.field == "num_samples"


@each("off", [None, 0, -1])
def test_top_k_none_zero_and_minus_one_keep_all_tokens(off):
    assert SamplingParams(top_k=off).top_k is None


NAN, INF = float("nan"), float("inf")
#: Field → values that it does not take.
ILLEGAL = {
    "temperature": [NAN, INF, -0.1, "hot", True, 1e-31, 1e39],
    "top_p": [0.0, 1.1],
    "top_k": [-2, 1.5],
    "min_p": [-0.1, NAN],
    "repetition_penalty": [0.0, 1e-39, 1e39],
    "frequency_penalty": [-1e39],
    "presence_penalty": [1e39, INF],
    "max_new_tokens": [0, 2.5],
    "min_new_tokens": [-1],
    "num_samples": [0],
    "num_beams": [0],
    "seed": ["lucky"],
    "stop": [[""], [3], 5, [str(number) for number in range(65)]],
    "ignore_eos": ["false"],
    "reasoning_marks": ["<think>"],
    "skip_special_tokens": [None],
    "early_stopping": ["banana"],
    "engine_kwargs": [None],
    "stop_token_ids": [5.0, [-1], ["x"]],
}


@each("field, value", [(field, value) for field, values in ILLEGAL.items() for value in values])
def test_an_illegal_value_is_refused_by_name(field, value):
    with refused(InvalidRequestError, field=field):
        SamplingParams(**{field: value})


def test_a_name_for_something_similar_is_refused_with_what_to_give_instead():
    with refused(InvalidRequestError, field="max_length"):
        SamplingParams.make(max_length=5)
    with refused(InvalidRequestError, field="sampling_params"):
        SamplingParams.make(5)


def test_equal_parameters_are_the_same_dictionary_key():
    first, second = (SamplingParams(stop=["x"], engine_kwargs={"a": [1]}) for _ in range(2))
    assert {first: 1}[second] == 1 and first != SamplingParams(stop=["x"], engine_kwargs={"a": [2]})


def test_limits_must_not_contradict_each_other():
    with refused(InvalidRequestError, field="min_new_tokens"):
        SamplingParams(min_new_tokens=5, max_new_tokens=4)
    with refused(InvalidRequestError, field="num_beams"):
        SamplingParams(length_penalty=2.0)
    with refused(InvalidRequestError, field="num_samples"):
        SamplingParams.make(num_beams=3, num_return_sequences=3)
    assert SamplingParams(num_beams=3, num_samples=1).num_samples == 1
    with refused(InvalidRequestError, field="do_sample"):
        SamplingParams(do_sample=False, temperature=0.5)
    with refused(InvalidRequestError, field="do_sample"):
        SamplingParams(do_sample=True, temperature=0)


def test_do_sample_false_is_greedy_whatever_the_temperature():
    """As in transformers, for what other libraries and configurations hold."""
    assert SamplingParams.make({"do_sample": False, "temperature": 0.8}) == SamplingParams(temperature=0)
    assert SamplingParams.make(do_sample=False, temperature=0.8).greedy


def test_none_in_a_mapping_is_the_default():
    """As in the requests of OpenAI's client, except for the limit, whose None is no limit."""
    given = {"temperature": None, "top_p": None, "n": None, "stop": None, "seed": None, "max_tokens": None}
    assert SamplingParams.make(given) == SamplingParams(max_new_tokens=None)


def test_do_sample_and_temperature_follow_each_other():
    assert SamplingParams(do_sample=False).temperature == 0
    assert SamplingParams(temperature=0).do_sample is False
    assert SamplingParams().do_sample is True
    greedy = SamplingParams(do_sample=False)
    assert SamplingParams.make(greedy, temperature=0.5).do_sample is True
    assert SamplingParams.make(greedy, max_tokens=3) == SamplingParams(do_sample=False, max_new_tokens=3)


def test_engine_parameters_are_those_that_an_engine_must_declare():
    assert SamplingParams(max_new_tokens=3, seed=1, num_samples=2, ignore_eos=True).engine_parameters() == {}
    made = SamplingParams(temperature=0.5, top_k=4, stop="x", engine_kwargs={"a": 1})
    assert made.engine_parameters() == {"temperature": 0.5, "top_k": 4, "stop": ("x",), "engine_kwargs": {"a": 1}}


def test_a_seed_depends_only_on_its_row_and_sample():
    few, many = answer_seeds(7, [4, 9], 2), answer_seeds(7, range(10), 5).reshape(10, 5)
    assert few.reshape(2, 2).tolist() == many[[4, 9], :2].tolist()
    assert not set(answer_seeds(8, range(10), 5).tolist()) & set(many.flatten().tolist())


def test_seeds_are_legal_and_differ_in_their_low_32_bits():
    # torch's CPU generator keeps 32 bits of a seed. 20,000 random 32-bit words hold 0.05 equal pairs on average.
    seeds = answer_seeds(0, range(5000), 4)
    assert seeds.dtype == torch.int64 and bool((seeds >= 0).all())
    assert len({seed & 0xFFFFFFFF for seed in seeds.tolist()}) >= 20_000 - 2
    # Each low bit is a fair coin: 10,000 ± 5 standard deviations of 71.
    ones = torch.stack([(seeds >> bit) & 1 for bit in range(32)]).sum(1)
    assert bool(((ones - 10_000).abs() < 354).all())


def test_one_stop_id_may_be_any_integer_and_no_truth_value():
    for one in (5, np.int64(5), np.array(5), torch.tensor(5)):
        assert SamplingParams(stop_token_ids=one).stop_token_ids == (5,)
    for wrong in (True, np.True_, torch.tensor(True), [torch.tensor(True)], 5.0, "5"):
        with refused(InvalidRequestError, field="stop_token_ids"):
            SamplingParams(stop_token_ids=wrong)
