"""The benchmarks with a real model run, here with a tiny one, and save every figure that they promise."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tqdm", reason="benchmarks need tqdm")

from benchmarks.gpu.device import SIZES, random_model, save
from benchmarks.measure import Figure

ROOT = Path(__file__).parent.parent
SCORED = ("2 rows of 16 to 120", "8 rows of 16 to 120", "one row of 16", "16 answers of 32 to a prompt of 64")
GENERATED = ("4 sampled tokens for 8 prompts", "4 sampled tokens for one prompt")
FIRST = ("what the first call takes more: scoring 8 rows", "what the first call takes more: 4 tokens for 8 prompts")

pytestmark = [pytest.mark.process, pytest.mark.nightly]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save(random_model(SIZES["tiny"]), tmp_path_factory.mktemp("checkpoint"))


def run(module, *options):
    subprocess.run([sys.executable, "-m", module, *map(str, options)], cwd=ROOT, check=True)


def check(figures, dtype):
    """Check the figures of one dtype: every work, the way that the backend took, and errors as small as the dtype's."""
    by_work = {}
    for figure in map(Figure.from_dict, figures):
        if f", {dtype}, V=2,048" in figure.work:
            by_work.setdefault(figure.work.split(f", {dtype}")[0], {})[figure.way.split(":")[0]] = figure
    for name in SCORED:
        assert by_work[f"scoring {name}"]["backend"].ratio > 0
        assert by_work[f"scoring {name}"]["backend"].way.startswith(("backend: tiled", "backend: sliced"))
        for error in ("largest", "mean"):
            ways = by_work[f"{error} error of scoring {name}"]
            assert 0 < ways["backend"].error < {"float32": 1e-5, "bfloat16": 0.3}[dtype]
            assert ways["backend"].ratio == ways["backend"].error / ways["padded"].error
    for name in GENERATED:
        assert set(by_work[name]) == {"raw generate", "with log-probs", "backend", "the same again"}
        assert by_work[name]["backend"].way.startswith("backend: cached")
    for name in FIRST:
        (ways,) = (ways for work, ways in by_work.items() if work.startswith(name))
        # A later call does not try again what the first one found out.
        assert ways["forwards of the body"].ratio > 0
        assert ways["seconds"].goal_seconds in (1.5, None)
    # The rows of one prompt share it.
    assert int(by_work[f"scoring {SCORED[-1]}"]["backend"].way.split(", ")[2].split()[0]) >= 15 * 63


def test_a_run_keeps_what_was_measured_before(checkpoint, tmp_path):
    (tmp_path / "quick.json").write_text(json.dumps({"scoring": {"figures": []}}))
    run("benchmarks.real", "--checkpoint", checkpoint, "--quick", "--out", tmp_path)
    found = json.loads((tmp_path / "quick.json").read_text())
    assert list(found) == ["scoring", "real, float32"]
    check(found["real, float32"]["figures"], "float32")
    assert {"date", "machine", "versions"} <= set(found["real, float32"])


def test_the_benchmarks_of_a_gpu_measure_a_checkpoint_in_two_dtypes(checkpoint, tmp_path):
    run("benchmarks.gpu", "--only", "real", "--checkpoint", checkpoint, "--tiny", "--out", tmp_path)
    (part,) = json.loads((tmp_path / "tiny.json").read_text()).values()
    assert "reason" not in part
    for dtype in ("float32", "bfloat16"):
        check(part["figures"], dtype)
