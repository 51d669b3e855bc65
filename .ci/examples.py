"""Run the Python of the README and of docs/ with the installed packages, and not with the checkout.

    python .ci/examples.py CHECKOUT

A page that needs more than core and its transformers plugin is named as skipped. Run it next to the folder
tiny-model. Each page runs in a folder that holds nothing else.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

#: Pages that are not tried: they make environments, or continue what commands of the page have written.
NOT_TRIED = {"write-a-backend.md", "lm-eval.md"}
#: What a page may need in addition. Any other package that is missing is one that core should have asked for.
OPTIONAL = {
    *("datasets", "httpx", "inspect_ai", "lm_eval", "matplotlib", "msgspec", "openai", "opentelemetry", "orjson"),
    *("pandas", "peft", "polars", "pytest", "ray", "starlette", "torchrl", "trl", "uvicorn", "vllm"),
}
RUN = """
import pathlib, sys
sys.path.append(sys.argv[1])
from helpers.pages import Page
Page(pathlib.Path(sys.argv[2])).run()
"""


def needed(errors: str) -> str:
    """Return what a page that failed needs in addition; "" if it failed for another reason."""
    found = re.search(r"No module named '(\w+)|engine behind a URL needs (httpx)|no backend is named '(toy)'", errors)
    name = next(filter(None, found.groups()), "") if found else ""
    return name if name in {*OPTIONAL, "toy"} else ""


checkout = Path(sys.argv[1]).resolve()


def is_tried(page: Path) -> bool:
    # The pages of errors end with one: tests/test_error_pages.py runs them.
    return (
        "\n```python\n" in page.read_text() and not {"_build", "errors"} & {*page.parts} and page.name not in NOT_TRIED
    )


def run(page: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, str(checkout / "tests"), str(page)]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tiny-model").symlink_to(Path("tiny-model").resolve())
        return subprocess.run(command, capture_output=True, text=True, cwd=folder)


pages = list(filter(is_tried, [checkout / "README.md", *sorted((checkout / "docs").rglob("*.md"))]))
failed = []
with ThreadPoolExecutor(os.cpu_count()) as pool:
    for page, done in zip(pages, pool.map(run, pages), strict=True):
        name = page.relative_to(checkout)
        more = needed(done.stderr) if done.returncode else ""
        outcome = f"skipped, needs {more}" if more else "FAILED" if done.returncode else "passed"
        print(f"{outcome}: {name}", flush=True)
        if done.returncode and not more:
            failed.append(name)
            print(done.stdout[-2000:], done.stderr[-4000:], sep="\n")
if failed:
    sys.exit(f"failed: {', '.join(map(str, failed))}")
