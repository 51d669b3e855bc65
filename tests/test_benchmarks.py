"""`make bench` measures every part that there is, and the site shows what it measured."""

from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("tqdm", reason="benchmarks need tqdm")

from benchmarks.__main__ import PARTS
from benchmarks.measure import AGAIN, Figure

FOLDER = Path(__file__).parent.parent / "benchmarks"


def test_every_module_with_figures_is_a_part_of_make_bench():
    assert set(PARTS) == {path.stem for path in FOLDER.glob("*.py") if "\ndef figures(" in path.read_text()}
    assert len(PARTS) == len(set(PARTS))


def test_the_table_of_the_site_shows_noise_and_missed_goals(monkeypatch):
    pytest.importorskip("sphinx", reason="what builds the site is not installed: the group docs")
    pytest.importorskip("matplotlib", reason="what builds the site is not installed: the group docs")
    monkeypatch.syspath_prepend(FOLDER.parent / "docs" / "_ext")
    tables = import_module("result_figures")
    assert tables.AGAIN == AGAIN
    common = {"work": "w", "baseline": "a", "turns": 3, "rows": 2, "goal_seconds": 1e-6}
    figures = [
        Figure(way="a", seconds=4e-6, ratio=1.0, spread=(1.0, 1.0), **common),
        Figure(way="b", seconds=2e-6, ratio=1.005, spread=(0.9, 1.25), goal=1.0, **common),
        Figure(way="c", seconds=1e-6, ratio=0.25, spread=(0.2, 0.3), goal=0.5, **common),
        Figure(way=AGAIN, seconds=4e-6, ratio=1.1, spread=(1.0, 1.2), **common),
        Figure(work="memory of --w", way="b", mib=12.5, goal=10),
    ]
    assert list(tables.table_lines([each.as_dict() for each in figures]))[2:] == [
        "| w | b | a | 1.005; 1.000 µs a row | 0.900 to 1.250 | 1.100 | ≤ 1; ≤ 1 µs a row **missed** |",
        "|  | c | a | 0.250; 0.500 µs a row | 0.200 to 0.300 | 1.100 | ≤ 0.5; ≤ 1 µs a row |",
        "| `memory of --w` | b |  | 12.5 MiB |  |  | ≤ 10 MiB **missed** |",
    ]
