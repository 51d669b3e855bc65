"""`ProbeScores`: what a model says about a few fixed sequences, as plain values that can be sent anywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corelm.validate import invalid, shown, token_ids

#: A sequence of token ids.
Probe = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProbeScores:
    """The log-probabilities of the tokens of a few probes, under one set of weights.

    `corelm_fleet.probe_scores` makes it from a trainer's model; ``update_weights(…, expect=…)`` compares an
    engine with it. It can be pickled and copied; `to_dict` and `make` convert it to and from plain JSON values.

    Attributes:
        probes: the token ids of each probe.
        logprobs: for each probe, the log-probability in nats of every token but the first, at temperature 1.
        dtype: what the numbers were computed in, such as "float32", or "tf32"; None if it is not known.

    Raises:
        InvalidRequestError: the values are of other types or lengths; `field` is ``expect``.
    """

    probes: tuple[Probe, ...]
    logprobs: tuple[tuple[float, ...], ...]
    dtype: str | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        put("probes", tuple(token_ids("expect", probe) for probe in _sequence("probes", self.probes)))
        put("logprobs", tuple(map(_floats, _sequence("logprobs", self.logprobs))))
        if [max(len(probe) - 1, 0) for probe in self.probes] != [len(row) for row in self.logprobs] or not self.probes:
            raise invalid(
                "expect",
                "expected one row of log-probs for each probe, with one number for each token but the first; "
                "make it with probe_scores(model)",
            )
        if self.dtype is not None and not isinstance(self.dtype, str):
            raise invalid("expect", f"dtype: expected a name such as 'float32' or None, got {shown(self.dtype)}")

    def by_probe(self) -> dict[Probe, tuple[float, ...]]:
        """Return the log-probs by the ids of their probe."""
        return dict(zip(self.probes, self.logprobs, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as lists, numbers and texts."""
        return {
            "probes": [list(probe) for probe in self.probes],
            "logprobs": [list(row) for row in self.logprobs],
            "dtype": self.dtype,
        }

    @classmethod
    def make(cls, given: Any) -> ProbeScores | None:
        """Return what a caller expects: `given` itself, or what its `to_dict` described; None for None.

        Raises:
            InvalidRequestError: `given` is something else; `field` is ``expect``.
        """
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise invalid("expect", f"expected what probe_scores(model) returns, got {shown(given)}")
        if given.keys() != {"probes", "logprobs", "dtype"}:
            names = ", ".join(sorted(map(str, given)))
            raise invalid("expect", f"expected the keys of probe_scores(model).to_dict(), got: {names or 'none'}")
        return cls(**given)


def _sequence(name: str, given: Any) -> Sequence[Any]:
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise invalid("expect", f"{name}: expected a sequence of rows, got {shown(given)}")
    return given


def _floats(given: Any) -> tuple[float, ...]:
    try:
        row = tuple(map(float, given))
    except (TypeError, ValueError):
        raise invalid("expect", f"logprobs: expected rows of numbers, got {shown(given)}") from None
    if not all(map(math.isfinite, row)):
        raise invalid("expect", "logprobs: expected finite numbers; the model returned NaN or infinity")
    return row
