"""``corelm doctor``: what is wrong here, and what to type.

This module must not import torch, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer

from corelm.application import scan
from corelm.errors import printable
from corelm_cli import flags, interrupt_ends_process
from corelm_cli.engine import EngineChoice
from corelm_cli.exits import SOME_FAILED, typed_exits
from corelm_cli.progress import Bar
from corelm_cli.streams import is_terminal

if TYPE_CHECKING:
    from corelm_cli.diagnosis import Finding

_MARKS = {"ok": "ok      ", "warning": "warning ", "problem": "PROBLEM "}
_INDENT = " " * 8


def doctor(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="A model to open. Report how the backend runs it, and what slows it down."
        ),
    ] = None,
    python: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ENV", help="Another interpreter, or the folder of an environment, to look at. Can be repeated."
        ),
    ] = None,
    base_url: Annotated[
        list[str] | None,
        typer.Option(help="A server to look at; a few short prompts are sent to it. Can be repeated."),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="The backend for the servers, by default what fits each; for MODEL, by default transformers."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The name of the servers' model, if they have several.")] = None,
    option: flags.EngineOptions = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array of findings.")] = False,
) -> None:
    """Say what is wrong here and what to type: interpreters, engines, versions, CUDA, servers, names.

    Each engine is imported in a process of its own, which takes seconds to a minute. Nothing is changed. With MODEL,
    that model is looked at instead of this interpreter: it is opened here, and a short batch is timed.

    Exit code 0: nothing is wrong, or there are warnings only. 1: there is a problem. 2: the command was refused. 130:
    interrupted.
    """
    with typed_exits():
        options = flags.engine_options(option, None)
        with interrupt_ends_process():
            from corelm_cli.diagnosis import findings_of, local_findings, model_findings, server_findings

        found = scan()
        model_choice = EngineChoice(backend=backend or "transformers", model=path, options=options)
        sections = chain(
            [("this interpreter", local_findings())] if path is None else [],
            [] if path is None else [(f"the model {path}", model_findings(model_choice, found))],
            ((f"the interpreter {path}", findings_of(path)) for path in python or ()),
            ((f"the server {url}", server_findings(url, found, options, backend, model)) for url in base_url or ()),
        )
        with Bar("looking", quiet=False, counts=False, redirects=is_terminal(sys.stdout)) as bar:
            levels = _printed(sections, as_json, bar)
    if levels["problem"]:
        raise typer.Exit(SOME_FAILED)


def _printed(sections: Iterable[tuple[str, Iterator[Finding]]], as_json: bool, bar: Bar) -> Counter[str]:
    """Print the findings, as they come unless as JSON, and return how many there are of each level."""
    found: list[dict[str, Any]] = []
    say = (lambda text: None) if as_json else typer.echo
    for title, findings in sections:
        bar.show(f"looking at {title}", refresh=True)
        say(f"{printable(title)}:")
        for finding in findings:
            found.append({"where": title, **asdict(finding)})
            say(_line(_MARKS[finding.level], f"{finding.about}: {finding.text}"))
            if finding.remedy:
                say(_line(_INDENT, f"→ {finding.remedy}"))
        say("")
    levels = Counter(each["level"] for each in found)
    count = [f"{levels[level]} {level}{'' if levels[level] == 1 else 's'}" for level in ("problem", "warning")]
    say(f"{', '.join(count)}; {levels['ok']} things are as they should be.")
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    return levels


def _line(mark: str, text: str) -> str:
    return textwrap.fill(
        printable(text),
        width=110,
        initial_indent=mark,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
