"""``corelm conformance``: run the kit on an installed backend, without a test file, and write a report.

This module must not import torch, so that ``--help`` answers at once.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from enum import StrEnum
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from corelm.errors import how_to_install
from corelm.validate import invalid
from corelm_cli import flags, interrupt_ends_process, strict_json
from corelm_cli.engine import EngineChoice
from corelm_cli.exits import INTERRUPTED, REFUSED, SOME_FAILED, typed_exits
from corelm_cli.progress import Bar
from corelm_cli.streams import tell

#: pytest's exit statuses, and those of the command.
_CODES = {0: 0, 1: SOME_FAILED, 2: INTERRUPTED}
_NO_TESTS = 5


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


class OracleOption(StrEnum):
    """What the backend is compared with."""

    transformers = "transformers"


@app.command(cls=flags.GroupedCommand)
def conformance(
    backend: Annotated[
        str, typer.Argument(metavar="NAME", help="The backend, as listed by `corelm backends`.", show_default=False)
    ],
    model: flags.Model = None,
    base_url: flags.BaseURL = None,
    option: flags.EngineOptions = None,
    timeout: flags.Timeout = None,
    oracle: Annotated[
        OracleOption,
        typer.Option(help="What to compare with: the plain float32 forward of the model in transformers, row by row."),
    ] = OracleOption.transformers,
    oracle_model: Annotated[
        str | None, typer.Option(help="The folder of the oracle's model; by default the one of --model.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Where the report goes; .html, .json and .md are added to it.")] = Path(
        "conformance"
    ),
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="The largest accepted difference from the oracle, in nats.",
            show_default="as the plugin says, or 0.0001",
        ),
    ] = None,
    draws: Annotated[int, typer.Option(min=100, help="Tokens to draw in each test of a distribution.")] = 2000,
    engine_sampling: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Sampling parameters with engine_kwargs that change answers, for a backend that takes these, such as "
            """'{"engine_kwargs": {"logit_bias": {"7": 20}}}'.""",
        ),
    ] = None,
    keeps_cache_in_flight: Annotated[
        bool | None,
        typer.Option(
            help="Whether the engine keeps its KV cache when weights change in the middle of an answer.",
            show_default="as the plugin says",
        ),
    ] = None,
    new_weights: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="A folder with other weights for the same model, for a backend that loads paths. By default new "
            "weights are tensors: those of the oracle with some noise.",
        ),
    ] = None,
    not_shown: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=REASON", help="Why something that the backend declares cannot be shown here. Can be repeated."
        ),
    ] = None,
    select: Annotated[
        str | None, typer.Option("--select", "-k", help="Run only the tests or themes that match, as pytest's -k does.")
    ] = None,
    quiet: flags.Quiet = False,
) -> None:
    """Run the conformance kit on a backend, and report what it declares and which promises it keeps.

    Choose a small model whose distributions are far from flat, such as the one that
    `python -m corelm_testing.tiny tiny-model` makes. New weights, for a backend that takes them, are that model's with
    some noise. Adapters, likewise, are random LoRAs of its q_proj and v_proj.

    Exit code 1: a test failed. 2: the command was refused. 3: the engine failed. 130: interrupted.
    """
    assert oracle is OracleOption.transformers
    engine = EngineChoice.from_flags(backend, model, base_url, option, timeout=timeout)
    with typed_exits():
        reasons = {name: str(reason) for name, reason in flags.key_values(not_shown or [], "--not-shown").items()}
        sampling = _sampling(engine_sampling)
        folder = oracle_model or model
        if folder is None:
            flag = "--model" if base_url is None else "--oracle-model"
            raise invalid(flag, "expected a folder with the model, which transformers loads to compare with")
        if find_spec("pytest") is None:
            raise invalid("conformance", f"the kit runs on pytest: {how_to_install('pytest>=8')}")
        with interrupt_ends_process():
            from corelm_testing import by_name
            from corelm_testing.plain_oracle import PlainOracle

        with ExitStack() as stack:
            plain = PlainOracle.load(folder)
            # Opened here, so that an engine that does not open is one error and not one for each test.
            opened = stack.enter_context(engine.open())
            of_plugin = getattr(opened.engine.plugin, "conformance", {})
            if keeps_cache_in_flight is None:
                keeps_cache_in_flight = not of_plugin.get("recomputes_in_flight", True)
            subject = by_name.Subject(
                opened=opened,
                opener=engine.open,
                plain=plain,
                tolerance=of_plugin.get("tolerance", 1e-4) if tolerance is None else tolerance,
                draws=draws,
                sampling=sampling or (None if "engine_kwargs" in reasons else of_plugin.get("engine_sampling")),
                recomputes_in_flight=not keeps_cache_in_flight,
                not_shown=reasons,
                other_weights=None if new_weights is None else (new_weights, PlainOracle.load(new_weights)),
            )
            # pytest takes the standard streams while a test runs.
            console = Console(file=stack.enter_context(open(os.dup(2), "w", encoding="utf-8")))
            bar = stack.enter_context(Bar("testing", quiet=quiet, console=console, redirects=False))
            ran, started = count(1), time.monotonic()

            def on_test(tests: int) -> None:
                bar.show(rate=f"{next(ran) / (time.monotonic() - started):.1f} tests/s", total=tests, advance=1)

            arguments = [*([] if select is None else ["-k", select]), *["-q"] * quiet]
            status = by_name.run(subject, output, arguments, on_test)
        if status == _NO_TESTS:
            from corelm_testing import THEMES

            raise invalid("select", f"no test of the kit matches {select!r}; its themes are {', '.join(THEMES)}")
    if status in _CODES and not quiet:
        tell(f"The report is in {output}.html, {output}.json and {output}.md.")
    raise typer.Exit(_CODES.get(status, REFUSED))


def _sampling(given: str | None) -> dict[str, Any] | None:
    if given is None:
        return None
    try:
        found = strict_json.loads(given)
    except (ValueError, RecursionError) as error:
        raise invalid("engine_sampling", f"expected JSON, got {given!r}: {error}") from None
    if not isinstance(found, dict) or "engine_kwargs" not in found:
        raise invalid("engine_sampling", f"expected an object with engine_kwargs, got {given!r}")
    return found
