"""How a command ends: exit codes, and errors as one message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from corelm.errors import BackendTimeoutError, CoreLMError, EngineError
from corelm_cli.streams import tell
from corelm_cli.wording import as_flags

#: Exit codes: some lines failed; the command was refused, or a file failed; the engine failed; Ctrl-C, as in a shell.
SOME_FAILED, REFUSED, ENGINE_FAILED, INTERRUPTED = 1, 2, 3, 130


@contextmanager
def typed_exits() -> Iterator[None]:
    """Print an error, or that the command was interrupted, as one message, and exit with its code."""
    try:
        yield
    except (CoreLMError, OSError) as error:
        tell(f"error: {as_flags(str(error))}")
        raise typer.Exit(exit_code(error)) from error
    except KeyboardInterrupt:
        tell("interrupted")
        raise typer.Exit(INTERRUPTED) from None


def exit_code(error: Exception) -> int:
    # A timeout of an engine is an OSError, too.
    return ENGINE_FAILED if isinstance(error, (EngineError, BackendTimeoutError)) else REFUSED
