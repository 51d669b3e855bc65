"""`RetrieveLogProb`: what another policy says of the tokens. `RetrieveKL`, `KLRewardTransform`: that, and the KL."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from corelm.containers.classes import Tokens
from corelm.errors import InvalidRequestError, MissingKeyError
from corelm.kl.controllers import KLController
from corelm.kl.estimators import Estimator
from corelm.kl.layout import find, parts, place
from corelm.kl.penalty import KLComputation
from corelm.policy.policy import LLMPolicy


class RetrieveLogProb(TensorDictModuleBase):
    """Scores the tokens that are there with `policy` and writes a whole `LogProbs`: values, scored mask, provenance.

    It is the tokens that are scored, id for id, in the columns or rows they stand in; nothing is rendered or tokenized
    again, so the result lines up with what the tokens were sampled with. The engine, its weights and its device may be
    others than the sampler's; the vocabulary must not be. No gradients: those come from ``policy.log_prob``.

    It acts on ``("next", …)`` if there is one, else on the TensorDict itself; the tokens may be in either.

    Args:
        policy: an `LLMPolicy`, sampling or scoring. Its engine and its `log_probs_mode` are used.
        log_probs_key: where the result goes.
        tokens_key, masks_key: the `Tokens`, and the `Masks` that dense ones need; None for the policy's own keys.

    Raises:
        MissingKeyError, InvalidRequestError: there are no tokens, or something else is there.
        CapabilityError, EngineError, BackendTimeoutError, BackendClosedError: the engine.
    """

    def __init__(
        self,
        policy: LLMPolicy,
        *,
        log_probs_key: NestedKey = "ref_log_probs",
        tokens_key: NestedKey | None = None,
        masks_key: NestedKey | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(policy, LLMPolicy):
            raise InvalidRequestError(f"policy: expected an LLMPolicy, got {type(policy).__name__}", field="policy")
        self.tokens_key = policy.options.keys.tokens if tokens_key is None else tokens_key
        self.masks_key = policy.options.keys.masks if masks_key is None else masks_key
        self.log_probs_key = log_probs_key
        outputs = dict.fromkeys(("return_text", "return_tokens", "return_masks", "return_history"), False)
        scorer = policy.replace(generate=False, input_mode="tokens", return_log_probs=True, inplace=False, **outputs)
        # By layout: what is scored comes back as it stands.
        self._scorers = {padded: scorer.replace(pad_output=padded) for padded in (False, True)}
        self.in_keys = [(*parts(self.tokens_key), "full")]
        self.out_keys = [(*parts(log_probs_key), name) for name in ("full", "scored_mask")]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        tokens, here = find(tensordict, self.tokens_key)
        if not isinstance(tokens, Tokens):
            raise InvalidRequestError(
                f"{self.tokens_key!r}: expected Tokens, got {type(tokens).__name__}", field=str(self.tokens_key)
            )
        scorer = self._scorers[tokens.padded]
        view = TensorDict({}, batch_size=tensordict.batch_size, device=tensordict.device)
        view[scorer.options.keys.tokens] = tokens
        # Rows of their own length need no masks; for dense ones the scorer says what is missing.
        with suppress(MissingKeyError):
            view[scorer.options.keys.masks] = find(tensordict, self.masks_key, first=here)[0]
        place(tensordict).set(self.log_probs_key, scorer(view)[scorer.options.keys.log_probs])
        return tensordict


class RetrieveKL(TensorDictModuleBase):
    """`RetrieveLogProb` of the reference, then `KLComputation`.

    Args:
        ref_policy: the reference.
        gen_policy: scores the tokens too, in place of the log-probs they were sampled with. None reads those.
        estimator, coeff, detach, add_to_reward, assistant_only, mask_key, allow_mismatch, gen_log_probs_key,
        ref_log_probs_key, masks_key, kl_key, reward_key: as in `KLComputation`.
        tokens_key: as in `RetrieveLogProb`.

    Raises:
        What the two raise.
    """

    def __init__(
        self,
        ref_policy: LLMPolicy,
        *,
        gen_policy: LLMPolicy | None = None,
        estimator: str | Estimator = "k1",
        coeff: float | KLController = 1.0,
        gen_log_probs_key: NestedKey = ("log_probs", "full"),
        ref_log_probs_key: NestedKey = ("ref_log_probs", "full"),
        tokens_key: NestedKey = "tokens",
        masks_key: NestedKey = "masks",
        **options: Any,
    ) -> None:
        super().__init__()
        self.kl = KLComputation(
            estimator,
            coeff,
            gen_log_probs_key=gen_log_probs_key,
            ref_log_probs_key=ref_log_probs_key,
            masks_key=masks_key,
            **options,
        )
        scorings = [(ref_policy, ref_log_probs_key)]
        if gen_policy is not None:
            scorings.insert(0, (gen_policy, gen_log_probs_key))
        self.scorings = [
            RetrieveLogProb(policy, log_probs_key=parts(key)[:-1], tokens_key=tokens_key, masks_key=masks_key)
            for policy, key in scorings
        ]
        made = [key for scoring in self.scorings for key in scoring.out_keys]
        self.in_keys = [
            *self.scorings[0].in_keys,
            *(key for key in self.kl.in_keys if parts(key) not in [parts(one) for one in made]),
        ]
        self.out_keys = [*made, *self.kl.out_keys]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        for scoring in self.scorings:
            tensordict = scoring(tensordict)
        result: TensorDictBase = self.kl(tensordict)
        return result


class KLRewardTransform(RetrieveKL):
    """Takes coeff · KL against `ref_policy` from the reward: `RetrieveKL` that always has a reward.

    Works on any TensorDict with a reward, with or without a ``next``; no environment is needed.

    Args:
        ref_policy: the reference.
        coeff: a number, or a controller whose `value` is read at every call.
        options: as in `RetrieveKL`, but for `add_to_reward`.
    """

    def __init__(
        self,
        ref_policy: LLMPolicy,
        coeff: float | KLController = 1.0,
        *,
        estimator: str | Estimator = "k1",
        **options: Any,
    ) -> None:
        super().__init__(ref_policy, estimator=estimator, coeff=coeff, **options, add_to_reward=True)
