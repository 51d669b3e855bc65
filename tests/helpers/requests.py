"""Requests as an engine gets them, of which a test says only what it is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from corelm import Ragged, SamplingParams
from corelm.spec import GenerateRequest, ScoreRequest

GENERATION = {field.name for field in fields(GenerateRequest)}


def generation(prompts: Sequence[list[int]] = ([5],), logprobs: str = "raw", **given: Any) -> GenerateRequest:
    """Return a request with these fields, and with these sampling parameters."""
    sampling = SamplingParams(**{name: value for name, value in given.items() if name not in GENERATION})
    known = {
        "seeds": None,
        "stop_ids": frozenset(),
        "request_ids": tuple(map(str, range(len(prompts)))),
        "timeout": None,
    }
    own = {name: value for name, value in given.items() if name in GENERATION}
    return GenerateRequest(
        **{"prompts": Ragged.from_list([*prompts]), "sampling": sampling, "logprobs": logprobs, **known, **own}
    )


def scoring(rows: Sequence[list[int]], score_from: Sequence[int] | None = None, **given: Any) -> ScoreRequest:
    """Return a request to score rows from these positions on, with these fields."""
    known = {"temperature": 1.0, "return_logits": False, "grad": False, "device": None, "timeout": None}
    starts = torch.tensor(score_from or [1] * len(rows))
    own = {
        "sequences": Ragged.from_list([*rows]),
        "score_from": starts,
        "request_ids": tuple(map(str, range(len(rows)))),
    }
    return ScoreRequest(**{**own, **known, **given})
