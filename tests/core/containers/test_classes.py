"""The containers under the operations of a TensorDict, in both layouts, compared with plain Python lists."""

import io
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack

import corelm.containers
from corelm.containers import SAFE_GLOBALS, ChatHistory, History, LogProbs, Masks, PerToken, Text, Tokens, ragged
from corelm.errors import InvalidRequestError
from corelm.spec.message import Message
from corelm.spec.provenance import Provenance
from corelm.tensors.ragged import Ragged
from helpers.each import each
from helpers.four_rows import (
    CHATS,
    HOT,
    PROMPTS,
    RAW,
    RESPONSES,
    RIGHT,
    TEXTS,
    assert_holds,
    batch,
    both_layouts,
    plain,
)
from helpers.refusals import refused

Operation = Callable[[TensorDict], TensorDictBase]

FLAT: dict[str, tuple[Operation, Any]] = {
    "as it is": (lambda td: td, [0, 1, 2, 3]),
    "a row": (lambda td: td[1], 1),
    "a slice": (lambda td: td[1:3], [1, 2]),
    "a mask": (lambda td: td[torch.tensor([True, False, False, True])], [0, 3]),
    "an index": (lambda td: td[torch.tensor([3, 1, 1])], [3, 1, 1]),
    "a list": (lambda td: td[[2, 0]], [2, 0]),
    "a two-dimensional index": (lambda td: td[torch.tensor([[3, 1], [0, 2]])], [[3, 1], [0, 2]]),
    "an empty slice": (lambda td: td[:0], []),
    "an empty mask": (lambda td: td[torch.zeros(4, dtype=torch.bool)], []),
    "an empty index": (lambda td: td.exclude("finish_reason")[torch.tensor([], dtype=torch.int64)], []),
    "an empty slice of an empty slice": (lambda td: td.exclude("finish_reason")[:0][:0], []),
    "rows stacked lazily": (lambda td: lazy_stack([td[2], td[0]]), [2, 0]),
    "slices stacked lazily": (lambda td: lazy_stack([td[:2], td[2:]]), [[0, 1], [2, 3]]),
    "unbound and stacked": (lambda td: lazy_stack(list(td.unbind(0))), [0, 1, 2, 3]),
    "a replayed batch": (lambda td: lazy_stack(list(lazy_stack(list(td.unbind(0)))[1:].unbind(0))), [1, 2, 3]),
    "a slice of stacked rows": (lambda td: lazy_stack(list(td.unbind(0)))[2:], [2, 3]),
    "equal rows stacked": (lambda td: torch.stack([td[1], td[1]]), [1, 1]),
    "equal rows stacked if they fit": (lambda td: LazyStackedTensorDict.maybe_dense_stack([td[1], td[1]]), [1, 1]),
    "two batches stacked": (lambda td: torch.stack([td, td]), [[0, 1, 2, 3], [0, 1, 2, 3]]),
    "two batches stacked along the rows": (lambda td: torch.stack([td, td], 1), [[0, 0], [1, 1], [2, 2], [3, 3]]),
    "concatenated": (lambda td: torch.cat([td[2:], td[:2]]), [2, 3, 0, 1]),
    "concatenated with empty slices": (lambda td: torch.cat([td[:0], td[:2], td[4:]]), [0, 1]),
    "split": (lambda td: td.split(2)[1], [2, 3]),
    "reshaped": (lambda td: td.reshape(2, 2), [[0, 1], [2, 3]]),
    "cloned": (lambda td: td.clone(), [0, 1, 2, 3]),
    "locked": (lambda td: td.lock_(), [0, 1, 2, 3]),
    "pickled": (lambda td: pickle.loads(pickle.dumps(td)), [0, 1, 2, 3]),
    "a row pickled": (lambda td: pickle.loads(pickle.dumps(td[3])), 3),
    "an empty slice pickled": (lambda td: pickle.loads(pickle.dumps(td[:0])), []),
    "selected": (lambda td: td.select("tokens", "masks", "log_probs", "text", "history"), [0, 1, 2, 3]),
}

