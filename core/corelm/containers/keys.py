"""Keys of a TensorDict: their parts, a listing of them, and where an entry is: at the root or under ``next``."""

from __future__ import annotations

from typing import Any

from tensordict import NestedKey, TensorDictBase

from corelm.errors import MissingKeyError


def key_parts(key: NestedKey) -> tuple[str, ...]:
    """Return the key as a tuple: ``"tokens"`` and ``("tokens",)`` are the same key."""
    return key if isinstance(key, tuple) else (key,)


def list_keys(td: TensorDictBase) -> str:
    """Return all keys of `td`, sorted, for an error message: ``"log_probs, log_probs.full, reward"``."""
    return ", ".join(sorted(".".join(key_parts(key)) for key in td.keys(include_nested=True))) or "nothing"


def next_or_root(td: TensorDictBase) -> TensorDictBase:
    """Return ``td["next"]`` if it exists, else `td`: the TensorDict that holds rewards and receives results."""
    return td.get("next") if "next" in td.keys() else td


def find_entry(td: TensorDictBase, key: NestedKey, first: TensorDictBase | None = None) -> tuple[Any, TensorDictBase]:
    """Return an entry and the TensorDict that holds it.

    `first` is searched first, if given, then ``next``, then the root: a policy writes its log-probs before the step,
    an environment writes its rewards after it.

    Raises:
        MissingKeyError: none of them has the key.
    """
    for holder in [*([] if first is None else [first]), next_or_root(td), td]:
        if key in holder.keys(include_nested=True):
            return holder.get(key), holder
    shown = key_parts(key)[0] if len(key_parts(key)) == 1 else key
    raise MissingKeyError(f"the TensorDict has no {shown!r}; it has: {list_keys(td)}", field=str(shown))
