"""Run the `corelm` command in a test, with the toy backend and files in a temporary folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from corelm.cli.app import app

CHAT = [{"role": "user", "content": "Where is the cat?"}]
LINES: list[Any] = [
    {"prompt": "The cat"},
    {"id": "chat", "messages": CHAT},
    {"id": "sea", "prompt": "The sea", "metadata": {"kept": ["by", "its owner"]}},
    {"id": 10, "prompt": "Is the tea"},
    {"id": "bird", "prompt": "A small bird"},
]

#: A plugin that fails on demand: when it opens, in its chat template, or at call number `FAIL_AT`.
FAULTY = """
import os
from toy_backend import ByteTokenizer, ToyBackend
import corelm

class Choosy(ByteTokenizer):
    def apply_chat_template(self, conversation, **options):
        if conversation[-1]["content"] == "bad":
            raise ValueError("not in my template")
        return super().apply_chat_template(conversation, **options)

class Faulty(ToyBackend):
    calls = 0

    @classmethod
    def open(cls, model=None):
        if model == "broken":
            raise RuntimeError("no such model")
        return super().open(tokenizer=Choosy())

    @corelm.hookimpl
    def generate(self, request):
        self.calls += 1
        if self.calls == int(os.environ.get("FAIL_AT", "0")):
            raise RuntimeError("out of memory")
        return super().generate(request)
"""


def corelm_command(*arguments: object) -> Result:
    # The output must not depend on the terminal.
    return CliRunner(env={"FORCE_COLOR": None, "COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments])


def write_prompts(folder: Path) -> tuple[Path, Path]:
    """Write `LINES` to an input file; return its path and that of an output file, which does not exist."""
    source = folder / "prompts.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return source, folder / "answers.jsonl"


def generate(files: tuple[Path, Path], *more: object, backend: str = "toy") -> Result:
    source, target = files
    always = ("--backend", backend, "--input", source, "--output", target, "--max-new-tokens", 9)
    return corelm_command("generate", *always, *more)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
