"""The most probable ids: how many candidates to ask vLLM for, and `TopIds` from the candidates that it returns.

vLLM returns the k most probable ids of a position, and the token of that position in addition. Where fewer than k ids
have a probability, it fills up with other ids, at minus infinity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from corelm.spec import GenerateRequest, TopIds, log_tail_mass
from corelm_engine_kit import RowError

#: The most ids that callers may ask for.
MOST_IDS = 1024
#: The most candidates that an engine allows which this plugin opens; see `wanted`.
MOST_CANDIDATES = MOST_IDS + 1
#: At and below this, a log-prob over HTTP stands for minus infinity, which JSON cannot hold.
_INFINITE = -9999.0
#: How much more probable, in nats, a token may be than the id that was named as the most probable one.
_SAME = 2.0**-7


def limit(max_logprobs: int, vocab_size: int) -> int:
    """Return the most candidates of an engine with this ``max_logprobs``, where -1 means no limit."""
    return vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)


def wanted(request: GenerateRequest, most: int) -> int:
    """Return how many candidates to ask for at each sampled token.

    Args:
        request: the request.
        most: the most that vLLM returns.
    """
    sampling, k = request.sampling, request.top_logprobs
    if k == 0 or _certain(request):
        return 0
    # One more shows whether truncation has left any probability to the others. It could not be told from rounding.
    return min(k + (request.logprobs == "processed" and sampling.truncates_support), most)


def top_of_answer(
    request: GenerateRequest, ids: Sequence[int], candidates: tuple[Tensor, Tensor] | None, vocab_size: int
) -> TopIds | None:
    """Return the most probable ids at the sampled tokens `ids`; None if they were not asked for.

    Args:
        request: the request.
        ids: the tokens.
        candidates: what `flat_candidates` or `named_candidates` returned; None if each token was certain.
        vocab_size: ids are below it.
    """
    k = request.top_logprobs
    if k == 0:
        return None
    if candidates is not None:
        return top_ids(*candidates, k, vocab_size)
    top = TopIds.nothing(len(ids), k)
    top.ids[:, 0] = torch.tensor(list(ids), dtype=torch.int64)
    top.logprobs[:, 1:], top.tail[:] = -torch.inf, -torch.inf
    return top


def top_ids(ids: Tensor, logprobs: Tensor, k: int, vocab_size: int) -> TopIds:
    """Return the `k` most probable ids out of at least as many candidates for each position.

    Args:
        ids: int64[positions, candidates], the most probable first.
        logprobs: float64[positions, candidates].
        k: how many to return.
        vocab_size: ids are below it.

    Raises:
        RowError: the candidates are not ids with log-probs, most probable first.
    """
    # Keep the `not`: NaN fails every comparison and must be rejected.
    if not bool((logprobs.diff(dim=1) <= 0).logical_or(logprobs[:, 1:] == -torch.inf).all()) or not bool(
        ((logprobs[:, :1] > -torch.inf) & (logprobs[:, :1] <= _SAME)).all()
    ):
        raise RowError("the log-probs of its most probable ids are not log-probs, or not in order")
    nothing = logprobs == -torch.inf
    if not bool(((ids >= 0) & (ids < vocab_size)).logical_or(nothing).all()):
        raise RowError(f"one of its most probable ids is outside the vocabulary, which has {vocab_size} ids")
    tail = log_tail_mass(logprobs[:, :k])
    tail[nothing.any(dim=1)] = -torch.inf
    if k == vocab_size:
        tail[:] = -torch.inf
    return TopIds(ids.masked_fill(nothing, -1)[:, :k], logprobs[:, :k].float(), tail)


def flat_candidates(flat: Any, first: int, end: int, count: int) -> tuple[Tensor, Tensor]:
    """Return ids and log-probs of the `count` candidates at each position from `first` to the one before `end`.

    Args:
        flat: vLLM's `FlatLogprobs`, whose first candidate at each position is the token itself.
        first: a position.
        end: a position.
        count: how many candidates were asked for.

    Raises:
        RowError: vLLM returned fewer, or none is as probable as the token.
    """
    if first == end:
        return torch.zeros(0, count, dtype=torch.int64), torch.zeros(0, count, dtype=torch.float64)
    starts, ends = flat.start_indices[first:end], flat.end_indices[first:end]
    if any(stop - start != count + 1 for start, stop in zip(starts, ends, strict=True)):
        raise _missing(count)
    part = slice(starts[0], ends[-1])
    ids = torch.tensor(flat.token_ids[part], dtype=torch.int64).view(-1, count + 1)
    logprobs = torch.tensor(flat.logprobs[part], dtype=torch.float64).view(-1, count + 1)
    if bool((logprobs[:, 0] > logprobs[:, 1] + _SAME).any()):
        raise _missing(count)
    return ids[:, 1:], logprobs[:, 1:]


def named_candidates(positions: Sequence[Mapping[int, Any]], count: int) -> tuple[Tensor, Tensor]:
    """Return ids and log-probs of the `count` most probable candidates at each position.

    Args:
        positions: the log-probs by id; the token itself may be one more than `count`.
        count: how many candidates were asked for.

    Raises:
        RowError: a position has fewer.
    """
    if any(len(found) < count for found in positions):
        raise _missing(count)
    best = [sorted(found.items(), key=lambda pair: -pair[1])[:count] for found in positions]
    ids = torch.tensor([[token for token, _ in row] for row in best], dtype=torch.int64).view(-1, count)
    logprobs = torch.tensor([[value for _, value in row] for row in best], dtype=torch.float64).view(-1, count)
    return ids, logprobs.masked_fill(logprobs <= _INFINITE, -torch.inf)


def _certain(request: GenerateRequest) -> bool:
    """Return whether each token was sampled with probability 1: vLLM returns its log-prob at temperature 1."""
    return request.logprobs == "processed" and request.sampling.greedy


def _missing(count: int) -> RowError:
    return RowError(
        f"vLLM did not return the {count} most probable ids of every token. It leaves them out where it scores another "
        "row by id in the same step; do not score rows while answers with top_logprobs are generated"
    )
