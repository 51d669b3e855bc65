"""`answer`: the recorded answer to a request, with its tokens handed over in the recorded order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from corelm import Ragged, TokenSets
from corelm.errors import own
from corelm.spec import Adapter, GenerateResult
from corelm_testing.cassette.errors import CassetteError
from corelm_testing.cassette.index import Played, RecordedCall, answers_per_row
from corelm_testing.cassette.records import chunk_of, request_json
from corelm_testing.cassette.weights import WeightsHistory

#: Fields that an engine leaves out where they say nothing of any row, and what they then mean for each row.
_OF_SOME_ROWS: Mapping[str, Any] = {"errors": "", "cached_tokens": None}


class Player(Protocol):
    """Finds recorded calls: `StrictPlayer` or `ContentPlayer`."""

    weights: WeightsHistory

    def play(self, hook: str, request: Any, adapter: Adapter = None) -> list[Played]:
        """Return the recorded calls that hold the rows of a request."""


def answer(player: Player, hook: str, request: Any, weights: str | None = None) -> Any:
    """Return what was recorded for a request.

    Args:
        weights: the fingerprint of new weights, see `request_json`.

    Raises:
        NotRecordedError: it is not recorded.
        CassetteError: the cassette is damaged.
        Exception: what was raised when it was recorded.
    """
    form = request_json(hook, request, weights)
    played = player.play(hook, form, getattr(request, "adapter", None))
    parts = [_part(each, answers_per_row(hook, form)) for each in played]
    for part in parts:
        _hand_over(part, request)
        if part.call.error is not None:
            raise own(part.call.error)
    result = parts[0].result if len(parts) == 1 and parts[0].rows is None else _joined(parts)
    if isinstance(result, GenerateResult) and getattr(request, "on_answer", None) is not None:
        for row, tokens in enumerate(result.ids.lengths.tolist()):
            request.on_answer(row, tokens)
    device = getattr(request, "device", None)
    return result if device is None else _on_device(result, device)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Rows of a recorded result.

    Attributes:
        call: the recorded call.
        result: its result; None if it raised.
        rows: the rows of the result that count; None for all.
        places: the rows of the answer that these are; None for all.
    """

    call: RecordedCall
    result: Any
    rows: list[int] | None
    places: list[int] | None


def _part(played: Played, samples: int) -> _Part:
    result = played.call.result
    label = played.call.weight_version
    said = ("weight_versions", "version_runs")
    if label is not None and result is not None and all(getattr(result, name, None) is None for name in said):
        # The weights changed without an update, and nothing else tells a replay that they did.
        result = replace(result, weight_versions=(label,) * _count(result))
    rows, places = (
        None if some is None else [row * samples + sample for row in some for sample in range(samples)]
        for some in (played.rows, played.places)
    )
    return _Part(played.call, result, rows, places)


def _hand_over(part: _Part, request: Any) -> None:
    on_tokens = getattr(request, "on_tokens", None)
    if on_tokens is None:
        return
    # A row may be asked for more than once.
    listening: dict[int, list[int]] = {}
    for row, place in zip(part.rows or (), part.places or (), strict=True):
        listening.setdefault(row, []).append(place)
    for form in part.call.stream:
        row = chunk_of(form).row
        for place in [row] if part.rows is None else listening.get(row, ()):
            on_tokens(chunk_of(form, place))


def _joined(parts: Sequence[_Part]) -> Any:
    """Return one result of the rows of several results.

    Raises:
        CassetteError: the results do not belong together.
    """
    if isinstance(parts[0].result, bool):
        return parts[0].result
    order = torch.tensor([place for part in parts for place in part.places or ()], dtype=torch.int64).argsort()
    values = {each.name: _field(each.name, parts, order) for each in fields(parts[0].result)}
    return replace(parts[0].result, **values)


def _field(name: str, parts: Sequence[_Part], order: Tensor) -> Any:
    given = [getattr(part.result, name) for part in parts]
    if all(value is None for value in given):
        return None
    if name in _OF_SOME_ROWS:
        nothing = _OF_SOME_ROWS[name]
        given = [value or (nothing,) * _count(part.result) for value, part in zip(given, parts, strict=True)]
    if any(value is None for value in given):
        raise CassetteError(f"the recorded rows do not belong together: some have {name} and some do not; record again")
    rows = [part.rows or [] for part in parts]
    if isinstance(given[0], Ragged):
        return Ragged.cat([value.select(some) for value, some in zip(given, rows, strict=True)]).select(order)
    if isinstance(given[0], TokenSets):
        return TokenSets.cat([value.select(some) for value, some in zip(given, rows, strict=True)]).select(order)
    if isinstance(given[0], tuple):
        flat = [value[row] for value, some in zip(given, rows, strict=True) for row in some]
        return tuple(flat[place] for place in order.tolist())
    return given[0]


def _count(result: Any) -> int:
    return len(result.ids if isinstance(result, GenerateResult) else result.logprobs)


def _on_device(result: Any, device: torch.device) -> Any:
    moved = {
        each.name: value.to(device)
        for each in fields(result)
        if isinstance(value := getattr(result, each.name), (Ragged, TokenSets))
    }
    return replace(result, **moved)
