"""Many segments of a pack attend in one call, and the numbers stay those of each row alone.

The kernel runs on GPUs only. Here `reference` stands for it, so these tests show that it is asked for the right thing.
One test runs PyTorch's, on a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from corelm import Backend
from helpers import oracle
from helpers.plain_forward import Open, assert_same_gradients, assert_scores, gradients, own_loss
from helpers.scoring_path import scoring_path
from helpers.tiny_models import DEVICE, random_rows, tiny_model
from transformers_backend.fast.attention import PackedSegment, VarlenAttention, torch_varlen, varlen_calls
from transformers_backend.fast.scoring import FastScorer
from transformers_backend.scoring import ScoringPath

FLOAT = frozenset({torch.float32})


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `torch.nn.attention.varlen.varlen_attn` in plain PyTorch, on any device and in any dtype.

    The last query of a sequence stands at its last key.

    Args:
        query: ``[all queries, heads, size]``.
        key, value: ``[all keys, heads of keys, size]``.
        cu_seq_q, cu_seq_k: int32[sequences + 1], where each begins, and where the last ends.
        max_q, max_k: at least the longest of them; a kernel looks no further.
        scale: None for one over the root of `size`.
        window_size: how many keys before and after its own a query sees, -1 for all. ``(-1, 0)`` is causal.
        enable_gqa: whether there are fewer heads of keys than of queries.

    Returns:
        ``[all queries, heads, size]``.

    Raises:
        ValueError: the numbers contradict each other: a kernel would read past its inputs or skip some.
    """
    left, right = window_size
    ends = (len(query), len(key))
    outputs = []
    for starts, longest, end in ((cu_seq_q, max_q, ends[0]), (cu_seq_k, max_k, ends[1])):
        bounds = starts.tolist()
        if starts.dtype != torch.int32 or bounds[0] != 0 or bounds[-1] != end or int(starts.diff().max()) > longest:
            raise ValueError(f"sequences begin at {starts}, of {end} tokens with at most {longest} in each")
    for (q, q_end), (k, k_end) in zip(pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True):
        places, seen = torch.arange(k_end - k - (q_end - q), k_end - k)[:, None], torch.arange(k_end - k)
        allowed = torch.ones(q_end - q, k_end - k, dtype=torch.bool)
        if left >= 0:
            allowed &= places - seen <= left
        if right >= 0:
            allowed &= seen - places <= right
        own, keys, values = (part.transpose(0, 1)[None] for part in (query[q:q_end], key[k:k_end], value[k:k_end]))
        mask = allowed.to(query.device)
        out = scaled_dot_product_attention(own, keys, values, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


class Counted:
    """A kernel that notes how many sequences each call had."""

    def __init__(self, kernel: Callable[..., Tensor] = reference) -> None:
        self.kernel, self.calls = kernel, list[int]()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, *args: Any, **kw: Any) -> Tensor:
        self.calls.append(len(cu_seq_q) - 1)
        return self.kernel(query, key, value, cu_seq_q, *args, **kw)


def use(backend: Backend, kernel: Callable[..., Tensor], dtypes: frozenset[torch.dtype] = FLOAT) -> None:
    """Let a backend score with this kernel on the CPU."""
    plugin, joint = backend.engine.plugin, VarlenAttention(kernel, dtypes)
    plugin.scorer = FastScorer(plugin.engine, plugin.self_test, 32768, lambda device: joint)


def rows_with_common_starts() -> list[list[int]]:
    (start,) = random_rows(40, seed=7)
    return [*random_rows(30, 2, 70), *(start + answer for answer in random_rows(5, 9, 20, seed=8))]


# What the kernels are told --------------------------------------------------------------------------------------------


def test_segments_have_the_keys_of_their_common_start_and_not_all_at_once() -> None:
    keys = torch.tensor([0, 1, 3]), torch.tensor([0, 1, 3, 4, 5])
    segments = (PackedSegment(0, 3), PackedSegment(3, 4, keys[0]), PackedSegment(4, 6, keys[1]))
    (call,) = varlen_calls(segments)
    assert (call.start, call.stop, call.max_q, call.max_k) == (0, 6, 3, 5)
    assert call.cu_seq_q.tolist() == [0, 3, 4, 6] and call.cu_seq_k.tolist() == [0, 3, 6, 11]
    assert call.keys.tolist() == [0, 1, 2, 0, 1, 3, 0, 1, 3, 4, 5]
    assert call.cu_seq_q.dtype == call.cu_seq_k.dtype == torch.int32
    for most, spans in ((6, [(0, 4), (4, 6)]), (1, [(0, 3), (3, 4), (4, 6)])):
        assert [(each.start, each.stop) for each in varlen_calls(segments, max_keys=most)] == spans
    # Rows that share nothing are not copied.
    (call,) = varlen_calls([PackedSegment(0, 3), PackedSegment(3, 4)])
    part = torch.randn(1, 2, 4, 8)
    assert call.keys is None and all(each.data_ptr() == part.data_ptr() for each in call.of(part, part, part))


