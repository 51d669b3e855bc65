"""Objects as bytes, for a process that this one trusts: a process that it started, or that started it.

Objects are pickled, with two exceptions. The bytes of a large tensor stay where they are, next to the pickle, so that
sending a tensor copies it once. The records of the specification travel by the names of their fields: what arrives is
checked as if it had been made by hand, and a field that the other side does not know is an error.
"""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from corelm.errors import described, error_from, plain_error
from corelm.spec import whole_tensor

#: A pickle, and the bytes of its large tensors.
Packed = tuple[bytes, list[pickle.PickleBuffer]]

#: Bytes from which a tensor stays out of the pickle.
_LARGE = 4096


def pack(value: Any) -> Packed:
    """Return a pickle of the value, and the bytes of its large tensors.

    Tensors are sent from the CPU, contiguous, without gradients, and gathered if they are sharded.

    Raises:
        Exception: the value holds an object that cannot be pickled. Each kind of object raises its own error.
    """
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    return file.getvalue(), buffers


def unpack(packed: bytes | memoryview, buffers: Sequence[pickle.PickleBuffer | memoryview | bytearray] = ()) -> Any:
    """Return the value. Its large tensors are views of `buffers`, which must be writable.

    Raises:
        Exception: a record does not pass its checks or has an unknown field, or a class is not known here.
    """
    return pickle.loads(packed, buffers=buffers)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return _reduced_tensor(obj)
        if isinstance(obj, MappingProxyType):
            return dict, (dict(obj),)
        cls = type(obj)
        if is_dataclass(cls) and cls.__module__.partition(".")[0] == "corelm":
            return _record, (cls, {each.name: getattr(obj, each.name) for each in fields(cls)})
        return NotImplemented


def _reduced_tensor(tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    if tensor.is_quantized:
        raise TypeError("the scales of a quantized tensor would be lost; send tensor.dequantize()")
    plain = whole_tensor(tensor).cpu().contiguous()
    dtype, shape = str(plain.dtype).removeprefix("torch."), tuple(plain.shape)
    # NumPy knows neither bfloat16 nor the 8-bit floats. The array and not its memoryview: a buffer of a memoryview
    # crashes Python 3.11 when both are garbage of one cycle.
    data: Any = plain.reshape(-1).view(torch.uint8).numpy()
    if data.nbytes < _LARGE:
        return _tensor_of_bytes, (data.tobytes(), dtype, shape)
    return _tensor_of_buffer, (pickle.PickleBuffer(data), dtype, shape)


def _tensor_of_bytes(data: bytes, dtype: str, shape: tuple[int, ...]) -> Tensor:
    # A tensor of no bytes cannot be a view of them.
    if not data:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
    return _tensor_of_buffer(bytearray(data), dtype, shape)


def _tensor_of_buffer(data: Any, dtype: str, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(data, dtype=getattr(torch, dtype)).reshape(shape)


def _record(cls: Any, values: dict[str, Any]) -> Any:
    return cls(**values)


class HostTraceback(Exception):
    """The traceback of an exception in a host, as text. It is the cause of the exception that is raised here."""

    def __str__(self) -> str:
        return f"in the host:\n{self.args[0]}"


class HostedError(Exception):
    """An exception of the host whose class is not known here. Its message names the class."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as plain data.

    Attributes:
        kind: the name of its class, or of the nearest one that this package or Python defines; "" if there is none.
        message: its message.
        details: its other arguments, by name.
        described: the type and the message of the original.
        trace: its traceback and those of its causes.
    """

    kind: str
    message: str
    details: dict[str, Any] = field(default_factory=dict)
    described: str = ""
    trace: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        kind, text, details = plain_error(error)
        trace = "".join(traceback.format_exception(error)).rstrip()
        return cls(kind, text, details, described(error), trace)

    def error(self) -> Exception:
        """Return the exception to raise in this process."""
        error = error_from(self.kind, self.message, **self.details) or HostedError(self.described)
        error.__cause__ = HostTraceback(self.trace)
        return error
