"""``corelm compare``: the same prompts through two or more engines; how far apart they are, and why.

This module must not import torch, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from corelm.spec import SamplingParams
from corelm_cli import flags, interrupt_ends_process
from corelm_cli.compare_sides import sides_of_flags
from corelm_cli.exits import INTERRUPTED, typed_exits
from corelm_cli.streams import Messages, Stream, is_terminal, standard_output, tell
from corelm_cli.wording import as_flags

if TYPE_CHECKING:
    from corelm_compare import Comparison, SideSpec

_TESTS = "Comparison"


@flags.sampling_flags("num_samples", max_new_tokens=24)
def compare(
    ctx: typer.Context,
    sampling: dict[str, Any],
    backend: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A backend, as listed by `corelm backends`. Give it once for each side; the flags of this section "
            "that follow it belong to that side, and those before the first --backend to all sides.",
            autocompletion=flags.installed_backends,
            rich_help_panel=flags.ENGINE,
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="Path of the model, or a name that the engine knows.", rich_help_panel=flags.ENGINE
        ),
    ] = None,
    base_url: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="URL of a running server.", rich_help_panel=flags.ENGINE),
    ] = None,
    python: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="Interpreter, or environment, in which the engine runs as a process of its own.",
            rich_help_panel=flags.ENGINE,
        ),
    ] = None,
    option: flags.EngineOptions = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=FOLDER]",
            help="The adapter of every call, as in `corelm score`.",
            rich_help_panel=flags.ENGINE,
        ),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="What to call the side; by default, its backend.", rich_help_panel=flags.ENGINE
        ),
    ] = None,
    input: Annotated[
        Path | None,
        typer.Option(
            help="JSONL file of prompts, in the format described above; - is the standard input. Default: ten prompts "
            "that core brings.",
            rich_help_panel=flags.FILES,
        ),
    ] = None,
    max_prompts: Annotated[
        int | None,
        typer.Option(min=1, metavar="<int>", help="Read only so many lines.", rich_help_panel=flags.FILES),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a page of HTML with pictures, which needs no network.",
            rich_help_panel=flags.FILES,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print everything as JSON to the standard output; the text goes to the standard error.",
            rich_help_panel=flags.FILES,
        ),
    ] = False,
    oracle: Annotated[
        str,
        typer.Option(
            metavar="FOLDER",
            help="The model whose plain float32 forward, in transformers on this CPU, says which side is wrong. auto "
            "takes the first --model that is a folder; none goes without.",
            rich_help_panel=_TESTS,
        ),
    ] = "auto",
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FOLDER",
            help="Other weights that a side may hold, such as those before an update. Can be repeated.",
            rich_help_panel=_TESTS,
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="<nats>",
            help="The mean of |Δ| up to which sides agree. Default: measured, from each side's distance to itself.",
            rich_help_panel=_TESTS,
        ),
    ] = None,
    timeout: flags.Timeout = None,
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
    given = {"backend": backend, "name": name, "model": model, "base_url": base_url, "python": python}
    with interrupt_ends_process():
        from corelm_cli.compare_lines import read_all

        sides = sides_of_flags(ctx, {**given, "option": option, "adapter": adapter})
    with typed_exits(), ExitStack() as stack:
        _check_report(report)
        prompts, completions = (None, None) if input is None else read_all(_file(input), max_prompts)
        settings = {
            "oracle": None if oracle == "none" else oracle,
            "checkpoints": checkpoint or (),
            "sampling": _sampling(sampling),
            "seed": sampling.get("seed", 0),
            "tolerance": tolerance,
            "timeout": timeout,
        }
        if prompts is None:
            tell("No --input is given: comparing with the prompts that core brings.")
        stdout = stack.enter_context(standard_output())
        try:
            found = _compared(sides, prompts, completions, settings)
        except KeyboardInterrupt:
            tell("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        _show(found, stdout, as_json)
        if report is not None:
            from corelm_compare import write_report

            write_report(found, report)
            tell(f"The report is in {report}.")
    raise typer.Exit(found.exit_code)


def _compared(sides: list[SideSpec], prompts: Any, completions: Any, settings: dict[str, Any]) -> Comparison:
    import corelm_compare as package
    from corelm_compare.oracles import without_bars

    without_bars()
    console = Console(file=cast(IO[str], Messages()), highlight=False)
    names = " and ".join(side.name or side.backend for side in sides)
    if not is_terminal(sys.stderr):
        return package.compare(sides, prompts, completions, **settings)
    with console.status(f"comparing {names}", spinner="line"):
        return package.compare(sides, prompts, completions, **settings)


def _show(found: Comparison, stdout: Stream, as_json: bool) -> None:
    """Print the text, and the JSON if it is asked for."""
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


def _sampling(given: dict[str, Any]) -> SamplingParams:
    """Return the parameters of completions: those of `corelm_compare`, and what the flags change."""
    from corelm_compare.material import DEFAULT

    return SamplingParams.make(DEFAULT, **{key: value for key, value in given.items() if key != "seed"})


def _check_report(path: Path | None) -> None:
    """Refuse a file that cannot be written, before anything is computed."""
    from corelm.validate import invalid

    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        what = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise invalid("--report", f"{path} {what}; give another file")


def _file(path: Path) -> Path | None:
    """Return None for a dash, which is the standard input."""
    return None if str(path) == "-" else path
