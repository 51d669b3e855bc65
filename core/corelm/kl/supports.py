"""Whether two truncated scorings were normalised over the same ids, which their labels do not say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from corelm.containers.classes import LogProbs
from corelm.containers.reading import carries_sets, provenance_of_rows, token_sets
from corelm.errors import ProvenanceMismatchError
from corelm.kl.layout import TokenLayout
from corelm.spec.provenance import Provenance

#: How both get the same ids.
_ADVICE = (
    'sample with return_support=True and log_probs_mode="processed", and score over the ids of the sampler with '
    "LLMPolicy(…, generate=False, support_key=…); or pass allow_mismatch=True"
)


def distribution_of(row: LogProbs) -> Provenance | None:
    """Return the provenance of a single row; of full support if it says that no id was left out at any token."""
    (found,) = provenance_of_rows(row, 1)
    if found is None or found.support == "full" or not carries_sets(row) or bool(row.kept_counts.any()):
        return found
    return replace(found, support="full")


def check_supports(view: TensorDictBase, names: dict[str, Any], mask: Tensor, layout: TokenLayout) -> None:
    """Raise if two truncated scorings were normalised over different ids, or one does not say over which.

    Args:
        view: holds the two scorings, and the `masks` of dense ones.
        names: what they are called in errors, by their key in `view`.
        mask: bool[total]: the positions that count.
        layout: how the tokens are stored.

    Raises:
        ProvenanceMismatchError: naming the first row and position that differ.
    """
    scorings = {key: view.get(key) for key in names}
    count = len(layout.lengths)
    cut = [_truncated(one, count) for one in scorings.values()]
    both = cut[0] & cut[1]
    if not bool(both.any()):
        return
    where = layout.ragged(mask.cpu())
    counts = where.values & both[where.row_index]
    if not bool(counts.any()):
        return
    first = int(counts.nonzero()[0])
    for key, one in scorings.items():
        if not carries_sets(one):
            raise ProvenanceMismatchError(
                f"row {int(where.row_index[first])}: both scorings are of truncated support, and {names[key]} does not "
                f"say which ids were left, so nothing shows that they are of one distribution; {_ADVICE}"
            )
    one, other = (token_sets(view, key) for key in scorings)
    for key, sets in zip(scorings, (one, other), strict=True):
        if not torch.equal(sets.lengths, layout.lengths):
            row = int((sets.lengths != layout.lengths).nonzero()[0])
            raise ProvenanceMismatchError(
                f"row {row}: {names[key]} has sets for {int(sets.lengths[row])} tokens, but there are "
                f"{int(layout.lengths[row])}; {_ADVICE}"
            )
    differ = (counts & ~one.same_as(other)).nonzero().flatten()
    if len(differ):
        at = int(differ[0])
        pairs = zip(names, (one, other), strict=True)
        found = " and ".join(f"{_some(sets, at)} in {names[key]}" for key, sets in pairs)
        raise ProvenanceMismatchError(
            f"row {int(where.row_index[at])}, position {int(where.positions[at])}: the scorings were normalised over "
            f"different ids, {found}, so their difference has no meaning; {_ADVICE}"
        )


def _truncated(scoring: LogProbs, count: int) -> Tensor:
    """Return bool[rows]: which rows are known to be of truncated support."""
    found = provenance_of_rows(scoring, count)
    return torch.tensor([one is not None and one.support == "truncated" for one in found], dtype=torch.bool)


def _some(sets: Any, at: int) -> str:
    """Return the ids at a position, or how many they are."""
    start, end = sets.ids.offsets[at : at + 2].tolist()
    ids = sets.ids.values[start:end].tolist()
    return f"{ids}" if 0 < len(ids) <= 6 else f"{len(ids):,} ids" if ids else "the whole vocabulary"
