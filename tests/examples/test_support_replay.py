"""`examples/support_replay.py`: the bias of scores over the whole vocabulary, and none over the ids that were left."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch

import support_replay
from corelm_testing.tiny import build_tiny
from support_replay import Outcome


@pytest.fixture(scope="module")
def unsure_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny model after a few steps: the demo's is so sure that top-p leaves one id."""
    return build_tiny(tmp_path_factory.mktemp("support") / "tiny-model", steps=80, progress=False)


@pytest.fixture(scope="module")
def outcome(unsure_model: Path) -> Outcome:
    return support_replay.replay(unsure_model, top_p=0.8, top_k=1024, seed=0, samples=2)


def test_without_the_support_the_mean_ratio_is_the_mass_that_was_left(outcome: Outcome) -> None:
    assert outcome.tokens > 300 and outcome.kept_ids > 2
    assert 0.8 <= outcome.kept_mass < 0.95
    assert outcome.without.mean == pytest.approx(outcome.kept_mass, abs=1e-5)
    assert 0.2 < outcome.without.outside < 0.9
    # What top-p leaves has at least 0.8 of the mass.
    assert 0.1 < outcome.without.farthest <= 0.2 + 1e-5


def test_with_the_support_no_ratio_is_far_off(outcome: Outcome) -> None:
    assert outcome.with_support.mean == pytest.approx(1.0, abs=1e-5)
    assert outcome.with_support.outside == 0 and outcome.with_support.farthest < 1e-4


def test_the_command_prints_a_table_of_80_columns(unsure_model: Path) -> None:
    threads = torch.get_num_threads()
    try:
        with redirect_stdout(StringIO()) as printed:
            support_replay.main(["--output", str(unsure_model.parent)])
    finally:
        torch.set_num_threads(threads)
    lines = printed.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    (whole,) = [line for line in lines if "the whole vocabulary" in line]
    (left,) = [line for line in lines if "the ids that were left" in line]
    assert re.search(r"0\.[89]\d\d +\d\d\.\d% ", whole), whole
    assert re.search(r"1\.000 +0\.0% ", left), left
