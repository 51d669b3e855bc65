"""Run the Python of the README and of docs/ with the installed packages, and not with the checkout.

    python .ci/examples.py CHECKOUT

A page that needs more than core and its transformers plugin is skipped, and named. Run it in an empty folder.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

#: What a page needs besides, as an import.
NEEDS = {
    "write-a-backend.md": "its own environments",
    "serving.md": "openai",
    "torchrl.md": "torchrl",
    "trl.md": "trl",
    "inspect.md": "inspect_ai",
    "lm-eval.md": "lm_eval",
}
RUN = """
import pathlib, sys
sys.path.append(sys.argv[1])
from helpers.pages import Page
Page(pathlib.Path(sys.argv[2])).run()
"""

checkout = Path(sys.argv[1]).resolve()
failed = []
for page in [checkout / "README.md", *sorted((checkout / "docs").rglob("*.md"))]:
    name = page.relative_to(checkout)
    if "\n```python\n" not in page.read_text() or "_build" in page.parts:
        continue
    if needed := NEEDS.get(page.name):
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
