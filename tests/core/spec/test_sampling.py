"""SamplingParams: names, aliases and validation; and the seeds that core derives."""

import dataclasses
import math
import pickle
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corelm.backend.arguments import answer_seeds, rows_of_ids
from corelm.containers.history import History
from corelm.errors import InvalidRequestError
from corelm.spec.message import Message
from corelm.spec.sampling import ALIASES, EVERY_ENGINE, FIELDS, SamplingParams
from helpers.each import each, examples
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


# Values of any kind: each is either legal or refused by name ----------------------------------------------------------


NUMBERS = [10**400, -(10**5000), 10**5000, 2**31, 2**63, 2**70, math.nan, math.inf, -math.inf, 1e308, 5e-324, 3.0, 0.5]
OTHERS = [None, True, False, "", "3", "\ud83d", b"3", 1j, object(), len]
EXACT = [Decimal("0.5"), Decimal("sNaN"), Fraction(1, 3)]
SEQUENCES = [[], [[]], [1, [2]], [10**5000], [math.nan], {}, {1: 2}, {"a": 1}, {3}, range(3), iter([1])]
ARRAYS = [np.float32(0.5), np.int64(3), np.array([1, 2]), np.array(["a"])]
TENSORS = [*map(torch.tensor, (3, 0.5, [1, 2], [[1, 2]], math.nan, 2))]
NO_VALUES = [torch.empty(2, device="meta"), torch.empty((), device="meta"), torch.tensor([[0, 1]]).to_sparse()]
NESTED = torch.nested.nested_tensor([torch.tensor([1]), torch.tensor([1, 2])], layout=torch.jagged)
ODD = [*NUMBERS, *OTHERS, *EXACT, *SEQUENCES, *ARRAYS, *TENSORS, *NO_VALUES, NESTED]
odd = st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers(), max_size=3)
OWN_TYPES = (int, float, bool, tuple, dict, type(None))


def made_or_refused(**values: Any) -> SamplingParams | None:
    try:
        return SamplingParams.make(values)
    except InvalidRequestError as error:
        assert error.field and str(error), "the error names the field"
        assert pickle.loads(pickle.dumps(error)).args == error.args
        return None


@each("name", [*FIELDS, *ALIASES])
def test_every_parameter_takes_or_refuses_every_value(name: str) -> None:
    for value in ODD:
        params = made_or_refused(**{name: value})
        if params is not None:
            found = getattr(params, ALIASES.get(name, name))
            assert type(found) in OWN_TYPES, f"{name}={type(value)} is kept as a {type(found)}"
            assert not isinstance(found, float) or math.isfinite(found)


@given(st.dictionaries(st.sampled_from([*FIELDS, *ALIASES]), odd, max_size=4))
@settings(max_examples=examples(50), deadline=None)
def test_parameters_that_are_legal_survive_every_round_trip(values: dict[str, Any]) -> None:
    params = made_or_refused(**values)
    if params is None:
        return
    assert SamplingParams.make(params) is params
    again = [
        SamplingParams.make(dataclasses.asdict(params)),
        SamplingParams(**{name: getattr(params, name) for name in FIELDS}),
        dataclasses.replace(params),
        # What an engine is asked to honour, and what every engine honours, are all that there is.
        SamplingParams(**params.engine_parameters(), **{name: getattr(params, name) for name in EVERY_ENGINE}),
    ]
    assert all(one == params and hash(one) == hash(params) for one in again)
    assert params.greedy == (params.temperature == 0) == (not params.do_sample)
    if params.seed is not None:
        assert 0 <= int(answer_seeds(params.seed, [0])) < 2**63


def test_values_that_used_to_pass_or_to_raise_something_else() -> None:
    for values, message in (
        ({"temperature": 10**400}, "temperature: expected a finite number of at least 0"),
        ({"temperature": 10**5000}, "temperature: expected a finite number of at least 0, got a value of type int"),
        ({"top_k": torch.tensor([1, 2])}, r"top_k: expected a whole number of at least -1 and at most 2147483647"),
        ({"max_new_tokens": 2**31}, "max_new_tokens: .* at most 2147483647"),
        ({"stop_token_ids": [2**70]}, "stop_token_ids: 1180591620717411303424 is larger than any vocabulary"),
        ({"stop_token_ids": [True]}, "stop_token_ids: expected a sequence of token ids"),
        ({"do_sample": torch.ones(2)}, "do_sample: expected True or False"),
        ({"n": torch.ones(2), "num_samples": 3}, "num_samples: .* are the same parameter"),
        ({"engine_kwargs": {1: 2}}, "engine_kwargs: expected names of parameters as keys, got 1"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            SamplingParams.make(values)
    assert SamplingParams(top_k=torch.tensor(3)).top_k == 3 and SamplingParams(top_k=-1.0).top_k is None


@each("name", [field.name for field in dataclasses.fields(Message)])
def test_a_message_takes_or_refuses_every_value(name: str) -> None:
    for value in ODD:
        try:
            message = Message(**{"role": "user", "content": "Hi", name: value})
        except InvalidRequestError as error:
            assert error.field == name
        else:
            assert message == Message.from_dict(message.to_dict())
            assert message.for_template()["role"] == message.role


@each("ids", [[2**70], [2**31], [10**5000], [-1], [True], [0.5]])
def test_ids_that_no_vocabulary_has_are_refused_by_row(ids: list[Any]) -> None:
    good = {"role": "user", "content": "Hi"}
    with refused(InvalidRequestError, field="history", rows=(1,)) as caught:
        History.from_chats([[good], [good, {"role": "assistant", "content": "x", "token_ids": ids}]])
    assert "message 1" in str(caught.value)


def test_a_message_refuses_values_that_cannot_be_copied_and_names_that_it_has() -> None:
    with refused(InvalidRequestError, field="extra"):
        Message.from_dict({"role": "user", "generator": (one for one in ())})
    with refused(InvalidRequestError, field="extra"):
        Message("user", "Hi", extra={"role": "system"})
    with refused(InvalidRequestError, field="extra"):
        Message.from_dict({"role": "user", 5: 6})


def test_prompts_of_every_kind_are_rows_or_refused() -> None:
    for value in [*ODD, *([one] for one in ODD)]:
        try:
            rows = rows_of_ids(value, "prompts")
        except InvalidRequestError as error:
            assert error.field == "prompts"
        else:
            assert rows.values.dtype == torch.int64 and len(rows.tolist()) == len(rows)


@each("made", [torch.zeros(2, 3, dtype=torch.int64, device="meta"), torch.zeros(2, 3, dtype=torch.int64).to_sparse()])
def test_tensors_without_ordinary_values_are_refused(made: torch.Tensor) -> None:
    with refused(InvalidRequestError, field="prompts"):
        rows_of_ids(made, "prompts")
    rows = [torch.tensor([1]), torch.zeros(3, dtype=torch.int64, device="meta")]
    with refused(InvalidRequestError, field="prompts", rows=(1,)):
        rows_of_ids(rows, "prompts")
