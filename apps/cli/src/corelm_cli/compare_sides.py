"""The flags of several engines on one line: those after a ``--backend`` belong to that engine.

This module must not import torch, so that ``--help`` answers at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer

from corelm_cli import flags
from corelm_cli.adapters import AdapterChoice

if TYPE_CHECKING:
    from corelm_compare import SideSpec

#: The flags that each engine has, by the names of the command's parameters.
SIDE_FLAGS = ("backend", "name", "model", "base_url", "python", "option", "adapter")
_ORDER = "corelm.order_of_flags"


class SidesCommand(flags.GroupedCommand):
    """A command that knows in which order its flags were given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not ctx.resilient_parsing:
            _, _, order = self.make_parser(ctx).parse_args(args=list(args))
            ctx.meta[_ORDER] = [parameter.name for parameter in order]
        return super().parse_args(ctx, args)


@dataclass
class _Group:
    """The flags of one engine, or those before the first."""

    number: int
    values: dict[str, str] = field(default_factory=dict)
    options: list[str] = field(default_factory=list)

    def add(self, name: str, value: str) -> None:
        if name == "option":
            self.options.append(value)
        elif name in self.values:
            raise typer.BadParameter(f"{self} has it more than once", param_hint=_flag(name))
        else:
            self.values[name] = value

    def __str__(self) -> str:
        return f"side {self.number} ({self.values['backend']})" if self.number else "the beginning, for all sides,"


def sides_of_flags(ctx: typer.Context, given: dict[str, Sequence[str] | None]) -> list[SideSpec]:
    """Return the engines that the flags name.

    Flags before the first ``--backend`` hold for all engines. A side that has a ``--base-url`` does not take the
    ``--model`` of all.

    Args:
        ctx: of the command, a `SidesCommand`.
        given: the values of each flag of `SIDE_FLAGS`, in the order in which they were given.

    Raises:
        typer.BadParameter: a side has a flag twice, or there are fewer than two sides.
    """
    shared, *groups = _grouped(ctx.meta.get(_ORDER, ()), {name: iter(given[name] or ()) for name in SIDE_FLAGS})
    if len(groups) < 2:
        raise typer.BadParameter(f"give it for each engine, at least two; got {len(groups)}", param_hint="--backend")
    if "name" in shared.values:
        raise typer.BadParameter("give it after the --backend that it names", param_hint="--name")
    return [_side(group, shared) for group in groups]


def _grouped(order: Iterable[str], values: dict[str, Iterator[str]]) -> list[_Group]:
    groups = [_Group(0)]
    for name in order:
        if name == "backend":
            groups.append(_Group(len(groups)))
        if name in values:
            groups[-1].add(name, next(values[name]))
    return groups


def _side(group: _Group, shared: _Group) -> SideSpec:
    from corelm_compare import SideSpec

    own, base = group.values, dict(shared.values)
    if "base_url" in own:
        base.pop("model", None)
    if "model" in own and "base_url" not in own:
        base.pop("base_url", None)
    found = {**base, **own}
    options = {
        **flags.engine_options(shared.options, None),
        **flags.engine_options(group.options, found.get("base_url")),
    }
    if "python" in found:
        if "python" in options:
            raise typer.BadParameter(f"{group} has it as an --option as well", param_hint="--python")
        options["python"] = found["python"]
    adapter = AdapterChoice.of_flag(found.get("adapter"))
    return SideSpec(
        backend=found["backend"],
        model=found.get("model"),
        options=options,
        name=own.get("name"),
        adapter=None if adapter is None else adapter.name,
        adapter_path=None if adapter is None else adapter.folder,
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
