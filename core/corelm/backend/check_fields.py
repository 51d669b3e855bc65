"""Check single fields of a hook's result: types, tensors, rows and log-probs.

The functions take `fail`, which makes an `EngineError` that names the plugin and the hook.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from corelm.errors import EngineError
from corelm.tensors.ragged import Ragged, unreadable, value_range
from corelm.validate import shown

Fail = Callable[[str], EngineError]

#: Rounding may put a log-probability above 0, but by no more than this. The same for float32 and float64.
_ABOVE_ZERO = 2.0**-10


def check_type(name: str, value: Any, kind: type | tuple[type, ...], fail: Fail) -> None:
    if not isinstance(value, kind):
        expected = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise fail(f"{name} is a {type(value).__name__}, expected a {expected}")


def check_choice(name: str, value: Any, legal: tuple[str, ...], fail: Fail) -> None:
    if value not in legal:
        raise fail(f"reports {name} {shown(value)}, expected {' or '.join(map(repr, legal))}")


def check_counts(name: str, counts: Any, most: Sequence[int], answers: int, fail: Fail) -> None:
    """Check for one count per answer, at most what its prompt has; None stands for one that is not known.

    Args:
        most: the largest count of each prompt.
        answers: the number of answers. Those to one prompt are next to each other.
    """
    check_type(name, counts, (tuple, list), fail)
    if len(counts) != answers:
        raise fail(f"returned {len(counts)} {name} for {answers} answers")
    for row, count in enumerate(counts):
        limit = most[row * len(most) // answers]
        if count is not None and not (type(count) is int and 0 <= count <= limit):
            raise fail(f"row {row}: {name} {shown(count)}, expected None or a number of at most {limit}")


def check_rows(name: str, rows: Any, dtype: torch.dtype, fail: Fail, *, may_have_graph: bool = False) -> None:
    """Check for a `Ragged` of single values of `dtype`, usable in later computations."""
    if not isinstance(rows, Ragged):
        raise fail(f"{name} is a {type(rows).__name__}, expected a Ragged")
    check_tensor(name, rows.values, fail, may_have_graph=may_have_graph)
    if rows.values.dtype != dtype or rows.values.ndim != 1:
        raise fail(f"{name} are {rows.values.dtype}{list(rows.values.shape)}, expected one {dtype} per position")
    check_lengths(name, rows, fail)


def check_tensor(name: str, values: Any, fail: Fail, *, may_have_graph: bool) -> None:
    why = unreadable(values)
    if why:
        raise fail(f"{name} is {why}")
    if values.is_inference():
        raise fail(
            f"{name} is an inference tensor, which autograd cannot use later; compute it under torch.no_grad() and not "
            "under torch.inference_mode()"
        )
    if values.requires_grad and not may_have_graph:
        raise fail(f"{name} carries a graph, but no gradient was asked for; compute it under torch.no_grad()")


def check_lengths(name: str, rows: Ragged, fail: Fail) -> None:
    """Check that lengths and values of a `Ragged` agree: it may have been changed after it was made."""
    lengths = rows.lengths
    why = unreadable(lengths)
    if why or lengths.dtype != torch.int64 or lengths.ndim != 1 or lengths.device.type != "cpu":
        raise fail(
            f"the lengths of {name} are {why or f'{lengths.dtype}{list(lengths.shape)} on {lengths.device}'}, "
            "expected int64[rows] on the CPU"
        )
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if len(lengths) else 0
    if bool((lengths < 0).any()) or total != rows.values.shape[0]:
        raise fail(f"the lengths of {name} add up to {total}, but there are {rows.values.shape[0]} values")
    if not torch.equal(rows.offsets[1:], ends):
        raise fail(f"the lengths of {name} were modified after the rows were made; make a new Ragged")


def check_logprobs(rows: Ragged, fail: Fail) -> None:
    """Check that the log-probs are finite and not above 0."""
    values = rows.values.detach()
    low, high = value_range(values)
    # Keep the `not (...)`: NaN fails every comparison and must be rejected.
    if not (low > -math.inf and high <= _ABOVE_ZERO):
        bad = ~torch.isfinite(values) | (values > _ABOVE_ZERO)
        index = int(bad.nonzero()[0])
        row, position = int(rows.row_index[index]), int(rows.positions[index])
        raise fail(
            f"row {row}, position {position}: the log-prob is {float(rows.values[index])}, expected a finite number of "
            "at most 0"
        )
