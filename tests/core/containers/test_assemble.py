"""`assemble`, with requests made by hand and results compared with plain Python lists."""

import itertools
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from corelm.containers import ragged
from corelm.containers.assemble import assemble
from corelm.errors import InvalidRequestError
from corelm.spec.provenance import Provenance
from corelm.spec.records import Columns, ContainerRequest, Parts
from corelm.tensors.ragged import Ragged
from helpers.each import each, examples
from helpers.refusals import refused

# The pad id occurs inside prompts and answers: pads are known from lengths, never from ids.
PAD = 0
PROMPTS = [[1, 2, 3], [PAD, 4], [5]]
RESPONSES = [[6], [7, PAD, 8], []]
FULL = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
LOGPROBS = [[0.0, 0.0, 0.0, -0.5], [0.0, 0.0, -1.0, -1.5, -2.0], [0.0]]
RAW = Provenance("toy", "tiny", "0")
HOT = Provenance("toy", "tiny", "1", "processed", 1.5, "truncated", (("repetition_penalty", 1.2),))

SPLIT = Parts(Ragged.from_list(PROMPTS), Ragged.from_list(RESPONSES), Ragged.from_list(FULL))


def marks(left: bool, right: bool) -> list[list[bool]]:
    """`left` on every prompt position, `right` on every response position."""
    return [[left] * len(p) + [right] * len(r) for p, r in zip(PROMPTS, RESPONSES, strict=True)]


def request(*fields: str, **changes: Any) -> ContainerRequest:
    given: dict[str, Any] = {
        "batch_size": (3,),
        "tokens": SPLIT,
        "logprobs": Ragged.from_list(LOGPROBS, torch.float32),
        "scored": Ragged.from_list(marks(False, True), torch.bool),
        "provenance": RAW,
        "pad_id": PAD,
    }
    return ContainerRequest(fields=frozenset(fields), **given | changes)


def plain(value: Any) -> Any:
    """Tensors, alone or in lists, as plain lists."""
    return [plain(item) for item in value] if isinstance(value, list) else value.tolist()


# The two layouts -----------------------------------------------------------------------------------------------------


def test_dense_rows() -> None:
    td = assemble(request("tokens", "masks", "log_probs", pad_output=True, pad_id=9))
    tokens, masks, log_probs = td["tokens"], td["masks"], td["log_probs"]
    assert tokens.prompt.tolist() == [[1, 2, 3], [9, 0, 4], [9, 9, 5]]
    assert tokens.response.tolist() == [[6, 9, 9], [7, 0, 8], [9, 9, 9]]
    assert tokens.full.tolist() == [[1, 2, 3, 6, 9, 9], [9, 0, 4, 7, 0, 8], [9, 9, 5, 9, 9, 9]]
    o, x = False, True
    assert masks.all_attention_mask.tolist() == [[x, x, x, x, o, o], [o, x, x, x, x, x], [o, o, x, o, o, o]]
    assert masks.all_response_mask.tolist() == [[o, o, o, x, o, o], [o, o, o, x, x, x], [o] * 6]
    assert log_probs.prompt.tolist() == [[0.0] * 3] * 3
    assert log_probs.response.tolist() == [[-0.5, 0.0, 0.0], [-1.0, -1.5, -2.0], [0.0] * 3]
    assert log_probs.full.tolist() == [[0.0] * 3 + row for row in log_probs.response.tolist()]
    assert log_probs.scored_mask.tolist() == masks.all_response_mask.tolist()
    assert log_probs.provenance == RAW
    assert [tokens.padded, masks.padded, log_probs.padded] == [True] * 3


@each("pad_output", [False, True])
def test_each_row_has_its_own_provenance(pad_output: bool) -> None:
    given = (RAW, HOT, RAW)
    td = assemble(request("log_probs", provenance=given, pad_output=pad_output))
    assert tuple(td[row]["log_probs"].provenance for row in range(3)) == given


def test_columns_are_kept() -> None:
    """A scored batch comes back in the columns of its input, including pads on both sides."""
    o, x = False, True
    mask = torch.tensor([[o, x, x, x, x, o, o, o], [o, o, x, x, x, x, x, o], [o, o, o, x, o, o, o, o]])
    td = assemble(request("tokens", "masks", "log_probs", columns=Columns(mask, 4), pad_output=True))
    assert td["tokens"].full.tolist() == [[0, 1, 2, 3, 6, 0, 0, 0], [0, 0, 0, 4, 7, 0, 8, 0], [0, 0, 0, 5, 0, 0, 0, 0]]
    assert td["tokens"].prompt.tolist() == [[0, 1, 2, 3], [0, 0, 0, 4], [0, 0, 0, 5]]
    assert td["log_probs"].full.tolist()[1] == [0.0, 0.0, 0.0, 0.0, -1.0, -1.5, -2.0, 0.0]
    assert td["masks"].all_attention_mask.tolist() == mask.tolist()
    assert td["masks"].all_response_mask.sum(-1).tolist() == [1, 3, 0]


# Batch shapes --------------------------------------------------------------------------------------------------------


row = st.lists(st.integers(0, 3), max_size=4)


