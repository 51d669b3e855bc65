"""Which `attention_mask` of a TensorDict belongs to the ids that are read, if no option names one."""

from __future__ import annotations

import math
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from corelm.containers.classes import Tokens
from corelm.containers.fields import flat
from corelm.errors import InvalidRequestError
from corelm.policy.values import find_value
from corelm.validate import as_list


def mask_next_to(td: TensorDictBase, top: tuple[str, ...], part: str, *, rather: bool) -> tuple[str, ...] | None:
    """Return the key of the `attention_mask` that belongs to the ids under the key `top`; None if there is none.

    It is in the plain TensorDict that holds the ids, or next to `top`. Its name may begin as that of the ids does:
    ``chosen_attention_mask`` for ``chosen_input_ids``. A mask of another shape belongs to the `input_ids` next to it if
    it has theirs, and it may be that of the prompts whose answers a container without pads or with responses holds.

    Args:
        td: holds the ids.
        top: the key of the ids, or of the container that holds them.
        part: the field of the container that is read.
        rather: whether a mask of another shape is refused, here for a container, else where it is applied.

    Raises:
        InvalidRequestError: the mask has another shape, or would hide tokens of rows that should have no pads, or of
            an answer, to which it need not belong.
    """
    held = find_value(td, top)
    widths, misfit = _widths_of(held, part), None
    answered = isinstance(held, (Tokens, TensorDictBase)) and {"response", "full"} <= set(held.keys())
    ragged = isinstance(held, Tokens) and not held.padded
    for key in _candidates(top, isinstance(held, TensorDictBase)):
        mask = find_value(td, key)
        if mask is None:
            continue
        fits = widths is not None and _widths(mask) == widths
        if answered or ragged:
            if fits and _hides(mask):
                raise _unclear(".".join(key)) if answered else no_pads(".".join(key))
        elif fits:
            return key
        elif key[-1] != "attention_mask" or not _is_of_input_ids(td, key, mask, top):
            misfit = misfit or key
    if misfit is None or not rather:
        return None
    if isinstance(held, (Tokens, TensorDictBase)):
        raise _misfit(".".join(top), ".".join(misfit))
    return misfit


def _candidates(top: tuple[str, ...], inside: bool) -> list[tuple[str, ...]]:
    *path, name = top
    own = name.removesuffix("input_ids") if name.endswith("input_ids") else name.removesuffix("ids")
    names = [f"{own}attention_mask"] if own != name else []
    names += ["attention_mask"] if "attention_mask" not in names else []
    return [*([(*top, "attention_mask")] if inside else []), *((*path, each) for each in names)]


def _is_of_input_ids(td: TensorDictBase, key: tuple[str, ...], mask: Any, top: tuple[str, ...]) -> bool:
    """Return whether a mask belongs to `input_ids` next to it, where the policy reads something else."""
    other = (*key[:-1], "input_ids")
    ids = None if other == top else find_value(td, other)
    return ids is not None and _widths(ids) == _widths(mask)


def _widths_of(held: Any, part: str) -> list[int] | None:
    """Return the widths of the rows of ids, or of the widest field of a container of ids."""
    if not isinstance(held, (Tokens, TensorDictBase)):
        return _widths(held)
    names = held.keys()
    if "full" in names:
        return _widths(_field(held, "full"))
    first = _widths(_field(held, "prompt")) if "prompt" in names else None
    if part == "prompt" or first is None or "response" not in names:
        return first
    second = _widths(_field(held, "response"))
    return None if second is None else [one + other for one, other in zip(first, second, strict=False)]


def _field(held: Any, name: str) -> Any:
    if isinstance(held, TensorDictBase):
        return find_value(held, (name,))
    try:
        return getattr(held, name)
    except InvalidRequestError:  # dense rows of different widths
        return [_field(row, name) for row in held.unbind(0)]


def _widths(value: Any) -> list[int] | None:
    """Return the length of each row of a dense or nested tensor, or of nested lists of rows; None for anything else."""
    if isinstance(value, Tensor):
        if value.is_nested:
            return [len(row) for row in value.unbind()]
        return [value.shape[-1]] * math.prod(value.shape[:-1]) if value.ndim else None
    value = as_list(value)
    if not isinstance(value, list):
        return None
    parts = [as_list(each) for each in value]
    if not any(isinstance(each, (list, Tensor)) for each in parts):
        return [len(parts)]
    found = [_widths(each) for each in parts]
    return None if None in found else [width for each in found for width in each or ()]


def _hides(mask: Any) -> bool:
    rows = mask.unbind() if isinstance(mask, Tensor) and mask.is_nested else flat(as_list(mask))
    return not all(bool(row.all()) if isinstance(row, Tensor) else bool(row) for row in rows)


def _misfit(name: str, mask: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{mask}: its rows are not as wide as those of the tokens under {name!r}; give the mask of prompt and response "
        "together if both are read, or delete it",
        field="masks",
    )


def _unclear(mask: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{mask}: it has the shape of the answers that the TensorDict holds, but may be that of their prompts; give "
        f"the policy attention_mask_key={mask!r} to apply it, or delete it",
        field="masks",
    )


def no_pads(mask: str) -> InvalidRequestError:
    """Return the error for a `mask` that hides tokens of rows of unequal length."""
    return InvalidRequestError(
        f"{mask}: tokens in rows of unequal length (padded=False) have no pads; leave their attention mask out, or, if "
        "the rows do hold pads, make the Tokens with padded=True",
        field="masks",
    )