SQUARE: dict[str, tuple[Operation, Any]] = {
    "as it is": (lambda td: td, [[0, 1], [2, 3]]),
    "a sample": (lambda td: td[0, 1], 1),
    "a prompt": (lambda td: td[1], [2, 3]),
    "the first samples": (lambda td: td[:, 0], [0, 2]),
    "no samples": (lambda td: td[:, :0], [[], []]),
    "a mask": (lambda td: td[torch.tensor([[True, False], [False, True]])], [0, 3]),
    "flattened": (lambda td: td.flatten(0, 1), [0, 1, 2, 3]),
    "unbound by sample": (lambda td: lazy_stack(list(td.unbind(1))), [[0, 2], [1, 3]]),
    "rows stacked lazily": (lambda td: lazy_stack([td[1, 0], td[0, 0]]), [2, 0]),
    "concatenated by sample": (lambda td: torch.cat([td[:, 1:], td[:, :1]], 1), [[1, 0], [3, 2]]),
    "two batches stacked": (lambda td: torch.stack([td, td]), [[[0, 1], [2, 3]]] * 2),
    "pickled": (lambda td: pickle.loads(pickle.dumps(td)), [[0, 1], [2, 3]]),
    "cloned": (lambda td: td.clone(), [[0, 1], [2, 3]]),
}


@both_layouts
@each("shape, name", [((4,), name) for name in FLAT] + [((2, 2), name) for name in SQUARE])
def test_operations_keep_rows_and_layout(shape: tuple[int, ...], name: str, pad_output: bool) -> None:
    operation, rows = (FLAT if shape == (4,) else SQUARE)[name]
    assert_holds(operation(batch(shape, pad_output)), rows, pad_output)


@both_layouts
@each("shape", [(4,), (2, 2)])
def test_an_empty_slice_keeps_every_key(shape: tuple[int, ...], pad_output: bool) -> None:
    td = batch(shape, pad_output)
    assert set(td[:0].keys(True, True)) == set(td.keys(True, True))
    assert {value.dtype for value in td[:0].values(True, True)} == {torch.int64, torch.float32, torch.bool}


@both_layouts
def test_an_absent_field_reads_as_none_and_is_not_a_key(pad_output: bool) -> None:
    td = batch((4,), pad_output).exclude(("tokens", "response"), ("text", "prompt"), ("history", "full"))
    assert td["tokens"].response is None
    assert td["text"].prompt is None
    assert td["history"].full is None
    assert td["masks"].all_assistant_mask is None
    assert td.get(("tokens", "response")) is None
    assert {("tokens", "response"), ("masks", "all_assistant_mask")}.isdisjoint(td.keys(True, True))


@both_layouts
@each(
    "join",
    [
        lambda a, b: lazy_stack([a, b]),
        lambda a, b: lazy_stack([a[1], b[0], a[0]]),
        lambda a, b: torch.cat([a, b]),
        lambda a, b: torch.stack([a, b]),
    ],
)
def test_rows_keep_their_own_provenance(join: Callable[[Any, Any], TensorDictBase], pad_output: bool) -> None:
    td = join(batch((4,), pad_output), batch((4,), pad_output, HOT))
    assert td["log_probs"].provenance == (RAW, HOT)
    loaded = pickle.loads(pickle.dumps(td))
    assert loaded["log_probs"].provenance == (RAW, HOT)


@both_layouts
def test_a_tuple_of_provenances_is_one_per_row(pad_output: bool, tmp_path: Path) -> None:
    td = batch((2, 2), pad_output, (HOT, RAW, RAW, RAW))
    td.memmap(tmp_path)
    for one in (td, TensorDict.load_memmap(tmp_path, allow_pickle=False)):
        assert one["log_probs"].provenance == (HOT, RAW)
        assert one[0, 0]["log_probs"].provenance == HOT
        assert one[1]["log_probs"].provenance == RAW


@both_layouts
def test_replacing_a_row_changes_only_that_row(pad_output: bool) -> None:
    td, other = batch((4,), pad_output), batch((4,), pad_output, HOT)
    td[1] = other[1]
    assert [td[row]["log_probs"].provenance for row in range(4)] == [RAW, HOT, RAW, RAW]
    assert plain(td["tokens"].response) == (RIGHT if pad_output else RESPONSES)


