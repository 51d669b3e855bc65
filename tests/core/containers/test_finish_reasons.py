"""What a user may do with `td["finish_reason"]`: all that a list of str does, with every tensordict."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import lazy_stack

import corelm
from helpers.each import each
from helpers.four_rows import batch, both_layouts

OPERATIONS: dict[str, Any] = {
    "as it is": (lambda td: td, ["stop", "length", "stop", "length"]),
    "a row": (lambda td: td[1], "length"),
    "a slice": (lambda td: td[1:3], ["length", "stop"]),
    "one row of a slice": (lambda td: td[1:2], ["length"]),
    "an index": (lambda td: td[torch.tensor([3, 3])], ["length", "length"]),
    "equal rows stacked": (lambda td: torch.stack([td[1], td[1]]), ["length", "length"]),
    "rows stacked lazily": (lambda td: lazy_stack([td[0], td[1]]), ["stop", "length"]),
    "batches stacked": (lambda td: torch.stack([td[:2], td[:2]]), [["stop", "length"], ["stop", "length"]]),
    "reshaped": (lambda td: td.reshape(2, 2), [["stop", "length"], ["stop", "length"]]),
    "concatenated": (lambda td: torch.cat([td[:1], td[3:]]), ["stop", "length"]),
    "cloned": (lambda td: td.clone(), ["stop", "length", "stop", "length"]),
    "repadded": (lambda td: corelm.repad(td), ["stop", "length", "stop", "length"]),
}


@both_layouts
@each("name", OPERATIONS)
def test_finish_reasons_read_as_lists_of_str(name: str, pad_output: bool) -> None:
    operation, expected = OPERATIONS[name]
    found = operation(batch((4,), pad_output))["finish_reason"]
    assert found == expected and isinstance(found, type(expected))
