"""Every command in the documentation is one that the command line takes; a tiny model answers those that it can.

Other tests run the blocks marked ``python``. Blocks marked ``py`` need an engine, a GPU or several machines.
They are only compiled here.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from helpers.pages import Page

typer = pytest.importorskip("typer", reason="the command needs the extra cli")

from typer.core import TyperGroup  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from corelm_cli.app import app  # noqa: E402

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("plugins/*/README.md")}
    # What was true of an older version stays as it was.
    - {ROOT / "CHANGELOG.md"}
)
#: Words of the pages that stand for something that a reader fills in.
ELLIPSIS = "…"
COMMAND = re.compile(r"^(?:\$ )?((?:python -m )?corelm [a-z][a-z-]*(?: .*)?)$", re.MULTILINE)


def commands_in_blocks(text: str) -> Iterator[str]:
    """Yield the command lines of the code blocks that are not Python, without prompts, pipes and comments."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language in ("", "bash", "sh", "console", "shell"):
            yield from COMMAND.findall(block.replace("\\\n", " "))


def commands_in_spans(text: str) -> Iterator[str]:
    """Yield the commands with a flag or an argument that stand between backticks."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose):
        if re.match(r"corelm [a-z]", span):
            yield " ".join(span.split())


def words(line: str) -> list[str]:
    """Return the arguments of a command as a shell would, up to a pipe, a redirection or another command."""
    found = shlex.split(re.sub(r"^python -m ", "", line), comments=True)
    ends = [number for number, word in enumerate(found) if re.match(r"\d?[|<>&;]", word)]
    return [word for word in found[1 : min(ends, default=None)] if word != ELLIPSIS]


def without_effect(command: Any) -> Any:
    """Return the command with all that parses its arguments, and with nothing behind it."""
    for name in [*getattr(command, "added", ())]:
        command.commands[name] = typer.main.get_command(command.added[name].load())
    if hasattr(command, "added"):
        # They would be loaded again when they run.
        command.resolve_command = partial(TyperGroup.resolve_command, command)
    for each in getattr(command, "commands", {}).values():
        without_effect(each)
    if not hasattr(command, "commands"):
        command.callback = lambda **_: None
    return command


SHOWN = [
    (f"{page.relative_to(ROOT)}: {line}", line, complete)
    for page in PAGES
    for find, complete in ((commands_in_blocks, True), (commands_in_spans, False))
    for line in dict.fromkeys(find(page.read_text()))
]


def complaint(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the command line says against the arguments; nothing if it takes them."""
    with pytest.raises(SystemExit) as end:
        without_effect(typer.main.get_command(app)).main(arguments, "corelm")
    said = capsys.readouterr()
    return (said.err or said.out) if end.value.code else ""


def test_the_command_line_takes_what_the_pages_show(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # A flag may act while the arguments are read: --install-completion writes to the home folder.
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("prompts.jsonl", "choices.jsonl"):
        Path(name).touch()
    for shown, line, complete in SHOWN:
        said = complaint(words(line), capsys)
        # A sentence names the flags that it is about; a block is to be copied.
        assert not said or (not complete and "Missing" in said), shown


def test_the_pages_show_commands():
    assert len(SHOWN) >= 20
    assert {words(line)[0] for _, line, _ in SHOWN} >= {"generate", "score", "chat", "serve", "backends"}


def test_what_does_not_exist_is_found(capsys):
    for line in ("corelm generate --modle x", "corelm generat", "corelm backends --top-k 3"):
        assert "No such" in complaint(words(line), capsys), line


RUN = [
    (name, line)
    for name, line, complete in SHOWN
    if complete and re.search(r"corelm (generate|score|chat|backends)", line)
]


@pytest.mark.parametrize("line", [line for _, line in RUN], ids=[name for name, _ in RUN])
def test_a_command_for_a_tiny_model_runs(line, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-model").symlink_to(tiny_model)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "Who are"}) + "\n")
    (tmp_path / "choices.jsonl").write_text(
        json.dumps({"prompt": "Who are", "completions": [" you?", " they?"]}) + "\n"
    )
    (tmp_path / "book.txt").write_text("Who are you? " * 100)
    arguments = [re.sub(r"^PATH$", "tiny-model", word) for word in words(line)]
    done = CliRunner().invoke(app, arguments, input="Who are you?\n")
    assert done.exit_code == 0, done.output
    if "--output" in arguments:
        (answer,) = Path(arguments[arguments.index("--output") + 1]).read_text().splitlines()
        assert json.loads(answer)
    else:
        assert done.stdout.strip()


TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_every_make_target_exists():
    for page in PAGES:
        text = page.read_text()
        named = re.findall(r"`make ([a-z][a-z-]*)[^`]*`", text)
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            named += re.findall(r"^make ([a-z][a-z-]*)", block, re.MULTILINE) if language != "python" else []
        assert [name for name in named if name not in TARGETS] == [], page


def test_python_that_is_not_run_compiles():
    for page in PAGES:
        for number, block in enumerate(Page(page).blocks("py"), 1):
            compile(block, f"{page}-{number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