@each("order", [(False, True), (True, False)])
def test_a_stack_of_both_layouts_is_detected(order: tuple[bool, bool]) -> None:
    # Row 1 has three response tokens, and its padded row has three columns: the shape does not tell the layout.
    td = lazy_stack([batch((4,), pad_output)[1] for pad_output in order])
    for read in (lambda: td["tokens"].response, lambda: td["tokens"].padded, lambda: td["log_probs"].full):
        with refused(InvalidRequestError, field="padded"):
            read()
    assert ragged(td, ("tokens", "full")).tolist() == [[4, 9, 10, 11]] * 2
    assert ragged(td, ("log_probs", "prompt")).tolist() == [[-0.0]] * 2


def test_dense_rows_of_different_widths_are_detected() -> None:
    wide = batch((4,), True)
    narrow = TensorDict(
        tokens=Tokens(full=torch.tensor([[5, 6]]), batch_size=[1]),
        masks=Masks(all_attention_mask=torch.tensor([[False, True]]), batch_size=[1]),
        batch_size=[1],
    )
    td = lazy_stack([wide[1], narrow[0]])
    with refused(InvalidRequestError, field="full"):
        td["tokens"].full  # noqa: B018
    assert td["tokens"].padded is True
    assert ragged(td, ("tokens", "full")).tolist() == [[4, 9, 10, 11], [6]]


def test_rows_are_set_from_lists_and_ragged() -> None:
    td = batch()
    td["log_probs"].full = [torch.full((n,), -1.0) for n in (1, 2, 3, 4)]
    assert plain(td[2]["log_probs"].full) == [-1.0] * 3
    td["tokens"].set("full", Ragged.from_list([[1], [2, 3], [], [4]]))
    assert plain(td["tokens"].full) == [[1], [2, 3], [], [4]]
    assert [row.untyped_storage().nbytes() for row in td["tokens"].full] == [8, 16, 0, 8]
    with refused(InvalidRequestError, field="full"):
        td["tokens"].full = [torch.tensor([1])]
    with refused(InvalidRequestError, field="full"):
        batch((4,), True)["tokens"].full = [torch.tensor([1])] * 4


@both_layouts
def test_ragged_reads_under_any_key(pad_output: bool) -> None:
    td = batch((2, 2), pad_output)
    td["ref_log_probs"] = td["log_probs"].clone()
    expected = [[-float(i) for i in row] for row in RESPONSES]
    assert ragged(td, ("ref_log_probs", "response")).tolist() == expected
    deep = TensorDict(next=td, batch_size=[2, 2])
    found = ragged(deep, ("next", "log_probs", "response"), masks=("next", "masks"))
    assert found.tolist() == expected
    assert found.values.dtype == torch.float32
    assert ragged(td[1, 1], ("tokens", "response")).tolist() == [[12, 13]]
    assert ragged(td[:0], ("log_probs", "full")).values.dtype == torch.float32


def test_ragged_reports_missing_fields_and_masks() -> None:
    td = batch((4,), True)
    for key in ("tokens", ("tokens", "answer"), ("text", "full"), ("nothing", "full"), ("masks", "all_assistant_mask")):
        with pytest.raises(
            InvalidRequestError,
            match=r"is not a field of a Tokens, Masks, LogProbs or PerToken .*(; it has: .*tokens|did you mean)",
        ):
            ragged(td, key)
    with pytest.raises(InvalidRequestError, match=r"did you mean \('tokens', 'response'\)"):
        ragged(td, "tokens.response")
    with refused(InvalidRequestError, field="masks"):
        ragged(td.exclude("masks"), ("tokens", "full"))
    td["masks"] = Masks(all_attention_mask=torch.ones(4, 5, dtype=torch.bool), batch_size=[4])
    with refused(InvalidRequestError, field="masks"):
        ragged(td, ("tokens", "full"))
    assert ragged(batch().exclude("masks"), ("tokens", "response")).tolist() == RESPONSES


