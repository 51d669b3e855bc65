"""Which logits of a tile are wanted by themselves, found and taken out before the tile is summed.

What is left in the tiles are the other ids, so their probability is a sum of its own. It keeps its digits however small
it is: one minus the sum of the wanted probabilities would not.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from transformers_backend.fast.logit_tiles import LogitTiles, LogSum

#: More logits that wait to be ranked than this many times those wanted, in one row, are ranked at once.
_WAITING = 4


class LargestLogit:
    """Finds the id of the largest logit of each row, the lowest of equal ones.

    Attributes:
        ids: int64[rows].
    """

    def __init__(self, rows: int, tiles: LogitTiles) -> None:
        device = tiles.hidden.device
        self.ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._peak = torch.full((rows,), -torch.inf, dtype=tiles.dtype, device=device)

    def read(self, tile: Tensor, entries: slice, peak: Tensor) -> None:
        """Look into ``tile[rows, entries]``, whose largest logits are `peak`, ``[rows]``."""
        larger = peak > self._peak
        if tile.device.type == "cpu":
            # Searching a tile takes many times as long as its maximum, and in few rows a later tile has a larger one.
            rows = larger.nonzero()[:, 0]
            if len(rows):
                some = tile if len(rows) == len(tile) else tile[rows]
                self.ids[rows] = some.argmax(1) + entries.start
        else:
            self.ids = torch.where(larger, tile.argmax(1) + entries.start, self.ids)
        self._peak = torch.maximum(self._peak, peak)


class WantedLogits(Protocol):
    """Collects the wanted logits of some rows."""

    def take_(self, tile: Tensor, entries: slice, others: LogSum) -> None:
        """Collect from ``tile[rows, entries]``, and put minus infinity in their places.

        Args:
            others: the sum of the exponentials of all logits that are not wanted. What was collected and is not wanted
                after all is added to it.
        """

    def finish(self, others: LogSum) -> tuple[Tensor, Tensor]:
        """Return the ids, int64[rows, k], -1 for none; and their logits, minus infinity where there is no id."""


class GivenLogits:
    """Collects the logits of given ids.

    Args:
        ids: int64[rows, k], -1 for no id.
        tiles: makes the tiles.

    Attributes:
        values: ``[rows, k]``, the logits of the ids in the tiles so far, minus infinity for no id.
    """

    def __init__(self, ids: Tensor, tiles: LogitTiles) -> None:
        self._ids = ids
        # The order of the ids is that of the tiles, so those of a tile lie next to each other.
        found, order = torch.where(ids < 0, tiles.vocab_size, ids).flatten().sort()
        starts = [*(entries.start for entries in tiles.entries()), tiles.vocab_size]
        # The device is waited for here, and not at every tile.
        bounds = torch.searchsorted(found, torch.tensor(starts, device=ids.device)).tolist()
        self._bounds = dict(zip(starts, pairwise(bounds), strict=False))
        self._sorted, self._order = found, order
        self.values = torch.full(ids.shape, -torch.inf, dtype=tiles.dtype, device=ids.device)

    def places(self, entries: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return where ids are in a tile of these entries, int64[m]: their rows, their columns, and their places in
        the flat table of ids.
        """
        first, last = self._bounds[entries.start]
        places = self._order[first:last]
        return places // self._ids.shape[1], self._sorted[first:last] - entries.start, places

    def read(self, tile: Tensor, entries: slice) -> tuple[Tensor, Tensor]:
        """Collect from ``tile[rows, entries]``. Return the rows and columns of what was collected, int64[m] each."""
        rows, columns, places = self.places(entries)
        if len(places):
            self.values.view(-1)[places] = tile[rows, columns]
        return rows, columns

    def take_(self, tile: Tensor, entries: slice, others: LogSum) -> None:
        tile[self.read(tile, entries)] = -torch.inf

    def finish(self, others: LogSum) -> tuple[Tensor, Tensor]:
        return self._ids, self.values


