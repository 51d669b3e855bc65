"""Write a software bill of materials (CycloneDX, JSON) for each file of pins: make sbom.

    .venv/bin/python .ci/sbom.py FOLDER

Two runs write the same bytes. A line without a version, for a Python older than that of the tests, is left out: what
pip takes there is not pinned.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def pinned(pins: str) -> str:
    """Return the lines that name a version."""
    return "".join(f"{line}\n" for line in pins.splitlines() if re.match(r"[\w.-]+==", line))


def write(folder: Path) -> None:
    """Write ``NAME.cdx.json`` into `folder` for every ``constraints/NAME.txt``.

    Raises:
        subprocess.CalledProcessError: the bill is not valid CycloneDX.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted((ROOT / "constraints").glob("*.txt")):
        command = [sys.executable, "-W", "ignore:The Component this BOM", "-m", "cyclonedx_py", "requirements", "-"]
        command += ["--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "library", "--validate"]
        command += ["--output-reproducible", "--of", "JSON", "--output-file", str(folder / f"{path.stem}.cdx.json")]
        subprocess.run(command, input=pinned(path.read_text()), text=True, check=True)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
