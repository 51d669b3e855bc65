"""The exception tree: everything that `corelm` and its plugins raise on purpose.

Each is also a builtin exception that a caller would think to catch.
"""

from __future__ import annotations

import builtins
import copy
import inspect
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)

#: Row numbers, each with what is wrong with the row.
Problems = dict[int, str]

#: How many lines a message spells out. The error's `problems` hold all of them.
_SPELLED_OUT = 5

#: Characters of a text of others, for example of an engine's error, that a message in the log repeats.
_LONGEST = 300


class CoreLMError(Exception):
    """Root of every error raised on purpose by `corelm` and its plugins.

    Messages repeat texts from prompts, files and servers. ``str(error)`` is therefore `printable`, except that newlines
    and tabs are kept; ``error.args`` holds the message unchanged.
    """

    def __str__(self) -> str:
        # Not super(): KeyError would show the message in quotes.
        return printable(Exception.__str__(self), keep="\n\t")


class _RowsError(CoreLMError):
    """An error that can name the rows at fault."""

    problems: Problems

    def __init__(self, message: str, *, problems: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.problems = dict(sorted((problems or {}).items()))

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(self.problems)


# Finding and opening a backend ----------------------------------------------------------------------------------------


class BackendNotFoundError(CoreLMError, LookupError):
    """No backend of that name is known, installed or allowed."""


class BackendNotInstalledError(CoreLMError, ImportError):
    """The backend is one of ours, but its extra is not installed."""


class BackendImportError(CoreLMError, ImportError):
    """The plugin is installed, but its module failed to import; the cause is chained."""


class BackendConflictError(CoreLMError, RuntimeError):
    """Several distributions claim one backend name, and none of them is used."""


class BackendIncompatibleError(CoreLMError, TypeError):
    """The plugin does not fit this hook specification: API range missing or wrong, hooks missing or misspelt."""


class BackendClosedError(CoreLMError, RuntimeError):
    """The backend was closed; open a new one."""


class BackendAsleepError(CoreLMError, RuntimeError):
    """The engine sleeps, or was opened without weights. The message says what to call; the engine is fine."""


# A request ------------------------------------------------------------------------------------------------------------


class InvalidRequestError(_RowsError, ValueError):
    """A request that must not reach the engine.

    Attributes:
        field: the field or parameter at fault.
        rows: the flat indices of the rows at fault, ascending; empty if no single row is at fault.
        problems: those rows, each with what is wrong with it.
    """

    def __init__(self, message: str, *, field: str | None = None, problems: Mapping[int, str] | None = None) -> None:
        super().__init__(message, problems=problems)
        self.field = field


class MissingKeyError(InvalidRequestError, KeyError):
    """The TensorDict lacks a key that the policy reads."""


class TemplateError(_RowsError, ValueError):
    """A chat template is missing, fails, or cannot do what was asked of it.

    Attributes:
        rows: the flat indices of the conversations at fault, ascending; empty if no single conversation is at fault.
        problems: those rows, each with what is wrong with it.
    """


class ResponseFormatError(CoreLMError, ValueError):
    """An answer does not follow the format that its parser reads: a tool call that is cut off, for example.

    A policy does not raise it: the message of such an answer holds its plain text, and `errors` says why.
    """


class CapabilityError(CoreLMError, NotImplementedError):
    """The engine cannot do what was asked. Nothing else was done instead.

    Attributes:
        capability: the field of `Capabilities`, the sampling parameter or the hook that is missing.
    """

    def __init__(self, message: str, *, capability: str | None = None) -> None:
        super().__init__(message)
        self.capability = capability


class ProvenanceMismatchError(CoreLMError, ValueError):
    """Log-probabilities of different distributions were about to be compared."""


# An engine ------------------------------------------------------------------------------------------------------------


class EngineError(_RowsError, RuntimeError):
    """The engine or its plugin failed, or returned what the specification does not allow.

    Attributes:
        usable: whether the engine can take another request; None if that is not known.
        rows: the flat indices of the rows that failed, ascending; empty if the whole call failed.
        problems: those rows, each with what is wrong with it.
    """

    def __init__(self, message: str, *, usable: bool | None = None, problems: Mapping[int, str] | None = None) -> None:
        super().__init__(message, problems=problems)
        self.usable = usable


class QueueFullError(EngineError):
    """A batcher's queue holds `max_queue` requests and is set to refuse more. The engine itself is fine."""


class StaleWeightsError(EngineError):
    """The engine does not answer as the weights in force would. It takes requests nevertheless.

    From then on, rows carry a label that no weights had before. Load the weights again, or open the engine again.
    """


class BackendTimeoutError(CoreLMError, TimeoutError):
    """The engine did not answer within the timeout of the call."""


class TokenBoundaryWarning(UserWarning):
    """Warns that a token holds the end of a prompt and the beginning of its completion, and counts as the prompt's."""


class ResponseParserWarning(UserWarning):
    """Warns that a policy's `response_parser` raised; `errors` of the result says on which answers, and why."""


# Messages -------------------------------------------------------------------------------------------------------------


def printable(text: str, keep: str = "") -> str:
    r"""Return `text` with an escape sequence for each character that is not printable.

    A terminal obeys some of these characters, and others reorder or hide the text around them.

    Args:
        keep: characters to leave as they are.

    >>> print(printable("a\x1b]0;title\x07b"))
    a\x1b]0;title\x07b
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def brief(text: str) -> str:
    r"""Return `text` as one printable line of at most 300 characters, for a message in the log.

    >>> brief("two\nlines")
    'two\\nlines'
    """
    # Cut first: an error may repeat megabytes of a reply.
    line = printable(text[:_LONGEST])
    return line if len(text) <= _LONGEST and len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


def refuse(problems: Mapping[int, str], field: str) -> None:
    """Raise one `InvalidRequestError` for all `problems`; return if there are none."""
    if problems:
        raise InvalidRequestError(f"{field}: {spelled_out(problems)}", field=field, problems=problems)


def spelled_out(problems: Mapping[int, str]) -> str:
    """Return the first few problems, row by row, and how many more rows have one. One that all rows share is said once.

    >>> spelled_out({0: "is empty", 1: "is too long"}), spelled_out({2: "is empty", 3: "is empty"})
    ('row 0: is empty; row 1: is too long', 'row 2: is empty; likewise row 3')
    """
    if len(problems) > 1 and len({*problems.values()}) == 1:
        first, *rest = sorted(problems)
        run = len(rest) > 2 and rest == [*range(rest[0], rest[-1] + 1)]
        others = f"{rest[0]}–{rest[-1]}" if run else first_few([*map(str, rest)], sep=", ")
        return f"row {first}: {problems[first]}; likewise row{'s' * (len(rest) > 1)} {others}"
    return first_few([f"row {row}: {problems[row]}" for row in sorted(problems)], "more rows")


def first_few(lines: Sequence[str], rest: str = "more", sep: str = "; ") -> str:
    """Return the first few lines in one text, and how many more there are.

    >>> first_few(["a", "b", "c", "d", "e", "f", "g"])
    'a; b; c; d; e; and 2 more'
    """
    left_out = len(lines) - _SPELLED_OUT
    return sep.join([*lines[:_SPELLED_OUT], *([f"and {left_out} {rest}"] if left_out > 0 else [])])


# Exceptions as plain data ---------------------------------------------------------------------------------------------


def plain_error(error: BaseException) -> tuple[str, str, dict[str, Any]]:
    """Return the class, the message and the other arguments of an exception, for `error_from`.

    Returns:
        The name of its class, or of the nearest one that this module or Python defines, "" if there is none; the
        message; the arguments by name.
    """
    alone = len(error.args) == 1 and isinstance(error.args[0], str)
    text = error.args[0] if alone else message(error)
    kind = next((each for each in type(error).__mro__ if type(error_from(each.__name__, "")) is each), None)
    details: dict[str, Any] = {}
    if kind is not None and issubclass(kind, CoreLMError):
        names = inspect.signature(kind.__init__).parameters
        details = {name: value for name, value in vars(error).items() if name in names}
    return "" if kind is None else kind.__name__, text, details


def error_from(kind: str, text: str, **details: Any) -> Exception | None:
    """Return an exception of that class; None if no exception has the name, or if it takes more than a message."""
    found = globals().get(kind) or getattr(builtins, kind, None)
    # One that is merely an Exception would lose the name of its class.
    if not isinstance(found, type) or not issubclass(found, Exception) or found is Exception:
        return None
    try:
        return found(text, **details)
    except TypeError:
        return None


# Exceptions of others -------------------------------------------------------------------------------------------------


def described(error: BaseException) -> str:
    """Return the type and the message of an exception, for another error's message."""
    return f"{type(error).__name__}: {message(error)}"


def message(error: BaseException) -> str:
    """Return the message of an exception, even if its ``__str__`` fails."""
    try:
        return str(error)
    except Exception as failure:
        return f"(its message cannot be read: {type(failure).__name__})"


#: Packages whose functions stand between a caller and what warns: they call our modules, or hold our `with` blocks.
_BETWEEN = ("corelm", "torch", "tensordict", "contextlib")


def level_of_caller() -> int:
    """Return the stack level, as `warnings.warn` counts it, of the code that called `corelm` or the warning plugin."""
    depth, between = 1, (*_BETWEEN, sys._getframe(1).f_globals["__name__"].partition(".")[0])
    while sys._getframe(depth).f_globals.get("__name__", "").startswith(between):
        depth += 1
    return depth


def how_to_install(*requirements: str, python: str = "") -> str:
    """Return what to type to install requirements, such as ``core-vllm-backend[engine]`` or ``tqdm``.

    It names folders of this project, with those that they need. On a package index, somebody else may have the names.

    Args:
        python: an interpreter other than this one.
    """
    named = dict.fromkeys(word for each in requirements for word in _folders(each))
    words = [*([python, "-m"] if python else []), "pip", "install", *named]
    line = " ".join(f'"{word}"' if re.search(r"[][<> ]", word) else word for word in words)
    return f"{line} in a checkout of core, or install its wheels" if "." in named else line


def _folders(requirement: str) -> list[str]:
    name, bracket, extra = requirement.partition("[")
    part = name.removeprefix("core-")
    if part in ("core", name):
        return ["."] if part == "core" else [requirement]
    needed = {"ray-backend": "apps/fleet", "cli": "apps/interop"}.get(part, "kits/engine")
    kind = "plugins" if part.endswith("-backend") else "kits" if part in ("testing", "engine-kit") else "apps"
    folder = f"{kind}/{part.removesuffix('-kit').replace('-', '_')}"
    return [".", "kits/engine", needed, f"{folder}{bracket}{extra}"]


def is_interrupt(error: BaseException) -> bool:
    """Return whether the user interrupted the program, rather than an engine or a callback that failed.

    Python raises a `KeyboardInterrupt` in the main thread only.
    """
    return isinstance(error, KeyboardInterrupt) and is_main_thread()


def is_main_thread() -> bool:
    """Return whether the caller is the main thread: the one in which Python handles signals."""
    # Not `current_thread`, which would remember threads that `threading` did not start.
    return threading.get_ident() == threading.main_thread().ident


def own(error: E) -> E:
    """Return a copy of an error for one of several callers. Raising it writes to it, so callers cannot share one."""
    try:
        made = copy.copy(error)
    except Exception:
        # This exception class cannot be copied.
        return error
    made.__cause__ = error.__cause__
    return made.with_traceback(error.__traceback__)
