"""Capabilities: what a plugin declares, and mistakes in it."""

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


NAN = float("nan")
#: Field → values that it does not take.
MISTAKES: dict[str, list[Any]] = {
    "sampling": [
        *({"top_k": None, "temprature": (0.0, 2.0)}, {"topk": None}, {"max_new_tokens": None}, {"seed": None}),
        *({"temperature": limits} for limits in (2.0, (2.0, 0.0), (NAN, 2.0), ("0", "2"))),
        *({"stop": (0, 4)}, {"length_penalty": None}, ["top_k"], None),
    ],
    "generation_modes": [{"raww"}, {"logits"}, "raw", None],
    "vocab_size": [0, 7.5, True, None],
    "max_context": [10**30, 0, "512"],
    "eos_token_ids": [2, {7}, {"</s>"}],
    "score": [1],
    "abort": [None],
    # Without what each of them needs.
    **{name: [True] for name in ("logits", "score_temperature", "gradients", "seeds_are_costly")},
}


@each("field, value", [(field, value) for field, values in MISTAKES.items() for value in values])
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
