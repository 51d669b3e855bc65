"""The exception tree: everything `corelm` raises on purpose, each also a builtin a caller would think to catch."""

from __future__ import annotations

from collections.abc import Mapping


class CoreLMError(Exception):
    """Root of every error raised on purpose by `corelm` and its plugins."""


class BackendNotFoundError(CoreLMError, LookupError):
    """No backend of that name is known, installed or allowed."""


class BackendNotInstalledError(CoreLMError, ImportError):
    """The backend is one of ours, but its extra is not installed."""


class BackendImportError(CoreLMError, ImportError):
    """The plugin is installed and its module failed to import; the cause is chained."""


class BackendConflictError(CoreLMError, RuntimeError):
    """Two distributions claim one backend name; none is picked."""


class BackendIncompatibleError(CoreLMError, TypeError):
    """The plugin does not fit this hook specification: API range missing or wrong, hooks missing or misspelt."""


class BackendClosedError(CoreLMError, RuntimeError):
    """The backend was closed; open a new one."""


class InvalidRequestError(CoreLMError, ValueError):
    """A request that must not reach the engine.

    Attributes:
        rows: the flat indices of the rows at fault, ascending; empty if the fault is not one row's.
        field: the field or parameter at fault.
        problems: `rows` with what is wrong with each.
    """

    def __init__(self, message: str, *, field: str | None = None, problems: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.problems = dict(sorted((problems or {}).items()))

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(self.problems)


class MissingKeyError(InvalidRequestError, KeyError):
    """The TensorDict lacks a key that the policy reads."""

    # KeyError shows its message in quotes.
    __str__ = Exception.__str__


class TemplateError(CoreLMError, ValueError):
    """A chat template is missing, fails, or cannot give what was asked of it.

    Attributes:
        rows: the flat indices of the conversations at fault, ascending; empty if it is not one conversation's fault.
        problems: `rows` with what is wrong with each.
    """

    def __init__(self, message: str, *, problems: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.problems = dict(sorted((problems or {}).items()))

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(self.problems)


class CapabilityError(CoreLMError, NotImplementedError):
    """The engine cannot do what was asked, and says so instead of doing something else.

    Attributes:
        capability: the field of `Capabilities`, the sampling parameter or the hook that is missing.
    """

    def __init__(self, message: str, *, capability: str | None = None) -> None:
        super().__init__(message)
        self.capability = capability


class ProvenanceMismatchError(CoreLMError, ValueError):
    """Log-probabilities of different distributions were about to be compared."""


class EngineError(CoreLMError, RuntimeError):
    """The engine or its plugin failed, or returned what the specification does not allow.

    Attributes:
        usable: whether the engine can take another request; None where that is not known.
        rows: the flat indices of the rows that failed, ascending; empty if it is not one row's failure.
        problems: `rows` with what is wrong with each.
    """

    def __init__(self, message: str, *, usable: bool | None = None, problems: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.usable = usable
        self.problems = dict(sorted((problems or {}).items()))

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(self.problems)


class QueueFullError(EngineError):
    """A batcher's queue holds `max_queue` requests, and was told to say so; nothing is wrong with the engine."""


class BackendTimeoutError(CoreLMError, TimeoutError):
    """The engine did not answer within the timeout of the call."""


Problems = dict[int, str]


#: How many rows a message spells out; `InvalidRequestError.problems` always holds them all.
_SPELLED_OUT = 5


def refuse(problems: Mapping[int, str], field: str) -> None:
    """Raise one `InvalidRequestError` for all `problems`; return if there are none."""
    if problems:
        raise InvalidRequestError(f"{field}: {spelled_out(problems)}", field=field, problems=problems)


def spelled_out(problems: Mapping[int, str]) -> str:
    rows = sorted(problems)
    lines = [f"row {row}: {problems[row]}" for row in rows[:_SPELLED_OUT]]
    if len(rows) > _SPELLED_OUT:
        lines.append(f"and {len(rows) - _SPELLED_OUT} more rows")
    return "; ".join(lines)