class LargestLogits:
    """Collects the k largest logits of each row.

    The largest so far give a threshold, and a later tile has few logits above it: in random order, k of those that
    come while the vocabulary seen doubles. They wait, and are ranked when it has doubled, so that most tiles cost one
    comparison.

    Args:
        k: how many.
        rows: the number of rows.
        tiles: makes the tiles.
    """

    def __init__(self, k: int, rows: int, tiles: LogitTiles) -> None:
        device = tiles.hidden.device
        self._k = k
        self._values = torch.full((rows, k), -torch.inf, dtype=tiles.dtype, device=device)
        self._ids = torch.full((rows, k), -1, dtype=torch.int64, device=device)
        # A comparison leaves a number of logits that is not known before, for which a GPU would be waited for.
        self._rank_all = device.type != "cpu"
        self._threshold = self._values[:, :1]
        self._seen = 0
        self._ranked = 0
        self._waiting: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._counts = torch.zeros(rows, dtype=torch.int64, device=device)
        self._above = torch.empty(0 if self._rank_all else rows * tiles.width, dtype=torch.bool)

    def take_(self, tile: Tensor, entries: slice, others: LogSum) -> None:
        if self._rank_all or self._seen < self._k:
            values, columns = tile.topk(min(self._k, tile.shape[1]), 1, sorted=False)
            tile.scatter_(1, columns, -torch.inf)
            self._rank(values, columns + entries.start, others)
            self._ranked = self._seen + tile.shape[1]
        else:
            self._let_wait(tile, entries.start)
        self._seen += tile.shape[1]
        if self._seen >= 2 * self._ranked or (
            self._waiting and int(self._counts.max()) > max(_WAITING * self._k, tile.shape[1])
        ):
            self._rank_waiting(others)

    def finish(self, others: LogSum) -> tuple[Tensor, Tensor]:
        self._rank_waiting(others)
        values, order = self._values.sort(1, descending=True)
        # An id whose logit is minus infinity has no probability.
        return self._ids.gather(1, order).masked_fill_(values == -torch.inf, -1), values

    def _let_wait(self, tile: Tensor, start: int) -> None:
        """Take the logits above the threshold out of the tile."""
        height, width = tile.shape
        # One buffer for all tiles: new memory takes as long as the comparison.
        above = self._above[: tile.numel()]
        torch.gt(tile, self._threshold, out=above.view(height, width))
        flat, places = tile.view(-1), _true_places(above)
        rows = places // width
        counts = rows.bincount(minlength=height)
        # They are in the order of their rows: how many of its row are before each.
        before = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
        self._waiting.append((rows, self._counts[rows] + before, places - rows * width + start, flat[places]))
        self._counts += counts
        flat.index_fill_(0, places, -torch.inf)

    def _rank_waiting(self, others: LogSum) -> None:
        self._ranked = self._seen
        if not self._waiting:
            return
        rows, columns, ids, values = (torch.cat(each) for each in zip(*self._waiting, strict=True))
        shape = (len(self._counts), int(self._counts.max()))
        waiting = self._values.new_full(shape, -torch.inf).index_put_((rows, columns), values)
        names = self._ids.new_full(shape, -1).index_put_((rows, columns), ids)
        self._waiting = []
        self._counts.zero_()
        self._rank(waiting, names, others)

    def _rank(self, values: Tensor, ids: Tensor, others: LogSum) -> None:
        """Keep the largest of those kept and these, ``[rows, n]``, and add the rest to the others."""
        values, ids = torch.cat([self._values, values], 1), torch.cat([self._ids, ids], 1)
        self._values, columns = values.topk(self._k, 1, sorted=False)
        self._ids, self._threshold = ids.gather(1, columns), self._values.amin(1, keepdim=True)
        others.add_(values.scatter_(1, columns, -torch.inf))


def _true_places(mask: Tensor) -> Tensor:
    """Return int64[m]: where a flat mask, on the CPU, is True. Few of it are, so eight are looked at together."""
    if mask.numel() % 8:
        return mask.nonzero()[:, 0]
    some = mask.view(torch.int64).nonzero()
    places = (some * 8 + torch.arange(8)).view(-1)
    return places[mask[places]]


def rows_of(tiles: LogitTiles, ids: Tensor) -> Iterator[tuple[slice, GivenLogits]]:
    """Yield the blocks of rows of the tiles, each with the places of its ids, int64[n, k]."""
    for rows in tiles.rows():
        yield rows, GivenLogits(ids[rows], tiles)
