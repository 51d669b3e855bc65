"""Every command that a page, a docstring or a message prints is one that can be typed.

Its program parses it: the command line, `argparse`, make, pip or pytest. A tiny model answers what it can. Other tests
run the blocks marked ``python``. Blocks marked ``py`` need an engine, a GPU or several machines, and are compiled here.
"""

import argparse
import ast
import json
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import httpx2
import pytest
from packaging.requirements import Requirement

from corelm.errors import how_to_install
from helpers.pages import Page
from helpers.processes import PATIENCE

typer = pytest.importorskip("typer", reason="the command needs the extra cli")

from typer.core import TyperGroup  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from corelm_cli.app import app  # noqa: E402
from helpers.serving import served  # noqa: E402

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("[kpa]*/*/README.md")}
    # What was true of an older version stays as it was.
    - {ROOT / "CHANGELOG.md"}
)
MODULES = [
    *(path for folder in ("core", "examples", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))),
    *sorted(ROOT.glob("[kpa]*/*/src/**/*.py")),
]
PROGRAM = re.compile(r"(?:[A-Z_]+=\S+ )*(?:corelm|(?:\S+/)?python|torchrun|pip|make|pytest) \S")
#: What pages say not to type.
WARNING = re.compile(r"\*\*(?:Do not type|`pip install core` may).*?:", re.DOTALL)

# Finding them ---------------------------------------------------------------------------------------------------------


