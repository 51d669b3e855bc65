"""`make bench` measures every part that there is."""

from pathlib import Path

import pytest

pytest.importorskip("tqdm", reason="benchmarks need tqdm")

from benchmarks.__main__ import PARTS

FOLDER = Path(__file__).parent.parent / "benchmarks"


def test_every_module_with_figures_is_a_part_of_make_bench():
    assert set(PARTS) == {path.stem for path in FOLDER.glob("*.py") if "\ndef figures(" in path.read_text()}
    assert len(PARTS) == len(set(PARTS))
