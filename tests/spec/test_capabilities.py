"""Capabilities: what a plugin declares, and mistakes in it."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest

from corelm.errors import InvalidRequestError
from corelm.spec import Capabilities


def declare(**given: Any) -> Capabilities:
    return Capabilities(**{"vocab_size": 7, "max_context": None, **given})


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("sampling", {"top_k": None, "temprature": (0.0, 2.0)}, "no field 'temprature'; did you mean 'temperature'"),
        ("sampling", {"topk": None}, "no field 'topk'; did you mean 'top_k'"),
        ("sampling", {"max_new_tokens": None}, "leave out 'max_new_tokens'"),
        ("sampling", {"seed": None}, "leave out 'seed'"),
        ("sampling", ["top_k"], "expected a mapping"),
        ("sampling", None, "expected a mapping"),
        ("sampling", {"temperature": 2.0}, "temperature: expected None or a pair"),
        ("sampling", {"temperature": (2.0, 0.0)}, "temperature: expected None or a pair"),
        ("sampling", {"temperature": (float("nan"), 2.0)}, "temperature: expected None or a pair"),
        ("sampling", {"temperature": ("0", "2")}, "temperature: expected None or a pair"),
        ("sampling", {"stop": (0, 4)}, "stop: expected None, got"),
        ("sampling", {"length_penalty": None}, "declare num_beams"),
        ("generation_modes", {"raww"}, "unknown mode 'raww'; did you mean 'raw'"),
        ("generation_modes", {"logits"}, "unknown mode 'logits'; known modes: 'raw', 'processed', 'scaled'"),
        ("generation_modes", "raw", "expected a set"),
        ("generation_modes", None, "expected a set"),
        ("vocab_size", 0, "from 1 to"),
        ("vocab_size", 7.5, "from 1 to"),
        ("vocab_size", True, "from 1 to"),
        ("vocab_size", None, "from 1 to"),
        ("max_context", 10**30, "from 1 to 2147483647, got 1000.*; None means"),
        ("max_context", 0, "from 1 to"),
        ("max_context", "512", "from 1 to"),
        ("eos_token_ids", 2, "expected a set of token ids"),
        ("eos_token_ids", {7}, "expected ids from 0 to 6, got 7"),
        ("eos_token_ids", {"</s>"}, "expected ids from 0 to 6"),
        ("score", 1, "expected True or False"),
        ("abort", None, "expected True or False"),
        ("logits", True, "declare score=True"),
        ("score_temperature", True, "declare score=True"),
        ("gradients", True, "declare score=True"),
        ("seeds_are_costly", True, "declare per_answer_seeds=True"),
    ],
)
def test_a_mistake_is_refused_when_the_capabilities_are_made(field: str, value: Any, says: str):
    with pytest.raises(InvalidRequestError, match=says) as caught:
        declare(**{field: value})
    assert caught.value.field == field


def test_collections_of_other_types_become_the_declared_ones():
    made = declare(eos_token_ids=[2, 2], generation_modes=["raw"], sampling={"temperature": [0, 2]})
    assert made == declare(eos_token_ids=frozenset({2}), generation_modes=frozenset({"raw"}), sampling=made.sampling)
    assert made.sampling == {"temperature": (0, 2)} and made.eos_token_ids == frozenset({2})


def test_the_values_cannot_change_later():
    sampling = {"top_k": None}
    made = declare(sampling=sampling)
    sampling["top_p"] = None
    assert set(made.sampling) == {"top_k"}
    with pytest.raises(TypeError):
        made.sampling["top_p"] = None  # type: ignore[index]


def test_capabilities_can_be_copied_changed_and_sent_to_another_process():
    made = declare(sampling={"top_k": (1, 5)}, score=True)
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == replace(made) == made
    assert replace(made, sampling={**made.sampling, "top_p": None}).sampling == {"top_k": (1, 5), "top_p": None}
