"""What the commands write of other ids than those that were sampled or given, in JSON types."""

from __future__ import annotations

import math
from typing import Any

from corelm.spec import GenerateResult, ScoreResult

#: The fields of a result, and the keys that `corelm.to_records` has for them.
_KEYS = {
    "kept_ids": "kept_ids",
    "kept_log_mass": "kept_log_mass",
    "top_ids": "top_ids",
    "top_logprobs": "top_log_probs",
    "tail_log_mass": "tail_log_mass",
}
#: All keys that `id_fields` may return.
ID_KEYS = tuple(_KEYS.values())


def id_fields(batch: GenerateResult | ScoreResult) -> list[dict[str, list[Any]]]:
    """Return, for each row of a result, what was asked for of other ids, by key, with one value per token.

    JSON has no minus infinity, so None stands for the log of a probability of 0.
    """
    rows: list[dict[str, list[Any]]] = [{} for _ in range(len(_rows(batch)))]
    for name, key in _KEYS.items():
        found = getattr(batch, name, None)
        if found is not None:
            for row, values in zip(rows, found.tolist(), strict=True):
                row[key] = [_plain(value) for value in values]
    return rows


def _rows(batch: GenerateResult | ScoreResult) -> Any:
    return batch.ids if isinstance(batch, GenerateResult) else batch.logprobs


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return None if value == -math.inf else value
