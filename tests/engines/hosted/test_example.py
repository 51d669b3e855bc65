"""`examples/three_engines.py`: three engines in one script, from an environment without vLLM and SGLang."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from helpers.cpu_engines import ENGINES, ROOT


def test_three_engines_agree_on_a_conversation(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "engines.json").write_text(json.dumps(ENGINES))
    command = [sys.executable, str(ROOT / "examples" / "three_engines.py"), str(folder), str(tmp_path / "engines.json")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    print(result.stdout)
    counts = re.findall(r"^(\w+) +(\d+) tokens", result.stdout, re.MULTILINE)
    assert [name for name, _ in counts] == list(ENGINES) and len({count for _, count in counts}) == 1
    differences = re.findall(r"largest difference (\S+) nats", result.stdout)
    assert len(differences) == 3 and all(float(difference) < 1e-4 for difference in differences)
