"""``corelm compare``: the same prompts through two or more engines; how far apart they are, and why.

This module must not import torch, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from corelm import validate
from corelm.spec import SamplingParams
from corelm_cli import flags, interrupt_ends_process
from corelm_cli.engine import named_adapter
from corelm_cli.exits import typed_exits
from corelm_cli.progress import Bar
from corelm_cli.streams import Messages, Stream, is_terminal, standard_output, tell
from corelm_cli.wording import as_flag, as_flags

if TYPE_CHECKING:
    from corelm_compare import Comparison, SideSpec

#: The flags that each engine has, by the names of the command's parameters.
SIDE_FLAGS = ("backend", "name", "model", "base_url", "python", "option", "adapter")
_ORDER = "corelm.order_of_flags"
#: How completions are sampled, without flags. `corelm_compare` has the same default.
DEFAULT = SamplingParams(max_new_tokens=24)


def _in_panel(panel: str) -> Callable[..., Any]:
    def option(metavar: str | None, help: str, **more: Any) -> Any:
        return typer.Option(metavar=metavar, help=help, rich_help_panel=panel, **more)

    return option


_engine, _file_flag, _test = map(_in_panel, (flags.ENGINE, flags.FILES, "Comparison"))


@flags.sampling_flags("num_samples", max_new_tokens=DEFAULT.max_new_tokens)
def compare(
    ctx: typer.Context,
    sampling: dict[str, Any],
    backend: Annotated[
        list[str] | None,
        _engine(
            "NAME",
            "A backend, as listed by `corelm backends`. Give it once for each side; the flags of this section that "
            "follow it belong to that side, and those before the first --backend to all sides.",
            autocompletion=flags.installed_backends,
        ),
    ] = None,
    model: Annotated[list[str] | None, _engine("TEXT", "Path of the model, or a name that the engine knows.")] = None,
    base_url: Annotated[list[str] | None, _engine("URL", "URL of a running server.")] = None,
    python: Annotated[
        list[str] | None,
        _engine("PATH", "Run the engine as a separate process in this interpreter or environment."),
    ] = None,
    option: flags.EngineOptions = None,
    adapter: Annotated[
        list[str] | None, _engine("NAME[=FOLDER]", "The adapter of every call, as in `corelm score`.")
    ] = None,
    name: Annotated[list[str] | None, _engine("TEXT", "What to call the side; by default, its backend.")] = None,
    input: Annotated[
        Path | None,
        _file_flag(
            None,
            "JSONL file of prompts, in the format described above; - is the standard input. Default: eight texts that "
            "core brings, and two conversations if all sides have a chat template.",
            callback=flags.to_read,
        ),
    ] = None,
    max_prompts: Annotated[int | None, _file_flag("<int>", "Read only so many lines.", min=1)] = None,
    report: Annotated[
        Path | None, _file_flag("FILE", "Write a page of HTML with pictures, which needs no network.")
    ] = None,
    as_json: Annotated[
        bool,
        flags.of_files(
            "--json", help="Print everything as JSON to the standard output; the text goes to the standard error."
        ),
    ] = False,
    oracle: Annotated[
        str,
        _test(
            "FOLDER",
            "Let the plain float32 forward of this model, in transformers on this CPU, decide which side is wrong. "
            "auto takes the first --model that is a folder; none goes without.",
        ),
    ] = "auto",
    checkpoint: Annotated[
        list[str] | None,
        _test("FOLDER", "Other weights that a side may hold, such as those before an update. Can be repeated."),
    ] = None,
    tolerance: Annotated[
        float | None,
        _test(
            "<nats>",
            "The mean of |Δ| up to which sides agree. Default: measured, from each side's distance to itself.",
        ),
    ] = None,
    budget: Annotated[
        float | None,
        _test("<seconds>", "Try nothing more after so many seconds, and say what was left out. Default: no limit."),
    ] = None,
    quick: Annotated[
        bool,
        _test(
            None,
            "Compare four prompts only, the first of --input, with at most 8 sampled tokens, in about 60 seconds or "
            "--budget. Rows made of their ids are scored as well.",
        ),
    ] = False,
    timeout: flags.Timeout = None,
    quiet: flags.Quiet = False,
) -> None:
    """Compare engines on the same prompts: how far apart their log-probs are, and why.

    All sides score the same tokens. If they differ by more than from themselves, one thing at a time is changed, and
    the change that takes the difference away is named, with what to do about it.

    Each input line is a JSON object with one of `prompt` (a text), `messages` (a conversation) and `ids` (token ids),
    and optionally `completion` or `response`, on all lines or on none. Without them, one side samples completions; the
    flags of sampling say how. The output of `corelm generate --copy-input` can be compared.

    Example: corelm compare --model PATH --backend transformers --backend vllm --python /envs/vllm

    Exit code 0: the sides agree, or differ as their dtypes round. 1: they differ. 2: the command was refused, or a file
    could not be read or written. 3: an engine failed. 130: interrupted.
    """
    if max_prompts is not None and input is None:
        raise typer.BadParameter("there is no --input to read", param_hint="--max-prompts")
    # Before the imports, which take seconds.
    with typed_exits():
        _check_report(report)
        params = SamplingParams.make(DEFAULT, **sampling)
        seed = validate.count("seed", params.seed or 0)
    given = {"backend": backend, "name": name, "model": model, "base_url": base_url, "python": python}
    with interrupt_ends_process():
        from corelm_cli.lines import read_all

        sides = sides_of_flags(ctx, {**given, "option": option, "adapter": adapter})
    with typed_exits(), ExitStack() as stack:
        prompts, completions = (None, None) if input is None else read_all(flags.named_file(input), max_prompts)
        settings = {
            "oracle": None if oracle == "none" else oracle,
            "checkpoints": checkpoint or (),
            "sampling": params,
            "seed": seed,
            **{"tolerance": tolerance, "timeout": timeout, "budget": budget, "quick": quick},
        }
        if prompts is None and not quiet:
            tell(f"No --input is given: comparing with {'four of ' * quick}the prompts that core brings.")
        stdout = stack.enter_context(standard_output())
        found = _compared(sides, prompts, completions, settings, quiet)
        _show(found, stdout, as_json)
        if report is not None:
            from corelm_compare import write_report

            write_report(found, report)
            if not quiet:
                tell(f"The report is in {report}.")
    raise typer.Exit(found.exit_code)


def _compared(
    sides: list[SideSpec], prompts: Any, completions: Any, settings: dict[str, Any], quiet: bool
) -> Comparison:
    import corelm_compare as package
    from corelm_compare.oracles import without_bars

    without_bars()
    started = time.monotonic()
    with Bar("comparing", quiet=quiet, counts=False) as bar:

        def on_progress(doing: str, left: float | None) -> None:
            done = time.monotonic() - started
            told = "" if left is None else f"about {left:.0f} s left"
            bar.show(doing, told, completed=done, total=None if left is None else done + left, refresh=True)

        return package.compare(sides, prompts, completions, **settings, on_progress=on_progress)


def _show(found: Comparison, stdout: Stream, as_json: bool) -> None:
    from corelm_compare.report_text import as_text

    watched = is_terminal(sys.stderr if as_json else sys.stdout)
    text = as_text(_with_flags(found), min(shutil.get_terminal_size().columns, 120) if watched else 80)
    if not as_json:
        stdout.write(text.encode(errors="backslashreplace"))
        return
    print(text, end="", file=Messages(), flush=True)
    told = json.dumps(found.to_json(), ensure_ascii=False, allow_nan=False) + "\n"
    stdout.write(told.encode(errors="backslashreplace"))


def _with_flags(found: Comparison) -> Comparison:
    """Return the comparison with sentences that name flags instead of Python's arguments."""
    return replace(
        found,
        causes=tuple(
            replace(each, evidence=as_flags(each.evidence), advice=as_flags(each.advice)) for each in found.causes
        ),
        not_tried={name: as_flags(reason) for name, reason in found.not_tried.items()},
        notes=tuple(map(as_flags, found.notes)),
    )


