"""The ids that truncation had left when a token was drawn: how SGLang is asked for them, and what its replies say.

SGLang calls them the sampling mask. Its sampler copies them from the distribution that it draws from. Two numbers come
with each token: its log-prob before truncation and its log-prob among these ids. Their difference is the log of the
probability that these ids had together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch

from corelm.errors import CapabilityError
from corelm.spec import GenerateRequest, SamplingParams, TopIds
from corelm_engine_kit import RowError, checked_ids, checked_logprobs

#: How much the probability of the ids that top-p has left may be below top_p, by rounding.
_SHORT_OF_TOP_P = 1e-3
#: How much less the log-prob of a token may be after truncation than before, by rounding.
_LOST = 1e-2


@dataclass(frozen=True, slots=True)
class KeptIds:
    """What truncation had left at each token of an answer.

    Attributes:
        ids: the ids.
        log_mass: the log of their probability before truncation.
        logprobs: the log-prob of the token among them.
        top: the most probable of them; None if these were not asked for.
    """

    ids: Sequence[Sequence[int]] = ()
    log_mass: Sequence[float] = ()
    logprobs: Sequence[float] = ()
    top: TopIds | None = None


def wants_truncated(request: GenerateRequest) -> bool:
    """Return whether the log-probs to return are those after truncation."""
    return request.return_support and request.logprobs == "processed"


def kept_fields(request: GenerateRequest) -> dict[str, Any]:
    """Return the fields that ask for the ids that truncation leaves."""
    if not request.return_support:
        return {}
    # Otherwise the server returns the log-prob of the sampled id only.
    every = {"sampling_logprobs_mode": "support"} if request.top_logprobs and wants_truncated(request) else {}
    return {"return_sampling_mask": True, **every}


def top_k_of(sampling: SamplingParams, limit: int, vocab_size: int) -> int:
    """Return the top_k with which the server returns the ids that are left. It needs one of at most `limit`.

    Where the caller gave none, this one cuts nothing off that `kept_ids` would not notice.
    """
    remedy = f"start the server with sampling_mask_max_tokens={vocab_size}"
    top_k = min(sampling.top_k or vocab_size, vocab_size)
    if top_k == 1 and sampling.temperature != 1.0:
        raise CapabilityError(
            "SGLang decodes greedily with top_k=1, and its log-probs may then be those at temperature 1, which do not "
            "tell what the kept id's probability was; give temperature=1, top_k=2, or temperature=0, which needs no "
            "support",
            capability="return_support",
        )
    if sampling.top_k is not None and top_k > limit:
        raise CapabilityError(
            f"the server returns at most {limit} kept ids a token, but top_k is {sampling.top_k}; give a smaller "
            f"top_k, or {remedy}",
            capability="return_support",
        )
    if top_k > limit and sampling.top_p < 1.0 and sampling.min_p > 0.0:
        raise CapabilityError(
            f"the server returns at most {limit} kept ids a token, and with both top_p and min_p SGLang's kernels may "
            f"apply top_p to these alone; give one of them, or {remedy}",
            capability="return_support",
        )
    return min(top_k, limit)


def kept_ids(
    meta: Any, ids: Sequence[int], full: Sequence[float], request: GenerateRequest, *, limit: int, vocab_size: int
) -> KeptIds:
    """Return what truncation had left at the tokens of an answer, unless the server's limit may have cut off more.

    Args:
        meta: the ``meta_info`` of the reply. It may be about more tokens.
        full: their log-probs before truncation.
        limit: the most ids a token that the server returns.
    """
    sampling, every = request.sampling, "sampling_logprobs_mode" in kept_fields(request)
    sets, numbers = (meta.get(f"output_token_sampling_{name}") for name in ("mask", "logprobs"))
    for found in (sets, numbers):
        if not isinstance(found, list) or len(found) < len(ids):
            raise RowError("it does not have output_token_sampling_mask for every token; leave out return_support=True")
    sets, numbers = sets[: len(ids)], numbers[: len(ids)]
    checked_ids([*chain.from_iterable(sets)], vocab_size=vocab_size, limit=sum(map(len, sets)))
    for position, (token, kept) in enumerate(zip(ids, sets, strict=True)):
        if token not in kept or len({*kept}) != len(kept):
            raise RowError(f"the ids that were kept at position {position} have one twice, or lack the sampled {token}")
        if sampling.top_k is None and len(kept) >= limit < vocab_size:
            raise RowError(
                f"truncation kept at least {limit} ids at position {position}, and the server returns no more; give "
                "top_k, or start it with a larger sampling_mask_max_tokens"
            )
    top = None
    if every:
        tables = [checked_logprobs(row, len(kept)) for row, kept in zip(numbers, sets, strict=True)]
        numbers = [row[kept.index(token)] for token, row, kept in zip(ids, tables, sets, strict=True)]
        top = _most_probable(sets, tables, request.top_logprobs)
    logprobs = checked_logprobs(numbers, len(ids))
    masses = [before - after for before, after in zip(full, logprobs, strict=True)]
    for position, mass in enumerate(masses):
        if mass > _LOST:
            raise RowError(
                f"the log-prob at position {position} is {full[position]:.4g} before truncation and "
                f"{logprobs[position]:.4g} after it, but truncation cannot lower it"
            )
        if sampling.min_p == 0.0 and sampling.top_k is None and math.exp(mass) < sampling.top_p - _SHORT_OF_TOP_P:
            raise RowError(
                f"the ids that top_p={sampling.top_p} kept at position {position} had a probability of only "
                f"{math.exp(mass):.4g}"
            )
    return KeptIds(sets, [min(0.0, mass) for mass in masses], logprobs, top)


def _most_probable(sets: Sequence[Sequence[int]], tables: Sequence[Sequence[float]], k: int) -> TopIds:
    """Return the most probable of the ids in each set. The rest of the set is all of the tail."""
    found = [dict(zip(ids, table, strict=True)) for ids, table in zip(sets, tables, strict=True)]
    top = TopIds.of(found, k)
    rest = [torch.tensor([*islice(sorted(table, reverse=True), k, None)]).logsumexp(0) for table in tables]
    return TopIds(top.ids, top.logprobs, torch.stack(rest).clamp(max=0.0) if rest else top.tail)
