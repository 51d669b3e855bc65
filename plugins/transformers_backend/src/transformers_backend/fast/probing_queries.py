"""Compares what a head in tiles answers about a position with the model's own logits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from corelm.spec import Ragged
from corelm_engine_kit.token_scores import TokenQuery, TokenScores, scores_of_logits
from transformers_backend.engine import is_device_failure
from transformers_backend.fast.probing import HeadFormula, equal_but_for_rounding
from transformers_backend.fast.split import SplitForward
from transformers_backend.fast.tiled_scores import tiled_scores
from transformers_backend.fast.tiles import TiledHead

_log = logging.getLogger(__name__)

#: The witness of a formula has large logits; a state with small ones is tried as well.
_SMALL = 1 / 30
#: Number of ids in a set that is tried, and of most probable ones.
_SET, _TOP = 24, 8
_TEMPERATURE = 0.7


def answers_alike(head: TiledHead, split: SplitForward, formula: HeadFormula, *, several: bool) -> bool:
    """Return whether tiles give the log-probs of given tokens and the largest logits.

    Args:
        head: the head in tiles.
        split: runs the model's own head.
        formula: that of the tiles.
        several: try the log-probs over sets, of the most probable ids and of given ones instead.
    """
    assert formula.witness is not None
    states = torch.cat([formula.witness, formula.witness * _SMALL]).to(head.weight.device)
    logits, what = split.logits(states).float(), " for several ids" if several else ""
    for query in _queries(logits, several):
        try:
            alike = _alike(tiled_scores(head, states, query), logits, query, formula.dtype)
        except Exception as error:
            if is_device_failure(error):
                raise
            # A kernel may fail in any way on a device on which it was not tried.
            _log.warning("the head is not used in tiles%s: %s: %s", what, type(error).__name__, error)
            return False
        if not alike:
            _log.warning("the head is not used in tiles%s: its numbers differ from the model's own", what)
            return False
    return True


def _queries(logits: Tensor, several: bool) -> Iterator[TokenQuery]:
    """Yield what is tried on two states."""
    vocab_size = logits.shape[1]
    if not several:
        for targets in (logits.argmax(-1), logits.argmin(-1), torch.tensor([0, vocab_size - 1], device=logits.device)):
            yield TokenQuery(targets, _TEMPERATURE)
        yield TokenQuery(targets, argmax=True)
        return
    spread = torch.arange(0, vocab_size, max(1, vocab_size // _SET))
    best = logits.argmax(-1).cpu()
    # The second set is empty, which stands for the whole vocabulary; the other sets have an id that matters.
    some, whole = torch.cat([spread, best[:1]]).unique(), spread[:0]
    plain = TokenQuery(best.to(logits.device), _TEMPERATURE)
    for rows in ([some, whole], [some, torch.cat([spread[::2], best[1:]]).unique()]):
        yield replace(plain, sets=Ragged.from_list(rows).to(logits.device))
    yield replace(plain, top_k=min(_TOP, vocab_size))
    ids = some.repeat(2, 1)
    ids[1, 0] = -1
    yield replace(plain, top_ids=ids.to(logits.device))


def _alike(found: TokenScores, logits: Tensor, query: TokenQuery, dtype: torch.dtype) -> bool:
    wanted = scores_of_logits(logits, query)
    pairs = [(found.logprobs, wanted.logprobs)]
    if found.argmax is not None:
        # Rounding may swap ids that are nearly as probable.
        pairs.append((logits.gather(1, found.argmax[:, None]), logits.amax(1, keepdim=True)))
    if found.top is not None and wanted.top is not None:
        pairs.append((found.top.logprobs, wanted.top.logprobs))
        # Rounding may swap ids that are nearly as probable; what is said of the ids that were found has to be right.
        own = scores_of_logits(logits, replace(query, top_k=0, top_ids=found.top.ids)).top
        assert own is not None
        pairs += [(found.top.logprobs, own.logprobs), (found.top.tail, own.tail)]
    # What is rounded are the logits, so their size says by how much.
    tempered = logits / query.temperature
    largest = tempered[tempered.isfinite()].abs().max().reshape(1)
    return all(
        torch.equal(one.isfinite(), other.isfinite())
        and equal_but_for_rounding(
            torch.cat([one[one.isfinite()], largest]), torch.cat([other[other.isfinite()], largest]), dtype
        )
        for one, other in pairs
    )
