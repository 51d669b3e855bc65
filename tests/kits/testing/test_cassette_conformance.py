"""The conformance kit passes on the replay of what it recorded of transformers, and says what was not recorded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
#: Tests that draw seeds on several threads at once, or that measure how long a call takes: what they ask for differs in
#: every run.
NOT_REPLAYED = {
    "test_eight_threads_at_once_each_get_their_own_answers",
    "test_a_timeout_ends_the_wait_and_the_engine_if_it_declares_so",
}
NOT_RECORDED = "its calls are not recorded"
#: A replay has none.
NO_GRADIENTS = "gradients is not declared"


@pytest.mark.nightly
def test_the_kit_passes_on_the_replay_of_its_recording(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "pytest", "tests/helpers/cassette_conformance.py", "-q", "-p", "no:cacheprovider"),
        f"--corelm-report={tmp_path / 'report'}",
    ]
    env = {**os.environ, "CASSETTES": str(tmp_path / "cassettes")}
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200, check=False)
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-2000:]
    outcomes: dict[str, dict[tuple[str, str], tuple[str, str]]] = {}
    for suite in json.loads((tmp_path / "report.json").read_text())["suites"]:
        found = {(each["test"], each["case"]): (each["outcome"], each["reason"]) for each in suite["tests"]}
        outcomes[suite["suite"].rpartition("::")[2]] = found
    recorded, replayed = outcomes["TestRecorded"], outcomes["TestReplayed"]
    assert recorded.keys() == replayed.keys()
    passed = {test for test, (outcome, _) in recorded.items() if outcome == "passed"}
    assert len(passed) > 220
    lost = {test for test in passed if replayed[test][0] != "passed"}
    assert {test for test, case in lost if replayed[test, case][1] != NO_GRADIENTS} <= NOT_REPLAYED
    assert {replayed[test] for test in lost} <= {("not applicable", why) for why in (NO_GRADIENTS, NOT_RECORDED)}
