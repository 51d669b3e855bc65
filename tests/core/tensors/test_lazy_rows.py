"""Stacks whose rows are made when somebody asks for one: when that is, and that nobody sees a difference."""

import threading
from typing import Any

import torch
from tensordict import LazyStackedTensorDict
from torch.utils import _pytree as pytree

from corelm.containers import Tokens, ragged
from corelm.containers.assemble import assemble
from corelm.containers.history import History
from corelm.spec.message import Message
from corelm.spec.provenance import Provenance
from corelm.spec.records import ContainerRequest, Parts
from corelm.tensors.lazy_rows import lazy_rows
from corelm.tensors.ragged import Ragged
from helpers.each import each

ROWS = [[1, 2, 3], [4], [5, 6], [7]]
RAW = Provenance("toy", "tiny", "0")


def request(**changes: Any) -> ContainerRequest:
    tokens = Ragged.from_list(ROWS)
    given: dict[str, Any] = {
        "batch_size": (4,),
        "fields": frozenset({"text", "tokens", "masks", "log_probs", "history"}),
        "tokens": Parts(None, None, tokens),
        "texts": Parts(None, None, tuple("abcd")),
        "chats": Parts(None, None, tuple((Message("user", text),) for text in "abcd")),
        "logprobs": Ragged(-tokens.values.float(), tokens.lengths),
        "scored": Ragged.full(tokens.lengths, True, torch.bool),
        "provenance": RAW,
        "finish_reasons": ("stop", "stop", "length", "stop"),
    }
    return ContainerRequest(**given | changes)


def test_a_pytree_has_the_leaves_of_its_rows() -> None:
    leaves, spec = pytree.tree_flatten({"rows": lazy_rows({"full": Ragged.from_list(ROWS)}, (4,))})
    assert [leaf.tolist() for leaf in leaves] == ROWS
    doubled = pytree.tree_unflatten([2 * leaf for leaf in leaves], spec)["rows"]
    assert type(doubled) is LazyStackedTensorDict
    assert [row["full"].tolist() for row in doubled] == [[2 * token for token in row] for row in ROWS]


@each("context", [torch.no_grad, torch.inference_mode])
def test_gradients_do_not_ask_when_the_rows_are_made(context: Any) -> None:
    values = torch.zeros(7, requires_grad=True)
    td = assemble(request(logprobs=Ragged(values, Ragged.from_list(ROWS).lengths)))
    with context():
        found = td["log_probs"].full
        tokens = td["tokens"].full
    torch.cat(found).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [1.0] * 7
    assert not any(row.is_inference() for row in tokens)


def test_what_is_written_to_flat_rows_does_not_show() -> None:
    td = assemble(request())
    for _ in range(2):
        found = ragged(td, ("tokens", "full"))
        assert found.tolist() == ROWS
        found.values.zero_()
    assert [row.tolist() for row in td["tokens"].full] == ROWS


def test_what_is_written_to_a_row_is_read_from_then_on() -> None:
    td = assemble(request())
    td["tokens"].full[0].zero_()
    assert ragged(td, ("tokens", "full")).tolist() == [[0, 0, 0], *ROWS[1:]]


def test_chats_share_nothing_that_can_be_written_to() -> None:
    call = {"name": "f", "arguments": {"x": 1}}
    mine = Message("assistant", None, tool_calls=(call,), extra={"notes": [1]})
    history = History.of([[mine]] * 2, (2,))
    for _ in range(2):
        call["arguments"]["x"] = 2
        for message in (mine, history.chats[0][0]):
            message.extra["notes"].append(2)
            message.tool_calls[0]["name"] = "g"
    assert history[1].to_chats() == [
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": 1}}], "notes": [1]}
    ]


def test_threads_that_ask_at_once_get_the_same_rows() -> None:
    for _ in range(20):
        tokens = assemble(request(fields=frozenset({"tokens"})))["tokens"]
        start, found = threading.Barrier(4), []

        def ask(tokens: Tokens = tokens, start: Any = start, found: list[Any] = found) -> None:
            start.wait()
            found.append(tokens.full)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({tuple(map(id, rows)) for rows in found}) == 1
