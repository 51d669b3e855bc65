"""Subcommands that other distributions add through entry points of the group ``corelm.commands``.

An entry point has the name of its command and refers to a `typer.Typer`, which is imported when the command runs. The
help shows the summary of its distribution, or for our own distributions the description below.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from corelm.errors import how_to_install

GROUP = "corelm.commands"
#: The commands of this project's other distributions, and what they do.
_KNOWN = {
    "fleet": ("core-fleet", "Show the replicas that run on a cluster."),
    "conformance": ("core-testing", "Run the conformance kit on a backend, and report what it keeps."),
    "new-backend": ("core-testing", "Write a new backend: a distribution that passes the kit."),
}


class Commands(TyperGroup):
    """The commands of this distribution, and those of others, which are imported when they run.

    Attributes:
        added: the entry points of the others, by name.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.added: dict[str, metadata.EntryPoint] = {}
        for point in metadata.entry_points(group=GROUP):
            if point.name in self.commands or point.dist is None:
                continue
            self.added[point.name] = point
            _, does = _KNOWN.get(point.name, ("", point.dist.metadata["Summary"] or "Another distribution."))
            self.commands[point.name] = TyperCommand(point.name, help=f"{does} ({point.dist.name})")

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command of another distribution."""
        if args and args[0] in _KNOWN and args[0] not in self.added:
            where, _ = _KNOWN[args[0]]
            ctx.fail(f"corelm {args[0]} is in {where}, which is not installed: {how_to_install(where)}")
        name, command, rest = super().resolve_command(ctx, args)
        if name in self.added:
            command = typer.main.get_command(self.added[name].load())
        return name, command, rest
