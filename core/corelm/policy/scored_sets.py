"""`ScoredSupport`: the ids over which scores are normalised, and what that makes of their provenance."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from corelm.spec.provenance import Provenance
from corelm.tensors.ragged import Ragged
from corelm.tensors.token_sets import TokenSets


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredSupport:
    """The ids over which to normalise the score of each token.

    Attributes:
        sets: as long as the sequences, on the CPU; an empty set stands for the whole vocabulary.
        temperature: that of the scores.
    """

    sets: TokenSets
    temperature: float

    @property
    def for_engine(self) -> TokenSets | None:
        """The sets, or None if all of them are empty: an engine that knows no sets can score these rows."""
        return self.sets if self.sets.ids.values.shape[0] else None

    def restrict(self, logits: Ragged) -> Ragged:
        """Return the logits ``values[total, vocab]``, minus infinity for the ids that are not in the sets."""
        ids = self.sets.ids.to(logits.values.device)
        kept = torch.zeros_like(logits.values, dtype=torch.bool)
        kept[ids.row_index.to(kept.device), ids.values] = True
        kept |= (ids.lengths == 0).to(kept.device)[:, None]
        return logits.with_values(logits.values.masked_fill(~kept, -torch.inf))


def provenance_of_scores(
    found: Provenance | tuple[Provenance, ...], support: ScoredSupport | None
) -> Provenance | tuple[Provenance, ...]:
    """Return the provenance of scores, with the support of each row: rows without any set are of full support.

    Args:
        found: what the engine says of all rows, or of each.
        support: the ids over which they were normalised; None for the whole vocabulary.
    """
    if support is None:
        return found
    cut = (support.sets.flat.lengths > 0).tolist()
    labels = {on: Provenance.label_of_scores(support.temperature, truncated=on) for on in {*cut, False}}
    rows = found if isinstance(found, tuple) else (found,) * len(cut)
    made = tuple(replace(row, **labels[on]) for row, on in zip(rows, cut, strict=True))
    return made if len({*made}) > 1 else next(iter(made), found)
