"""The notebooks in docs/ run from the first cell to the last, and show what they are for."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))
NOTEBOOKS = [path for path in NOTEBOOKS if "_build" not in path.parts and ".jupyter_cache" not in path.parts]


def test_there_is_a_notebook():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_kept_without_outputs(path):
    cells = json.loads(path.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


def test_the_tour_runs_and_shows_tokens_and_plots(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(ROOT / "docs" / "notebooks" / "tour.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not any(output.output_type == "stream" and output.name == "stderr" for output in outputs)
    shown = [output.data for output in outputs if "data" in output]
    assert sum("image/png" in data for data in shown) == 2
    (result,) = [data["text/html"] for data in shown if "finish_reason" in data["text/plain"]]
    assert "What" in result and re.search(r"title=\"[^\"]*-\d+\.\d+", result), "no token has its log-prob"
    # The reference is an earlier step of the same training: its KL is not 0.
    (printed,) = re.findall(r"^\[(.*)\]$", "".join(o.text for o in outputs if o.output_type == "stream"), re.MULTILINE)
    assert all(abs(float(number)) > 0.5 for number in printed.split(","))
