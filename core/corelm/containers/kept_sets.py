"""`token_sets`: the ids over which the log-probs of a TensorDict were normalised."""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase

from corelm.containers.classes import LogProbs, ragged
from corelm.containers.field_shapes import COUNTS, SETS
from corelm.containers.keys import key_parts, list_keys
from corelm.errors import InvalidRequestError, MissingKeyError, Problems, refuse
from corelm.tensors.ragged import Ragged
from corelm.tensors.token_sets import TokenSets


def token_sets(td: TensorDictBase, key: NestedKey = "log_probs", *, masks: NestedKey = "masks") -> TokenSets:
    """Return the ids over which the log-probs of each token were normalised, as long as the tokens.

    An empty set stands for the whole vocabulary, and for a token that was not scored. Works for both layouts and every
    batch shape; the rows are in C order.

    Args:
        td: holds the `LogProbs`; may be a single row, with batch shape ().
        key: the key of the `LogProbs`.
        masks: the key of the `Masks` that tell tokens from pads in dense rows. Other layouts need no masks.

    Raises:
        MissingKeyError: there is no `LogProbs` under the key, or it has no such ids.
        InvalidRequestError: dense rows have no masks, or the ids of a row are not as many as its counts say; `rows`
            lists these rows.
    """
    path = key_parts(key)
    name = ".".join(path)
    held = td.get(path, None)
    if not isinstance(held, LogProbs):
        raise MissingKeyError(f"{name}: expected a LogProbs; the TensorDict has: {list_keys(td)}", field=name)
    if not carries_sets(held):
        raise MissingKeyError(
            f"{name}.{SETS}: these log-probs do not say over which ids they were normalised; sample with "
            "LLMPolicy(…, return_support=True)",
            field=f"{name}.{SETS}",
        )
    counts, flat = (ragged(td, (*path, field), masks=masks) for field in (COUNTS, SETS))
    refuse(_count_problems(counts.to("cpu"), flat), f"{name}.{COUNTS}")
    try:
        return TokenSets.from_flat(flat, counts)
    except ValueError as error:
        raise InvalidRequestError(f"{name}.{SETS}: {error}, in {COUNTS}", field=f"{name}.{SETS}") from error


def _count_problems(counts: Ragged, flat: Ragged) -> Problems:
    """Return the rows whose counts are not those of their ids, and why."""
    totals = torch.zeros_like(counts.lengths).index_add_(0, counts.row_index, counts.values.long())
    problems: Problems = {
        row: f"the counts add up to {int(totals[row])}, but {SETS} holds {int(flat.lengths[row])} ids"
        for row in (totals != flat.lengths).nonzero().flatten().tolist()
    }
    for at in (counts.values < 0).nonzero().flatten().flip(0).tolist():
        position = int(counts.positions[at])
        problems[int(counts.row_index[at])] = f"position {position}: the count is {int(counts.values[at])}"
    return problems


def carries_sets(log_probs: LogProbs) -> bool:
    """Return whether these log-probs say over which ids they were normalised."""
    return {SETS, COUNTS} <= set(log_probs.keys())
