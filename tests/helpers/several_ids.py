"""An oracle for what is asked of several ids at a position: plain sums in float64 over one row of logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from corelm.spec import ScoreResult


def over_set(logits: Tensor, token: int, ids: Sequence[int], temperature: float = 1.0) -> float:
    """Return the log-prob of `token` among `ids`, all of them if there are none, from logits ``[V]``."""
    scores = (logits.double() / temperature).tolist()
    chosen = list(ids) or range(len(scores))
    largest = max(scores[each] for each in chosen)
    return scores[token] - largest - math.log(math.fsum(math.exp(scores[each] - largest) for each in chosen))


def tail(logits: Tensor, ids: Sequence[int], temperature: float = 1.0) -> float:
    """Return the log of the probability of all ids but these."""
    scores = (logits.double() / temperature).tolist()
    others = [score for token, score in enumerate(scores) if token not in set(ids)]
    if not others:
        return -math.inf
    largest, top = max(others), max(scores)
    mass, total = (math.fsum(math.exp(x - most) for x in some) for some, most in ((others, largest), (scores, top)))
    return largest + math.log(mass) - top - math.log(total)


def check_top(
    out: ScoreResult, row: int, logits: Tensor, temperature: float, *, first: int = 1, atol: float = 1e-5
) -> None:
    """Compare the log-probs of a row's ids, and the tails, with logits ``[positions, V]`` that predict its tokens."""
    assert out.top_ids is not None and out.top_logprobs is not None and out.tail_log_mass is not None
    ids, log_probs, tails = (each.split()[row] for each in (out.top_ids, out.top_logprobs, out.tail_log_mass))
    assert (ids[:first] == -1).all() and not log_probs[:first].any() and not tails[:first].any()
    for place in range(first, len(ids)):
        given = [token for token in ids[place].tolist() if token >= 0]
        wanted = [over_set(logits[place - 1], token, (), temperature) for token in given]
        found = log_probs[place].detach()[ids[place] >= 0]
        torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-7, atol=atol)
        assert (log_probs[place][ids[place] < 0] == -math.inf).all()
        expected = tail(logits[place - 1], given, temperature)
        assert math.isclose(float(tails[place]), expected, rel_tol=1e-7, abs_tol=atol) or expected == tails[place]