def _check_report(path: Path | None) -> None:
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        what = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise validate.invalid("--report", f"{path} {what}; give another file")


# The flags of several engines on one line: those after a --backend belong to that engine ---------------------------


class SidesCommand(flags.GroupedCommand):
    """A command that knows in which order its flags were given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not ctx.resilient_parsing:
            _, _, order = self.make_parser(ctx).parse_args(args=list(args))
            ctx.meta[_ORDER] = [parameter.name for parameter in order]
        return super().parse_args(ctx, args)


#: The values of each flag of a side, in order.
_Group = dict[str, list[str]]


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
    values = {name: iter(given[name] or ()) for name in SIDE_FLAGS}
    groups: list[_Group] = [{}]
    for name in ctx.meta.get(_ORDER, ()):
        if name == "backend":
            groups.append({})
        if name in values:
            found = groups[-1].setdefault(name, [])
            found.append(next(values[name]))
            if name != "option" and len(found) > 1:
                which = _called(len(groups) - 1, groups[-1])
                raise typer.BadParameter(f"{which} has it more than once", param_hint=as_flag(name))
    shared, *sides = groups
    if len(sides) < 2:
        for name in (each["backend"][0] for each in sides):
            if name not in (installed := flags.installed_backends()):
                meant = validate.did_you_mean(name, installed) or f"; installed: {', '.join(installed) or 'none'}"
                raise typer.BadParameter(f"no installed backend is named {name!r}{meant}", param_hint="--backend")
        raise typer.BadParameter(f"give it for each engine, at least two; got {len(sides)}", param_hint="--backend")
    if "name" in shared:
        raise typer.BadParameter("give it after the --backend that it names", param_hint="--name")
    return [_side(number, group, shared) for number, group in enumerate(sides, 1)]


def _called(number: int, group: _Group) -> str:
    return f"side {number} ({group['backend'][0]})" if number else "the beginning, for all sides,"


def _side(number: int, group: _Group, shared: _Group) -> SideSpec:
    from corelm_compare import SideSpec

    base, own = ({name: each[0] for name, each in one.items() if name != "option"} for one in (shared, group))
    if "base_url" in own:
        base.pop("model", None)
    if "model" in own and "base_url" not in own:
        base.pop("base_url", None)
    found = {**base, **own}
    options = {
        **flags.engine_options(shared.get("option"), None),
        **flags.engine_options(group.get("option"), found.get("base_url")),
    }
    if "python" in found:
        if "python" in options:
            raise typer.BadParameter(f"{_called(number, group)} has it as an --option as well", param_hint="--python")
        options["python"] = found["python"]
    adapter, folder = named_adapter(found.get("adapter"))
    return SideSpec(
        backend=found["backend"],
        model=found.get("model"),
        options=options,
        name=own.get("name"),
        adapter=adapter,
        adapter_path=folder,
    )