# The reference --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "scale"), [((-1, 0), None), ((2, 0), 0.3), ((-1, -1), None)])
def test_the_reference_is_attention_written_out(window: tuple[int, int], scale: float | None) -> None:
    torch.manual_seed(0)
    lengths_q, lengths_k = [3, 2, 1], [3, 5, 4]
    query, key, value = (torch.randn(total, heads, 8).double() for total, heads in ((6, 4), (12, 2), (12, 2)))
    starts = [torch.tensor([0, *torch.tensor(each).cumsum(0)], dtype=torch.int32) for each in (lengths_q, lengths_k)]
    out = reference(query, key, value, *starts, 3, 5, scale=scale, window_size=window, enable_gqa=True)
    q = k = 0
    for queries, keys in zip(lengths_q, lengths_k, strict=True):
        for head in range(4):
            for row in range(queries):
                place = keys - queries + row
                first = max(0, place - window[0]) if window[0] >= 0 else 0
                last = place + 1 if window[1] == 0 else keys
                seen, values = (part[k : k + keys, head // 2][first:last] for part in (key, value))
                weights = (seen @ query[q + row, head] * (8**-0.5 if scale is None else scale)).softmax(0)
                torch.testing.assert_close(out[q + row, head], weights @ values)
        q, k = q + queries, k + keys


def test_the_reference_refuses_what_a_kernel_would_read_wrongly() -> None:
    for changed in ({"max_q": 1}, {"max_k": 4}, {"cu_seq_q": [0, 1, 2]}, {"cu_seq_k": [0, 3, 9]}):
        numbers = {"cu_seq_q": [0, 1, 3], "cu_seq_k": [0, 3, 8], "max_q": 2, "max_k": 5} | changed
        starts = [torch.tensor(numbers[name], dtype=torch.int32) for name in ("cu_seq_q", "cu_seq_k")]
        query, key = torch.randn(3, 2, 8), torch.randn(8, 2, 8)
        with pytest.raises(ValueError, match="sequences begin"):
            reference(query, key, key, *starts, numbers["max_q"], numbers["max_k"])


def test_pytorchs_kernel_takes_what_the_reference_takes() -> None:
    """Shapes and arguments only: no number is computed without a GPU."""
    if "enable_gqa" not in inspect.signature(varlen_attn).parameters:
        pytest.skip("this version of PyTorch shares heads unasked")
    with FakeTensorMode():
        query, key = (torch.empty(n, heads, 64, dtype=torch.bfloat16) for n, heads in ((6, 4), (11, 2)))
        starts = [torch.empty(4, dtype=torch.int32) for _ in range(2)]
        options = {"scale": 0.1, "window_size": (7, 0), "enable_gqa": True}
        out = varlen_attn(query.requires_grad_(), key, key, *starts, 3, 5, **options)
        assert out.shape == (6, 4, 64) and out.dtype == torch.bfloat16
        (gradient,) = torch.autograd.grad(out.sum(), query)
        assert gradient.shape == query.shape


def test_a_kernel_that_is_not_told_of_shared_heads_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11 has no `enable_gqa`: seen on an H100, where no model attended jointly."""

    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):  # type: ignore[no-untyped-def]
        options = {"scale": scale, "window_size": window_size, "enable_gqa": query.shape[1] != key.shape[1]}
        return reference(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options)

    def oldest(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):  # type: ignore[no-untyped-def]
        raise AssertionError("it has no windows")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", oldest)
    assert torch_varlen(torch.device("cuda")) is None
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", older)
    joint = torch_varlen(torch.device("cuda"))
    assert joint is not None
    query, key, value = (torch.randn(1, heads, 8, 16).bfloat16() for heads in (4, 2, 2))
    layer = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    assert joint.fits(sdpa_attention_forward, layer, query, key, value, 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_cuda_pytorchs_kernel_agrees_with_each_row_alone(open_model: Open) -> None:
    model, rows = tiny_model("mixtral", sliding_window=8).bfloat16().cuda(), rows_with_common_starts()
    backend = open_model(model)
    found = backend.score_logprobs(rows).logprobs.split()
    assert scoring_path(backend).layout == "fused" and scoring_path(backend).shared == 80
    for ids, one in zip(rows, found, strict=True):
        torch.testing.assert_close(one.cpu(), oracle.logprobs(model.cpu(), ids), rtol=0, atol=0.3)
        model.cuda()


# The numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "window"), [("qwen2", 3), ("mixtral", 8), ("qwen2", 64), ("mixtral", 4096)])
def test_windows_common_starts_and_shared_heads(open_model: Open, name: str, window: int) -> None:
    extra = {"use_sliding_window": True, "max_window_layers": 1} if name == "qwen2" else {}
    model, kernel, rows = tiny_model(name, sliding_window=window, **extra), Counted(), rows_with_common_starts()
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    backend = open_model(model)
    use(backend, kernel)
    backend.score_logprobs(rows)
    kernel.calls.clear()
    assert_scores(backend, model, rows)
    assert scoring_path(backend) == ScoringPath("tiled", "fused", shared=80)
    # One call a layer for six rows.
    assert kernel.calls == [6, 6]


def test_gradients_flow_through_a_common_start(open_model: Open) -> None:
    model, kernel, rows = tiny_model(), Counted(), rows_with_common_starts()
    backend = open_model(model)
    use(backend, kernel)
    out = backend.score_logprobs(rows, grad=True)
    assert scoring_path(backend) == ScoringPath("tiled", "fused", shared=80) and kernel.calls[-1] == 6
    found = gradients(model, out.logprobs.values.sum())
    assert_same_gradients(found, gradients(model, own_loss(model, rows)))


def test_under_autocast_it_attends_in_autocasts_dtype(open_model: Open) -> None:
    """Trainers of bfloat16 keep float32 weights."""
    model, rows = tiny_model(), rows_with_common_starts()
    seen = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append({query.dtype, key.dtype, value.dtype})
        return reference(query, key, value, *args, **kwargs)

    backend = open_model(model)
    use(backend, kernel, frozenset({torch.bfloat16}))
    assert_scores(backend, model, rows)
    assert seen == []
    with torch.autocast(DEVICE, torch.bfloat16):
        found = backend.score_logprobs(rows).logprobs.split()
    assert seen and all(each == {torch.bfloat16} for each in seen)
    for ids, one in zip(rows, found, strict=True):
        torch.testing.assert_close(one, oracle.logprobs(model, ids), rtol=0, atol=0.3)


# When not to ----------------------------------------------------------------------------------------------------------


def aligned_at_the_first_key(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    lengths = cu_q.diff().tolist(), cu_k.diff().tolist(), cu_k.diff().tolist()
    parts = (each.split(some) for each, some in zip((query, key, value), lengths, strict=True))
    outputs = []
    for row in zip(*parts, strict=True):
        q, k, v = (each.transpose(0, 1)[None] for each in row)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=kwargs["scale"], enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def one_key_too_many(*args: Any, window_size: tuple[int, int], **kwargs: Any) -> Tensor:
    left, right = window_size
    return reference(*args, window_size=(left + 1 if left >= 0 else left, right), **kwargs)


def wrong_backwards(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return reference(query, key.detach(), *args, **kwargs)


def not_there(*args: Any, **kwargs: Any) -> Tensor:
    raise RuntimeError("no kernel image is available, on purpose")


@pytest.mark.parametrize("kernel", [aligned_at_the_first_key, one_key_too_many, wrong_backwards, not_there])
def test_a_kernel_that_is_wrong_is_not_used(open_model: Open, kernel: Callable[..., Tensor]) -> None:
    model, counted, rows = tiny_model("mixtral", sliding_window=8), Counted(kernel), rows_with_common_starts()
    expected, backend = [oracle.logprobs(model, ids) for ids in rows], open_model(model)
    use(backend, counted)
    out = backend.score_logprobs(rows, grad=True)
    for found, wanted in zip(out.logprobs.split(), expected, strict=True):
        torch.testing.assert_close(found.detach(), wanted, rtol=0, atol=1e-5)
    gradient = torch.autograd.grad(out.logprobs.values.sum(), model.model.layers[0].self_attn.k_proj.weight)[0]
    assert float(gradient.abs().max()) > 0
    # It was tried, and is not asked again.
    assert counted.calls
    counted.calls.clear()
    backend.score_logprobs(rows, grad=True)
    assert counted.calls == []


def test_a_kernel_that_is_wrong_for_many_rows_is_found_out_by_the_model(open_model: Open) -> None:
    def kernel(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = reference(query, key, value, cu_seq_q, *args, **kwargs)
        return out if len(cu_seq_q) <= 6 else out * 1.5

    model, rows = tiny_model(), rows_with_common_starts()
    backend = open_model(model)
    use(backend, kernel)
    assert_scores(backend, model, rows)
    assert scoring_path(backend) == ScoringPath("tiled", "packed", shared=80)


@pytest.mark.parametrize("odd", ["dropout", "size"])
def test_what_the_kernel_cannot_express_attends_as_before(open_model: Open, odd: str) -> None:
    kernel, rows = Counted(), rows_with_common_starts()
    extra = {"attention_dropout": 0.1} if odd == "dropout" else {"head_dim": 12}
    model = tiny_model("mixtral", **extra)
    backend = open_model(model.train(odd == "dropout"))
    use(backend, kernel)
    with torch.random.fork_rng():
        backend.score_logprobs(rows, grad=odd == "dropout")
        kernel.calls.clear()
        out = backend.score_logprobs(rows, grad=odd == "dropout")
    assert kernel.calls == [] and bool(out.logprobs.values.isfinite().all())
