"""Run the `corelm` command in a test, with the toy backend and files in a temporary folder."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from corelm_cli.app import app

#: Input and output; "-" is the standard input or output.

CHAT = [{"role": "user", "content": "Where is the cat?"}]
LINES: list[Any] = [
    {"prompt": "The cat"},
    {"id": "chat", "messages": CHAT},
    {"id": "sea", "prompt": "The sea", "metadata": {"kept": ["by", "its owner"]}},
    {"id": 10, "prompt": "Is the tea"},
    {"id": "bird", "prompt": "A small bird"},
]

#: A plugin that fails on demand: when it opens, in its chat template, at call number `FAIL_AT`, at every call from
#: number `FAIL_FROM` on, or for a prompt with a certain word: "strange" fails the tokenizer, "poison" the call, and
#: "plague" this call and all later ones.
FAULTY = """
import os
from corelm_testing.toy import ByteTokenizer, ToyBackend
import corelm

class Choosy(ByteTokenizer):
    def apply_chat_template(self, conversation, **options):
        if conversation[-1]["content"] == "bad":
            raise ValueError("not in my template")
        return super().apply_chat_template(conversation, **options)

    def __call__(self, texts, **options):
        if any("strange" in text for text in texts):
            raise TypeError("expected other texts")
        return super().__call__(texts, **options)

class Faulty(ToyBackend):
    calls = 0
    dead = False

    @classmethod
    def open(cls, model=None, headers=None):
        if model == "broken":
            raise RuntimeError("no such model")
        return super().open(tokenizer=Choosy())

    @corelm.hookimpl
    def generate(self, request):
        self.calls += 1
        prompts = [bytes(min(i, 255) for i in row) for row in request.prompts.tolist()]
        if log := os.environ.get("CALLS"):
            with open(log, "a") as file:
                print(len(prompts), file=file)
        self.dead |= self.calls >= int(os.environ.get("FAIL_FROM", "999999"))
        self.dead |= any(b"plague" in prompt for prompt in prompts)
        if self.dead or self.calls == int(os.environ.get("FAIL_AT", "0")):
            raise RuntimeError("out of memory")
        if any(b"poison" in prompt for prompt in prompts):
            raise RuntimeError("internal error")
        return super().generate(request)
"""


def corelm_command(*arguments: object, stdin: str | None = None) -> Result:
    # The output must not depend on the terminal.
    runner = CliRunner(env={"FORCE_COLOR": None, "COLUMNS": "200"})
    return runner.invoke(app, [str(argument) for argument in arguments], input=stdin)


def write_prompts(folder: Path) -> tuple[Path, Path]:
    """Write `LINES` to an input file; return its path and that of an output file, which does not exist."""
    source = folder / "prompts.jsonl"
    write_rows(source, LINES)
    return source, folder / "answers.jsonl"


def write_rows(path: Path, lines: Iterable[Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def generate(
    files: tuple[Path | str, Path | str], *more: object, backend: str = "toy", stdin: str | None = None
) -> Result:
    source, target = files
    always = ("--backend", backend, "--input", source, "--output", target, "--max-new-tokens", 9)
    return corelm_command("generate", *always, *more, stdin=stdin)


def score(
    files: tuple[Path | str, Path | str], *more: object, backend: str = "toy", stdin: str | None = None
) -> Result:
    source, target = files
    return corelm_command("score", "--backend", backend, "--input", source, "--output", target, *more, stdin=stdin)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def settings_of(output: Path) -> dict[str, Any]:
    """Return the object in the settings file of an output."""
    found: dict[str, Any] = json.loads(output.with_name(f"{output.stem}.settings.json").read_text(encoding="utf-8"))
    return found
