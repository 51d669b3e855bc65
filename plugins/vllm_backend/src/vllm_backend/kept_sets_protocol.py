"""The ids that a token was drawn from: how requests ask `kept_sets` in vLLM's workers for them, and what comes back."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy

from corelm.spec import GenerateRequest, RowAnswer, SamplingParams
from corelm.validate import invalid
from corelm_engine_kit import RowError

#: The name in vLLM's ``extra_args`` under which a request says how it is truncated.
ARGUMENT = "core_support"
#: The method of vLLM's workers that returns the sets.
TAKE = "core_take_kept_sets"
#: The engine arguments that load `kept_sets`.
PROCESSOR, EXTENSION = "vllm_backend.kept_sets:KeptSets", "vllm_backend.kept_sets.KeptSetsWorker"


#: What the workers remembered of one answer: for each token, the ids that it was drawn from, and the log of their
#: probability before truncation.
RowSets = tuple[list[list[int]], list[float]]


def engine_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine arguments that load `kept_sets`, in addition to what the caller has `given`.

    Raises:
        InvalidRequestError: the caller has given a ``worker_extension_cls``.
    """
    if given.get("worker_extension_cls"):
        raise invalid(
            "worker_extension_cls", "return_support=True needs this argument of vLLM itself; leave one of them out"
        )
    # The last one, so that what others take away is not in the sets.
    processors = [*(given.get("logits_processors") or ()), PROCESSOR]
    return {"logits_processors": processors, "worker_extension_cls": EXTENSION}


def are_loaded(config: Any) -> bool:
    """Return whether an engine with this `VllmConfig` has loaded `kept_sets`."""
    return bool(config.parallel_config.worker_extension_cls == EXTENSION)


def parameters(key: str, sampling: SamplingParams) -> dict[str, Any]:
    """Return the fields of vLLM's `SamplingParams` with which `kept_sets` truncates, and vLLM itself does not."""
    own = {"key": key, "top_k": sampling.top_k or 0, "top_p": sampling.top_p, "min_p": sampling.min_p}
    others = sampling.engine_kwargs.get("extra_args") or {}
    return {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "extra_args": {**others, ARGUMENT: own}}


def new_keys(request: GenerateRequest) -> list[str]:
    """Return a name for the sets of each row; none if they are not wanted."""
    return [uuid.uuid4().hex for _ in request.request_ids] if request.return_support else []


def rows_of(replies: Sequence[Any], count: int) -> list[RowSets]:
    """Return the sets of `count` rows out of the replies of all workers, of which some do not sample."""
    rows: list[RowSets] = [([], [])] * count
    for reply in replies:
        for row, (ids, counts, log_mass) in enumerate((reply or ())[:count]):
            if counts and not rows[row][0]:
                flat, ends = numpy.frombuffer(ids, numpy.int32).tolist(), accumulate(counts, initial=0)
                rows[row] = [flat[start:end] for start, end in pairwise(ends)], list(log_mass)
    return rows


def with_sets(answer: RowAnswer, sets: RowSets) -> RowAnswer:
    """Return the answer with the sets of its tokens. A worker may be a few tokens ahead of what was returned.

    Raises:
        RowError: there are fewer.
    """
    (ids, log_mass), count = sets, len(answer.ids)
    if len(ids) < count:
        raise RowError(f"vLLM's workers remembered the ids of {len(ids)} tokens, but {count} were sampled")
    return replace(answer, kept_ids=ids[:count], kept_log_mass=log_mass[:count])
