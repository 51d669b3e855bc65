"""Noise: is a difference that of a dtype, or of quantized weights?

The plain forward is made again with weights rounded as each would. Rounding of the same weights moves the same tokens
in the same direction, so the differences are correlated; those of other weights are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from corelm_compare.cases import FLOAT32_NOISE, Case, exact, flat, mean
from corelm_compare.oracles import Oracle, Rows
from corelm_compare.records import Cause, Confidence, Experiment

HALVES = ("bfloat16", "float16")
#: Mean |Δ| that is taken for rounding without an oracle. Seen: 0.06 in bfloat16, 0.003 in float16.
UNMEASURED = {"bfloat16": 0.1, "float16": 0.02}
#: Mean |Δ| of float32 whose products are made in TF32. Not measured here: it is below what fleets allow, 0.05.
_TF32_NOISE = 0.02
#: By how much the size of rounding may differ between two ways of computing in one dtype. vLLM in bfloat16 on a CPU
#: was 1.0 times as far from float32 as the plain forward in bfloat16, with a correlation of 0.62.
_SMALLER, _LARGER = 0.2, 2.0
#: The same if the differences are not correlated, so that the size alone speaks for rounding.
_LARGER_UNRELATED = 1.5
#: How much larger than that of the plain forward the largest difference may be.
_TAIL = 12.0
#: The largest part of the difference that may have one sign.
_ONE_SIDED = 0.5
#: From this correlation on, two differences have one origin. Those of unrelated weights were below 0.15, and those of
#: 4 bits and another base of rotary positions up to 0.33: a few tokens move much, whichever thing is changed.
_RELATED = 0.3
#: Quantized weights must explain all but this part of the difference: they are known exactly, or nearly.
_LEFT_QUANTIZED = 0.5
#: The levels of NF4, as bitsandbytes has them: the quantiles of a normal distribution.
_NF4 = (
    *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
)


@dataclass(frozen=True, slots=True)
class Rounding:
    """The plain forward with rounded weights.

    Attributes:
        name: of the dtype, or of the scheme.
        delta: float32, what it adds to the plain forward's numbers, flat over the rows.
        quantized: whether it is a scheme of quantization.
    """

    name: str
    delta: Tensor
    quantized: bool

    @property
    def size(self) -> float:
        """The mean of |Δ|."""
        return mean(self.delta[torch.isfinite(self.delta)].abs())


def halves(oracle: Oracle, rows: Rows) -> list[Rounding]:
    """Return what bfloat16 and float16 do to the numbers of the rows."""
    plain = torch.cat(oracle.numbers(rows))
    found = []
    for name in HALVES:
        numbers = torch.cat(oracle.in_dtype(getattr(torch, name)).numbers(rows))
        found.append(Rounding(name, numbers - plain, False))
    return found


def quantized(oracle: Oracle, rows: Rows) -> Iterator[Rounding]:
    """Return what usual schemes of quantized weights do to the numbers of the rows."""
    plain = torch.cat(oracle.numbers(rows))
    for whole, schemes in ((False, _SCHEMES), (True, _WHOLE)):
        for name, scheme in schemes.items():
            changed = oracle.with_weights(_on_matrices(scheme, whole=whole))
            yield Rounding(name, torch.cat(changed.numbers(rows)) - plain, True)


@dataclass(frozen=True, slots=True)
class Fit:
    """How well a rounding fits a difference.

    Attributes:
        size: the mean of |Δ| of the difference.
        left: what is left of it without the rounding's.
        related: the correlation of the two.
        alike: whether they are about equally large, on both sides of 0, without an outlier.
        tokens: over how many tokens.
    """

    size: float
    left: float
    related: float
    alike: bool
    tokens: int


def _fit(delta: Tensor, rounding: Rounding) -> Fit | None:
    """Return how well a rounding fits a difference; None if they have too few tokens in common."""
    both = torch.isfinite(delta) & torch.isfinite(rounding.delta)
    own, theirs = delta[both].double(), rounding.delta[both].double()
    if len(own) < 8:
        return None
    size, expected, related = float(own.abs().mean()), float(theirs.abs().mean()), correlation(own, theirs)
    balanced = abs(float(own.mean())) <= _ONE_SIDED * size + 3 * float(own.std()) / len(own) ** 0.5
    tame = float(own.abs().max()) <= _TAIL * float(theirs.abs().max())
    most = _LARGER if related >= _RELATED else _LARGER_UNRELATED
    alike = _SMALLER * expected <= size <= most * expected and balanced and tame
    return Fit(size, float((own - theirs).abs().mean()), related, alike, len(own))


def related_dtype(numbers: Sequence[Tensor], truth: Sequence[Tensor], roundings: Sequence[Rounding]) -> str | None:
    """Return the low precision whose rounding is most like the difference of numbers from the plain forward's.

    None if none is correlated with it.
    """
    fits = [(fit, each.name) for each in roundings if (fit := _fit(flat(numbers) - flat(truth), each)) is not None]
    alike = [(fit.related, name) for fit, name in fits if fit.alike and fit.related >= _RELATED]
    return max(alike)[1] if alike else None


def explain(case: Case, dtype: str | None, roundings: list[Rounding]) -> tuple[list[Experiment], Cause | None]:
    """Return what was tried, and the cause `dtype` or `quantized` if one of them fits."""
    delta, side = flat(case.numbers) - flat(case.truth), case.side.name
    experiments: list[Experiment] = []
    fitting: list[tuple[float, Rounding, Experiment]] = []
    for rounding in roundings:
        fit = _fit(delta, rounding)
        if fit is None:
            continue
        if rounding.quantized:
            fits = fit.alike and fit.left <= _LEFT_QUANTIZED * fit.size
        else:
            fits = fit.alike and (fit.related >= _RELATED or dtype == rounding.name)
        id, changed = (
            "quantized" if rounding.quantized else "dtype",
            f"{case.what}: {case.reference} in {rounding.name}",
        )
        note = f"its own distance is {rounding.size:.3g}; correlation of the differences {fit.related:.2f}"
        experiments.append(Experiment(id, side, changed, fit.size, fit.left, fit.tokens, fits, note))
        if fits:
            fitting.append((fit.related, rounding, experiments[-1]))
    if not fitting:
        return experiments, None
    related, rounding, done = max(fitting, key=lambda each: each[0])
    evidence = (
        f"{side} is {done.before:.3g} nats a token from {case.reference}, on both sides of 0 (mean "
        f"{float(delta[torch.isfinite(delta)].mean()):+.2g}); {case.reference} in {rounding.name} is "
        f"{rounding.size:.3g} away, {done.after:.2g} from these numbers, and the differences correlate by {related:.2f}"
    )
    # Few schemes are tried: another one may be closer.
    confidence: Confidence = "likely" if related >= _RELATED and not rounding.quantized else "possible"
    if exact(done.before, done.after):
        confidence = "certain"
    advice = "load the checkpoint without quantization"
    if not rounding.quantized:
        advice = "open both sides with dtype='float32' to compare anything else; in training, correct for it "
        advice += "(corelm.kl.ImportanceCorrection)"
    figures = {"mean_abs": done.before, "left": done.after, "expected": rounding.size, "correlation": related}
    return experiments, Cause(done.id, side, confidence, evidence, advice, figures)


def noise_of(dtype: str | None, roundings: list[Rounding]) -> float:
    """Return mean |Δ| from the plain forward up to which a side of this dtype is right."""
    if dtype == "tf32":
        return _TF32_NOISE
    if dtype not in HALVES:
        return FLOAT32_NOISE
    sizes = [each.size for each in roundings if each.name == dtype]
    return max(FLOAT32_NOISE, 3 * max(sizes)) if sizes else UNMEASURED[dtype]


def correlation(one: Tensor, other: Tensor) -> float:
    """Return Pearson's correlation; 0.0 if one of them does not vary."""
    a, b = one.double() - one.double().mean(), other.double() - other.double().mean()
    size = float(a.norm() * b.norm())
    return float((a * b).sum()) / size if size > 0 else 0.0


