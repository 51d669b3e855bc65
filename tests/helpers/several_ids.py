"""An oracle for what is asked of several ids at a position: plain sums in float64 over one row of logits."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from corelm.spec import ScoreResult


def over_set(logits: Tensor, token: int, ids: Sequence[int], temperature: float = 1.0) -> float:
    """Return the log-prob of `token` among `ids`, all of them if there are none, from logits ``[V]``."""
    scores = logits.double() / temperature
    return float(scores[token] - (scores[list(ids)] if ids else scores).logsumexp(0))


def check_top(
    out: ScoreResult, row: int, logits: Tensor, temperature: float, *, first: int = 1, atol: float = 1e-5
) -> None:
    """Compare the log-probs of a row's ids, and the tails, with logits ``[positions, V]`` that predict its tokens."""
    assert out.top_ids is not None and out.top_logprobs is not None and out.tail_log_mass is not None
    ids, log_probs, tails = (each.split()[row].detach() for each in (out.top_ids, out.top_logprobs, out.tail_log_mass))
    assert (ids[:first] == -1).all() and not log_probs[:first].any() and not tails[:first].any()
    ids, log_probs, tails = ids[first:], log_probs[first:], tails[first:]
    every = (logits[first - 1 : first - 1 + len(ids)].double() / temperature).log_softmax(-1)
    wanted = every.gather(1, ids.clamp_min(0)).masked_fill(ids < 0, -math.inf)
    torch.testing.assert_close(log_probs.double(), wanted, rtol=1e-7, atol=atol)
    # One column more takes the ids that are missing.
    others = torch.ones(len(ids), every.shape[1] + 1, dtype=torch.bool)
    others = others.scatter_(1, torch.where(ids < 0, every.shape[1], ids), False)[:, :-1]
    rest = every.masked_fill(~others, -math.inf).logsumexp(-1)
    torch.testing.assert_close(tails.double(), rest, rtol=1e-7, atol=atol)
