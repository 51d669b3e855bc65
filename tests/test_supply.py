"""What lets others check a release: builds that anyone can repeat, and bills of materials."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: Core and one of the plugins, whose builds are alike.
DISTRIBUTIONS = [ROOT, ROOT / "plugins" / "vllm_backend"]

pytestmark = pytest.mark.process


def copied(source: Path, to: Path) -> Path:
    """Copy what git knows of a distribution, without times."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=source, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in listed:
        if (source / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, to / name)
    return to


def built(source: Path, into: Path, **environment: str) -> dict[str, str]:
    """Build the sdist and the wheel, and return the SHA-256 of each."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(into), "-t", "sdist", "-t", "wheel"]
    subprocess.run(command, cwd=source, check=True, capture_output=True, env={**os.environ, **environment})
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in into.iterdir()}


@pytest.mark.parametrize("source", DISTRIBUTIONS, ids=lambda path: path.name if path != ROOT else "core")
def test_two_builds_have_the_same_bytes(source, tmp_path):
    first = built(copied(source, tmp_path / "first"), tmp_path / "one")
    other = copied(source, tmp_path / "elsewhere" / "second")
    for number, path in enumerate(sorted(other.rglob("*"), reverse=True)):
        # Another clock, and a umask that lets nobody else read.
        os.utime(path, (1e9 + number, 1e9 + number))
        path.chmod(0o700 if path.is_dir() else 0o600)
    second = built(other, tmp_path / "two", TZ="Asia/Tokyo", LC_ALL="C", PYTHONHASHSEED="5")
    assert first == second
    assert len(first) == 2


@pytest.mark.nightly
def test_a_bill_of_materials_lists_every_pin_and_can_be_repeated(tmp_path):
    pytest.importorskip("cyclonedx_py", reason="cyclonedx-bom is not installed")
    for folder in ("one", "two"):
        subprocess.run([sys.executable, str(ROOT / ".ci" / "sbom.py"), str(tmp_path / folder)], check=True)
    for pins in (ROOT / "constraints").glob("*.txt"):
        bill = tmp_path / "one" / f"{pins.stem}.cdx.json"
        assert bill.read_bytes() == (tmp_path / "two" / bill.name).read_bytes()
        parts = {(part["name"], part["version"]) for part in json.loads(bill.read_text())["components"]}
        lines = re.findall(r"^([\w.-]+)==([\w.!+-]+)", pins.read_text(), re.MULTILINE)
        assert lines
        assert parts == set(lines)
