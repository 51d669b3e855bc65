"""`corelm compare`: transformers in this process against the real vLLM in its own environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from helpers.cpu_engines import ENGINES


def test_transformers_and_vllm_agree(folder: Path, tmp_path: Path) -> None:
    lines = [
        {"prompt": "What is your name?"},
        {"messages": [{"role": "user", "content": "Where is the cat?"}]},
        {"ids": [5, 6, 7]},
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    # Its interpreter has a flag.
    options = [f"--option={name}={json.dumps(value)}" for name, value in ENGINES["vllm"].items() if name != "python"]
    command = [
        *(sys.executable, "-m", "corelm_cli", "compare", "--model", str(folder), "--json"),
        *("--input", str(tmp_path / "prompts.jsonl"), "--report", str(tmp_path / "report.html")),
        *("--backend", "transformers", "--option", "dtype=float32"),
        *("--backend", "vllm", "--python", ENGINES["vllm"]["python"], *options),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    found = json.loads(done.stdout)
    assert found["verdict"] == "agree" and found["causes"] == []
    (gap,) = [gap for gap in found["gaps"] if gap["kind"] == "sides"]
    assert 0 < gap["mean_abs"] < 1e-5 and gap["count"] > 200
    assert "vllm" in found["sides"][1]["software"] and "OK: transformers and vllm agree" in done.stderr
    assert "transformers and vllm agree" in (tmp_path / "report.html").read_text()