def printed(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield each command of a page, or of a module's docstring, and whether it is complete: it stands in a block."""
    text = WARNING.sub("", path.read_text())
    if path.suffix == ".py":
        text = re.sub(r"((?:^    .*\n?)+)", r"```\n\1\n```\n", ast.get_docstring(ast.parse(text)) or "", flags=re.M)
    fence = re.compile(r"^ *```([^\n]*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
    for language, block in fence.findall(text):
        if language in ("", "bash", "sh"):
            lines = re.sub(r" *\\\n *", " ", block).splitlines()
            typed = [line[2:] for line in lines if line.startswith("$ ")] or lines
            yield from ((part, True) for line in typed for part in parts(line.removeprefix("    ")))
    for _, span in re.findall(r"(?<!`)(``?)([^`]+)\1(?!`)", fence.sub("", text)):
        yield from ((part, False) for part in parts(" ".join(span.split())))


def parts(line: str) -> Iterator[str]:
    """Yield the commands of a line, which may be a pipeline; the first of alternatives, and no ellipses."""
    line = re.sub(r"\[(--[^]|]*)(\|[^]]*)?\]", r"\1", line).replace("…", "")
    yield from filter(PROGRAM.match, line.split(" | "))


#: Each, with whether it is complete, and one place where it stands.
SHOWN = {shown: path.relative_to(ROOT) for path in [*MODULES, *PAGES] for shown in printed(path)}


def words(line: str) -> list[str]:
    """Return the words of a command as a shell would, without variables and redirections."""
    found = shlex.split(re.sub(r"^(?:[A-Z_]+=\S+ )*", "", line), comments=True)
    return found[: min([number for number, word in enumerate(found) if re.match(r"\d?[<>&;]", word)], default=None)]


# Whether their programs take them -------------------------------------------------------------------------------------


def complaint(line: str, config: pytest.Config, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what is wrong with a command; nothing if its program takes it."""
    match words(line):
        case ["corelm", *arguments]:
            with pytest.raises(SystemExit) as end:
                without_effect(typer.main.get_command(app)).main(arguments, "corelm")
            said = capsys.readouterr()
            return (said.err or said.out) if end.value.code else ""
        case ["make", *arguments]:
            makefile, names = (ROOT / "Makefile").read_text(), [each.partition("=")[0] for each in arguments]
            known = rf"^({'|'.join(names)})( \?=|:)|\(if \$\(({'|'.join(names)})\)"
            return f"make has not all of {names}" * (len(set(re.findall(known, makefile, re.MULTILINE))) < len(names))
        case ["pip", "install", *arguments] if arguments:
            return wrong_for_pip(arguments)
        case ["pytest", *arguments] | [_, "-m", "pytest", *arguments]:
            for option in (each.partition("=")[0] for each in arguments if each.startswith("--")):
                config.getoption(option)
        case ["torchrun", "--nproc-per-node", _, program, *arguments] | [_, "-m", program, *arguments]:
            return parsed(program, arguments, capsys)
        case [python, program, *arguments] if python.endswith("python"):
            return parsed(program, arguments, capsys)
    return ""


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


def parsed(program: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the `argparse` of a module, or of a file, says against the arguments."""
    spec = None if program.endswith(".py") else find_spec(program)
    path = ROOT / program if spec is None else Path(str(spec.origin))
    path = path.with_name("__main__.py") if path.name == "__init__.py" else path
    if not path.is_file():
        return f"there is no {program}"
    if "ArgumentParser" not in path.read_text():
        return ""
    parse_args = argparse.ArgumentParser.parse_args

    def parse(*given: Any, **more: Any) -> None:
        parse_args(*given, **more)
        sys.exit(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr(sys, "argv", [program, *arguments])
        if spec is None:
            patch.syspath_prepend(str(path.parent))
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().err if end.value.code else ""


PROJECTS = {
    path.parent.relative_to(ROOT).as_posix(): tomllib.loads(path.read_text())["project"]
    for path in [ROOT / "pyproject.toml", *ROOT.glob("[kpa]*/*/pyproject.toml")]
}
FOLDERS = {project["name"]: folder for folder, project in PROJECTS.items()}
EXTRAS = {folder: project.get("optional-dependencies", {}) for folder, project in PROJECTS.items()}


def requirements(folder: str, extras: Iterable[str]) -> list[Requirement]:
    """Return what the distribution of a folder needs with these extras."""
    return [*map(Requirement, chain(PROJECTS[folder]["dependencies"], *(EXTRAS[folder][extra] for extra in extras)))]


def wrong_for_pip(arguments: list[str]) -> str:
    """Return why ``pip install`` of these fails in a checkout, or may take what is another project's on an index."""
    if arguments[0] in ("-e", "wheels/*.whl"):  # the reader's own folder; what make dist has built
        return ""
    named: set[str] = set()
    needed: set[str] = set()
    for each in arguments:
        folder, _, extras = each.rstrip("]").partition("[")
        if folder == "." or "/" in folder:
            found = {"."} if folder == "." else {path.relative_to(ROOT).as_posix() for path in ROOT.glob(folder)}
            asked = [extra for extra in extras.split(",") if extra]
            if not found or not found <= PROJECTS.keys():
                return f"there is no {folder}"
            if not all({*asked} <= EXTRAS[path].keys() for path in found):
                return f"{folder} has not all of the extras {extras}"
            named |= found
            needed |= {need.name for path in found for need in requirements(path, asked)}
        elif (other := Requirement(each)).name in FOLDERS:
            return f"on an index, {other.name} may be another project's"
        else:
            for need in (need for path in PROJECTS for need in requirements(path, EXTRAS[path])):
                if need.name == other.name and not all(need.specifier.contains(at.version) for at in other.specifier):
                    return f"{each} may be less than {need}"
    missing = {FOLDERS[name] for name in needed & FOLDERS.keys()} - named
    return f"these are needed, too: {sorted(missing)}" if missing else ""


@pytest.mark.parametrize(("line", "complete"), [pytest.param(*key, id=f"{SHOWN[key]}: {key[0]}") for key in SHOWN])
def test_what_is_printed_can_be_typed(line, complete, tmp_path, monkeypatch, capsys, pytestconfig):
    monkeypatch.chdir(tmp_path)
    # A flag may act while the arguments are read: --install-completion writes to the home folder.
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    for name in ("prompts.jsonl", "choices.jsonl", "book.txt"):
        # What each of them may hold: a line of JSON, or a text.
        Path(name).write_text("{}\n")
    said = complaint(line, pytestconfig, capsys)
    # A sentence names the flags that it is about; a block is to be copied.
    assert not said or (not complete and re.search("Missing|are required", said))


# Advice in messages ---------------------------------------------------------------------------------------------------


def test_every_distribution_of_ours_can_be_installed_as_messages_say():
    engines = [f"{name}[engine]" for name in FOLDERS if f"{name}[engine]" in str(PROJECTS["."])]
    assert len(engines) == 3
    for each in (*FOLDERS, *engines):
        line = how_to_install(each, python="/envs/other/bin/python")
        assert line.startswith("/envs/other/bin/python -m pip install . ") and line.endswith(" or install its wheels")
        assert not wrong_for_pip(words(line.partition(" in a ")[0])[4:]), each


def test_advice_in_messages_can_be_typed():
    for path in MODULES:
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            advice: list[list[str]] = []
            if isinstance(node, ast.Call) and ast.unparse(node.func) == how_to_install.__name__:
                given = [each.value for each in node.args if isinstance(each, ast.Constant)]
                advice = [words(how_to_install(*given).partition(" in a ")[0])[2:]] if given else []
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                advice = [shlex.split(each) for each in re.findall(r"pip install\b([^,;\n]*)", node.value)]
            for each in advice:
                # An f-string would go on here with a name: `how_to_install` knows the folders, and quotes.
                assert each and not wrong_for_pip(each), f"{path}:{node.lineno}"


# Running them ---------------------------------------------------------------------------------------------------------

#: What stands for something of the reader's, and what a test gives.
FILLED_IN = {**dict.fromkeys(["PATH", "PATH_OF_A_MODEL"], "tiny-model"), "vllm": "transformers", "NAME": "transformers"}
FILLED_IN |= {"/envs/vllm": sys.executable, **dict.fromkeys(["runs/step-10", "runs/step-20"], "tiny-model")}
#: In blocks, and what makes a new backend. Left out is what needs a server, or another engine or its flags.
RUN = [
    line
    for line, complete in SHOWN
    if re.match(r"corelm (generate|score|chat|backends|doctor|compare|serve|conformance|new-backend)\b", line)
    and (complete or "new-backend NAME" in line)
    and not re.search("http:|llamacpp|max-model-len", line)
]
#: Markers, each with a pattern of the commands that have it.
MARKS = ((pytest.mark.process, "/envs/|doctor|serve|conformance"), (pytest.mark.nightly, "conformance"))


@pytest.mark.parametrize(
    "line",
    [pytest.param(line, id=line, marks=[mark for mark, of in MARKS if re.search(of, line)]) for line in RUN],
)
def test_a_command_for_a_tiny_model_runs(line, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CORELM_BACKENDS", "transformers")
    (tmp_path / "tiny-model").symlink_to(tiny_model)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "Who are"}) + "\n")
    (tmp_path / "choices.jsonl").write_text(
        json.dumps({"prompt": "Who are", "completions": [" you?", " they?"]}) + "\n"
    )
    (tmp_path / "book.txt").write_text("Who are you? " * 100)
    program, *arguments = (FILLED_IN.get(word, word) for word in words(line)[1:])
    if program == "serve":
        with served(*arguments) as server:
            assert httpx2.get(f"{server.url}/health", timeout=PATIENCE, trust_env=False).status_code == 200
            assert server.end(signal.SIGINT) == (130, "interrupted\n")
        return
    if program == "new-backend":
        arguments[0] = "mine"
    if program == "conformance":  # pytest does not run in itself
        subprocess.run([sys.executable, "-m", "corelm_cli", program, *arguments], check=True)
        (suite,) = json.loads((tmp_path / "conformance.json").read_text())["suites"]
        assert suite["counts"]["passed"] > 50
        return
    done = CliRunner().invoke(app, [program, *arguments], input="Who are you?\n")
    assert done.exit_code == 0, done.output
    for option in {"--output", "--report"} & {*arguments}:
        assert Path(arguments[arguments.index(option) + 1]).read_text().strip()
    assert done.stdout.strip() or done.stderr.strip() or "--output" in arguments


def test_python_that_is_not_run_compiles():
    for page in PAGES:
        for number, block in enumerate(Page(page).blocks("py"), 1):
            compile(block, f"{page}-{number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
