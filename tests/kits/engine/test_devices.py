"""Numbers of GPUs as people type them, among those that this process sees, and names of dtypes."""

from __future__ import annotations

import pytest
import torch

from corelm.errors import InvalidRequestError
from corelm_engine_kit import device_numbers, torch_dtype, visible_devices
from helpers.each import each


def test_numbers_are_read_from_what_people_type() -> None:
    for given in ([0, 3], (0, 3), "0,3", "0, 3", range(0, 6, 3), ["0", "3"]):
        assert device_numbers(given) == [0, 3], given
    assert device_numbers(3) == [3]


def test_anything_else_is_refused() -> None:
    for given in ([], "", "cuda:0", [0, 0], -1, [True], 1.5, ["0", None], {}):
        with pytest.raises(InvalidRequestError) as caught:
            pytest.fail(f"{given!r} was read: {device_numbers(given)}")
        assert caught.value.field == "devices"


def test_numbers_count_the_gpus_that_this_process_sees() -> None:
    uuids = {"CUDA_VISIBLE_DEVICES": "GPU-aa, GPU-bb"}
    assert visible_devices([1, 0], uuids) == "GPU-bb,GPU-aa"
    assert visible_devices(2, {"CUDA_VISIBLE_DEVICES": "4,5,6"}) == "6"
    assert visible_devices([2], {}) == "2"
    for seen in ("4,5", ""):
        with pytest.raises(InvalidRequestError, match=f"this process sees {len(seen.split(',')) if seen else 0} GPUs"):
            visible_devices([2], {"CUDA_VISIBLE_DEVICES": seen})


@each("name, meant", [("half", "float16"), ("float", "float32"), ("double", "float64")])
def test_torchs_own_short_names_of_dtypes_are_dtypes(name: str, meant: str) -> None:
    assert torch_dtype(name) is torch_dtype(f"torch.{name}") is getattr(torch, meant)
