"""The notebooks in docs/ are kept with what they show, for those who read them in the repository.

`make notebooks` runs them again. The site runs them as well: tests/test_docs_site.py reads what they show there.
"""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))
NOTEBOOKS = [path for path in NOTEBOOKS if "_build" not in path.parts and ".jupyter_cache" not in path.parts]


def test_notebooks_are_kept_with_what_they_show():
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), path.name
        # The first cell sets up, and the last closes the engines.
        assert all(cell["outputs"] for cell in cells[1:-1]), path.name
        shown = [output for cell in cells for output in cell["outputs"]]
        assert not any(output["output_type"] == "error" for output in shown), path.name
        kinds = {kind for output in shown for kind in output.get("data", ())}
        # A result shows its texts, token by token.
        assert {"text/html", "image/png"} <= kinds and path.stat().st_size < 80_000, path.name
        pages = ["".join(output["data"]["text/html"]) for output in shown if "text/html" in output.get("data", ())]
        assert any("What is your name?" in page for page in pages), path.name
        assert str(ROOT) not in path.read_text() and "/tmp/" not in path.read_text(), path.name
