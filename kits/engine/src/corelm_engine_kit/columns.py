"""`inverse_cdf` and `argmax`: find one column of each row.

A wide row is searched in two levels, first a tile and then a column inside it: a cumulative sum over a whole vocabulary
costs more than all the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from corelm_engine_kit.softmax import Workspace

#: Vocabulary entries in a tile of a two-level search, and up to how many are searched in one level. These depend on
#: nothing but the width: what a row gets must not depend on how many other rows there are.
_TILE, _ONE_LEVEL = 256, 2048


def inverse_cdf(
    scores: Tensor, uniforms: Tensor, temperature: float = 1.0, workspace: Workspace | None = None
) -> tuple[Tensor, Tensor]:
    """Return the column where each row's cumulative softmax passes its uniform number, and that column's log-prob.

    Columns at -inf are never chosen.

    Args:
        scores: float32[rows, K].
        uniforms: float64[rows] in [0, 1).
        temperature: divides the scores.
        workspace: memory to use.
    """
    workspace, uniforms = workspace or Workspace(), uniforms[:, None]
    if scores.shape[-1] <= _ONE_LEVEL:
        mass, _ = workspace.softmax(scores, _nothing, temperature)
        ids, _, total = _locate(mass, uniforms)
    else:
        mass, tiles = workspace.softmax(scores, _mass_by_tile, temperature)
        tile, uniforms, total = _locate(tiles, uniforms)
        columns, inside = _tile(mass, tile)
        column, _, _ = _locate(inside, uniforms)
        ids = columns.gather(-1, column)
    # The total is 1 except for the rounding of softmax's own sum over the row, and dividing by it removes that: 3e-4 if
    # one token is nearly sure and 150,000 others share half a percent.
    logprobs = (mass.gather(-1, ids) / total).log().float()
    return ids[:, 0], logprobs[:, 0]


def argmax(scores: Tensor) -> Tensor:
    """Return int64[rows]: the first of the best columns, like `Tensor.argmax`. Searching by tiles costs a tenth."""
    if scores.shape[-1] <= _ONE_LEVEL:
        return scores.argmax(-1)
    tile = _by_tile(scores, torch.amax).argmax(-1, keepdim=True)
    columns, inside = _tile(scores, tile, beyond=-math.inf)
    return columns.gather(-1, inside.argmax(-1, keepdim=True))[:, 0]


def _nothing(scores: Tensor, mass: Tensor) -> Tensor:
    return mass[:, :0]


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


def _locate(mass: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the cell of each row in which the fraction `uniforms` of the row's mass ends.

    Args:
        mass: float32[rows, n].
        uniforms: float64[rows, 1] in [0, 1].

    Returns:
        The cell, int64; where in the cell, float64 in [0, 1]; and the mass of the row, float64; [rows, 1] each.
    """
    upper = mass.cumsum(-1, dtype=torch.float64)
    total = upper[:, -1:]
    # Strictly below the total, so that the cell found has some mass.
    target = torch.minimum(uniforms * total, total.nextafter(total.new_zeros(())))
    # The clamp only matters for NaN, which would become an index out of range.
    cell = torch.searchsorted(upper, target, right=True).clamp_max_(mass.shape[-1] - 1)
    inside = 1.0 - (upper.gather(-1, cell) - target) / mass.gather(-1, cell)
    return cell, inside.clamp_(0.0, 1.0), total
