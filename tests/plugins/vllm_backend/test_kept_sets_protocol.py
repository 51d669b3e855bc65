"""Kept ids: what vLLM's workers are told, what comes back from them."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from corelm import SamplingParams
from corelm.errors import InvalidRequestError
from corelm.spec import RowAnswer
from corelm_engine_kit import RowError
from helpers.each import case
from vllm_backend import VLLMBackend
from vllm_backend.kept_sets_protocol import EXTENSION, PROCESSOR, engine_arguments, parameters, rows_of, with_sets


def reply(*sets: list[int]) -> Any:
    """What a worker says of one row, each of whose sets has the mass ``-len(set)``."""
    flat = numpy.array([token for kept in sets for token in kept], dtype=numpy.int32)
    return [flat.tobytes(), [len(kept) for kept in sets], [-float(len(kept)) for kept in sets]]


def test_vllm_is_told_not_to_truncate_and_the_workers_are() -> None:
    sampling = SamplingParams(top_k=5, top_p=0.9, engine_kwargs={"extra_args": {"mine": 1}})
    assert parameters("a-key", sampling) == {
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "extra_args": {"mine": 1, "core_support": {"key": "a-key", "top_k": 5, "top_p": 0.9, "min_p": 0.0}},
    }
    assert parameters("a-key", SamplingParams())["extra_args"]["core_support"]["top_k"] == 0


def test_the_processor_is_the_last_one_and_a_workers_extension_of_the_callers_is_refused() -> None:
    found = engine_arguments({"logits_processors": ["a:B"]})
    assert found == {"logits_processors": ["a:B", PROCESSOR], "worker_extension_cls": EXTENSION}
    with pytest.raises(InvalidRequestError):
        engine_arguments({"worker_extension_cls": "a.B"})


def test_the_option_is_true_or_false_and_belongs_to_an_engine_in_this_process() -> None:
    for options in [{"return_support": 1}, {"return_support": True, "base_url": "http://localhost:1"}]:
        with case(options), pytest.raises(InvalidRequestError):
            VLLMBackend.open(None if "base_url" in options else "a-model", **options)


def test_rows_come_from_the_worker_that_samples() -> None:
    nothing = [reply(), reply()]
    rows = rows_of([nothing, [reply([1, 2], [3]), reply()], None, [reply([7]), reply([4, 5])]], 2)
    assert rows == [([[1, 2], [3]], [-2.0, -1.0]), ([[4, 5]], [-2.0])]
    # What was asked for in addition, to have it forgotten, belongs to no row.
    assert len(rows_of([[reply([1]), reply([2])]], 1)) == 1


def test_a_worker_may_be_ahead_of_the_answer_but_not_behind() -> None:
    (sets,) = rows_of([[reply([1, 2], [3])]], 1)
    first = with_sets(RowAnswer([1], [], "stop"), sets)
    assert first.kept_ids == [[1, 2]] and first.kept_log_mass == [-2.0]
    with pytest.raises(RowError, match="remembered the ids of 2 tokens, but 3 were sampled"):
        with_sets(RowAnswer([1, 3, 3], [], "stop"), sets)
