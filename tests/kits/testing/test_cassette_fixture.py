"""The pytest fixture `cassette`: recorded on the first run, replayed from then on, next to the test file."""

import json
from pathlib import Path

import pytest

from helpers.cassettes import both

pytest_plugins = "pytester"

TEST = """
import os
import pytest

ROWS = [[65, 66], [67]]

def test_answers(cassette):
    with cassette.open("toy") as policy, cassette.open("toy", label="reference") as reference:
        batch = policy.generate(ROWS, {"max_new_tokens": 4, "seed": int(os.environ.get("SEED", "1"))})
        scores = reference.score_logprobs(ROWS)
        assert policy.name == "toy" and batch.ids.tolist() and scores.logprobs.tolist()
        print("SOFTWARE", policy.engine.software)

@pytest.mark.corelm_cassette(match="content", path="shared")
@pytest.mark.parametrize("row", [[65], [66]])
def test_one(cassette, row):
    cassette.open("toy", label=str(row[0])).score_logprobs([[row[0], 67]])
"""


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import here what the inner runs need: they forget their imports, and torch cannot be imported twice."""
    path = tmp_path_factory.mktemp("imported") / "c"
    both(path, lambda backend: (backend.generate([[65]], {"max_new_tokens": 1, "seed": 1}), backend.score_logprobs([])))


def ran(pytester: pytest.Pytester, *arguments: str, passed: int = 3, failed: int = 0) -> str:
    run = pytester.runpytest("-p", "no:cacheprovider", "-s", *arguments)
    run.assert_outcomes(passed=passed, failed=failed)
    return run.stdout.str()


def test_it_records_once_and_replays_from_then_on(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makepyfile(test_mine=TEST)
    ran(pytester, "--corelm-record-mode=none", passed=0, failed=3)
    assert "SOFTWARE core-testing" in ran(pytester)
    folder = pytester.path / "cassettes" / "test_mine" / "test_answers"
    assert sorted(each.name for each in folder.iterdir()) == ["0", "reference"]
    assert sorted(each.name for each in (pytester.path / "shared").iterdir()) == ["65", "66"]
    before = {file: file.read_bytes() for file in pytester.path.rglob("calls.jsonl")}
    for mode in ("once", "none"):
        assert "SOFTWARE a cassette of" in ran(pytester, f"--corelm-record-mode={mode}")
    # Another request is refused, and says what to type.
    monkeypatch.setenv("SEED", "2")
    assert "Pass the same seed=" in ran(pytester, passed=2, failed=1)
    assert before == {file: file.read_bytes() for file in pytester.path.rglob("calls.jsonl")}
    # New episodes are added, and then replayed.
    ran(pytester, "--corelm-record-mode=new_episodes")
    assert len(calls(folder / "0")) == 2 and len(calls(folder / "reference")) == 1
    ran(pytester, "--corelm-record-mode=all")
    assert len(calls(folder / "0")) == 1
    ran(pytester, "--corelm-record-mode=none")


def test_a_test_that_failed_is_recorded_again(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makepyfile(
        test_mine="""
        import os

        def test_two_calls(cassette):
            backend = cassette.open("toy")
            backend.score_logprobs([[65, 66]])
            assert "FAILS" not in os.environ
            backend.score_logprobs([[67, 68]])
        """
    )
    monkeypatch.setenv("FAILS", "1")
    ran(pytester, passed=0, failed=1)
    monkeypatch.delenv("FAILS")
    for _ in range(2):
        ran(pytester, passed=1)
        assert len(calls(pytester.path / "cassettes" / "test_mine" / "test_two_calls" / "0")) == 2


@pytest.mark.process
def test_each_test_has_a_folder_for_itself_in_every_process(pytester: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    pytester.makepyfile(
        test_mine="""
        import pytest

        IDS = ["a-b", "a/b", "<", ">", "1", "1-", "x" * 300]

        class TestIt:
            @pytest.mark.xdist_group("one")
            @pytest.mark.parametrize("token", range(65, 72), ids=IDS)
            def test_it(self, cassette, token):
                cassette.open("toy").score_logprobs([[token, 66]])
        """
    )
    ran(pytester, passed=7)
    folders = sorted(each.name for each in (pytester.path / "cassettes" / "test_mine").iterdir())
    assert len(folders) == 7 and {"TestIt.test_it-a-b", "TestIt.test_it-1"} <= {*folders}
    run = pytester.runpytest_subprocess(
        "-p", "no:cacheprovider", "-n1", "--dist=loadgroup", "--corelm-record-mode=none"
    )
    run.assert_outcomes(passed=7)


def test_an_unknown_setting_is_named(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.corelm_cassette(matches="content")
        def test_it(cassette):
            pass
        """
    )
    run = pytester.runpytest("-p", "no:cacheprovider")
    run.assert_outcomes(errors=1)
    assert "matches is unknown; it takes match, match_seeds, save_tokenizer and path" in run.stdout.str()


def calls(path: Path) -> list[str]:
    return [line for line in (path / "calls.jsonl").read_text().splitlines() if "call" in json.loads(line)]
