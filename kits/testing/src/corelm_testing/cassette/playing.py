"""`answer`: the recorded answer to a request, with its tokens handed over in the recorded order."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from corelm import Ragged, TokenSets
from corelm_engine_kit.joining import Part, joined, rows_of_result
from corelm_testing.cassette.content import ContentPlayer, for_rows
from corelm_testing.cassette.errors import CassetteError
from corelm_testing.cassette.index import RecordedCall, answers_per_row
from corelm_testing.cassette.records import chunk_of, request_json


def answer(player: ContentPlayer, hook: str, request: Any, weights: str | None = None) -> Any:
    """Return what was recorded for a request.

    Args:
        weights: the fingerprint of new weights, see `request_json`.

    Raises:
        NotRecordedError: it is not recorded.
        CassetteError: the cassette is damaged, or only some of the recorded rows name their weights.
        EngineError: the recorded rows are of different distributions.
        Exception: what was raised when it was recorded.
    """
    form = request_json(hook, request, weights)
    samples, parts = answers_per_row(hook, form), []
    for each in player.play(hook, form, getattr(request, "adapter", None)):
        rows, places = (
            [row * samples + sample for row in some for sample in range(samples)] for some in (each.rows, each.places)
        )
        _hand_over(each.call, rows, places, request)
        if each.call.error is not None:
            raise for_rows(each.call.error, each.rows, each.places)
        parts.append(Part(_labelled(each.call), rows, places))
    result: Any = parts[0].result
    if isinstance(result, bool):
        return result
    if len({_names_weights(part.result) for part in parts}) > 1:
        raise CassetteError("the recorded rows do not belong together: some name their weights; record them again")
    result = joined(parts, "")
    device = getattr(request, "device", None)
    return result if device is None else _on_device(result, device)


def _labelled(call: RecordedCall) -> Any:
    """Return the result of a call, with the label of the weights if nothing else tells a replay of it."""
    result, label = call.result, call.weight_version
    if label is None or _names_weights(result):
        return result
    return replace(result, weight_versions=(label,) * len(rows_of_result(result)))


def _names_weights(result: Any) -> bool:
    return any(getattr(result, name, None) is not None for name in ("weight_versions", "version_runs"))


def _hand_over(call: RecordedCall, rows: list[int], places: list[int], request: Any) -> None:
    on_tokens = getattr(request, "on_tokens", None)
    if on_tokens is None:
        return
    # A row may be asked for more than once.
    listening: dict[int, list[int]] = {}
    for row, place in zip(rows, places, strict=True):
        listening.setdefault(row, []).append(place)
    for form in call.stream:
        for place in listening.get(chunk_of(form).row, ()):
            on_tokens(chunk_of(form, place))


def _on_device(result: Any, device: torch.device) -> Any:
    moved = {
        each.name: value.to(device)
        for each in fields(result)
        if isinstance(value := getattr(result, each.name), (Ragged, TokenSets))
    }
    return replace(result, **moved)
