"""The flags that ask for other ids than those that were sampled or given. `id_fields` writes what they ask for.

This module must not import torch, so that ``--help`` and the completion of a shell answer at once.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from corelm_cli.flags import FILES

ReturnSupport = Annotated[
    bool,
    typer.Option(
        "--return-support",
        help="Write `kept_ids`, the ids that top-k, top-p and min-p had left for each token (none: all ids), and "
        "`kept_log_mass`, the log of their mass. With --log-probs.",
        rich_help_panel=FILES,
    ),
]
TopLogprobs = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="<int>",
        help="Write this many of the most probable ids for each token, `top_ids`, with `top_log_probs`, and the log of "
        "the mass of all others, `tail_log_mass`. With --log-probs.",
        rich_help_panel=FILES,
    ),
]
TopK = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="<int>",
        help="Write this many of the most probable ids for each token that is counted, `top_ids`, with "
        "`top_log_probs`, and the log of the mass of all others, `tail_log_mass`.",
        rich_help_panel=FILES,
    ),
]


def asked_for(log_probs: str, return_support: bool, top_logprobs: int) -> dict[str, Any]:
    """Return the settings that say what is written of other ids: those that are not at their default.

    Raises:
        typer.BadParameter: no log-probs are written, whose distribution these numbers are of.
    """
    given = {"return_support": return_support, "top_logprobs": top_logprobs}
    asked = {name: value for name, value in given.items() if value}
    if asked and log_probs == "none":
        flag = f"--{next(iter(asked)).replace('_', '-')}"
        raise typer.BadParameter(
            "no log-probs are written, which say of which distribution it is; give --log-probs raw or processed as "
            "well",
            param_hint=flag,
        )
    return asked