def test_selecting_a_field_keeps_its_provenance_and_scored_mask() -> None:
    log_probs = LogProbs(full=torch.zeros(2, 3), scored_mask=torch.ones(2, 3, dtype=torch.bool), batch_size=[2])
    log_probs.set("provenance", Provenance("toy", "mine", "0"))
    td = TensorDict(log_probs=log_probs, batch_size=[2]).select(("log_probs", "full"))
    assert td["log_probs"].provenance == Provenance("toy", "mine", "0") and td["log_probs"].scored_mask.all()


# The ``repr``: short, for people, and never an exception --------------------------------------------------------------


@both_layouts
def test_every_container_says_what_it_holds(pad_output: bool) -> None:
    td = batch((4,), pad_output)
    assert repr(td["tokens"]).startswith("Tokens(4 rows; the first: ") and repr(td["tokens"][0]).startswith("Tokens(1 ")
    for name in ("prompt", "response", "full"):
        assert f"{name}[{td['tokens'][0].get(name).shape[-1]}]" in repr(td["tokens"])
    td["text"].response = ["\x1bHere is a text that is too long to be shown", "", "", ""]
    assert "; the first: prompt '" in repr(td["text"]) and r"response '\x1bHere is ...g to be shown'" in repr(
        td["text"]
    )
    chats = History.from_chats([[[Message("user", "a")]] * 2])
    assert repr(chats) == "History(2 rows as (1, 2); the first: conversation[1] 'a')"
    assert repr(chats[:, :0]) == "History(0 rows as (1, 0): conversation)"
    assert repr(ChatHistory(full=chats, batch_size=[1, 2])) == "ChatHistory(2 rows as (1, 2); the first: full[1] 'a')"


@each("stacked", [False, True])
def test_printing_takes_as_many_steps_for_many_rows_as_for_few(stacked: bool) -> None:
    def steps(count: int) -> int:
        tokens = Tokens.from_rows(prompt=[[1, 2]] * count, response=[[3]] * count)
        tokens, seen = lazy_stack(list(tokens.unbind(0))) if stacked else tokens, []
        sys.setprofile(lambda frame, event, arg: seen.append(event))
        try:
            repr(tokens)
        finally:
            sys.setprofile(None)
        return len(seen)

    steps(3)  # what is done once in a process
    assert steps(300) == steps(3)


def test_a_misspelt_field_is_told_the_right_one() -> None:
    td = batch((4,), False)
    for container, name, meant in (("tokens", "respons", "response"), ("text", "reponse", "response")):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'; did you mean '{meant}'"):
            getattr(td[container], name)
    assert not hasattr(td["tokens"], "__dataframe__") and td["tokens"].batch_dims == 1


def test_a_class_has_no_value_of_a_field() -> None:
    """A dataclass that derives from a container would take it for the default."""
    for cls in (Text, Tokens, Masks, LogProbs, PerToken, ChatHistory):
        for name in cls.__dataclass_fields__:
            with pytest.raises(AttributeError, match="of instances"):
                getattr(cls, name)


@both_layouts
@each("shape", [(), (4,), (2, 2)])
def test_a_result_can_be_printed_alone_nested_and_stacked(shape: tuple[int, ...], pad_output: bool) -> None:
    td = batch((4,), pad_output)[1] if shape == () else batch(shape, pad_output)
    if len(shape) == 1:
        td["text"].response = ["\x1b[2J", "b", "c", "d"]
    for printed in (td, TensorDict({"next": td}), lazy_stack([td, td])):
        assert "\x1b" not in repr(printed) and "tokens" in repr(printed)


# Saved files name containers by ``corelm.containers``, never by one of its modules ------------------------------------


CLASSES = (ChatHistory, History, LogProbs, Masks, PerToken, Text, Tokens)


@both_layouts
@each("weights_only", [False, True])
def test_torch_save(pad_output: bool, weights_only: bool) -> None:
    file = io.BytesIO()
    torch.save(batch((4,), pad_output), file)
    file.seek(0)
    with torch.serialization.safe_globals(list(SAFE_GLOBALS)):
        assert_holds(torch.load(file, weights_only=weights_only), [0, 1, 2, 3], pad_output)


