"""The tokenizer of a fleet: that of any of its engines that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from corelm.errors import EngineError


class FleetTokenizer:
    """Stands for the tokenizers of a fleet's engines, which are alike. It asks the next one if an engine has ended.

    What is set on it is set on all of them, and on those of engines that are started later.

    Args:
        running: returns the tokenizers of the engines that run.
        each: yields tokenizers to ask, one after another, until one replies. It may wait for an engine to start.
    """

    def __init__(self, running: Callable[[], Sequence[Any]], each: Callable[[], Iterable[Any]]) -> None:
        self.__dict__.update(_running=running, _each=each, _set={})

    def adopt(self, tokenizer: Any) -> None:
        """Set on the tokenizer of an engine that was started what was set on this one."""
        for name, value in self._set.items():
            setattr(tokenizer, name, value)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._ask(lambda tokenizer: tokenizer(*args, **options))

    def __getattr__(self, name: str) -> Any:
        value = self._ask(lambda tokenizer: getattr(tokenizer, name))
        if not callable(value) or name.startswith("_"):
            return value
        return lambda *args, **options: self._ask(lambda tokenizer: getattr(tokenizer, name)(*args, **options))

    def __setattr__(self, name: str, value: Any) -> None:
        self._set[name] = value
        for tokenizer in self._running():
            setattr(tokenizer, name, value)

    def __len__(self) -> int:
        return int(self._ask(len))

    def __bool__(self) -> bool:
        # Otherwise Python would ask for the length.
        return True

    def __repr__(self) -> str:
        return f"FleetTokenizer({next(iter(self._running()), None)!r})"

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        error: EngineError | None = None
        for tokenizer in self._each():
            try:
                return question(tokenizer)
            except EngineError as failure:
                if failure.usable is not False:
                    raise
                error = failure
        assert error is not None
        raise error
