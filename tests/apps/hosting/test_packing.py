"""Objects as bytes: what is unpacked equals what was packed, and large tensors are not copied into the pickle."""

from __future__ import annotations

import gc
import inspect
import itertools
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from corelm import SamplingParams
from corelm.errors import InvalidRequestError
from corelm.spec import Capabilities, Message, records
from corelm.spec.records import GenerateRequest, Ragged
from corelm.tensors.token_sets import TokenSets
from corelm_fleet.hosting import packing
from corelm_fleet.hosting.packing import pack, unpack


def again(value: Any) -> Any:
    packed, buffers = pack(value)
    return unpack(packed, [memoryview(bytearray(buffer)) for buffer in buffers])


def test_packed_tensors_may_be_garbage_of_a_cycle() -> None:
    # As after an error, whose traceback holds the frame that holds the buffers. Python 3.11 crashed.
    for _ in range(50):
        _, buffers = pack([torch.zeros(5000)] * 3)
        cycle: dict[str, Any] = {"buffers": buffers, "raw": [buffer.raw() for buffer in buffers]}
        cycle["self"] = cycle
        del cycle, buffers
        gc.collect(0)


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.complex64,
]


def test_tensors_keep_their_values() -> None:
    for dtype, shape in itertools.product(DTYPES, [(), (0,), (3,), (2, 0, 5), (70, 33)]):
        tensor = (torch.rand(shape) * 4).to(dtype)
        found = again({"weight": tensor})["weight"]
        assert found.dtype == dtype and found.shape == tensor.shape, (dtype, shape)
        same = torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        assert same, (dtype, shape)


def test_a_view_sends_its_own_values_only() -> None:
    large = torch.arange(10**6)
    packed, buffers = pack(large[::1000])
    assert len(packed) + sum(len(buffer.raw()) for buffer in buffers) < 10_000
    assert again(large[::1000]).tolist() == list(range(0, 10**6, 1000))


def test_large_tensors_are_not_copied() -> None:
    tensor = torch.zeros(10_000)
    _, (buffer,) = pack(tensor)
    tensor[0] = 1.0
    assert torch.frombuffer(buffer, dtype=torch.float32)[0] == 1.0


def test_a_parameter_that_learns_crosses_without_its_gradients() -> None:
    found = again(torch.nn.Parameter(torch.ones(2)))
    assert type(found) is torch.Tensor and not found.requires_grad


def sample(annotation: str) -> Any:
    """A value that is not the default, for a field with this annotation."""
    rows = Ragged.from_list([[1, 2], [], [3]])
    values: dict[str, Any] = {
        "Ragged": rows,
        "Ragged | None": rows,
        "TokenSets | None": TokenSets.from_list([[[5, 17], []], [], [[300]]]),
        "tuple[VersionRuns, ...] | None": ((("1", 0), ("2", 3)), (("2", 0),)),
        "When": "abort",
        "Tensor": torch.tensor([1, 2]),
        "Tensor | None": torch.tensor([1, 2]),
        "SamplingParams": SamplingParams(temperature=0.5, stop=("x",), engine_kwargs={"deep": {"er": [1]}}),
        "SamplingParams | None": SamplingParams(temperature=0.5, stop=("x",), engine_kwargs={"deep": {"er": [1]}}),
        "bool": True,
        "float": 0.25,
        "float | None": 1.5,
        "int": 3,
        "int | None": 4,
        "str": "a",
        "str | None": "b",
        "tuple[str, ...]": ("a", "b"),
        "tuple[str, ...] | None": ("a", ""),
        "tuple[int, ...]": (2, 3),
        "tuple[int | None, ...] | None": (2, None),
        "tuple[bool, ...] | None": (True, False),
        "Sequence[int]": (5, 6),
        "Sequence[float]": (0.5, 0.25),
        "frozenset[int]": frozenset({7}),
        "frozenset[str]": frozenset({"text"}),
        "device | None": torch.device("cpu"),
        "Mode": "processed",
        "Support": "truncated",
        "Literal['none', 'raw', 'processed']": "processed",
        "Mapping[str, Tensor] | None": {"w": torch.ones(3)},
        "Path | None": Path("/somewhere"),
        "Adapter": "policy",
        "Mapping[str, Any] | None": {"r": 4},
        "object": {"probes": [[1, 2, 3]]},
        # An iterator is read where it is: hosts do not declare `weight_stream`.
        "Iterator[tuple[str, Tensor]] | None": None,
    }
    return values[annotation]


#: Records that stay in the process that uses them: they hold containers or only describe a layout.
LOCAL = {"ContainerRequest", "Parts", "Columns"}
CROSSING = [
    cls
    for name, cls in vars(records).items()
    if inspect.isclass(cls) and cls.__module__ == records.__name__ and name not in LOCAL
]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, (Ragged, TokenSets)):
        return type(other) is type(one) and one.tolist() == other.tolist()
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return bool(one == other)


def test_every_field_of_every_record_crosses() -> None:
    # A field with another kind of value fails here, until a sample of it is added and it crosses.
    for cls in CROSSING:
        callbacks = {each.name for each in fields(cls) if "Callable" in str(each.type)}
        sent = [each for each in fields(cls) if each.name not in callbacks]
        record = cls(**{each.name: sample(str(each.type).replace('"', "'")) for each in sent})
        found = again(record)
        assert type(found) is cls
        for each in fields(cls):
            assert equal(getattr(record, each.name), getattr(found, each.name)), (cls.__name__, each.name)
        # Functions are sent by name, and called in this process: see HostedEngine.
        assert not callbacks or cls is GenerateRequest


def test_what_the_records_are_made_of_crosses() -> None:
    message = Message("assistant", "hi", tool_calls=({"name": "f"},), token_ids=(1, 2), extra={"thought": "x"})
    assert again(message) == message
    capabilities = Capabilities(vocab_size=9, max_context=None, sampling={"top_p": (0.0, 1.0), "stop": None})
    assert again(capabilities) == capabilities
    assert again(MappingProxyType({"a": 1})) == {"a": 1}


def test_a_record_is_checked_where_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, buffers = pack(Ragged.from_list([[1, 2]]))
    with pytest.raises(ValueError, match="lengths add up to"):
        unpack(packed.replace((2).to_bytes(8, "little"), (3).to_bytes(8, "little")), buffers)
    # As if the other side knew a field more.
    monkeypatch.setattr(packing, "fields", lambda cls: [*fields(cls), type("Field", (), {"name": "__module__"})])
    packed, buffers = pack(SamplingParams())
    with pytest.raises((TypeError, InvalidRequestError), match="__module__"):
        unpack(packed, buffers)


def test_sampling_is_not_normalized_twice() -> None:
    for params in (SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=-1, num_samples=3, seed=4)):
        assert again(params) == params
    with pytest.raises(InvalidRequestError):
        SamplingParams(temperature=-1)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_quantized_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="dequantize"):
        pack(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8))
