"""Core refuses arguments of a wrong type, and objects whose methods fail, with an error that names the argument."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from corelm import Backend, DynamicBatcher
from corelm.errors import EngineError, InvalidRequestError
from corelm.spec.message import Message
from helpers.fakes import SHORT, Fake, fake


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


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda b: b.generate([[1]], SHORT, logprobs=Unprintable()), "logprobs: expected "),
        (lambda b: b.generate(Unprintable(), SHORT), "prompts: expected rows of token ids"),
        (lambda b: b.tokenize(Unprintable()), "texts: expected a str or a list of str, got <Unprintable"),
        (lambda b: b.update_weights({}, Unprintable()), "version: expected a str, got <Unprintable"),
        (lambda b: DynamicBatcher(Unprintable()), "backend: expected an opened backend"),
        (lambda b: DynamicBatcher(b, Unprintable()), "limits: expected Limits or None"),
        (lambda b: Backend.from_plugin(Fake(), "fake", retry=Unprintable()), "retry: expected an integer"),
        (
            lambda b: Message.from_dict({"role": "user", "x": Unprintable()}),
            "extra: holds what cannot be copied: Silent",
        ),
        (lambda b: Message.from_dict({Unprintable(): 3}), "role is missing"),
    ],
)
def test_a_value_that_cannot_be_shown_is_refused_by_name(call, says):
    with pytest.raises(InvalidRequestError, match=says):
        call(fake())


def test_a_result_that_cannot_be_shown_is_refused_by_name():
    with pytest.raises(EngineError, match=r"row 0: finish reason <Unprintable .* is not one of"):
        fake(lambda batch: replace(batch, finish_reasons=(Unprintable(),))).generate([[1]], SHORT)


def test_a_mapping_of_texts_is_refused():
    with pytest.raises(InvalidRequestError, match=r"texts: expected a str or a list of str, got \{'12': '34'\}"):
        fake().tokenize({"12": "34"})


def test_truth_values_are_no_positions_and_no_seeds_and_any_integer_is():
    backend = fake()
    for wrong in (True, [True], [torch.tensor(True)], torch.tensor([True]), np.array([True]), torch.tensor(True)):
        with pytest.raises(InvalidRequestError, match="score_from: expected 1 integers"):
            backend.score_logprobs([[1, 2, 3]], score_from=wrong)
        with pytest.raises(InvalidRequestError, match="seeds: expected 1 integers"):
            backend.generate([[1]], SHORT, seeds=wrong)
    for position in (2, np.int64(2), torch.tensor(2), [np.int32(2)], np.array([2])):
        assert backend.score_logprobs([[1, 2, 3]], score_from=position).scored.tolist() == [[False, False, True]]
    with pytest.raises(InvalidRequestError, match="row 0: expected a list of token ids"):
        backend.generate([[3, torch.tensor(True)]], SHORT)
