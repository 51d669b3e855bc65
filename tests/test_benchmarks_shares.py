"""Figures of benchmarks as shares of what the machine can do."""

import dataclasses

import pytest
from benchmarks.machine import (
    Machine,
    measure_machine,
)
from benchmarks.measure import AGAIN, Figure, compare, table

MACHINE = Machine(
    rates={"float32": 100e9, "bfloat16": 200e9},
    rates_by={"float32": "torch.mm, 8x8x8", "bfloat16": "linear, 8x8x8"},
    bandwidths={"triad": 10e9, "norm": 20e9},
)


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


def test_the_machine_is_measured_with_every_dtype_and_memory():
    machine = measure_machine(quick=True, products=[(16, 32, 16)], array_bytes=2**16)
    assert set(machine.rates) == {"float32", "bfloat16"} and min(machine.rates.values()) > 0
    assert all(way.endswith(", 16x32x16") for way in machine.rates_by.values())
    assert {"triad", "norm"} <= set(machine.bandwidths) and machine.bandwidth >= machine.bandwidths["triad"] > 0
    assert "GFLOP/s" in machine.described() and "GB/s" in machine.described()


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
