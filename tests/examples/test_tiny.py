"""`python -m corelm.examples.tiny`: the model of the documentation, for users who have no checkout."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import corelm
from corelm.errors import InvalidRequestError
from corelm.examples.tiny import build_tiny


def typed(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "corelm.examples.tiny", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)


def test_the_command_makes_a_model_that_a_backend_opens(tmp_path: Path) -> None:
    result = typed(tmp_path, "tiny-model")
    assert (result.returncode, result.stderr) == (0, ""), result.stderr  # A pipe gets no progress bars.
    assert result.stdout == "saved to tiny-model; open it with corelm.get_backend('transformers', 'tiny-model')\n"
    with corelm.get_backend("transformers", tmp_path / "tiny-model", dtype="float32") as backend:
        prompts = backend.tokenize(["What is your name?"]).ids
        assert len(backend.generate(prompts, {"max_new_tokens": 4}).ids) == 1


def test_the_command_explains_itself_without_transformers(tmp_path: Path) -> None:
    result = typed(tmp_path, "--help")
    assert result.returncode == 0 and "python -m corelm.examples.tiny" in result.stdout


def test_a_folder_with_files_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.safetensors").write_bytes(b"weeks of training")
    result = typed(tmp_path, "mine")
    assert result.returncode == 2 and "'mine' exists already" in result.stderr and "Traceback" not in result.stderr
    assert (tmp_path / "mine" / "model.safetensors").read_bytes() == b"weeks of training"
    with pytest.raises(InvalidRequestError, match="choose another folder") as caught:
        build_tiny(tmp_path / "mine", steps=1, progress=False)
    assert caught.value.field == "path"


def test_without_transformers_the_command_says_what_to_install(tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['transformers'] = None; from corelm.examples.tiny import main; main(['made'])"
    result = subprocess.run([sys.executable, "-c", hidden], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2 and 'pip install "transformers' in result.stderr
    assert "Traceback" not in result.stderr and not (tmp_path / "made").exists()


def test_an_example_is_imported_from_the_package_only() -> None:
    assert find_spec("tiny") is None
