"""What can be typed: the commands and their flags. The work is done in `listing` and `answering`.

Torch is imported by the commands that run a model, not here: listing and ``--help`` answer at once.
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from corelm._version import __version__
from corelm.cli import listing
from corelm.errors import BackendTimeoutError, CoreLMError, EngineError

#: Exit codes: some lines could not be answered; the command cannot be carried out; the engine failed.
SOME_FAILED, REFUSED, ENGINE_FAILED = 1, 2, 3
#: Arguments of `corelm.get_backend` itself, which therefore never reach an engine, and what to do instead.
NOT_OPTIONS = {
    "name": "give --backend",
    "model": "give --model",
    "plugins": "it takes objects, so call corelm.get_backend from Python",
    "retry": "give --retry",
    "timeout": "give --timeout",
}

app = typer.Typer(
    help="Sample from any language-model engine by its name.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class LogProbsOption(str, Enum):
    """Which log-probabilities to write."""

    none = "none"
    raw = "raw"
    processed = "processed"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"corelm {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which one.")
    ] = False,
) -> None:
    pass


@app.command()
def backends(
    as_json: Annotated[bool, typer.Option("--json", help="For programs: a list of objects.")] = False,
) -> None:
    """List the installed backends. Imports none of them."""
    listing.show(as_json)


@app.command()
def generate(
    backend: Annotated[str, typer.Option(help="Its name; see `corelm backends`.")],
    input: Annotated[Path, typer.Option(help="JSONL, a file or a pipe; what a line holds is said above.")],
    output: Annotated[Path, typer.Option(help="JSONL. What is in it already is not asked again.")],
    model: Annotated[str | None, typer.Option(help="A path or a name that the engine knows.")] = None,
    base_url: Annotated[str | None, typer.Option(help="Where the engine's server is.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="KEY=VALUE for the engine; VALUE is JSON or text. Written beside every answer, unless KEY ends in "
            "key, token, secret or password."
        ),
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Length limit of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    min_p: Annotated[float | None, typer.Option()] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends an answer; may be repeated.")] = None,
    seed: Annotated[int | None, typer.Option(help="An answer then depends on this and on its line number.")] = None,
    num_samples: Annotated[int | None, typer.Option(help="AnswersFile per prompt, one output line each.")] = None,
    retry: Annotated[int | None, typer.Option(min=1, help="How often a call that fails is tried in all.")] = None,
    timeout: Annotated[float | None, typer.Option(min=0, help="Seconds that a call may take.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that are sent together.")] = 16,
    log_probs: Annotated[
        LogProbsOption, typer.Option(help="Write the log-probability of every token.")
    ] = LogProbsOption.none,
    return_tokens: Annotated[bool, typer.Option("--return-tokens", help="Write the token ids.")] = False,
) -> None:
    """Answer every prompt of a file. Run it again to go on where it stopped.

    A line of the input is an object with `prompt`, a text, or `messages`, a conversation, and perhaps `tools` for its
    chat template. An `id` names it, else its line number does; `metadata` is copied to the answer.

    Exit code 1: some lines could not be answered; for the output answers.jsonl they are in answers.errors.jsonl. 2: the
    command cannot be carried out. 3: the engine failed.
    """
    from corelm.cli.answering import Job

    sampling = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "stop": stop or None,
        "seed": seed,
        "num_samples": num_samples,
    }
    options = _options(option or [])
    if base_url is not None:
        options["base_url"] = base_url
    try:
        failed = Job(
            source=input,
            target=output,
            backend=backend,
            model=model,
            options=options,
            sampling={name: value for name, value in sampling.items() if value is not None},
            batch_size=batch_size,
            log_probs=log_probs.value,
            return_tokens=return_tokens,
            retry=retry,
            timeout=timeout,
        ).run(Console(stderr=True, highlight=False))
    except (EngineError, BackendTimeoutError) as error:
        typer.echo(f"error: {error}", err=True)
        if output.is_file() and output.stat().st_size:
            typer.echo(f"The same command goes on with what {output} does not hold yet.", err=True)
        raise typer.Exit(ENGINE_FAILED) from error
    except (CoreLMError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(REFUSED) from error
    raise typer.Exit(SOME_FAILED if failed else 0)


def _options(pairs: list[str]) -> dict[str, Any]:
    """``["dtype=bfloat16", "seed=1"]`` → ``{"dtype": "bfloat16", "seed": 1}``: a value is JSON if it reads as JSON."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key.isidentifier():
            raise typer.BadParameter(f"expected KEY=VALUE, got {pair!r}", param_hint="--option")
        if key in NOT_OPTIONS:
            raise typer.BadParameter(f"{key} is not the engine's; {NOT_OPTIONS[key]}", param_hint="--option")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options
