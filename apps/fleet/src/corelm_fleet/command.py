"""``corelm fleet status``: the replicas that run elsewhere, as a table or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from corelm.application import load_backend, scan
from corelm.errors import BackendImportError, CapabilityError, brief, printable
from corelm_cli import flags
from corelm_cli.exits import typed_exits
from corelm_cli.streams import standard_output, tell

app = typer.Typer(
    help="Fleets that run on a cluster.", no_args_is_help=True, add_completion=False, rich_markup_mode=None
)

#: The method of a plugin's class that returns a `ReplicaStatus` for each replica that runs elsewhere.
METHOD = "replica_status"


@app.callback()
def fleet() -> None:
    pass


@app.command(cls=flags.GroupedCommand)
def status(
    backend: Annotated[
        str | None, typer.Option(help="The backend that has opened them. Without it: every one that can say.")
    ] = None,
    address: Annotated[str | None, typer.Option(help="The address of the cluster.")] = None,
    namespace: Annotated[str | None, typer.Option(help="The namespace of the replicas' names.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the replicas with a name that run on a cluster: weights, rows in work, tokens per second, starts.

    Exit code 2: the command was refused. 3: the cluster does not answer.
    """
    with typed_exits():
        given = {name: value for name, value in (("address", address), ("namespace", namespace)) if value is not None}
        # What engines print must not get into the JSON.
        with standard_output() as stdout:
            rows = [(name, each) for name, plugin in _plugins(backend) for each in getattr(plugin, METHOD)(**given)]
            text = _as_json(rows) if as_json else None
            if text is not None:
                stdout.write(text.encode())
        if text is None:
            _show(rows)
        sys.stdout.flush()


def _plugins(backend: str | None) -> Iterator[tuple[str, Any]]:
    """Yield the plugins that know replicas elsewhere, with their names."""
    found = False
    usable = [info.name for info in scan().backends if info.engine_available is not False and info.problem is None]
    for name in usable if backend is None else [backend]:
        try:
            plugin, _ = load_backend(name)
        except BackendImportError as error:
            if backend is not None:
                raise
            tell(f"skipped: {brief(str(error))}")
            continue
        if hasattr(plugin, METHOD):
            found = True
            yield name, plugin
    if not found:
        which = "no installed backend has" if backend is None else f"backend {backend!r} does not have"
        raise CapabilityError(f"{which} replicas that run on a cluster", capability=METHOD)


def _as_json(rows: list[tuple[str, Any]]) -> str:
    return json.dumps([{"backend": name, **asdict(each)} for name, each in rows], indent=2) + "\n"


def _show(rows: list[tuple[str, Any]]) -> None:
    if not rows:
        print("There is no replica.")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("backend", "replica", "state", "epoch", "rows", "tokens/s", "starts", "why"):
        table.add_column(title, overflow="fold")
    for name, each in rows:
        epoch = "?" if each.epoch is None else str(each.epoch)
        figures = (epoch, str(each.rows), f"{each.tokens_per_second:.1f}", str(each.starts), each.why)
        # `Text` keeps rich from reading markup in names that others chose.
        table.add_row(*(Text(printable(cell)) for cell in (name, each.name, each.state, *figures)))
    console = Console(highlight=False)
    if not console.is_terminal:
        # A pipe has no width, and programs read it line by line: keep each row on one line.
        console.width = 1000
    console.print(table)
