"""The commands and their flags. The work is done in `listing` and `answering`.

This module must not import torch, so that ``corelm backends`` and ``--help`` answer at once.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import IO, Annotated, Any, cast

import typer
from rich.console import Console

from corelm._version import __version__
from corelm.cli import interrupt_ends_process, listing, strict_json
from corelm.errors import BackendTimeoutError, CoreLMError, EngineError, printable

#: Exit codes: some lines failed; the command was refused, or a file failed; the engine failed; Ctrl-C, as in a shell.
SOME_FAILED, REFUSED, ENGINE_FAILED, INTERRUPTED = 1, 2, 3, 130
#: Arguments of `corelm.get_backend` itself, which never reach an engine, and what to do instead.
NOT_OPTIONS = {
    "name": "use --backend",
    "model": "use --model",
    "wrappers": "they are Python objects; call corelm.get_backend from Python",
    "retry": "use --retry",
    "timeout": "use --timeout",
}

app = typer.Typer(
    help="Sample from any language-model engine, chosen by name.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class LogProbsOption(str, Enum):
    """The log-probabilities to write."""

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
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def backends(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the installed backends without importing them."""
    try:
        listing.show(as_json)
        sys.stdout.flush()
    except OSError as error:
        _tell(f"error: {error}")
        raise typer.Exit(REFUSED) from error


@app.command()
def generate(
    backend: Annotated[str, typer.Option(help="Name of the backend, as listed by `corelm backends`.")],
    input: Annotated[
        Path, typer.Option(help="JSONL file with the prompts, in the format described above; - is the standard input.")
    ],
    output: Annotated[
        Path, typer.Option(help="JSONL file to append answers to. Prompts it already answers are skipped.")
    ],
    model: Annotated[str | None, typer.Option(help="Path of the model, or a name that the engine knows.")] = None,
    base_url: Annotated[str | None, typer.Option(help="URL of a running server to use instead of a model.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="Option for the engine, as KEY=VALUE; VALUE is JSON or text. Can be repeated. Options are saved with "
            "every answer, without secrets: an option called a key, token, password or the like is left out, and texts "
            "inside JSON are saved as a fingerprint."
        ),
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Maximum tokens per answer. Default: 256.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; 0 is greedy. Default: 1.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this total probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep this many of the likeliest tokens.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below this fraction of the top probability.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends an answer. Can be repeated.")] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Make answers reproducible: each depends only on the seed and its prompt's line number."),
    ] = None,
    num_samples: Annotated[int | None, typer.Option(help="Answers per prompt, each on its own line.")] = None,
    retry: Annotated[int | None, typer.Option(min=1, help="Attempts per engine call, including the first.")] = None,
    timeout: Annotated[float | None, typer.Option(min=0, help="Time limit of each engine call, in seconds.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of prompts to send to the engine at a time.")] = 16,
    log_probs: Annotated[
        LogProbsOption,
        typer.Option(
            help="Write the log-probability of every token: the model's own (raw), or the one it was sampled with "
            "(processed)."
        ),
    ] = LogProbsOption.none,
    return_tokens: Annotated[bool, typer.Option("--return-tokens", help="Write the ids of every answer.")] = False,
) -> None:
    """Answer every prompt in a JSONL file. If interrupted, run it again to continue.

    Each input line is a JSON object with either `prompt` (a text) or `messages`
    (a conversation, optionally with `tools` for the chat template). `id`
    identifies the line and defaults to its line number; `metadata` is copied to
    the answer.

    Exit code 1: some lines failed. For the output answers.jsonl, they are listed
    in answers.errors.jsonl. 2: the command was refused, or a file could not be
    read or written. 3: the engine failed. 130: interrupted.
    """
    # The help shows these line breaks, so they fit into a terminal of 80 columns.
    with interrupt_ends_process():
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
        if "base_url" in options:
            raise typer.BadParameter("base_url is given more than once", param_hint="--base-url")
        options["base_url"] = base_url
    try:
        failed = Job(
            # On the command line, a dash usually means the standard input.
            source=Path("/dev/stdin") if str(input) == "-" else input,
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
        ).run(Console(file=cast(IO[str], Messages()), highlight=False))
    except KeyboardInterrupt:
        _tell("interrupted", output)
        raise typer.Exit(INTERRUPTED) from None
    except (EngineError, BackendTimeoutError) as error:
        _tell(f"error: {error}", output)
        raise typer.Exit(ENGINE_FAILED) from error
    except OSError as error:
        _tell(f"error: {error}", output)
        raise typer.Exit(REFUSED) from error
    except CoreLMError as error:
        _tell(f"error: {error}")
        raise typer.Exit(REFUSED) from error
    raise typer.Exit(SOME_FAILED if failed else 0)


class Messages:
    """The standard error at the time of construction, as a file that can always be written to.

    Messages that cannot be shown are dropped: a run goes on when the program or the terminal that shows them is gone.
    """

    def __init__(self) -> None:
        # While a progress bar is shown, rich replaces sys.stderr with a file that writes to the bar's console, and thus
        # to this object.
        self._file = sys.stderr

    def __getattr__(self, name: str) -> Any:
        if name == "rich_proxied_file":
            # A console writes to the file of this name and not to this object, where failures are dropped.
            raise AttributeError(name)
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        if self._file is not None:
            with suppress(OSError):
                self._file.write(text)
        return len(text)

    def flush(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.flush()


def _tell(message: str, output: Path | None = None) -> None:
    """Print a message to stderr, and how to continue if the output has answers already."""
    # A message may repeat foreign text. Its further lines are indented, so that none passes for a message of ours.
    print(printable(message, keep="\n").replace("\n", "\n  "), file=Messages())
    if output is not None and output.is_file() and output.stat().st_size:
        print("Run the same command again to continue with the remaining prompts.", file=Messages())


def _options(pairs: list[str]) -> dict[str, Any]:
    """Return ``{"dtype": "bfloat16", "seed": 1}`` for ``["dtype=bfloat16", "seed=1"]``; values may be JSON."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key.isidentifier():
            raise typer.BadParameter(f"expected KEY=VALUE, got {pair!r}", param_hint="--option")
        if key in NOT_OPTIONS:
            raise typer.BadParameter(f"{key} is not an engine option; {NOT_OPTIONS[key]}", param_hint="--option")
        if key in options:
            raise typer.BadParameter(f"{key} is given more than once", param_hint="--option")
        try:
            options[key] = strict_json.loads(value)
        except (ValueError, RecursionError) as error:
            if value.startswith(("{", "[")):
                raise typer.BadParameter(f"{key} is not valid JSON: {error}", param_hint="--option") from error
            options[key] = value
    return options
