"""`python -m corelm_testing.tiny`: the model of the documentation, for users who have no checkout."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import corelm
from corelm.errors import InvalidRequestError
from corelm_testing import tiny
from corelm_testing.tiny import build_tiny


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which the command runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def opens(path: Path) -> bool:
    with corelm.get_backend("transformers", path, dtype="float32") as backend:
        prompts = backend.tokenize(["What is your name?"]).ids
        return len(backend.generate(prompts, {"max_new_tokens": 4}).ids) == 1


def test_the_command_makes_a_model_that_a_backend_opens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tiny, "build_tiny", partial(build_tiny, steps=3))
    tiny.main(["made"])
    out, err = capsys.readouterr()
    # A pipe gets no progress bars.
    assert (out, err) == ("saved to made; open it with corelm.get_backend('transformers', 'made')\n", "")
    assert opens(folder / "made")


@pytest.mark.process
@pytest.mark.nightly
def test_the_module_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "corelm_testing.tiny"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("saved to tiny-model;")
    assert opens(tmp_path / "tiny-model")


def test_a_folder_with_files_is_not_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "model.safetensors").write_bytes(b"weeks of training")
    with pytest.raises(SystemExit) as ended:
        tiny.main(["mine"])
    assert ended.value.code == 2 and "'mine' exists already" in capsys.readouterr().err
    assert (folder / "mine" / "model.safetensors").read_bytes() == b"weeks of training"
    with pytest.raises(InvalidRequestError) as caught:
        build_tiny(folder / "mine", steps=1, progress=False)
    assert caught.value.field == "path"


def test_impossible_sizes_are_refused(folder: Path) -> None:
    for options in ({"heads": 3}, {"heads": 0}, {"layers": 0}):
        with pytest.raises(InvalidRequestError) as caught:
            build_tiny(folder / "model", **options)
        assert caught.value.field == next(iter(options)), options


def test_without_transformers_the_command_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        tiny.main(["--help"])
    assert "python -m corelm_testing.tiny" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit) as ended:
        tiny.main(["made"])
    assert ended.value.code == 2 and 'pip install "transformers' in capsys.readouterr().err
    assert not (folder / "made").exists()
