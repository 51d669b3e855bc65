"""The completion of a shell, which asks the command itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

COMMAND = Path(sys.executable).parent / "corelm"


def completed(words: str) -> list[str]:
    """Return what bash offers after these words."""
    asking = {"_CORELM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    done = subprocess.run([COMMAND], capture_output=True, text=True, env={**os.environ, **asking})
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_a_shell_completes_commands_flags_and_backends():
    commands = {"backends", "fleet", "generate", "score", "chat", "serve", "compare", "conformance", "doctor"}
    negations = ("do-sample", "ignore-eos", "early-stopping", "skip-special-tokens")
    for words, offered in (
        ("corelm ", {*commands, "new-backend"}),
        ("corelm gen", {"generate"}),
        ("corelm generate --max", {"--max-new-tokens"}),
        ("corelm generate --no-", {f"--no-{name}" for name in negations}),
        ("corelm generate --log-probs r", {"raw"}),
        ("corelm generate --backend to", {"toy"}),
    ):
        assert set(completed(words)) == offered, words


def test_the_script_for_a_shell_can_be_shown():
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    for shell in ("bash", "zsh", "fish"):
        shown = subprocess.run([COMMAND, "--show-completion", shell], capture_output=True, text=True, env=environment)
        assert shown.returncode == 0 and "_CORELM_COMPLETE" in shown.stdout
