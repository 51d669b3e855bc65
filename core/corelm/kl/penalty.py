"""`KLComputation`: the KL between two scorings of the same tokens, and controllers of its coefficient."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from corelm.containers.classes import PerToken
from corelm.containers.fields import flat, rows
from corelm.containers.reading import list_keys, next_or_root
from corelm.errors import InvalidRequestError, MissingKeyError, Problems, level_of_caller, refuse
from corelm.kl.estimators import ESTIMATORS, Estimator, shape_of
from corelm.kl.pairs import PairKeys, TokenLayout, read_pair
from corelm.validate import invalid, number, one_of, positive, shown

Use = Literal["reward", "loss"]

_REVERSE = "its policy gradient is ∇ KL(gen‖ref) − ∇ KL(ref‖gen) (see arXiv:2512.21852); use 'k1' in the reward"
_NO_KL = "its gradient is not that of a KL divergence; use 'k1' in the reward, 'k2' or 'k3_st' in a loss"
#: Uses of an estimator whose gradient does not descend KL(gen‖ref), and why.
BIASED: dict[tuple[Use, str], str] = {
    ("reward", "k2"): "its policy gradient weights each token by the squared log-ratio; use 'k1' in the reward",
    ("reward", "k3"): _REVERSE,
    ("reward", "k3_st"): _REVERSE,
    ("reward", "abs"): _NO_KL,
    ("loss", "k1"): "its expected gradient is zero (arXiv:2506.09477); use 'k2' or 'k3_st' in a loss",
    ("loss", "abs"): _NO_KL,
}


class BiasedKLWarning(UserWarning):
    """Warns that an estimator is used where its gradient is known to be biased."""


#: The uses that were already warned about; clear the set to get the warnings again.
warned: set[tuple[Use, str]] = set()


def warn_if_biased(use: Use, estimator: str) -> None:
    """Warn, once per process, if this use of the estimator is known to be biased, and say why."""
    case = (use, estimator)
    if case in BIASED and case not in warned:
        warned.add(case)
        message = f"estimator {estimator!r} in the {use}: {BIASED[case]}"
        warnings.warn(message, BiasedKLWarning, stacklevel=level_of_caller())


class KLController(Protocol):
    """An object that can be passed as `coeff` instead of a number: its `value` is read at every call."""

    @property
    def value(self) -> float: ...


class FixedKLController:
    """A coefficient that stays at `coef`."""

    def __init__(self, coef: float) -> None:
        self._value = number("coef", coef)

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
        self._value = number("value", state["value"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(value={self._value:g})"


class AdaptiveKLController(FixedKLController):
    """A coefficient that is adjusted to bring the measured KL to `target`.

    Every update multiplies the coefficient by ``1 + error · n_steps / horizon``, where ``error = kl / target − 1``,
    clipped to ±0.2: the controller of Ziegler et al., arXiv:1909.08593, section 2.2, with `n_steps` and `horizon` as in
    the code they published.

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

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        super().load_state_dict(state)
        self._value = positive("value", self._value)


class KLComputation(TensorDictModuleBase):
    """Write the KL of each token to `kl_key`, in nats and without `coeff`, and subtract coeff · KL from the reward.

    The module reads rewards and writes results under ``next`` if the TensorDict has one, else at the root; log-probs
    and masks may be in either. A position counts if both scorings scored it and the mask selects it.

    From a per-token reward, coeff · KL of that token is subtracted; from a per-sequence reward, coeff times the sum.
    Dense log-probs give ``kl_key`` as float32 ``[*batch, width]``; rows of different lengths give a `PerToken`, read as
    ``td["kl_penalty"].full``. It is 0.0 where a token does not count.

    Args:
        estimator: `k1`, `k2`, `k3`, `abs`, `k1_st`, `k3_st`, or a function ``(gen, ref, mask) -> values`` of flat
            tensors; see `corelm.kl.estimators`. One that is biased in this use causes a `BiasedKLWarning`, once.
        coeff: a number, or a controller whose `value` is read at every call.
        detach: detach `kl_key` and the reward from the gradient. Pass False for a loss.
        add_to_reward: subtract coeff · KL from the reward. Pass False if there is no reward.
        assistant_only: count the assistant's tokens in the response; if False, every token that both scored.
        mask_key: count the tokens of another mask instead, regardless of `assistant_only`: a field of a `Masks` such as
            ``("masks", "all_response_mask")``, or a dense bool tensor shaped like ``tokens.full``.
        allow_mismatch: compare log-probs even if they are of different distributions.
        gen_log_probs_key: the field `full` of the policy's `LogProbs`.
        ref_log_probs_key: the field `full` of the reference's `LogProbs`.
        masks_key: the policy's `Masks`.
        kl_key: where the KL is written.
        reward_key: the reward, which is read and written.

    Raises:
        InvalidRequestError: an argument is invalid. On a call: the scorings have different layouts, a log-prob or a KL
            that counts is not finite, or the rewards have another shape (`rows` lists the rows at fault).
        MissingKeyError: on a call, a key is missing.
        ProvenanceMismatchError: on a call, the two scorings are of different distributions.
    """

    def __init__(
        self,
        estimator: str | Estimator = "k1",
        coeff: float | KLController = 1.0,
        *,
        detach: bool = True,
        add_to_reward: bool = True,
        assistant_only: bool = True,
        mask_key: NestedKey | None = None,
        allow_mismatch: bool = False,
        gen_log_probs_key: NestedKey = ("log_probs", "full"),
        ref_log_probs_key: NestedKey = ("ref_log_probs", "full"),
        masks_key: NestedKey = "masks",
        kl_key: NestedKey = "kl_penalty",
        reward_key: NestedKey = "reward",
    ) -> None:
        super().__init__()
        if isinstance(estimator, str):
            one_of("estimator", estimator, tuple(ESTIMATORS))
            if not detach:
                warn_if_biased("loss", estimator)
            if add_to_reward:
                warn_if_biased("reward", estimator)
        self.estimator = estimator
        self.coeff = coeff
        self.detach = detach
        self.add_to_reward = add_to_reward
        self.kl_key = kl_key
        self.reward_key = reward_key
        self.keys = PairKeys(gen_log_probs_key, ref_log_probs_key, masks_key, assistant_only, mask_key, allow_mismatch)
        rewards = [reward_key] if add_to_reward else []
        self.in_keys = [*self.keys.read, *rewards]
        self.out_keys = [kl_key, *rewards]
        self.coefficient()

    def coefficient(self) -> float:
        """Return the current value of `coeff`."""
        return number("coeff", getattr(self.coeff, "value", self.coeff))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        estimate = ESTIMATORS[self.estimator] if isinstance(self.estimator, str) else self.estimator
        gen, ref, mask, layout = read_pair(tensordict, self.keys)
        kl = estimate(gen, ref, mask)
        if not isinstance(kl, Tensor) or kl.shape != mask.shape:
            raise invalid("estimator", f"expected one value per token, shape {list(mask.shape)}; got {shape_of(kl)}")
        refuse(layout.not_finite(kl, mask, "the estimated KL"), str(self.kl_key))
        kl = torch.where(mask, kl.detach() if self.detach else kl, 0.0)
        out = next_or_root(tensordict)
        # Compute everything before writing anything, so that an error leaves the TensorDict unchanged.
        reward = None
        if self.add_to_reward:
            coefficient = self.coefficient()
            penalty = coefficient * kl
            refuse(layout.not_finite(penalty, mask, f"{coefficient:g} · KL"), str(self.reward_key))
            reward = _penalised(out, self.reward_key, penalty, layout)
        out.set(self.kl_key, layout.stored(kl))
        if isinstance(reward, list):
            for row, one in zip(rows(out), reward, strict=True):
                row.set(self.reward_key, one)
        elif reward is not None:
            out.set(self.reward_key, reward)
        return tensordict


