"""Figures of benchmarks as shares of what the machine can do."""

import dataclasses
import json
from pathlib import Path

import pytest
from benchmarks.machine import (
    LARGEST,
    UNKNOWN_CACHE,
    Machine,
    array_size,
    last_level_cache,
    measure_machine,
)
from benchmarks.measure import AGAIN, Figure, compare, table

MACHINE = Machine(
    rates={"float32": 100e9, "bfloat16": 200e9},
    rates_by={"float32": "torch.mm, 8x8x8", "bfloat16": "linear, 8x8x8"},
    bandwidths={"triad": 10e9, "norm": 20e9},
)
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "full.json"


@pytest.mark.parametrize(
    "flops, moved, dtype, least",
    [
        (100e9, 1e9, "float32", 1.0),
        (100e9, 1e9, "bfloat16", 0.5),
        (100e9, 40e9, "float32", 2.0),
        (None, 10e9, None, 0.5),
        (50e9, None, "float32", 0.5),
        (None, None, None, None),
    ],
)
def test_the_least_time_is_the_longer_of_operations_and_bytes(flops, moved, dtype, least):
    assert MACHINE.least_seconds(flops, moved, dtype) == least


def test_a_machine_is_the_same_after_json():
    assert Machine.from_dict(json.loads(json.dumps(MACHINE.as_dict()))) == MACHINE


def test_drift_is_the_largest_change_of_a_rate_or_the_best_bandwidth():
    assert MACHINE.drift(MACHINE) == 0
    slower = dataclasses.replace(MACHINE, rates={"float32": 95e9, "bfloat16": 150e9})
    assert MACHINE.drift(slower) == pytest.approx(0.25)
    # The triad is not the best of them, so its change does not count.
    assert MACHINE.drift(dataclasses.replace(MACHINE, bandwidths={"triad": 1e9, "norm": 24e9})) == pytest.approx(0.2)


def test_the_machine_is_measured_with_every_dtype_and_memory():
    machine = measure_machine(quick=True, products=[(16, 32, 16)], array_bytes=2**16)
    assert set(machine.rates) == {"float32", "bfloat16"} and min(machine.rates.values()) > 0
    assert all(way.endswith(", 16x32x16") for way in machine.rates_by.values())
    assert {"triad", "norm"} <= set(machine.bandwidths) and machine.bandwidth >= machine.bandwidths["triad"] > 0
    assert "GFLOP/s" in machine.described() and "GB/s" in machine.described()


def test_arrays_are_larger_than_the_largest_cache(tmp_path):
    assert last_level_cache(tmp_path) is None and array_size(None) == UNKNOWN_CACHE
    for index, size in enumerate(("32K", "1024K", "32M")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert last_level_cache(tmp_path) == 32 * 2**20
    assert array_size(32 * 2**20) == 128 * 2**20
    assert array_size(2**30) == LARGEST


def test_a_share_is_the_least_time_over_the_time_taken():
    figure = Figure(work="w", way="a", seconds=2.0, flops=100e9, bytes=1e9, dtype="float32", goal_share=0.6)
    assert figure.share is None and figure.met is None
    measured = figure.on(MACHINE)
    assert measured.share == 0.5 and measured.met is False
    assert dataclasses.replace(measured, goal_share=0.5).met is True
    assert "50 % of the machine" in table([measured]) and "goal 60 % of the machine: NOT MET" in table([measured])
    assert Figure(work="w", way="a", seconds=2.0).on(MACHINE).share is None


def test_every_goal_has_to_be_met():
    figure = Figure(
        work="w", way="a", seconds=2.0, ratio=0.5, spread=(0.5, 0.5), goal=0.4, flops=180e9, dtype="float32",
        goal_share=0.8,
    ).on(MACHINE)  # fmt: skip
    assert figure.share == pytest.approx(0.9) and figure.met is False
    assert "goal 0.4 and 80 % of the machine: NOT MET" in table([figure])
    assert dataclasses.replace(figure, goal=0.5).met is True
    assert dataclasses.replace(figure, goal=0.5, goal_share=0.95).met is False


def test_a_figure_is_the_same_after_json():
    figure = Figure(work="w", way="a", seconds=2.0, flops=1e9, bytes=1e9, dtype="float32", goal_share=0.5).on(MACHINE)
    saved = json.loads(json.dumps(figure.as_dict()))
    assert saved["share"] == figure.share and saved["met"] is figure.met
    assert Figure.from_dict(saved) == figure


def test_figures_saved_before_shares_were_measured_can_be_read():
    old = {"work": "w", "way": "a", "seconds": 1.0, "ratio": 0.5, "goal": 1.0, "met": True}
    figure = Figure.from_dict(old)
    assert figure.met is True and figure.share is None and figure.on(MACHINE).share is None
    for name, section in json.loads(RESULTS.read_text()).items():
        if name != "machine":
            assert [Figure.from_dict(each).work for each in section["figures"]]


def test_compare_gives_each_way_its_own_work():
    figures = compare(
        "w",
        {"a": lambda: None, "b": lambda: None},
        baseline="a",
        repeats=1,
        flops=8,
        bytes={"a": 4, "b": 2},
        dtype={"a": "float32", "b": "bfloat16"},
        goal_shares={"b": 0.5},
    )
    found = {figure.way: (figure.flops, figure.bytes, figure.dtype, figure.goal_share) for figure in figures}
    assert found == {
        "a": (8, 4, "float32", None), "b": (8, 2, "bfloat16", 0.5), AGAIN: (8, 4, "float32", None),
    }  # fmt: skip
