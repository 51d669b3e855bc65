"""The notebooks in docs/ are kept without outputs. The site runs them: tests/test_docs_site.py reads what they show."""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))
NOTEBOOKS = [path for path in NOTEBOOKS if "_build" not in path.parts and ".jupyter_cache" not in path.parts]


def test_notebooks_are_kept_without_outputs():
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text())["cells"]
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), path.name
