"""What a user may do with `td["finish_reason"]`: all that a list of str does, with every tensordict."""

from __future__ import annotations

import copy
import json
import pickle
from collections import Counter
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


@both_layouts
def test_finish_reasons_do_what_a_list_of_str_does(pad_output: bool) -> None:
    expected = ["stop", "length", "stop", "length"]
    td = batch((4,), pad_output)
    found = td["finish_reason"]
    assert isinstance(found, list) and found == expected and expected == found
    assert json.loads(json.dumps({"finish": found})) == {"finish": expected}
    assert Counter(found) == {"stop": 2, "length": 2} and set(found) == {"stop", "length"}
    assert found.count("stop") == 2 and found.index("length") == 1 and "stop" in found and len(found) == 4
    for plain in (sorted(found), found[:], list(found), td.get("finish_reason").tolist()):
        assert type(plain) is list
    assert [*found] == found[:] == expected and sorted(found) == sorted(expected)
    assert type(found[0]) is str and ",".join(found) == "stop,length,stop,length"
    for copied in (copy.copy(found), copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert isinstance(copied, list) and copied == expected


def test_nested_finish_reasons_are_lists_of_lists() -> None:
    td, expected = batch((2, 2)), [["stop", "length"], ["stop", "length"]]
    assert td["finish_reason"] == expected and json.loads(json.dumps(td["finish_reason"])) == expected
    plain = td.get("finish_reason").tolist()
    assert plain == expected and type(plain) is list and type(plain[0]) is list


def test_finish_reasons_differ_from_a_plain_list_where_the_documentation_says_so() -> None:
    td = batch()
    found = td["finish_reason"]
    assert type(found) is not list and repr(found) == "LinkedList(['stop', 'length', 'stop', 'length'])"
    found[0] = "abort"
    assert td["finish_reason"][0] == "abort"
    plain = list(found)
    plain[0] = "stop"
    assert td["finish_reason"][0] == "abort"