@both_layouts
@pytest.mark.parametrize(("shape", "rows"), [((4,), [0, 1, 2, 3]), ((2, 2), [[0, 1], [2, 3]])])
@pytest.mark.parametrize("inplace", [False, True])
def test_memmap(tmp_path: Path, shape: tuple[int, ...], rows: Any, pad_output: bool, inplace: bool) -> None:
    td = batch(shape, pad_output)
    mapped = td.memmap_(tmp_path) if inplace else td.memmap(tmp_path)
    assert_holds(mapped, rows, pad_output)
    # The files contain no pickle, so they load where pickles are refused.
    assert_holds(TensorDict.load_memmap(tmp_path, allow_pickle=False), rows, pad_output)


@both_layouts
def test_memmap_of_a_replayed_batch_and_of_an_empty_one(tmp_path: Path, pad_output: bool) -> None:
    td = batch((4,), pad_output)
    lazy_stack([td[2], td[0]]).memmap(tmp_path / "some")
    assert_holds(TensorDict.load_memmap(tmp_path / "some", allow_pickle=False), [2, 0], pad_output)
    td.exclude("finish_reason")[:0].memmap(tmp_path / "none")
    assert_holds(TensorDict.load_memmap(tmp_path / "none", allow_pickle=False), [], pad_output)


def every_container() -> TensorDict:
    """Every container, in both layouts."""
    rows, dense = batch(), batch((4,), True)
    rows["weights"] = lazy_stack([PerToken(full=torch.zeros(2), padded=False, batch_size=[]) for _ in range(4)])
    return TensorDict(rows=rows, dense=dense, history=History.from_chats(CHATS), batch_size=[4])


def save_pickle(folder: Path) -> None:
    (folder / "td.pickle").write_bytes(pickle.dumps(every_container()))


def save_torch(folder: Path) -> None:
    torch.save(every_container(), folder / "td.pt")


def save_memmap(folder: Path) -> None:
    every_container().memmap(folder)


every_format = pytest.mark.parametrize("save", [save_pickle, save_torch, save_memmap], ids=lambda save: save.__name__)


def test_every_class_is_named_by_the_package() -> None:
    assert {cls.__module__ for cls in CLASSES} == {"corelm.containers"}
    assert all(getattr(corelm.containers, cls.__qualname__) is cls for cls in CLASSES)
    assert set(CLASSES) < set(SAFE_GLOBALS)


@every_format
def test_saved_files_name_no_other_module_of_corelm(save: Callable[[Path], None], tmp_path: Path) -> None:
    save(tmp_path)
    saved = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    # A pickle names the module, a memmap the module and the class.
    allowed = {"corelm.containers", *(f"corelm.containers.{cls.__name__}" for cls in CLASSES)}
    names = {name.decode() for name in re.findall(rb"corelm(?:\.\w+)+", saved)}
    assert names and names <= allowed


#: Loads each format and prints what it finds. The pickle comes first, while nothing of corelm is imported.
LOAD = """
import pickle, sys
from pathlib import Path
folder = Path(sys.argv[1])
loaded = [pickle.loads((folder / "td.pickle").read_bytes())]

import torch
from tensordict import TensorDict
from corelm.containers import SAFE_GLOBALS
with torch.serialization.safe_globals(list(SAFE_GLOBALS)):
    loaded.append(torch.load(folder / "td.pt"))
loaded.append(TensorDict.load_memmap(folder, allow_pickle=False))

for td in loaded:
    print(*{type(value).__name__ for part in (td, td["rows"], td["dense"]) for value in part.values()})
    print([row.tolist() for row in td["rows", "tokens"].full], td["dense", "tokens"].response.tolist())
    print(td["dense", "log_probs"].provenance.backend, td["rows", "text"].full)
    print(td["history"].to_chats() == td["rows", "history"].full.to_chats())
"""


@pytest.mark.process
def test_saved_files_load_in_a_new_interpreter(tmp_path: Path) -> None:
    for save in (save_memmap, save_pickle, save_torch):
        save(tmp_path)
    result = subprocess.run([sys.executable, "-c", LOAD, tmp_path], capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    for at in range(0, 12, 4):
        names, tokens, values, same = lines[at : at + 4]
        assert {cls.__name__ for cls in CLASSES} <= set(names.split())
        assert tokens == f"{[p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]} {RIGHT}"
        assert (values, same) == (f"toy {TEXTS}", "True")
