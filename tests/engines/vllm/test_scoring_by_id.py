"""Scoring by id on vLLM's V2 model runner, which runs here in Triton's interpreter; see `interpreted`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from corelm import Backend
from engines.vllm.engine_access import async_engine
from helpers.tiny_models import tiny_model
from vllm_backend import scoring_by_id

#: Triton's interpreter takes half a minute.
pytestmark = pytest.mark.nightly

ROWS = [[5, 17, 300, 2, 8, 9, 40, 41], [8, 9, 10], [40, 41], [7, 7, 7, 7, 300, 301]]
STARTS = [1, 1, 1, 3]


@pytest.fixture(scope="module")
def found(tiny_folder: Path) -> dict[str, Any]:
    """What `interpreted` prints."""
    tests = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-m", "engines.vllm.interpreted", tiny_folder],
        input=json.dumps({"rows": ROWS, "starts": STARTS}),
        cwd=tests,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return result


def test_an_engine_that_can_score_by_id_does_so_after_a_trial(found: dict[str, Any]) -> None:
    # Two rows by id, from their first and their middle position on, and the same in the plain way.
    assert found["at_open"] == [[None, 0], [None, 15], [0, None], [0, None]]
    # The one position of the third row is the sampled one. Nothing is asked of its prompt.
    assert found["asked"] == [[None, 0], [None, 0], [None, None], [None, 2]]


def test_scores_by_id_are_the_models(found: dict[str, Any]) -> None:
    model = tiny_model(hidden_size=128)
    for row, start, by_id, plain in zip(ROWS, STARTS, found["by_id"], found["plain"], strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([row])).logits[0].float().log_softmax(-1)
        expected = [0.0] * start + [float(logprobs[place - 1, row[place]]) for place in range(start, len(row))]
        assert by_id == pytest.approx(expected, abs=1e-4) and by_id == pytest.approx(plain, abs=1e-5)


def test_the_most_probable_ids_come_in_the_plain_way(found: dict[str, Any]) -> None:
    assert found["asked_argmax"] == [[1, None], [1, None], [None, None], [1, None]]
    model = tiny_model(hidden_size=128)
    for row, start, argmax in zip(ROWS, STARTS, found["argmax"], strict=True):
        with torch.no_grad():
            best = model(torch.tensor([row])).logits[0].argmax(-1).tolist()
        assert argmax == [-1] * start + best[start - 1 : -1]


@pytest.mark.parametrize("spoil", ["shifted", "off", "nan", "short", "missing"])
def test_an_array_that_disagrees_with_the_plain_way_is_not_used(found: dict[str, Any], spoil: str) -> None:
    assert found["right"] is True and found[spoil] is False


def test_an_engine_without_the_v2_runner_scores_plainly(shared: Backend) -> None:
    config = async_engine(shared).llm.vllm_config
    assert not config.use_v2_model_runner and not scoring_by_id.offered(config)
