"""``corelm backends``: list the installed backends, as a table or as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from corelm.application import DISTRIBUTION, Scan, scan
from corelm.errors import how_to_install, printable
from corelm_cli.exits import typed_exits

_ENGINE = {True: "yes", False: "not installed", None: "unknown"}


def backends(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the installed backends without importing them."""
    with typed_exits():
        _show(scan(), as_json)
        sys.stdout.flush()


def _show(found: Scan, as_json: bool) -> None:
    for line in found.unreadable:
        print(f"skipped, metadata cannot be read: {printable(line)}", file=sys.stderr)
    if as_json:
        print(json.dumps([asdict(info) for info in found.backends], indent=2))
        return
    if not found.backends:
        print(f"No backend is installed. To install one: {how_to_install('core-transformers-backend')}")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("name", "distribution", "version", "core", "engine", "problem"):
        table.add_column(title, overflow="fold")
    for info in found.backends:
        needs = "unknown" if info.requires_core is None else info.requires_core or "any"
        engine = _ENGINE[info.engine_available]
        if info.distribution == DISTRIBUTION:
            needs, engine = "built in", "needs none"
        row = (info.name, info.distribution, info.version, needs, engine, info.problem or "")
        # `Text` keeps rich from reading markup in names that others chose.
        table.add_row(*(Text(printable(cell)) for cell in row))
    console = Console(highlight=False)
    if not console.is_terminal:
        # A pipe has no width, and programs read it line by line: keep each row on one line.
        console.width = 1000
    console.print(table)
