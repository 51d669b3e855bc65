"""How often a step of decoding waits for the device: counted on a CPU, where a read costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from corelm import Backend
from corelm.spec import GenerateRequest, Ragged, SamplingParams, TokenChunk
from helpers.tiny_models import random_rows, tiny_model

Open = Callable[..., Backend]
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
    for tokens in (10, 40):
        run(tokens)
        with HostReads() as reads:
            run(tokens)
        counts.append(reads.count)
    return (counts[1] - counts[0]) / 30


@pytest.fixture
def model() -> Any:
    # With top-p, a vocabulary of more than 1,024 is first searched in a short list.
    model = tiny_model(vocab_size=2000)
    with torch.no_grad():
        model.lm_head.weight.mul_(20.0)
    return model


@pytest.mark.parametrize("lengths", [(6, 6, 6), (9, 4, 6)], ids=["equal", "padded"])
@pytest.mark.parametrize(
    ("sampling", "most"),
    [
        ({}, 0),
        ({"temperature": 0.0}, 0),
        ({"stop": "never said"}, 1),
        ({"ignore_eos": False}, 1),
        ({"top_p": 0.9}, 1),
        ({"top_p": 0.9, "stop": "never said"}, 1),
    ],
)
def test_a_step_reads_once_at_most(
    open_model: Open, model: Any, lengths: tuple[int, ...], sampling: dict[str, Any], most: int
) -> None:
    backend, prompts = open_model(model), random_rows(*lengths)
    with torch.no_grad():
        # Otherwise rows end by themselves.
        model.lm_head.weight[2] = 0.0
    if len(set(lengths)) > 1:
        most += transformers_own_reads(model)
    options = {"ignore_eos": True, "seed": 0} | sampling

    def run(tokens: int) -> None:
        out = backend.generate(prompts, {"max_new_tokens": tokens} | options)
        assert out.ids.lengths.tolist() == [tokens] * len(prompts)

    assert reads_per_step(run) == most


def transformers_own_reads(model: Any) -> int:
    """Return how many values transformers itself reads in a step of rows with padding."""
    mask, ids = (torch.tensor(rows, device=model.device) for rows in ([[0, 1, 1], [1, 1, 1]], [[1, 1], [1, 1]]))
    with torch.no_grad():
        cache = model(input_ids=ids, attention_mask=mask[:, :2], use_cache=True).past_key_values
        with HostReads() as reads:
            model(input_ids=ids[:, :1], attention_mask=mask, past_key_values=cache)
    return reads.count


def test_top_p_over_a_flat_distribution_reads_once_more(open_model: Open, model: Any) -> None:
    """The short list does not hold enough, and nobody knows before it is read."""
    backend = open_model(model)
    options = {"top_p": 0.99, "temperature": 50.0, "ignore_eos": True, "seed": 0}
    run = lambda tokens: backend.generate(random_rows(6, 6), {"max_new_tokens": tokens} | options)  # noqa: E731
    assert reads_per_step(run) == 1
    run = lambda tokens: backend.generate(  # noqa: E731
        random_rows(6, 6), {"max_new_tokens": tokens, "stop": "never said"} | options
    )
    assert reads_per_step(run) == 2


def test_streaming_reads_ids_and_log_probs_together(open_model: Open, model: Any) -> None:
    plugin = open_model(model).engine.plugin
    prompts = Ragged.from_list([torch.tensor(row) for row in random_rows(6, 6)])

    def run(tokens: int) -> None:
        chunks: list[TokenChunk] = []
        request = GenerateRequest(
            prompts=prompts,
            sampling=SamplingParams(max_new_tokens=tokens),
            seeds=torch.arange(2),
            logprobs="raw",
            timeout=None,
            stop_ids=frozenset(),
            request_ids=("a", "b"),
            on_tokens=chunks.append,
        )
        out = plugin.generate(request)
        assert [chunk.ids[0] for chunk in chunks if chunk.row == 1] == out.ids.tolist()[1]
        assert torch.equal(
            torch.tensor([chunk.logprobs[0] for chunk in chunks if chunk.row == 1]), out.logprobs.split()[1]
        )

    # One for ids and log-probs, and one for the numbers of the rows, which are on the CPU.
    assert reads_per_step(run) == 2


@pytest.mark.parametrize(
    ("extra", "most"),
    # How many ids are left is read before they are copied; the most probable ids and their numbers are copied.
    [
        ({}, 1),
        ({"return_support": True}, 3),
        ({"top_logprobs": 8}, 3),
        ({"return_support": True, "top_logprobs": 8}, 5),
    ],
    ids=str,
)
def test_the_ids_that_were_left_and_the_most_probable_ones_are_read_in_two_pieces_each(
    open_model: Open, model: Any, extra: dict[str, Any], most: int
) -> None:
    plugin = open_model(model).engine.plugin
    prompts = Ragged.from_list(random_rows(6, 6))

    def run(tokens: int) -> None:
        request = GenerateRequest(
            prompts=prompts,
            sampling=SamplingParams(max_new_tokens=tokens, top_p=0.9, temperature=0.8),
            seeds=torch.arange(2),
            logprobs="processed",
            timeout=None,
            stop_ids=frozenset(),
            request_ids=("a", "b"),
            **extra,
        )
        assert plugin.generate(request).ids.lengths.tolist() == [tokens] * 2

    assert reads_per_step(run) == most
