"""`tiled_scores`: what `scores_of_logits` answers from full logits, from hidden states and a head in tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from corelm.spec import TopIds
from corelm_engine_kit.token_scores import TokenQuery, TokenScores, logprobs_by_sets
from transformers_backend.fast.tiles import TiledHead


def tiled_scores(head: TiledHead, states: Tensor, query: TokenQuery) -> TokenScores:
    """Answer `query`, on the device of the states, from ``[n, hidden]``. It asks for no logits."""
    temperature = query.temperature
    if query.wants_top:
        wanted = query.top_k if query.top_ids is None else query.top_ids
        logprobs, top, argmax = head.logprobs_and_top(states, query.targets, wanted, temperature, argmax=query.argmax)
        return TokenScores(logprobs.float(), (), argmax, TopIds(top.ids, top.logprobs.float(), top.tail.float()))
    if query.argmax and (query.sets is None or not bool(query.sets.lengths.any())):
        logprobs, argmax = head.logprobs_and_argmax(states, query.targets, temperature)
        return TokenScores(logprobs.float(), (), argmax)

    def whole(places: Tensor | None, some: TokenQuery) -> Tensor:
        return head.logprobs(states if places is None else states[places], some.targets, temperature).float()

    def within(places: Tensor, some: TokenQuery) -> Tensor:
        assert some.sets is not None
        return head.logprobs_in_sets(states[places], some.targets, some.sets, temperature).float()

    logprobs, best = logprobs_by_sets(query, whole, within), None
    if query.argmax:
        # Of the whole vocabulary, whatever the sets are.
        with torch.no_grad():
            best = head.logprobs_and_argmax(states, query.targets, temperature)[1]
    return TokenScores(logprobs, (), best)
