"""`KLComputation`: the KL between two scorings of the same tokens, and the reward less it."""

from __future__ import annotations

import sys
import warnings
from typing import Literal

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from corelm.kl.controllers import KLController
from corelm.kl.estimators import ESTIMATORS, Estimator
from corelm.kl.layout import place
from corelm.kl.pairs import PairKeys, read_pair
from corelm.kl.rewards import penalised, put
from corelm.validate import invalid, number, one_of

Where = Literal["reward", "loss"]

_FORWARD = "its policy gradient is that of KL(gen‖ref) less that of KL(ref‖gen) (see arXiv:2512.21852); use 'k1' there"
_NO_KL = "its gradient is not that of a KL divergence; use 'k1' in the reward, 'k2' or 'k3_st' in a loss"
#: What is known to push a policy elsewhere than down KL(gen‖ref), and why.
BIASED: dict[tuple[Where, str], str] = {
    ("reward", "k2"): "its policy gradient weighs a token by the square of the log-ratio; use 'k1' in the reward",
    ("reward", "k3"): _FORWARD,
    ("reward", "k3_st"): _FORWARD,
    ("reward", "abs"): _NO_KL,
    ("loss", "k1"): "its expected gradient is zero (arXiv:2506.09477); use 'k2' or 'k3_st' in a loss",
    ("loss", "abs"): _NO_KL,
}


class BiasedKLWarning(UserWarning):
    """An estimator is used where its gradient is known to be biased."""


#: The pairs that have been warned of; clear it to hear of them again.
warned: set[tuple[Where, str]] = set()


def warn_if_biased(where: Where, estimator: str) -> None:
    """Warn of a pair that is known to be biased, with the reason: once in the life of the process."""
    pair = (where, estimator)
    if pair in BIASED and pair not in warned:
        warned.add(pair)
        message = f"estimator {estimator!r} in the {where}: {BIASED[pair]}"
        warnings.warn(message, BiasedKLWarning, stacklevel=_first_caller())


def _first_caller() -> int:
    """How many calls up from the caller of this the first one is that is not ours."""
    depth = 1
    while sys._getframe(depth).f_globals.get("__name__", "").split(".")[0] == "corelm":
        depth += 1
    return depth


class KLComputation(TensorDictModuleBase):
    """Writes the KL of each token to `kl_key`, in nats and without `coeff`; takes coeff · KL from the reward.

    It acts on ``("next", …)`` if there is one, else on the TensorDict itself; what the policy wrote (log-probs and
    masks) may be in either. Positions that count are those scored in both, and selected.

    A reward of each token loses coeff · KL of that token; a reward of a sequence loses coeff times the sum.

    Args:
        estimator: `k1`, `k2`, `k3`, `abs`, `k1_st`, `k3_st`, or a function ``(gen, ref, mask) -> values`` of flat
            tensors, a value for each token; see `corelm.kl.estimators`. A pair of estimator and use that is known to be
            biased warns once.
        coeff: a number, or a controller whose `value` is read at every call.
        detach: cut the gradient, of `kl_key` and of the reward. False is for a loss.
        add_to_reward: whether there is a reward to take from.
        assistant_only: count the tokens of ``masks.all_assistant_mask``; else every scored one.
        mask_key: count the tokens of another mask: a field of a `Masks` such as ``("masks", "all_response_mask")``, or
            a dense bool tensor shaped as ``tokens.full``. It takes the place of `assistant_only`.
        allow_mismatch: compare log-probs of different distributions all the same.
        gen_log_probs_key, ref_log_probs_key: the field `full` of a `LogProbs` of the policy and of the reference.
        masks_key, kl_key, reward_key: the policy's masks, the result, the reward.

    Dense log-probs give ``kl_key`` as float32 ``[*batch, width]``; rows of their own length give a `PerToken`, read as
    ``td["kl_penalty"].full``. It is 0.0 where nothing counts.

    Raises:
        InvalidRequestError: an argument; on a call also log-probs that are not laid out alike or, where they count, not
            finite, and rewards of another shape (`rows` says where).
        MissingKeyError: a key is not there.
        ProvenanceMismatchError: the two are of different distributions.
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
        """What the KL is multiplied by just now."""
        return number("coeff", getattr(self.coeff, "value", self.coeff))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        estimate = ESTIMATORS[self.estimator] if isinstance(self.estimator, str) else self.estimator
        pair = read_pair(tensordict, self.keys, allow_mismatch=self.allow_mismatch)
        kl = estimate(pair.gen, pair.ref, pair.mask)
        if kl.shape != pair.mask.shape:
            raise invalid(
                "estimator", f"expected a value for each of {list(pair.mask.shape)} tokens, got {list(kl.shape)}"
            )
        kl = torch.where(pair.mask, kl.detach() if self.detach else kl, 0.0)
        out = place(tensordict)
        # Everything is computed before anything is written.
        reward = None
        if self.add_to_reward:
            reward = penalised(out, self.reward_key, self.coefficient() * kl, pair.layout)
        out.set(self.kl_key, pair.layout.stored(kl))
        if reward is not None:
            put(out, self.reward_key, reward)
        return tensordict
