"""Coefficients of a KL penalty: a fixed one and an adaptive one. Pass either as `coeff`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from corelm.validate import invalid, number, positive, shown


class KLController(Protocol):
    """An object that can be passed as `coeff` instead of a number: its `value` is read at every call."""

    @property
    def value(self) -> float: ...


class FixedKLController:
    """A coefficient that stays at `coef`."""

    def __init__(self, coef: float) -> None:
        self._value = number("coef", coef)

    @staticmethod
    def _legal(value: Any) -> float:
        """Return a coefficient that was saved."""
        return number("value", value)

    @property
    def value(self) -> float:
        return self._value

    def update(self, kl: Any, n_steps: int = 1) -> float:
        """Ignore the measured KL and return the unchanged value."""
        return self._value

    def state_dict(self) -> dict[str, float]:
        return {"value": self._value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        if not isinstance(state, Mapping) or "value" not in state:
            raise invalid("state", f"expected what state_dict() returns, a mapping with 'value'; got {shown(state)}")
        self._value = self._legal(state["value"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(value={self._value:g})"


class AdaptiveKLController(FixedKLController):
    """A coefficient that is adjusted to bring the measured KL to `target`.

    Every update multiplies the coefficient by ``1 + error · n_steps / horizon``, where ``error = kl / target − 1``,
    clipped to ±0.2. This is the log-space proportional controller of Ziegler et al., Fine-Tuning Language Models from
    Human Preferences, arXiv:1909.08593, section 2.2; `n_steps` and `horizon` are used as in the code they published.

    Args:
        init_coef: the initial coefficient, above 0 (a coefficient of 0 would stay 0).
        target: the target KL, above 0, in the units passed to `update`: usually nats per sequence.
        horizon: in the units of `n_steps`: usually sequences, 10,000 in the paper's code.
    """

    MAX_ERROR = 0.2

    def __init__(self, init_coef: float, target: float, horizon: float) -> None:
        super().__init__(positive("init_coef", init_coef))
        self.target = positive("target", target)
        self.horizon = positive("horizon", horizon)

    def update(self, kl: Any, n_steps: int = 1) -> float:
        """Adjust the coefficient to a measured KL and return the new value.

        Args:
            kl: the measured KL: a number, or a tensor with one element.
            n_steps: how much was sampled since the last update; above 0 and below ``horizon / MAX_ERROR``, where the
                coefficient would become 0.

        Raises:
            InvalidRequestError: `kl` is not finite, which would spoil the coefficient permanently, or `n_steps` is out
                of range.
        """
        measured, steps = number("kl", kl), positive("n_steps", n_steps)
        if not steps * self.MAX_ERROR < self.horizon:
            raise invalid(
                "n_steps",
                f"expected a number above 0 and below {self.horizon / self.MAX_ERROR:g}, got {shown(n_steps)}",
            )
        error = min(max(measured / self.target - 1, -self.MAX_ERROR), self.MAX_ERROR)
        self._value *= 1 + error * steps / self.horizon
        return self._value

    @staticmethod
    def _legal(value: Any) -> float:
        return positive("value", value)
