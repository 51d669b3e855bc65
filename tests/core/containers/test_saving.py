"""Containers that are saved and loaded. Saved files name them by ``corelm.containers``, never by one of its modules."""

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
from tensordict import TensorDict, lazy_stack

import corelm.containers
from corelm.containers import SAFE_GLOBALS, ChatHistory, History, LogProbs, Masks, PerToken, Text, Tokens
from helpers.each import each
from helpers.four_rows import CHATS, PROMPTS, RESPONSES, RIGHT, TEXTS, assert_holds, batch, both_layouts

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
