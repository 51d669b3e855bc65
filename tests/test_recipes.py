"""The scripts in examples/gpu run on a CPU, and what they import from vLLM exists.

There is no GPU here: what the scripts do on one is only compiled.
"""

import ast
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples" / "gpu"
SCRIPTS = sorted(FOLDER.glob("*.py"))
#: Seconds for a script. Each opens several engines.
TIMEOUT = 300


def run(tmp_path, tiny_model, name, *command):
    """Run a script as a process in an empty folder, and return what it prints."""
    (tmp_path / "tiny-model").symlink_to(tiny_model)
    command = [sys.executable, *command, str(FOLDER / name), "tiny-model"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
def test_two_ranks_sample_and_train_in_turns(tmp_path, tiny_model):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    said = run(tmp_path, tiny_model, "colocated.py", *torchrun)
    assert sorted(re.findall(r"rank \d, step \d: weights step-\d", said)) == [
        f"rank {rank}, step {step}: weights step-{step}" for rank in range(2) for step in range(2)
    ]


def test_a_trainer_learns_from_answers_that_are_one_step_old(tmp_path, tiny_model):
    said = run(tmp_path, tiny_model, "apart.py")
    assert re.findall(r"step (\d): sampled with (\S+),", said) == [("0", "0"), ("1", "0"), ("2", "step-0")]
    # The second rollout is of the first weights, and the trainer has taken a step since.
    mismatch = [float(found) for found in re.findall(r"mismatch (\S+)", said)]
    assert mismatch[0] < 1e-3 < min(mismatch[1:])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_imports_names_that_exist(script):
    assert {path.stem for path in SCRIPTS} == {"colocated", "apart"}
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and find_spec(node.module.partition(".")[0]):
            for name in node.names:
                assert hasattr(import_module(node.module), name.name)
