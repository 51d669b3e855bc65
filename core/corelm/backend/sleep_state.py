"""`SleepState`: which parts of an engine sleep, and whether it has weights. It refuses the calls that need them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from corelm.backend.hook_kinds import READ_WEIGHTS
from corelm.errors import BackendAsleepError
from corelm.spec.records import SLEEP_LEVELS, SLEEP_TAGS
from corelm.validate import did_you_mean, invalid, is_bool, shown


class SleepState:
    """What of an engine sleeps. Core keeps this, so that every engine refuses the same calls in the same words.

    Args:
        name: the name that the engine was opened by.
        without_weights: whether the engine was opened without weights.

    Attributes:
        asleep: the parts that sleep: `weights`, `kv_cache`, both or none.
        level: the level at which the engine was last put to sleep; 0 if it never was.
        without_weights: whether the engine has no weights, so that only an update can help.
    """

    def __init__(self, name: str, without_weights: bool) -> None:
        self._name = name
        self.asleep: frozenset[str] = frozenset()
        self.level = 0
        self.without_weights = without_weights

    @property
    def answers(self) -> bool:
        """Whether the engine can generate and score."""
        return not self.asleep and not self.without_weights

    def require(self, hook: str) -> None:
        """Refuse a hook that needs what sleeps or is missing.

        Raises:
            BackendAsleepError: the message says what to call.
        """
        if hook in READ_WEIGHTS and self.asleep:
            tags = "" if len(self.asleep) == len(SLEEP_TAGS) else repr([*self.asleep])
            what = f"its {_named(self.asleep)} {'sleeps' if tags and 'weights' not in self.asleep else 'sleep'}"
            raise BackendAsleepError(f"backend {self._name!r} cannot answer: {what}; call backend.wake({tags}) first")
        if hook in READ_WEIGHTS:
            self.require_weights()
        if hook == "update_weights" and "weights" in self.asleep:
            raise BackendAsleepError(
                f"backend {self._name!r}: there is no memory for new weights while its weights sleep; call "
                "backend.wake(['weights']) first"
            )

    def require_weights(self) -> None:
        """Refuse what needs weights, whether they sleep or not.

        Raises:
            BackendAsleepError: the engine has none.
        """
        if self.without_weights:
            raise BackendAsleepError(
                f"backend {self._name!r} has no weights yet; call backend.update_weights(…) with a complete set first"
            )

    def fall_asleep(self, level: int) -> None:
        """Note that the engine goes to sleep. All of it does.

        Raises:
            BackendAsleepError: part of it sleeps already.
        """
        if self.asleep:
            verb = "are" if "weights" in self.asleep else "is"
            raise BackendAsleepError(
                f"backend {self._name!r}: its {_named(self.asleep)} {verb} asleep already, since sleep({self.level}); "
                "call backend.wake() before it sleeps again"
            )
        self.asleep, self.level = frozenset(SLEEP_TAGS), level
        self.without_weights = self.without_weights or level == max(SLEEP_LEVELS)

    def saved(self) -> tuple[frozenset[str], int, bool]:
        """Return the state, for `restore`."""
        return self.asleep, self.level, self.without_weights

    def restore(self, saved: tuple[frozenset[str], int, bool]) -> None:
        """Go back to a state, because the engine refused to change it."""
        self.asleep, self.level, self.without_weights = saved


def sleep_level(given: Any, levels: Iterable[int]) -> int:
    """Return the level, or refuse it.

    Args:
        given: the caller's level.
        levels: those at which the engine can sleep.

    Raises:
        InvalidRequestError: it is no level, or none of the engine's; `field` is ``level``.
    """
    if is_bool(given) or given not in SLEEP_LEVELS:
        raise invalid(
            "level",
            f"expected 1, which keeps the weights outside the accelerator, or 2, which drops them; got {shown(given)}",
        )
    if given not in levels:
        raise invalid(
            "level", f"this engine, as it was opened, sleeps at level {' and '.join(map(str, sorted(levels)))} only"
        )
    return int(given)


def sleep_tags(given: Any) -> frozenset[str]:
    """Return the parts that the caller named; all of them for None.

    Raises:
        InvalidRequestError: an unknown part, or none; `field` is ``tags``.
    """
    if given is None:
        return frozenset(SLEEP_TAGS)
    named = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else []
    for tag in named:
        if tag not in SLEEP_TAGS:
            raise invalid(
                "tags", f"unknown part {shown(tag)}{did_you_mean(tag, SLEEP_TAGS)}; known: {', '.join(SLEEP_TAGS)}"
            )
    if not named:
        raise invalid("tags", f"expected None for all, or a list out of {', '.join(SLEEP_TAGS)}; got {shown(given)}")
    return frozenset(named)


def _named(tags: frozenset[str]) -> str:
    return " and ".join(tag.replace("kv_cache", "KV cache") for tag in SLEEP_TAGS if tag in tags)
