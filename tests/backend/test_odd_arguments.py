"""Core refuses arguments of a wrong type, and objects whose methods fail, with an error that names the argument."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from corelm import Backend, DynamicBatcher
from corelm.errors import EngineError, InvalidRequestError
from corelm.spec.message import Message
from helpers.cases import each
from helpers.fakes import SHORT, Fake, fake
from helpers.refusals import refused


class Unprintable:
    def __repr__(self):
        raise ArithmeticError

    def __iter__(self):
        raise Silent

    def __deepcopy__(self, memo):
        raise Silent


class Silent(Exception):
    def __str__(self):
        raise RuntimeError


@each(
    "call, field",
    [
        (lambda b: b.generate([[1]], SHORT, logprobs=Unprintable()), "logprobs"),
        (lambda b: b.generate(Unprintable(), SHORT), "prompts"),
        (lambda b: b.tokenize(Unprintable()), "texts"),
        (lambda b: b.update_weights({}, Unprintable()), "version"),
        (lambda b: DynamicBatcher(Unprintable()), "backend"),
        (lambda b: DynamicBatcher(b, Unprintable()), "limits"),
        (lambda b: Backend.from_plugin(Fake(), "fake", retry=Unprintable()), "retry"),
        (
            lambda b: Message.from_dict({"role": "user", "x": Unprintable()}),
            "extra",
        ),
        (lambda b: Message.from_dict({Unprintable(): 3}), "role"),
    ],
)
def test_a_value_that_cannot_be_shown_is_refused_by_name(call, field):
    with refused(InvalidRequestError, field=field):
        call(fake())


def test_a_result_that_cannot_be_shown_is_refused_by_name():
    with pytest.raises(EngineError, match=r"row 0: finish reason <Unprintable .* is not one of"):
        fake(lambda batch: replace(batch, finish_reasons=(Unprintable(),))).generate([[1]], SHORT)


def test_a_mapping_of_texts_is_refused():
    with refused(InvalidRequestError, field="texts"):
        fake().tokenize({"12": "34"})


def test_truth_values_are_no_positions_and_no_seeds_and_any_integer_is():
    backend = fake()
    for wrong in (True, [True], [torch.tensor(True)], torch.tensor([True]), np.array([True]), torch.tensor(True)):
        with refused(InvalidRequestError, field="score_from"):
            backend.score_logprobs([[1, 2, 3]], score_from=wrong)
        with refused(InvalidRequestError, field="seeds"):
            backend.generate([[1]], SHORT, seeds=wrong)
    for position in (2, np.int64(2), torch.tensor(2), [np.int32(2)], np.array([2])):
        assert backend.score_logprobs([[1, 2, 3]], score_from=position).scored.tolist() == [[False, False, True]]
    with refused(InvalidRequestError, field="prompts", rows=(0,)):
        backend.generate([[3, torch.tensor(True)]], SHORT)
