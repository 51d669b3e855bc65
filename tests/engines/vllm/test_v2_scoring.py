"""Scoring on vLLM's V2 model runner, which runs here in Triton's interpreter; see `interpreted`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.tiny_models import tiny_model

ROWS = [[5, 17, 300, 2, 8, 9, 40, 41], [8, 9, 10], [40, 41], [7, 7, 7, 7, 300, 301]]
STARTS = [1, 1, 1, 3]


# Triton's interpreter takes half a minute.
@pytest.mark.nightly
def test_scores_and_the_most_probable_ids_are_the_models(tiny_folder: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "engines.vllm.interpreted", tiny_folder],
        input=json.dumps({"rows": ROWS, "starts": STARTS}),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    model = tiny_model(hidden_size=128)
    for mode, (logprobs, argmax) in json.loads(ended.stdout.splitlines()[-1]).items():
        for row, start, scored, best in zip(ROWS, STARTS, logprobs, argmax, strict=True):
            with torch.no_grad():
                whole = model(torch.tensor([row])).logits[0].float().log_softmax(-1)
            expected = [float(whole[place - 1, row[place]]) for place in range(start, len(row))]
            assert scored == pytest.approx([0.0] * start + expected, abs=1e-4), mode
            assert best == [-1] * start + whole.argmax(-1).tolist()[start - 1 : -1], mode
