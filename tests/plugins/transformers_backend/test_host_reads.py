"""How often a step of decoding waits for the device: counted on a CPU, where a read costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.plain_forward import Open
from helpers.tiny_models import random_rows, tiny_model

_READS = {getattr(Tensor, name) for name in ("tolist", "numpy", "cpu", "nonzero", "__index__")}


class HostReads(TorchFunctionMode):
    """Counts what would wait for a GPU: values that become Python numbers, and results whose size is a value."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._below = _Scalars(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in _READS
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> HostReads:
        self._below.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._below.__exit__(*error)


class _Scalars(TorchDispatchMode):
    """Counts `bool(t)`, `int(t)`, `float(t)` and `t.item()`, transformers' own included."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._reads.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def reads_per_step(run: Callable[[int], object]) -> float:
    """Return how many values are read in a step of decoding; `run` decodes so many tokens."""
    counts = []
    for tokens in (4, 12):
        run(tokens)
        with HostReads() as reads:
            run(tokens)
        counts.append(reads.count)
    return (counts[1] - counts[0]) / 8


@pytest.fixture
def model() -> Any:
    # With top-p, a vocabulary of more than 1,024 is first searched in a short list.
    model = tiny_model(vocab_size=2000)
    with torch.no_grad():
        model.lm_head.weight.mul_(20.0)
        # Otherwise rows end by themselves.
        model.lm_head.weight[2] = 0.0
    return model


CUT = {"top_p": 0.9, "temperature": 0.8}
#: Parameters of sampling, options of the call, and how many values a step reads: those that end rows, and those whose
#: number is a value. The most probable ids and their numbers are copied, and so are the ids that are left.
CASES: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({}, {}, 0),
    ({"temperature": 0.0}, {}, 0),
    ({"stop": "never said"}, {}, 1),
    ({"ignore_eos": False}, {}, 1),
    ({"top_p": 0.9}, {}, 1),
    ({"top_p": 0.9, "stop": "never said"}, {}, 1),
    # The short list does not hold enough, which shows only when it is read.
    ({"top_p": 0.99, "temperature": 50.0, "stop": "never said"}, {}, 2),
    (CUT, {"return_support": True}, 3),
    (CUT, {"top_logprobs": 8}, 3),
    (CUT, {"return_support": True, "top_logprobs": 8}, 5),
]


@pytest.mark.parametrize("lengths", [pytest.param((6, 6), marks=pytest.mark.nightly), (9, 4)], ids=["equal", "padded"])
def test_a_step_reads_once_at_most(open_model: Open, model: Any, lengths: tuple[int, ...]) -> None:
    backend, prompts = open_model(model), random_rows(*lengths)
    for sampling, options, most in CASES:

        def run(tokens: int, given: dict[str, Any] = sampling, more: dict[str, Any] = options) -> None:
            sampling = {"max_new_tokens": tokens, "ignore_eos": True, "seed": 0} | given
            out = backend.generate(prompts, sampling, logprobs="processed" if more else "raw", **more)
            assert out.ids.lengths.tolist() == [tokens] * len(prompts)

        assert reads_per_step(run) == most, (sampling, options)