def _on_matrices(scheme: Callable[[Tensor], Tensor], *, whole: bool) -> Callable[[str, Tensor], Tensor]:
    """Return what a scheme does to the weights of a model: to all matrices, or to all but embeddings and head."""

    def change(name: str, weight: Tensor) -> Tensor:
        outside = not whole and any(part in name for part in ("embed", "lm_head", "wte", "wpe"))
        return weight if weight.ndim != 2 or outside else scheme(weight)

    return change


def _in_groups(weight: Tensor, size: int | None) -> Tensor:
    """Return the blocks of adjacent values in a row that share a scale; whole rows if the format has no blocks."""
    width = weight.shape[-1]
    return weight.reshape(-1, size if size is not None and width % size == 0 else width)


def _integers(bits: int, group: int | None) -> Callable[[Tensor], Tensor]:
    most = 2 ** (bits - 1) - 1

    def scheme(weight: Tensor) -> Tensor:
        parts = _in_groups(weight, group)
        scale = parts.abs().amax(-1, keepdim=True).clamp_min(1e-12) / most
        return ((parts / scale).round().clamp(-most - 1, most) * scale).reshape(weight.shape)

    return scheme


def _with_zero_points(bits: int, group: int, whole: bool) -> Callable[[Tensor], Tensor]:
    """Return the scheme whose zero is one of the levels (`whole`), or which begins at the least weight of a group."""
    most = 2**bits - 1

    def scheme(weight: Tensor) -> Tensor:
        parts = _in_groups(weight, group)
        low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
        if whole:
            low, high = low.clamp(max=0.0), high.clamp(min=0.0)
        scale = (high - low).clamp_min(1e-12) / most
        zero = -low / scale
        if whole:
            zero = zero.round()
        return (((parts / scale + zero).round().clamp(0, most) - zero) * scale).reshape(weight.shape)

    return scheme


