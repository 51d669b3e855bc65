"""Values of any kind, in `SamplingParams`, `Message` and prompts: each is either legal or refused by name."""

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
