"""Capabilities: what a plugin declares, and mistakes in it."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest

from corelm.errors import InvalidRequestError
from corelm.spec import Capabilities
from helpers.each import each
from helpers.refusals import refused


def declare(**given: Any) -> Capabilities:
    return Capabilities(**{"vocab_size": 7, "max_context": None, **given})


@each(
    "field, value",
    [
        ("sampling", {"top_k": None, "temprature": (0.0, 2.0)}),
        ("sampling", {"topk": None}),
        ("sampling", {"max_new_tokens": None}),
        ("sampling", {"seed": None}),
        ("sampling", ["top_k"]),
        ("sampling", None),
        ("sampling", {"temperature": 2.0}),
        ("sampling", {"temperature": (2.0, 0.0)}),
        ("sampling", {"temperature": (float("nan"), 2.0)}),
        ("sampling", {"temperature": ("0", "2")}),
        ("sampling", {"stop": (0, 4)}),
        ("sampling", {"length_penalty": None}),
        ("generation_modes", {"raww"}),
        ("generation_modes", {"logits"}),
        ("generation_modes", "raw"),
        ("generation_modes", None),
        ("vocab_size", 0),
        ("vocab_size", 7.5),
        ("vocab_size", True),
        ("vocab_size", None),
        ("max_context", 10**30),
        ("max_context", 0),
        ("max_context", "512"),
        ("eos_token_ids", 2),
        ("eos_token_ids", {7}),
        ("eos_token_ids", {"</s>"}),
        ("score", 1),
        ("abort", None),
        ("logits", True),
        ("score_temperature", True),
        ("gradients", True),
        ("seeds_are_costly", True),
    ],
)
def test_a_mistake_is_refused_when_the_capabilities_are_made(field: str, value: Any):
    with refused(InvalidRequestError, field=field):
        declare(**{field: value})


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
