"""The most probable ids: how many candidates to ask vLLM for, and `TopIds` from the candidates that it returns.

vLLM returns the k most probable ids of a position, and the token of that position in addition. Where fewer than k ids
have a probability, it fills up with other ids, at minus infinity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from corelm.spec import GenerateRequest, RowScores, ScoreRequest, TopIds
from corelm_engine_kit import RowError, checked_argmax, checked_top_ids

#: What stands before an id where a server labels a token with it.
LABEL = "token_id:"
#: The most ids that callers may ask for.
MOST_IDS = 1024
#: The most candidates that an engine allows which this plugin opens; see `wanted`.
MOST_CANDIDATES = MOST_IDS + 1
#: At and below this, a log-prob over HTTP stands for minus infinity, which JSON cannot hold.
_INFINITE = -9999.0
#: How much more probable, in nats, a token may be than the id that was named as the most probable one.
_SAME = 2.0**-7
#: How far below 1 the probabilities of all ids that have one may add up.
_ROUNDED = 1e-2


def limit(max_logprobs: int, vocab_size: int) -> int:
    """Return the most candidates of an engine with this ``max_logprobs``, where -1 means no limit."""
    return vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)


def wanted(request: GenerateRequest, most: int) -> int:
    """Return how many candidates to ask for at each sampled token."""
    certain = request.logprobs == "processed" and request.sampling.greedy
    # Each token had probability 1 then. vLLM returns its log-prob at temperature 1.
    return 0 if certain else sampled(request.top_logprobs, most)


def sampled(k: int, most: int) -> int:
    """Return how many candidates to ask for at a sampled token, for the `k` most probable ids.

    One more shows whether truncation has left any probability to the others, which could not be told from rounding, and
    whether vLLM has returned the token alone.
    """
    return min(k + 1, most) if k else 0


def of_scores(request: ScoreRequest) -> int:
    """Return how many candidates to ask for at each scored position."""
    return request.top_k or int(request.return_argmax)


def top_of_answer(
    request: GenerateRequest, ids: Sequence[int], candidates: tuple[Tensor, Tensor] | None, vocab_size: int
) -> TopIds | None:
    """Return the most probable ids at the sampled tokens `ids`; None if they were not asked for.

    Args:
        candidates: what `flat_candidates` or `named_candidates` returned; None if each token was certain.
    """
    k = request.top_logprobs
    if k == 0:
        return None
    if candidates is not None:
        return checked_top_ids(*candidates, k, vocab_size)
    top = TopIds.nothing(len(ids), k)
    top.ids[:, 0] = torch.tensor(list(ids), dtype=torch.int64)
    top.logprobs[:, 1:], top.tail[:] = -torch.inf, -torch.inf
    return top


def with_top(
    logprobs: Sequence[float],
    ids: Sequence[int],
    candidates: Sequence[tuple[Tensor, Tensor]],
    request: ScoreRequest,
    vocab_size: int,
) -> RowScores:
    """Return the scores of a row, with the most probable ids if these were asked for.

    Args:
        ids: the row's own ids at these positions.
        candidates: of these positions in order, as `flat_candidates` or `named_candidates` returned them.

    Raises:
        RowError: the candidates are not what `checked_top_ids` takes, or contradict the log-probs.
    """
    count = of_scores(request)
    if not count:
        return RowScores(logprobs)
    best, values = (torch.cat([part[:, :count] for part in parts]) for parts in zip(*candidates, strict=True))
    top = checked_top_ids(best, values, count, vocab_size)
    argmax = checked_argmax(top.ids[:, 0].tolist(), values[:, 0].tolist(), ids, logprobs)
    return RowScores(logprobs, argmax if request.return_argmax else (), top if request.top_k else None)


def flat_candidates(flat: Any, first: int, end: int, count: int) -> tuple[Tensor, Tensor]:
    """Return ids and log-probs of the `count` candidates at each position from `first` to the one before `end`.

    Args:
        flat: vLLM's `FlatLogprobs`, whose first candidate at each position is the token itself.

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

    Raises:
        RowError: a position has fewer.
    """
    if any(len(found) < count for found in positions):
        raise _missing(count)
    best = [sorted(found.items(), key=lambda pair: -pair[1])[:count] for found in positions]
    ids = torch.tensor([[token for token, _ in row] for row in best], dtype=torch.int64).view(-1, count)
    logprobs = torch.tensor([[value for _, value in row] for row in best], dtype=torch.float64).view(-1, count)
    logprobs = logprobs.masked_fill(logprobs <= _INFINITE, -torch.inf)
    if bool(((logprobs == -torch.inf).any(1) & (logprobs.exp().sum(1) < 1 - _ROUNDED)).any()):
        # vLLM fills up with such ids also where it leaves out others that do have a probability.
        raise _missing(count)
    return ids, logprobs


def answer_top(
    choice: Mapping[str, Any], request: GenerateRequest, ids: Sequence[int], count: int, vocab_size: int
) -> TopIds | None:
    """Return the most probable ids at the first tokens of an answer; None if they were not asked for.

    Raises:
        RowError: the choice does not have them.
    """
    candidates = None
    if count:
        candidates = named_candidates(by_label(choice, len(ids)), count)
    return top_of_answer(request, ids, candidates, vocab_size)


def labels(ids: Sequence[int]) -> list[str]:
    """Return how a server labels tokens with these ids."""
    return [f"{LABEL}{token}" for token in ids]


def by_label(choice: Mapping[str, Any], count: int) -> list[Mapping[int, Any]]:
    """Return the log-probs by id at the first `count` sampled tokens of a choice.

    Raises:
        RowError: the choice does not have them.
    """
    positions = (choice.get("logprobs") or {}).get("top_logprobs")
    if not isinstance(positions, list) or len(positions) < count:
        raise RowError("it does not have the most probable ids of every token (top_logprobs)")
    return [{int(name.removeprefix(LABEL)): value for name, value in found.items()} for found in positions[:count]]


def by_id(positions: Sequence[Mapping[str, Any]]) -> list[Mapping[int, Any]]:
    """Return the log-probs by id at positions of a prompt, from a server's ``prompt_logprobs``.

    Raises:
        RowError: the most probable id of a position does not have the rank 1, since others were left out.
    """
    for found in positions:
        if max(found.values(), key=lambda each: each["logprob"]).get("rank") != 1:
            raise RowError("its prompt_logprobs lack the most probable ids; leave out return_argmax=True and top_k")
    return [{int(name): each["logprob"] for name, each in found.items()} for found in positions]


def _missing(count: int) -> RowError:
    return RowError(
        f"vLLM did not return the {count} most probable ids of every token; its V1 model runner leaves them out in a "
        "step with a request of another client that has logprob_token_ids"
    )
