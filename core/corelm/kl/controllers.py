"""Coefficients of a KL penalty: one that stays and one that steers. Both go where a `coeff` goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from corelm.validate import invalid, number, positive


class KLController(Protocol):
    """What a `coeff` may be in place of a number: its `value` is read at every call."""

    @property
    def value(self) -> float: ...


class FixedKLController:
    """Always `coef`."""

    def __init__(self, coef: float) -> None:
        self._value = number("coef", coef)

    @property
    def value(self) -> float:
        return self._value

    def update(self, kl: Any, n_steps: int = 1) -> float:
        """Changes nothing, whatever was measured; returns the value."""
        return self._value

    def state_dict(self) -> dict[str, float]:
        return {"value": self._value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._value = number("value", state["value"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(value={self._value:g})"


class AdaptiveKLController(FixedKLController):
    """Steers the coefficient so that the measured KL goes to `target`: multiplied by ``1 + error · n_steps / horizon``
    at every update, where ``error = kl / target − 1``, cut to ±0.2.

    The log-space proportional controller of Ziegler et al., Fine-Tuning Language Models from Human Preferences,
    arXiv:1909.08593, section 2.2; `n_steps` and `horizon` as in the code they published.

    Args:
        init_coef: the coefficient to start with, above 0 (0 would stay 0).
        target: of the KL, above 0, in the units that `update` is given: usually nats a sequence.
        horizon: in the units of `n_steps`: usually sequences, 10,000 in the paper's code.
    """

    MAX_ERROR = 0.2

    def __init__(self, init_coef: float, target: float, horizon: float) -> None:
        super().__init__(positive("init_coef", init_coef))
        self.target = positive("target", target)
        self.horizon = positive("horizon", horizon)

    def update(self, kl: Any, n_steps: int = 1) -> float:
        """Take a measured KL in, a number or a tensor of one, and return the new value.

        Args:
            n_steps: how much has been sampled since the last update; at most ``horizon`` ÷ `MAX_ERROR`, where the
                coefficient would become 0.

        Raises:
            InvalidRequestError: a KL that is not finite, which would spoil the coefficient for good; or `n_steps`.
        """
        measured = number("kl", kl)
        if not 0 < n_steps * self.MAX_ERROR < self.horizon:
            raise invalid("n_steps", f"expected above 0 and below {self.horizon / self.MAX_ERROR:g}, got {n_steps}")
        error = min(max(measured / self.target - 1, -self.MAX_ERROR), self.MAX_ERROR)
        self._value *= 1 + error * n_steps / self.horizon
        return self._value