def _penalised(td: TensorDictBase, key: NestedKey, penalty: Tensor, layout: TokenLayout) -> Any:
    """Return the reward under `key` minus the flat `penalty`, in the layout and dtype of the reward.

    One reward per token is of shape ``[*batch, width]``, as wide as ``tokens.full`` (or as ``pad_output=True`` would
    make them), or one row per sample, bare or in a `PerToken`. From a single reward of a row, the sum is subtracted.
    """
    if key not in td.keys(include_nested=True):
        raise MissingKeyError(
            f"the TensorDict has no {key!r} to subtract the penalty from; it has: {list_keys(td)}. Write it, or leave "
            "rewards unchanged: KLComputation or RetrieveKL with add_to_reward=False",
            field=str(key),
        )
    try:
        reward = td.get(key)
    except RuntimeError:
        # Bare rows of different lengths, which only a lazy stack can hold.
        return _penalised_rows([row.get(key) for row in rows(td)], key, penalty, layout)
    if not isinstance(reward, PerToken):
        return _penalised_dense(reward, key, penalty, layout)
    given, reduced = reward.full, reward.clone(False)
    dense = isinstance(given, Tensor) and reward.padded
    subtract = _penalised_dense if dense else _penalised_rows
    reduced.full = subtract(given if dense else flat(given), key, penalty, layout)
    return reduced


def _penalised_dense(reward: Any, key: NestedKey, penalty: Tensor, layout: TokenLayout) -> Tensor:
    if not isinstance(reward, Tensor):
        raise InvalidRequestError(f"{key!r}: expected a tensor, got {type(reward).__name__}", field=str(key))
    batch, shape = layout.batch, tuple(reward.shape)
    if shape[: len(batch)] == batch and math.prod(shape[len(batch) :]) == 1:
        return _minus(reward, layout.row_sums(penalty))
    width = layout.columns.shape[-1]
    if shape in ((*batch, width), (*batch, width, 1)):
        return _minus(reward, layout.dense(penalty))
    raise InvalidRequestError(
        f"{key!r}: expected one reward per sequence, {list(batch)} or {[*batch, 1]}, or one per token of tokens.full, "
        f"{[*batch, width]} or {[*batch, width, 1]}; got {list(shape)}",
        field=str(key),
    )


def _penalised_rows(given: list[Tensor], key: NestedKey, penalty: Tensor, layout: TokenLayout) -> list[Tensor]:
    parts = layout.ragged(penalty).split()
    if len(given) != len(parts):
        raise InvalidRequestError(
            f"{key!r}: got {len(given)} rows of rewards for {len(parts)} rows of tokens", field=str(key)
        )
    problems: Problems = {
        row: f"expected {len(part)} rewards, one per token of tokens.full, or a single one; got {list(reward.shape)}"
        for row, (reward, part) in enumerate(zip(given, parts, strict=True))
        if reward.numel() not in (1, len(part)) or reward.ndim > 2
    }
    refuse(problems, str(key))
    return [
        _minus(reward, part if reward.numel() == len(part) else part.sum())
        for reward, part in zip(given, parts, strict=True)
    ]


def _minus(reward: Tensor, penalty: Tensor) -> Tensor:
    """Return ``reward − penalty`` as a new tensor; rewards that are not floats become float32."""
    dtype = reward.dtype if reward.dtype.is_floating_point else penalty.dtype
    finer = torch.promote_types(dtype, penalty.dtype)
    return (reward.to(finer) - penalty.to(reward.device).reshape(reward.shape)).to(dtype)
