"""The checkpoint with one thing of its configuration, or of its weights, left out or set otherwise.

Each variant is the plain forward again, over the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from corelm.errors import CoreLMError
from corelm_compare.cases import FLOAT32_NOISE, Case, Prediction
from corelm_compare.oracles import Oracle

#: Values that mean "no window": longer than every context.
_NO_WINDOW = 1 << 30
#: Scales that a configuration may have, and the value that changes nothing.
_SCALES = {
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
_FACTORS = (2.0, 4.0, 8.0)
_THETAS = (10_000.0, 500_000.0, 1_000_000.0)


@dataclass(frozen=True, slots=True)
class Variant:
    """One change of the checkpoint.

    Attributes:
        id: the cause that it would be.
        changed: what is changed, as a phrase.
        make: returns the changed oracle.
        advice: what to look at.
    """

    id: str
    changed: str
    make: Callable[[Oracle], Oracle]
    advice: str


def predict(case: Case) -> Iterator[Prediction]:
    """Score the rows with every variant that the checkpoint's configuration allows."""
    oracle = case.oracle
    if oracle is None:
        return
    for variant in _variants(case, oracle):
        try:
            numbers = variant.make(oracle).numbers(case.rows)
        except (CoreLMError, RuntimeError, ValueError, TypeError, KeyError, AttributeError):
            # A configuration that this model's code does not take: nothing is learned from it.
            continue
        yield Prediction(id=variant.id, changed=variant.changed, numbers=numbers, advice=variant.advice)


def _variants(case: Case, oracle: Oracle) -> Iterator[Variant]:
    config = oracle.config
    for name, words in (("final_logit_softcapping", "logits"), ("attn_logit_softcapping", "attention scores")):
        if getattr(config, name, None):
            yield Variant(
                "missing-softcap",
                f"no softcap of the {words} ({name}={getattr(config, name):g})",
                _with(**{name: None}),
                f"the engine leaves out {name}: use a version, or an attention backend, that knows it",
            )
    for name, neutral in _SCALES.items():
        if getattr(config, name, neutral) not in (neutral, None):
            yield Variant(
                "missing-scale",
                f"{name}={neutral:g} and not {getattr(config, name):g}",
                _with(**{name: neutral}),
                f"the engine ignores {name} of the configuration: use a version that knows it",
            )
    yield from _biases(oracle)
    if not begins_alike(case):
        return
    if getattr(config, "sliding_window", None):
        yield Variant(
            "sliding-window",
            f"no sliding window ({config.sliding_window})",
            _with(sliding_window=_NO_WINDOW),
            "the engine attends to the whole row: turn its sliding window on (disable_sliding_window=False), or use an "
            "attention backend that has one",
        )
    yield from _ropes(config)


def begins_alike(case: Case) -> bool:
    """Return whether the numbers after the first id alone agree: attention then has nothing to choose from."""
    off = [abs(float(n[1] - t[1])) for n, t in zip(case.numbers, case.truth, strict=True) if len(n) > 1]
    off = [each for each in off if each == each]
    return not off or sum(off) / len(off) <= max(10 * FLOAT32_NOISE, case.noise)


def _biases(oracle: Oracle) -> Iterator[Variant]:
    names = [name for name in oracle.parameter_names() if name.endswith("bias")]
    groups = {
        "of the output layer": [name for name in names if "head" in name or name.startswith("embed_out")],
        "of the attention": [name for name in names if any(part in name for part in ("q_proj", "k_proj", "c_attn"))],
        "of the norms": [name for name in names if "norm" in name or ".ln_" in name],
        "of all layers": names,
    }
    for words, group in groups.items():
        if group:
            yield Variant(
                "missing-bias",
                f"no biases {words}",
                partial(_without, names=frozenset(group)),
                f"the engine leaves out the biases {words}: check that it loaded {group[0]}",
            )


def _ropes(config: Any) -> Iterator[Variant]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(rope, Mapping):
        return
    advice = "compare rope_scaling and rope_theta of the engine with those of the checkpoint's config.json"
    # Families with several kinds of layers have parameters for each.
    nested = all(isinstance(each, Mapping) for each in rope.values())
    layers: Mapping[str, Any] = rope if nested else {"": rope}

    def every(**changes: Any) -> Callable[[Oracle], Oracle]:
        changed = {name: {**old, **changes} for name, old in layers.items() if old}
        return _with(rope_parameters=changed if nested else changed[""])

    first: Mapping[str, Any] = next((each for each in layers.values() if each), {})
    kind, theta = first.get("rope_type", "default"), first.get("rope_theta")
    if kind != "default":
        yield Variant("rope", f"no rope scaling ({kind})", every(rope_type="default"), advice)
    for factor in _FACTORS:
        if not (kind == "linear" and first.get("factor") == factor):
            yield Variant(
                "rope", f"linear rope scaling by {factor:g}", every(rope_type="linear", factor=factor), advice
            )
    for other in _THETAS:
        if theta is not None and theta != other:
            yield Variant("rope", f"rope_theta={other:g} and not {theta:g}", every(rope_theta=other), advice)


def _with(**changes: Any) -> Callable[[Oracle], Oracle]:
    return lambda oracle: oracle.with_config(**changes)


def _without(oracle: Oracle, names: frozenset[str]) -> Oracle:
    def change(name: str, weight: Tensor) -> Tensor:
        return torch.zeros_like(weight) if name in names else weight

    return oracle.with_weights(change)