@settings(deadline=None, max_examples=examples(40))
@given(st.lists(st.tuples(row, row), min_size=1, max_size=5), st.booleans(), st.booleans())
def test_every_value_is_kept_for_any_lengths(pairs: list[Any], pad_output: bool, split: bool) -> None:
    prompts, responses, full = [a for a, _ in pairs], [b for _, b in pairs], [a + b for a, b in pairs]
    parts = (Ragged.from_list(prompts), Ragged.from_list(responses)) if split else (None, None)
    scores = [[float(t) for t in range(len(row))] for row in full]
    td = assemble(
        ContainerRequest(
            batch_size=(len(full),),
            fields=frozenset({"tokens", "masks", "log_probs"}),
            tokens=Parts(*parts, Ragged.from_list(full)),
            logprobs=Ragged.from_list(scores, torch.float32),
            scored=Ragged.from_list([[t % 2 == 1 for t in range(len(row))] for row in full], torch.bool),
            pad_output=pad_output,
        )
    )
    odd = [[t if t % 2 else 0.0 for t in row] for row in scores]
    assert ragged(td, ("tokens", "full")).tolist() == full
    assert ragged(td, ("log_probs", "full")).tolist() == odd
    if split:
        assert ragged(td, ("tokens", "prompt")).tolist() == prompts
        assert ragged(td, ("tokens", "response")).tolist() == responses
        assert ragged(td, ("log_probs", "response")).tolist() == [
            o[len(p) :] for o, p in zip(odd, prompts, strict=True)
        ]
        assert ragged(td, ("masks", "all_response_mask")).values.sum() == sum(map(len, responses))
    if pad_output and split:
        both = [torch.cat([td[c].prompt, td[c].response], -1) for c in ("tokens", "log_probs")]
        assert torch.equal(both[0], td["tokens"].full) and torch.equal(both[1], td["log_probs"].full)


# Values --------------------------------------------------------------------------------------------------------------


@each("pad_output", [False, True])
def test_an_unscored_position_holds_zero(pad_output: bool) -> None:
    junk = [[float("nan")] * len(p) + [-1.0] * len(r) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    logprobs = Ragged.from_list(junk, torch.float32)
    td = assemble(request("log_probs", "masks", logprobs=logprobs, pad_output=pad_output))
    expected = [[0.0] * len(p) + [-1.0] * len(r) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    assert ragged(td, ("log_probs", "full")).tolist() == expected


@each("pad_output", [False, True])
@each("field, reached", [("full", 1.0), ("response", 1.0), ("prompt", 0.0)])
def test_gradients_reach_the_scored_values(field: str, reached: float, pad_output: bool) -> None:
    values = torch.tensor(list(itertools.chain(*LOGPROBS)), requires_grad=True)
    td = assemble(request("log_probs", logprobs=Ragged(values, SPLIT.full.lengths), pad_output=pad_output))
    found = getattr(td["log_probs"], field)
    (found if pad_output else torch.cat(found)).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [reached * scored for row in marks(False, True) for scored in row]


def leaves(td: Any, *keys: tuple[str, str]) -> list[Tensor]:
    values = [getattr(td[container], field) for container, field in keys]
    return [tensor for value in values for tensor in (value if isinstance(value, list) else [value])]


EVERY = [(c, f) for c in ("tokens", "log_probs") for f in ("prompt", "response", "full")] + [
    ("masks", "all_attention_mask"),
    ("masks", "all_response_mask"),
    ("masks", "all_assistant_mask"),
    ("log_probs", "scored_mask"),
]


@each("pad_output", [False, True])
def test_rows_and_fields_share_no_storage(pad_output: bool) -> None:
    assistant = Ragged.from_list(marks(True, True), torch.bool)
    asked = request("tokens", "masks", "log_probs", assistant=assistant, pad_output=pad_output)
    tensors = [tensor for tensor in leaves(assemble(asked), *EVERY) if tensor.numel()]
    given = [asked.tokens.full, asked.logprobs, asked.scored, asked.assistant]
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert len(storages) == len(tensors)
    assert storages.isdisjoint(rows.values.untyped_storage().data_ptr() for rows in given if rows is not None)
    for tensor in tensors:
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@each("pad_output", [False, True])
def test_no_tensor_is_an_inference_tensor(pad_output: bool) -> None:
    with torch.inference_mode():
        tokens = Parts(*(Ragged.from_list(rows) for rows in (PROMPTS, RESPONSES, FULL)))
        logprobs = Ragged.from_list(LOGPROBS, torch.float32)
        scored, assistant = (Ragged.from_list(marks(left, True), torch.bool) for left in (False, True))
    given = {"tokens": tokens, "logprobs": logprobs, "scored": scored, "assistant": assistant}
    td = assemble(request("tokens", "masks", "log_probs", **given, pad_output=pad_output))
    assert not any(tensor.is_inference() for tensor in leaves(td, *EVERY))


# Invalid requests ----------------------------------------------------------------------------------------------------


@each(
    "asked, field",
    [
        (request("text"), "text"),
        (request("history"), "history"),
        (request("log_probs", scored=None), "log_probs"),
        (request("images"), "images"),
        (request("tokens", batch_size=(2, 2)), "tokens.prompt"),
        (request("tokens", finish_reasons=("stop",)), "finish_reasons"),
        (request("tokens", errors=("",) * 4), "errors"),
        (request("text", texts=Parts(None, None, ("a",))), "texts.full"),
        (request("log_probs", provenance=(RAW, HOT)), "provenance"),
    ],
)
def test_missing_data_and_wrong_numbers_of_rows_are_refused(asked: ContainerRequest, field: str) -> None:
    with refused(InvalidRequestError, field=field):
        assemble(asked)


@each("name", ["logprobs", "scored", "assistant", "prompt and response", "columns"])
def test_lengths_that_differ_are_refused_with_their_rows(name: str) -> None:
    wrong = Ragged.from_list([[1] * 4, [1] * 4, [1] * 2])
    changes: dict[str, Any] = {name: wrong}
    if name == "columns":
        changes = {"columns": Columns(wrong.mask(), None), "pad_output": True}
    elif name == "prompt and response":
        changes = {"tokens": Parts(Ragged.from_list([[], [], []]), wrong, SPLIT.full)}
    with refused(InvalidRequestError, field=name, rows=(1, 2)):
        assemble(request("tokens", **changes))
