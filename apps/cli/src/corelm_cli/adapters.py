"""``--adapter``: the adapter of every call, and the folder that it is loaded from.

This module must not import torch, so that ``--help`` and the completion of a shell answer at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from corelm_cli.flags import ENGINE

if TYPE_CHECKING:
    from corelm import Backend

Adapter = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[=FOLDER]",
        help="The adapter (LoRA, for example) that answers or scores: one that the engine has, or one that is loaded "
        "from a folder that PEFT wrote, as in policy=runs/step-100.",
        rich_help_panel=ENGINE,
    ),
]


@dataclass(frozen=True, slots=True)
class AdapterChoice:
    """What ``--adapter`` names.

    Attributes:
        name: the adapter of every call.
        folder: where it is loaded from; None if the engine has it.
    """

    name: str
    folder: str | None

    @classmethod
    def of_flag(cls, given: str | None) -> AdapterChoice | None:
        """Return the choice for ``NAME`` or ``NAME=FOLDER``; None if the flag was not given.

        Raises:
            typer.BadParameter: the name or the folder is empty.
        """
        if given is None:
            return None
        name, sign, folder = given.partition("=")
        if not name or (sign and not folder):
            raise typer.BadParameter(f"expected NAME or NAME=FOLDER, got {given!r}", param_hint="--adapter")
        return cls(name, folder if sign else None)

    def load(self, backend: Backend) -> None:
        """Load the adapter if the flag says where from."""
        if self.folder is not None:
            backend.load_adapter(self.name, self.folder)

    def __str__(self) -> str:
        return self.name if self.folder is None else f"{self.name}={self.folder}"
