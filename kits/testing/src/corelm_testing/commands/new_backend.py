"""``corelm new-backend``: write a distribution with a small backend that passes the conformance kit.

This module must not import torch, so that ``--help`` answers at once.
"""

from __future__ import annotations

import keyword
import re
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from corelm._version import __version__
from corelm.backend.registry import scan
from corelm.validate import invalid, shown
from corelm_cli import flags
from corelm_cli.exits import typed_exits

#: Where each file of the template goes. `{module}` is the name of the package.
_FILES = {
    "pyproject.toml.in": "pyproject.toml",
    "README.md.in": "README.md",
    "__init__.py.in": "src/{module}/__init__.py",
    "gitignore.in": ".gitignore",
    "test.yml.in": ".github/workflows/test.yml",
}
#: The same for the files of each kind, which are in its own folder.
_FILES_OF_KINDS = {
    "backend.py.in": "src/{module}/backend.py",
    "engine.py.in": "src/{module}/engine.py",
    "server.py.in": "tests/server.py",
    "test_conformance.py.in": "tests/test_conformance.py",
}
#: The page about each kind.
_PAGES = {
    "logits": "docs/local-engines.md",
    "http": "docs/write-a-backend.md, section 6,",
    "engine": "docs/write-a-backend.md",
}
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


class Kind(StrEnum):
    """What a new backend is built on."""

    logits = "logits"
    http = "http"
    engine = "engine"


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(cls=flags.GroupedCommand)
def new_backend(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="What `corelm.get_backend` is to take, such as llamacpp.")
    ],
    kind: Annotated[
        Kind,
        typer.Option(
            help="logits: your engine says which logits follow some ids, and the engine kit samples and scores. "
            "http: a server answers a request for each row. engine: your engine samples by itself."
        ),
    ] = Kind.engine,
    output: Annotated[
        Path | None, typer.Option(help="The folder to make; by default NAME-backend, in this folder.")
    ] = None,
) -> None:
    """Write a new backend: a distribution that installs, and passes the conformance kit at once.

    Its engine is a stand-in, to be replaced by yours.

    Exit code 2: the name or the folder cannot be used.
    """
    with typed_exits():
        if not _NAME.fullmatch(name) or keyword.iskeyword(name):
            raise invalid(
                "name", f"expected small letters and digits, with single - or _ between them, got {shown(name)}"
            )
        if name in scan().names:
            raise invalid("name", f"a backend named {name!r} is installed here already; choose another name")
        folder = Path(f"{name}-backend") if output is None else output
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise invalid("output", f"{str(folder)!r} exists and is not an empty folder; choose another one")
        write(name, folder, kind)
    typer.echo(f"Made {folder}. Its tests pass as it is:\n\n  cd {folder}\n  pip install -e '.[test]'\n  pytest\n")
    typer.echo(f"Then open src/{_module(name)}/backend.py, and {_PAGES[kind]} of core.")


def write(name: str, folder: Path, kind: Kind = Kind.engine) -> None:
    """Write the files of a new backend into a folder, which may be missing."""
    module = _module(name)
    major, minor = map(int, __version__.split(".")[:2])
    values = {
        "name": name,
        "distribution": f"{name.replace('_', '-')}-backend",
        "module": module,
        "cls": "".join(part.capitalize() for part in re.split("[-_]", name)) + "Backend",
        "core": f"{major}.{minor}",
        "next_core": f"{major}.{minor + 1}",
        "key_variable": f"{module.upper()}_API_KEY",
        "kit_extra": "[http]" if kind is Kind.http else "",
        **_told(kind, name, module),
    }
    template = files(__package__) / "backend_template"
    sources = {template / source: target for source, target in _FILES.items()}
    sources |= {
        file: target for source, target in _FILES_OF_KINDS.items() if (file := template / kind.value / source).is_file()
    }
    for file, target in sources.items():
        path = folder / target.format(module=module)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(Template(file.read_text(encoding="utf-8")).substitute(values), encoding="utf-8")


def _told(kind: Kind, name: str, module: str) -> dict[str, str]:
    """Return what the files of the new backend say of its kind."""
    if kind is Kind.http:
        return {
            "stand_in": "tests/server.py",
            "call_it": "read its replies",
            "arguments": 'base_url="http://localhost:8000", tokenizer="PATH"',
            "flags": "--base-url http://localhost:8000 --option tokenizer=PATH --oracle-model PATH",
            "name_engine": "",
            "engines": "",
        }
    return {
        "stand_in": f"src/{module}/engine.py",
        "call_it": "call it",
        "arguments": '"PATH"',
        "flags": "--model PATH",
        "name_engine": ", and the module of your engine under `corelm.engines`",
        "engines": "# The module of your engine: `corelm backends` says whether it can be imported. Replace it.\n"
        f'[project.entry-points."corelm.engines"]\n{name} = "{module}"\n\n',
    }


def _module(name: str) -> str:
    return f"{name.replace('-', '_')}_backend"
