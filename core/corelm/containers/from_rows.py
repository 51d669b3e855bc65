"""Fields of rows of their own length, read from what a caller wrote by hand: lists, tensors, arrays or a `Ragged`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from tensordict import TensorClass, TensorDict
from torch import Tensor

from corelm.containers.fields import COUNTS, SETS, WIDE, unnested
from corelm.errors import InvalidRequestError, Problems, spelled_out
from corelm.tensors.lazy_rows import Shape, lazy_rows
from corelm.tensors.ragged import Ragged, as_tensor, unreadable
from corelm.validate import as_list, shown

C = TypeVar("C", bound=TensorClass)

_COUNTED = {1: "one dimension", 2: "two dimensions, [tokens, k]"}


def container_of_rows(
    cls: type[C],
    dtype: torch.dtype | Mapping[str, torch.dtype],
    given: Mapping[str, Any],
    objects: Mapping[str, Any] | None = None,
) -> C:
    """Return a container that is not padded, from the rows of its fields.

    `full` is the prompt followed by the response, if both are given.

    Args:
        cls: the class of the container.
        dtype: of all fields, or of each by name.
        given: what the caller passed for each field; None for nothing.
        objects: Python objects that all rows share, by field.

    Raises:
        InvalidRequestError: no field is given, a row is malformed, or the fields do not fit each other; `field` names
            the field, `rows` the rows at fault.
    """
    fields: dict[str, Ragged] = {}
    shapes: dict[str, Shape] = {}
    for name, value in given.items():
        if value is not None:
            wanted = dtype if isinstance(dtype, torch.dtype) else dtype[name]
            fields[name], shapes[name] = _read(value, wanted, f"{cls.__name__}.{name}", name)
    if not fields:
        raise InvalidRequestError(f"{cls.__name__}: pass the rows of a field: {', '.join(given)}", field="full")
    if len({*shapes.values()}) > 1:
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise InvalidRequestError(f"{cls.__name__}: the fields have different batches: {found}", field=[*fields][-1])
    _complete(cls.__name__, fields)
    shape = next(iter(shapes.values()))
    if 0 in shape:
        # A stack needs at least one row.
        empty = {name: rows.values.reshape(*shape, 0, *rows.values.shape[1:]) for name, rows in fields.items()}
        return cls.from_tensordict(TensorDict(empty, batch_size=shape))
    count = len(next(iter(fields.values())))
    shared = {name: [value] * count for name, value in (objects or {}).items()}
    return cls.from_tensordict(lazy_rows({**fields, **shared}, shape))


def _complete(container: str, fields: dict[str, Ragged]) -> None:
    """Add `full`, the prompt followed by the response, and refuse rows in which the fields do not fit each other."""

    def refuse_rows(name: str, problems: Problems) -> None:
        _refuse(problems, f"{container}.{name}", name)

    prompt, response, full = (fields.get(name) for name in ("prompt", "response", "full"))
    if response is None and full is not None and prompt is not None:
        response = full.slice(prompt.lengths, full.lengths)
    if prompt is not None and response is not None:
        joined = fields["full"] = prompt.join(response)
        if full is not None:
            pairs = enumerate(zip(joined.tolist(), full.tolist(), strict=True))
            wrong = {row: "is not the prompt followed by the response" for row, (one, two) in pairs if one != two}
            refuse_rows("full", wrong)
    if SETS in fields:
        sums = [sum(counts) for counts in fields[COUNTS].tolist()]
        pairs = enumerate(zip(fields[SETS].lengths.tolist(), sums, strict=True))
        refuse_rows(SETS, {row: f"has {n} ids, but {COUNTS} adds up to {m}" for row, (n, m) in pairs if n != m})
    # What is left are fields as long as the whole row, such as masks.
    first, *others = [name for name in fields if name not in ("prompt", "response", SETS)] or ["prompt"]
    for name in others:
        lengths = enumerate(zip(fields[name].lengths.tolist(), fields[first].lengths.tolist(), strict=True))
        refuse_rows(name, {row: f"has {n} values, but {first} has {m}" for row, (n, m) in lengths if n != m})


def _read(given: Any, dtype: torch.dtype, what: str, field: str) -> tuple[Ragged, Shape]:
    """Return the rows of a field, and the batch shape. A row has one value a token, or in a field of `WIDE` a row."""
    dims = 2 if field in WIDE else 1
    if isinstance(given, Tensor) and given.is_nested:
        given = list(given.unbind())
    elif isinstance(given, Ragged):
        given = list(given.split())
    expected = f"a list of rows, each a list or a tensor of {_COUNTED[dims]}"
    rows, shape = unnested(given, lambda one: _is_row(one, dims), expected, what, field)
    tensors, problems = [], {}
    for number, row in enumerate(rows):
        try:
            tensors.append(_row(row, dtype, dims))
        except Exception as error:  # the object's own methods may raise anything
            problems[number] = f"{error}, got {shown(row)}"
    _refuse(problems, what, field)
    if dims > 1:
        tensors = _of_one_width(tensors, what, field)
    lengths = torch.tensor([len(row) for row in tensors], dtype=torch.int64)
    return Ragged(torch.cat(tensors) if tensors else torch.empty((0,) * dims, dtype=dtype), lengths), shape


def _of_one_width(rows: list[Tensor], what: str, field: str) -> list[Tensor]:
    """Return tables of the same width; those without tokens are given it."""
    width = next((row.shape[1] for row in rows if row.numel()), 0)
    wrong = {
        number: f"has {row.shape[1]} values a token, but another row has {width}"
        for number, row in enumerate(rows)
        if row.numel() and row.shape[1] != width
    }
    _refuse(wrong, what, field)
    return [row if row.numel() else row.new_empty(len(row), width) for row in rows]


def _is_row(given: Any, dims: int) -> bool:
    """Return whether this is a row: numbers in so many dimensions, as a tensor, an array or lists."""
    if isinstance(given, Tensor):
        return not unreadable(given) and given.ndim == dims
    if _is_array(given):
        return bool(given.ndim == dims)
    values = as_list(given)
    if not isinstance(values, list):
        return False
    if any(isinstance(one, (int, float)) or getattr(one, "ndim", 1) == 0 for one in values):
        return True
    return dims > 1 and any(_is_row(one, dims - 1) for one in values)


def _is_array(given: Any) -> bool:
    return getattr(getattr(given, "dtype", None), "kind", "O") in "biuf"


def _row(row: Any, dtype: torch.dtype, dims: int) -> Tensor:
    """Return one row in `dtype`, which must hold all of its values."""
    if not _is_array(row):
        row = as_list(row)
    if isinstance(row, list):
        # Lists of numpy's or torch's own scalars are read as well, if slowly.
        row = [item.tolist() if hasattr(item, "tolist") else item for item in row]
    tensor = row if isinstance(row, Tensor) else as_tensor(row)
    if not tensor.numel():
        return tensor.new_empty(tensor.shape if tensor.ndim == dims else (0,) * dims, dtype=dtype)
    floats, bools = tensor.dtype.is_floating_point, tensor.dtype == torch.bool
    if dtype == torch.int64 and (floats or bools):
        raise TypeError("expected token ids")
    if dtype == torch.bool and not bools and (floats or bool(((tensor != 0) & (tensor != 1)).any())):
        raise TypeError("expected True and False, or 1 and 0")
    if tensor.ndim != dims or tensor.dtype.is_complex or (dtype == torch.float32 and bools):
        raise TypeError("expected numbers")
    return tensor.to(dtype)


def _refuse(problems: Problems, what: str, field: str) -> None:
    if problems:
        raise InvalidRequestError(f"{what}: {spelled_out(problems)}", field=field, problems=problems)
