"""The most that the machine can do: the rate of its best matrix products, and the bandwidth of its memory.

Some work cannot take less time than its operations at that rate, or than its bytes at that bandwidth, whichever is
longer. This is the roofline model (Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance
model for multicore architectures").

Both are measured with the threads that torch uses. They are counted per second of processor time, because other load
on the machine affects processor time least, and because numpy may use more threads than torch.
"""

from __future__ import annotations

import functools
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear

#: Rows, inner width and columns of a product.
Product = tuple[int, int, int]

PRODUCTS: tuple[Product, ...] = (
    *((256, 256, 1024), (1024, 256, 1024), (1024, 512, 1024)),
    *((512, 4096, 512), (1024, 1024, 1024), (2048, 2048, 2048)),
)
QUICK_PRODUCTS = PRODUCTS[2:5]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: An array is so many times as large as the last-level cache: STREAM asks for four times or more.
TIMES_CACHE = 4
#: The size of an array in bytes if the size of the cache is unknown, and the largest size.
UNKNOWN_CACHE, LARGEST = 2**28, 2**30
#: The shortest time of a sample, in seconds, and the number of samples.
SHORTEST, SAMPLES, QUICK_SAMPLES = 0.03, 5, 3


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What was measured on the machine.

    Attributes:
        rates: floating-point operations per second of the best matrix product, by dtype.
        rates_by: the library and the shape that reached the rate, by dtype.
        bandwidths: bytes per second, by the way to move them.
        threads: the number of threads that torch used.
    """

    rates: Mapping[str, float]
    rates_by: Mapping[str, str]
    bandwidths: Mapping[str, float]
    threads: int = 1

    @property
    def bandwidth(self) -> float:
        """Return the largest of all bandwidths."""
        return max(self.bandwidths.values())

    def least_seconds(self, flops: float | None, moved: float | None, dtype: str | None) -> float | None:
        """Return the least time that the machine needs for `flops` operations and `moved` bytes; None without both."""
        times = []
        if flops is not None and dtype is not None:
            times.append(flops / self.rates[dtype])
        if moved is not None:
            times.append(moved / self.bandwidth)
        return max(times, default=None)

    def drift(self, later: Machine) -> float:
        """Return the largest change of a rate or of the bandwidth until `later`, as a share of this one."""
        pairs = [(self.rates[dtype], later.rates[dtype]) for dtype in self.rates]
        return max(abs(after / before - 1) for before, after in [*pairs, (self.bandwidth, later.bandwidth)])

    def described(self) -> str:
        lines = [
            f"  {dtype:10}{rate / 1e9:8.1f} GFLOP/s   {self.rates_by[dtype]}" for dtype, rate in self.rates.items()
        ]
        fastest = max(self.bandwidths, key=lambda way: self.bandwidths[way])
        others = ", ".join(f"{way} {rate / 1e9:.1f}" for way, rate in self.bandwidths.items() if way != fastest)
        lines.append(f"  {'memory':10}{self.bandwidth / 1e9:8.1f} GB/s      {fastest} ({others})")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Machine:
        return cls(**found)


def measure_machine(
    quick: bool = False, *, products: Sequence[Product] | None = None, array_bytes: int | None = None
) -> Machine:
    """Measure the machine in about 20 seconds of processor time, or in about 6 with `quick`.

    Args:
        quick: whether to take fewer shapes and samples.
        products: the shapes of the matrix products.
        array_bytes: the size of an array whose bytes are moved; by default larger than any cache.
    """
    samples = QUICK_SAMPLES if quick else SAMPLES
    rates, rates_by = {}, {}
    with torch.no_grad():
        for name, dtype in DTYPES.items():
            found = {}
            for product in products or (QUICK_PRODUCTS if quick else PRODUCTS):
                flops, shape = 2 * product[0] * product[1] * product[2], "x".join(map(str, product))
                for library, way in product_ways(product, dtype):
                    found[f"{library}, {shape}"] = flops / typical_seconds(way, samples)
            rates_by[name] = max(found, key=lambda way: found[way])
            rates[name] = found[rates_by[name]]
        moved = bandwidth_ways(array_bytes or array_size(last_level_cache()))
        bandwidths = {way: size / typical_seconds(run, samples) for way, (size, run) in moved.items()}
    return Machine(rates=rates, rates_by=rates_by, bandwidths=bandwidths, threads=torch.get_num_threads())


def typical_seconds(way: Callable[[], object], samples: int) -> float:
    """Return the median processor time of a run of `way`."""
    way()
    start = time.process_time()
    way()
    runs = int(SHORTEST / max(time.process_time() - start, 1e-6)) + 1
    taken = []
    for _ in range(samples):
        start = time.process_time()
        for _ in range(runs):
            way()
        taken.append((time.process_time() - start) / runs)
    return statistics.median(taken)


def product_ways(product: Product, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the libraries that compute a matrix product of `product`, each with a function that does so once."""
    rows, inner, columns = product
    left, right = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    out, weight = torch.empty(rows, columns, dtype=dtype), right.T.contiguous()
    yield "torch.mm", functools.partial(torch.mm, left, right, out=out)
    yield "linear", functools.partial(linear, left, weight)
    short = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    if torch.backends.mkldnn.is_available() and (short is None or getattr(torch.ops.mkldnn, short)()):
        yield "oneDNN", functools.partial(linear, left.to_mkldnn(), weight)
        onednn: Any = torch.ops.mkldnn
        packed = onednn._reorder_linear_weight(weight, rows)
        yield "oneDNN, packed", lambda: onednn._linear_pointwise(left, packed, None, "none", [], "")
    if dtype == torch.float32:
        yield "numpy", functools.partial(np.matmul, left.numpy(), right.numpy(), out=out.numpy())


def bandwidth_ways(size: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """Return ways to move bytes of arrays of `size` bytes: the bytes that each moves, and a function that does so once.

    The triad counts as in STREAM: two arrays read and one written. The others only read, as decoding does.
    """
    width = 4096
    count = size // 4 // width * width
    first, second, out = torch.randn(count), torch.randn(count), torch.empty(count)
    matrix, vector, size = first.view(-1, width), torch.randn(width), 4 * count
    ways: dict[str, tuple[int, Callable[[], object]]] = {
        "triad": (3 * size, functools.partial(torch.add, first, second, alpha=3.0, out=out)),
        "dot product": (2 * size, functools.partial(torch.dot, first, second)),
        "norm": (size, first.norm),
        "matrix times vector": (size, functools.partial(torch.mv, matrix, vector)),
    }
    if torch.backends.mkldnn.is_available():
        ways["oneDNN, matrix times vector"] = (size, lambda: linear(vector[None].to_mkldnn(), matrix))
    return ways


def array_size(cache: int | None) -> int:
    """Return the bytes of an array that is far larger than a last-level cache of `cache` bytes."""
    return UNKNOWN_CACHE if cache is None else min(TIMES_CACHE * cache, LARGEST)


def last_level_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int | None:
    """Return the bytes of the largest cache that Linux lists for the first core; None if it lists none."""
    sizes = [
        int(found[1]) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[found[2]]
        for path in folder.glob("index*/size")
        if (found := re.fullmatch(r"(\d+)([KMG]?)", path.read_text().strip())) is not None
    ]
    return max(sizes, default=None)
