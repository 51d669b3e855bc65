"""A tile reduced by kernels gives what the plain passes give, and kernels that do not are not used.

The Triton kernels run in Triton's interpreter here, in another process because that is chosen when Triton is imported.
They are compiled for a GPU, and one test runs them there.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from transformers_backend.fast.tiles import VARIABLE, TiledHead, agree, kernels_for

CPU = torch.device("cpu")
WITH_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

_IN_INTERPRETER = """
import sys
import torch
from transformers_backend.fast import triton_head
from transformers_backend.fast import tiles
from transformers_backend.fast.tiles import TiledHead, agree

# As many tiles as a GPU would have.
triton_head._BLOCK, tiles._CPU_TILE = 64, (32, 512)
kernels, cpu = triton_head.ByTriton(), torch.device("cpu")
for dtype in (torch.float32, torch.bfloat16):
    assert agree(kernels, cpu, dtype), dtype
torch.manual_seed(0)
# More rows and entries than a tile, and not a multiple of either.
for dtype, atol in ((torch.float32, 1e-4), (torch.bfloat16, 0.02)):
    hidden, weight = torch.randn(40, 24, dtype=dtype), torch.randn(1100, 24, dtype=dtype)
    tokens, upstream = torch.randint(1100, (40,)), torch.linspace(-1, 2, 40)
    tokens[:4] = torch.tensor([0, 1023, 1024, 1099])
    found = []
    for each in (False, kernels):
        leaves = [leaf.clone().requires_grad_() for leaf in (hidden, weight)]
        out = TiledHead(leaves[1], None, 0.5, kernels=each).logprobs(leaves[0], tokens, 0.7)
        found.append((out, *torch.autograd.grad(out, leaves, upstream)))
    for plain, other in zip(*found):
        scale = float(plain.float().abs().max())
        assert float((plain.float() - other.float()).abs().max()) <= atol * scale, (dtype, plain.shape)
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=2e-5)
print("right")
"""


class Plain:
    """Does what kernels do, in PyTorch."""

    def fold(
        self, product: Tensor, factor: float, columns: Tensor, largest: Tensor, total: Tensor, chosen: Tensor
    ) -> None:
        logits, place = product.to(total.dtype) * factor, columns.clamp(0, product.shape[1] - 1)[:, None]
        chosen.copy_(torch.where(columns == place[:, 0], logits.gather(1, place)[:, 0], chosen))
        normalizer = torch.logaddexp(largest + total.log(), logits.logsumexp(1))
        largest.copy_(normalizer)
        total.fill_(1.0)

    def gradient_(self, product: Tensor, factor: float, columns: Tensor, normalizer: Tensor, upstream: Tensor) -> None:
        softmax = (product.to(normalizer.dtype) * factor - normalizer[:, None]).exp()
        chosen = torch.arange(product.shape[1]) == columns[:, None]
        product.copy_((chosen.to(softmax) - softmax) * upstream[:, None])


@pytest.mark.nightly
@WITH_TRITON
def test_the_triton_kernels_are_right_in_the_interpreter() -> None:
    environment = dict(os.environ, TRITON_INTERPRET="1")
    done = subprocess.run(
        [sys.executable, "-c", _IN_INTERPRETER], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and done.stdout.endswith("right\n"), done.stderr


@WITH_TRITON
@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.nightly), "bf16"])
def test_the_triton_kernels_compile_for_hopper(dtype: str) -> None:
    """Triton brings the compiler that it needs for that; no GPU is asked."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime import JITFunction

    from transformers_backend.fast import triton_head

    kernels = [each for each in vars(triton_head).values() if isinstance(each, JITFunction)]
    assert len(kernels) == 2
    given = {"product": f"*{dtype}", "columns": "*i64", "width": "i32", "factor": "fp32", "BLOCK": "constexpr"}
    for kernel in kernels:
        # The other arguments are sums and factors of the rows.
        signature = {name: given.get(name, "*fp32") for name in kernel.arg_names}
        made = compile(ASTSource(kernel, signature, constexprs={"BLOCK": 4096}), target=GPUTarget("cuda", 90, 32))
        assert len(made.asm["cubin"]) > 0


@WITH_TRITON
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_cuda_the_triton_kernels_are_right(dtype: torch.dtype) -> None:
    from transformers_backend.fast.triton_head import ByTriton

    assert agree(ByTriton(), torch.device("cuda"), dtype)


