"""The demo in a pipe: its tables fit 80 columns, and nothing draws progress."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# CI runs `make demo` itself.
pytestmark = [pytest.mark.process, pytest.mark.nightly]
DEMO = Path(__file__).parent.parent.parent / "examples" / "demo.py"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    # Two hundred steps, so that the answers are as long as a reader of the README sees them.
    words = [sys.executable, DEMO, "--output", "out"]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=tmp_path_factory.mktemp("demo"))
    assert done.returncode == 0, done.stderr
    return done


def test_the_tables_fit_80_columns_with_every_answer_on_one_line(ran):
    assert max(map(len, ran.stdout.splitlines())) <= 80
    for question in ("What is your name?", "Who are you?", "How big are you?"):
        (line,) = [line for line in ran.stdout.splitlines() if question in line][-1:]
        assert re.search(r"\d+ \+ \d+ +-\d\.\d{3} +(stop|length)", line), line
    assert "identical; largest difference" in " ".join(ran.stdout.split())
