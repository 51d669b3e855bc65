"""`KLComputation`: the KL between two scorings of the same tokens, subtracted from the reward if asked for."""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from corelm.containers.keys import next_or_root
from corelm.errors import level_of_caller, refuse
from corelm.kl.controllers import KLController
from corelm.kl.estimators import ESTIMATORS, Estimator
from corelm.kl.pairs import PairKeys, read_pair
from corelm.kl.rewards import store_reward, subtract_penalty
from corelm.validate import invalid, number, one_of

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


class KLComputation(TensorDictModuleBase):
    """Write the KL of each token to `kl_key`, in nats and without `coeff`, and subtract coeff · KL from the reward.

    The module reads rewards and writes results under ``next`` if the TensorDict has one, else at the root; the policy's
    log-probs and masks may be in either. A position counts if both scorings scored it and the mask selects it.

    From a per-token reward, coeff · KL of that token is subtracted; from a per-sequence reward, coeff times the sum.

    Dense log-probs give ``kl_key`` as float32 ``[*batch, width]``; rows of different lengths give a `PerToken`, read as
    ``td["kl_penalty"].full``. It is 0.0 where a token does not count.

    Args:
        estimator: `k1`, `k2`, `k3`, `abs`, `k1_st`, `k3_st`, or a function ``(gen, ref, mask) -> values`` of flat
            tensors that returns one value per token; see `corelm.kl.estimators`. An estimator that is known to be
            biased in this use causes one `BiasedKLWarning`.
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
        self.allow_mismatch = allow_mismatch
        self.kl_key = kl_key
        self.reward_key = reward_key
        self.keys = PairKeys.selecting(gen_log_probs_key, ref_log_probs_key, masks_key, assistant_only, mask_key)
        self.in_keys = [*self.keys.read, *([reward_key] if add_to_reward else [])]
        self.out_keys = [kl_key, *([reward_key] if add_to_reward else [])]
        self.coefficient()

    def coefficient(self) -> float:
        """Return the current value of `coeff`."""
        return number("coeff", getattr(self.coeff, "value", self.coeff))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        estimate = ESTIMATORS[self.estimator] if isinstance(self.estimator, str) else self.estimator
        pair = read_pair(tensordict, self.keys, allow_mismatch=self.allow_mismatch)
        kl = estimate(pair.gen, pair.ref, pair.mask)
        if not isinstance(kl, Tensor) or kl.shape != pair.mask.shape:
            found = list(kl.shape) if isinstance(kl, Tensor) else type(kl).__name__
            raise invalid("estimator", f"expected one value per token, shape {list(pair.mask.shape)}; got {found}")
        refuse(pair.layout.not_finite(kl, pair.mask, "the estimated KL"), str(self.kl_key))
        kl = torch.where(pair.mask, kl.detach() if self.detach else kl, 0.0)
        out = next_or_root(tensordict)
        # Compute everything before writing anything, so that an error leaves the TensorDict unchanged.
        reward = None
        if self.add_to_reward:
            coefficient = self.coefficient()
            penalty = torch.where(pair.mask, coefficient * kl, 0.0)
            refuse(pair.layout.not_finite(penalty, pair.mask, f"{coefficient:g} · KL"), str(self.reward_key))
            reward = subtract_penalty(out, self.reward_key, penalty, pair.layout)
        out.set(self.kl_key, pair.layout.stored(kl))
        if reward is not None:
            store_reward(out, self.reward_key, reward)
        return tensordict