# The first case has more tokens and entries than a tile, and not a multiple of either.
@pytest.mark.parametrize(("n", "vocab"), [(1100, 2700), (1024, 1024), (1, 3), (0, 10)])
@pytest.mark.parametrize(("scale", "heat", "dtype"), [(1.0, 1.0, torch.float32), (2.5, 0.7, torch.bfloat16)])
def test_a_head_gives_kernels_the_tiles_that_they_need(
    n: int, vocab: int, scale: float, heat: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in ((n, 24), (vocab, 24))]
    tokens, upstream = torch.randint(vocab, (n,), generator=generator), torch.linspace(-1, 2, n)

    def of(head: TiledHead) -> list[Tensor]:
        out = head.logprobs(leaves[0], tokens, heat)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]

    found = of(TiledHead(leaves[1], None, scale, kernels=Plain()))
    # The product is rounded to the dtype of the head before the factor, as the plain passes round it.
    logits = (leaves[0] @ leaves[1].T).detach().double() * (scale / heat)
    expected = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(found[0].double(), expected, rtol=5e-7, atol=3e-5)
    for gradient, wanted in zip(found[1:], of(TiledHead(leaves[1], None, scale))[1:], strict=True):
        largest = float(wanted.abs().max()) if wanted.numel() else 1.0
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=largest * (1e-5 if dtype != torch.bfloat16 else 0.01))


@pytest.mark.usefixtures("narrow_tiles")
@pytest.mark.parametrize("heat", [1.0, 0.7])
def test_logits_below_the_range_of_float16_have_no_probability(heat: float) -> None:
    """In the first column of a tile, in other columns, and in a whole tile."""
    torch.manual_seed(0)
    hidden, weight = torch.rand(6, 8, dtype=torch.float16) + 0.5, torch.randn(3000, 8, dtype=torch.float16)
    # Products below -65504 are minus infinity.
    weight[[0, 7, 1024]] = -30_000.0
    weight[2048:] = -30_000.0
    tokens = torch.tensor([1, 1023, 1025, 0, 7, 2999])
    logits = (hidden @ weight.T).double() / heat
    assert bool(logits[:, [0, 2999]].isneginf().all())
    expected = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    found = TiledHead(weight, None).logprobs(hidden, tokens, heat)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-5)


def test_tiles_keep_the_digits_of_logits_far_from_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.cat([torch.full((1, 4), -3_000.0), torch.randn(99, 4, generator=generator)])
    hidden, tokens = torch.ones(3, 4), torch.tensor([1, 2, 3])
    expected = (hidden.double() @ weight.double().T).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    found = TiledHead(weight, None).logprobs(hidden, tokens)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)


def test_heads_with_a_bias_or_a_cap_are_reduced_by_the_plain_passes() -> None:
    class Never(Plain):
        def fold(self, *args: object, **kwargs: object) -> None:
            raise AssertionError("called")

    hidden, weight, tokens = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 4])
    for head in (
        TiledHead(weight, torch.zeros(5), kernels=Never()),
        TiledHead(weight, None, cap=3.0, kernels=Never()),
    ):
        head.logprobs(hidden, tokens)
    # Nor is the argmax taken by a kernel.
    TiledHead(weight, None, kernels=Never()).logprobs_and_top(hidden, tokens, 0, argmax=True)
    with pytest.raises(AssertionError, match="called"):
        TiledHead(weight, None, kernels=Never()).logprobs(hidden, tokens)


def test_kernels_that_are_wrong_or_fail_are_not_used() -> None:
    class WrongSum(Plain):
        def fold(self, product: Tensor, factor: float, columns: Tensor, *state: Tensor) -> None:
            super().fold(product[:, :-1], factor, columns, *state)

    class WrongGradient(Plain):
        def gradient_(self, product: Tensor, *args: object) -> None:
            product.zero_()

    class Failing(Plain):
        def gradient_(self, product: Tensor, *args: object) -> None:
            raise RuntimeError("no compiler")

    assert agree(Plain(), CPU, torch.float32)
    for kernels in (WrongSum(), WrongGradient(), Failing()):
        assert not agree(kernels, CPU, torch.float32)


@WITH_TRITON
def test_a_gpu_gets_triton_where_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (("", True, "ByTriton"), ("1", True, "ByTriton"), ("", False, "NoneType"), ("0", True, "NoneType"))
    for setting, right, name in cases:
        monkeypatch.delenv(VARIABLE, raising=False)
        if setting:
            monkeypatch.setenv(VARIABLE, setting)
        monkeypatch.setattr("transformers_backend.fast.tiles.agree", lambda *args, right=right: right)
        kernels_for.cache_clear()
        try:
            assert type(kernels_for(torch.device("cuda"), torch.bfloat16)).__name__ == name, (setting, right)
        finally:
            kernels_for.cache_clear()


def test_a_cpu_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    assert kernels_for(CPU, torch.float32) is None