def _nf4(weight: Tensor) -> Tensor:
    levels = torch.tensor(_NF4)
    parts = _in_groups(weight.flatten(), 64)
    scale = parts.abs().amax(-1, keepdim=True).clamp_min(1e-12)
    edges = (levels[1:] + levels[:-1]) / 2
    return (levels[torch.bucketize(parts / scale, edges)] * scale).reshape(weight.shape)


def _fp8(rows: bool) -> Callable[[Tensor], Tensor]:
    def scheme(weight: Tensor) -> Tensor:
        largest = weight.abs().amax(-1, keepdim=True) if rows else weight.abs().amax()
        scale = largest.clamp_min(1e-12) / 448.0
        return (weight / scale).to(torch.float8_e4m3fn).float() * scale

    return scheme


_SCHEMES: dict[str, Callable[[Tensor], Tensor]] = {
    "int8, a scale for each row": _integers(8, None),
    "fp8 (e4m3)": _fp8(rows=False),
    "fp8 (e4m3), a scale for each row": _fp8(rows=True),
    "int4, groups of 128": _integers(4, 128),
    "int4, groups of 32": _integers(4, 32),
    **{f"int4 with zero points, groups of {size}": _with_zero_points(4, size, True) for size in (128, 64, 32)},
    **{f"int4 from the least weight on, groups of {size}": _with_zero_points(4, size, False) for size in (128, 64, 32)},
    "nf4": _nf4,
}
#: Those that also quantize embeddings and head, as the files of llama.cpp do.
_WHOLE = {
    "int8, groups of 32, embeddings and head too": _integers(8, 32),
    "int4, groups of 32, embeddings and head too": _integers(4, 32),
    "int4 from the least weight on, groups of 32, embeddings and head too": _with_zero_points(4, 32, False),
}
