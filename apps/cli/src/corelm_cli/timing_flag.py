"""The flag `--timing` of the commands that answer files. This module must not import torch."""

from __future__ import annotations

from typing import Annotated

import typer

from corelm_cli import flags

Timed = Annotated[
    bool,
    typer.Option(
        "--timing",
        help="Measure the calls of the engine: tokens per second, durations, waits, cache hits. The figures follow the "
        "other lines at the end; with --json they are in `timing`.",
        rich_help_panel=flags.ENGINE,
    ),
]
