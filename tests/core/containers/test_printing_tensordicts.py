"""A TensorDict prints what its containers print, with every tensordict, and others print as they always do."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tensordict import TensorClass, TensorDict, lazy_stack

from corelm.containers import Tokens
from corelm.containers.glance import row_count
from helpers.each import each
from helpers.four_rows import batch, both_layouts

CONTAINERS = ("text", "tokens", "masks", "log_probs", "history")


@both_layouts
@each("shape", [(), (4,), (2, 2)])
@each("place", ["alone", "nested", "stacked"])
def test_a_tensordict_prints_what_its_containers_print(place: str, shape: tuple[int, ...], pad_output: bool) -> None:
    td = batch((4,), pad_output)[1] if shape == () else batch(shape, pad_output)
    shown = repr({"alone": td, "nested": TensorDict({"next": td}), "stacked": lazy_stack([td, td])}[place])
    count = row_count((2, *shape) if place == "stacked" else shape)
    for name in CONTAINERS:
        assert f"{name}: {type(td[name]).__name__}({count}" in shown
    assert ("raw, toy, model 'tiny'" in shown and "'a' → 'a'" in shown) or not shape


@pytest.mark.process
def test_other_tensordicts_print_as_they_do_without_corelm() -> None:
    make = "TensorDict(a=torch.zeros(2, 3), b='text', c=TensorDict(d=torch.ones(2)), batch_size=[])"
    code = f"import torch; from tensordict import TensorDict; print(repr({make}))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    repr(batch())
    assert repr(eval(make)) == ran.stdout.rstrip("\n")


class Rollout(TensorClass):
    """What a user may keep a container in."""

    tokens: Tokens
    reward: torch.Tensor


class LongTokens(Tokens):
    """A user's own container."""

    extra: torch.Tensor | None = None


def test_containers_print_inside_a_tensorclass_and_as_a_subclass() -> None:
    td = batch()
    rollout = Rollout(tokens=td["tokens"], reward=torch.zeros(4), batch_size=[4])
    assert "tokens" in repr(rollout) and "full" in repr(rollout)
    shown = repr(TensorDict(rollout=rollout, text=td["text"], batch_size=[4]))
    assert "tokens" in shown and "full" in shown and "0: 'a' → 'a'" in shown
    own = LongTokens(full=torch.zeros(2, 3, dtype=torch.int64), extra=torch.zeros(2, 1), batch_size=[2])
    assert "extra" in repr(own) and "not shown" not in repr(own)
