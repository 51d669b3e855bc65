"""Run the Python of the README and of docs/ with the installed packages, and not with the checkout.

    python .ci/examples.py CHECKOUT

A page that needs more than core and its transformers plugin is skipped, and named. Run it in an empty folder.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

#: Pages that need more than an import shows.
NEEDS = {"write-a-backend.md": "its own environments", "lm-eval.md": "lm_eval", "from-lm-eval.md": "lm_eval"}
#: What is installed here. If it cannot be imported, that is a failure and no reason to skip.
INSTALLED = {"corelm", "torch", "tensordict", "transformers", "transformers_backend"}
RUN = """
import pathlib, sys
sys.path.append(sys.argv[1])
from helpers.pages import Page
Page(pathlib.Path(sys.argv[2])).run()
"""


def missing(page: str) -> list[str]:
    """Return the packages that the page's Python imports and that are not installed here."""
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    nodes = [node for block in blocks for node in ast.walk(ast.parse(block))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    roots = {name.partition(".")[0] for name in names}
    return sorted(root for root in roots - INSTALLED if root and find_spec(root) is None)


checkout = Path(sys.argv[1]).resolve()
failed = []
for page in [checkout / "README.md", *sorted((checkout / "docs").rglob("*.md"))]:
    name = page.relative_to(checkout)
    if "\n```python\n" not in page.read_text() or "_build" in page.parts:
        continue
    if needed := NEEDS.get(page.name) or ", ".join(missing(page.read_text())):
        print(f"skipped: {name} needs {needed}")
        continue
    command = [sys.executable, "-c", RUN, str(checkout / "tests"), str(page)]
    done = subprocess.run(command, capture_output=True, text=True)
    print(f"{'passed' if done.returncode == 0 else 'FAILED'}: {name}", flush=True)
    if done.returncode != 0:
        failed.append(name)
        print(done.stdout[-2000:], done.stderr[-4000:], sep="\n")
if failed:
    sys.exit(f"failed: {', '.join(map(str, failed))}")
