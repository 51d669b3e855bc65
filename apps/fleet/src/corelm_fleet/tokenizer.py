"""The tokenizer of a fleet: that of any of its engines that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from corelm.errors import EngineError

#: Methods that change a tokenizer begin like this, such as `add_tokens` and `set_truncation_and_padding`.
_CHANGING = ("add_", "set_")


class FleetTokenizer:
    """Stands for the tokenizers of a fleet's engines, which are alike. It asks the next one if an engine has ended.

    What changes it, an assignment or a method such as `add_tokens`, changes all of them, and those of engines that are
    started later.

    Args:
        running: returns the tokenizers of the engines that run.
        each: yields tokenizers to ask, one after another, until one replies. It may wait for an engine to start.
    """

    def __init__(self, running: Callable[[], Sequence[Any]], each: Callable[[], Iterable[Any]]) -> None:
        self.__dict__.update(_running=running, _each=each, _changes={})

    def adopt(self, tokenizer: Any) -> None:
        """Change the tokenizer of an engine that was started as this one was changed."""
        for change in list(self._changes.values()):
            change(tokenizer)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._ask(lambda tokenizer: tokenizer(*args, **options))

    def __getattr__(self, name: str) -> Any:
        if name in ("_running", "_each", "_changes"):
            # A copy that is being made does not have them yet.
            raise AttributeError(name)
        value = self._ask(lambda tokenizer: getattr(tokenizer, name))
        if not callable(value) or name.startswith("_"):
            return value
        run = partial(self._change, object()) if name.startswith(_CHANGING) else self._ask
        return lambda *args, **options: run(lambda tokenizer: getattr(tokenizer, name)(*args, **options))

    def __setattr__(self, name: str, value: Any) -> None:
        self._change(name, lambda tokenizer: setattr(tokenizer, name, value))

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

    def _change(self, key: Any, change: Callable[[Any], Any]) -> Any:
        """Change all tokenizers, and return what the first one replies. A later change with this key replaces it."""
        replies = []
        before = self._changes.pop(key, None)
        self._changes[key] = change
        try:
            for tokenizer in self._running():
                try:
                    replies.append(change(tokenizer))
                except EngineError as failure:
                    # The tokenizer of an engine that has ended: the next start of that engine is changed, too.
                    if failure.usable is not False:
                        raise
        except BaseException:
            del self._changes[key]
            if before is not None:
                self._changes[key] = before
            raise
        return replies[0] if replies else None
