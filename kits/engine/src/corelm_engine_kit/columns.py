"""`draw` and `argmax`: find one column of each row.

A row is searched in two levels, first a tile and then a column inside it: a second pass over a whole vocabulary costs
more than all the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from corelm_engine_kit.softmax import Workspace

#: Columns of a tile. What a row gets must not depend on how many other rows there are, so this is fixed.
_TILE = 256


def numbers_for(width: int) -> int:
    """Return how many random numbers a row of so many columns takes in `draw`."""
    return _TILE + -(-width // _TILE)


def draw(
    scores: Tensor, exponentials: Tensor, temperature: float = 1.0, workspace: Workspace | None = None
) -> tuple[Tensor, Tensor]:
    """Return a column of each row, drawn from its softmax, and that column's log-prob. No column at -inf is drawn.

    Of exponentially distributed numbers, each divided by a mass, each is the least with the probability of its mass.
    First the tiles race so, then the columns of the first tile. Scores that are rounded otherwise change who is first
    only where the first two are about equal, once in some 100,000 draws. Where a cumulative sum passes a random number
    depends on the rounding of all columns before it: an improbable column has less mass than the sum has error.

    Args:
        scores: float32[rows, K].
        exponentials: float32[rows, `numbers_for(K)` or more], independent and of mean 1.
        temperature: divides the scores.
        workspace: memory to use.
    """
    assert exponentials.shape[-1] >= numbers_for(scores.shape[-1])
    mass, tiles = (workspace or Workspace()).softmax(scores, _mass_by_tile, temperature)
    columns, inside = _tile(mass, _first(tiles, exponentials[:, _TILE:]))
    ids = columns.gather(-1, _first(inside, exponentials))
    # The total is 1 except for the rounding of softmax's own sum over the row, and dividing by it removes that: 3e-4 if
    # one token is nearly sure and 150,000 others share half a percent.
    total = tiles.sum(-1, keepdim=True, dtype=torch.float64)
    logprobs = (mass.gather(-1, ids) / total).log().float()
    return ids[:, 0], logprobs[:, 0]


def argmax(scores: Tensor) -> Tensor:
    """Return int64[rows]: the first of the best columns, like `Tensor.argmax`. Searching by tiles costs a tenth."""
    if scores.shape[-1] <= 8 * _TILE:
        return scores.argmax(-1)
    tile = _by_tile(scores, torch.amax).argmax(-1, keepdim=True)
    columns, inside = _tile(scores, tile, beyond=-math.inf)
    return columns.gather(-1, inside.argmax(-1, keepdim=True))[:, 0]


def _mass_by_tile(scores: Tensor, mass: Tensor) -> Tensor:
    return _by_tile(mass, torch.sum)


def _by_tile(values: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    """Return [rows, tiles]: `reduce` over each tile of [rows, K]. The last tile may be shorter."""
    whole = values.shape[-1] // _TILE
    tiles = [reduce(values[:, : whole * _TILE].unflatten(-1, (whole, _TILE)), dim=-1)]
    if values.shape[-1] % _TILE:
        tiles.append(reduce(values[:, whole * _TILE :], dim=-1, keepdim=True))
    return torch.cat(tiles, dim=-1)


def _tile(values: Tensor, tile: Tensor, beyond: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the columns of one tile a row and the values there, [rows, _TILE] each; `beyond` fills a shorter tile."""
    columns = tile * _TILE + torch.arange(_TILE, device=tile.device)
    last = values.shape[-1] - 1
    return columns, values.gather(-1, columns.clamp_max(last)).masked_fill_(columns > last, beyond)


def _first(mass: Tensor, exponentials: Tensor) -> Tensor:
    """Return int64[rows, 1]: the column of the least exponential over mass."""
    return (exponentials[:, : mass.shape[-1]] / mass).argmin(-1, keepdim=True)
