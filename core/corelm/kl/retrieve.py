"""`RetrieveLogProb` scores tokens with another policy; `RetrieveKL` and `KLRewardTransform` also compute the KL."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from corelm.containers.classes import LogProbs, Tokens
from corelm.containers.fields import rows
from corelm.containers.reading import carries_sets, find_entry, key_parts, next_or_root, provenance_of_rows
from corelm.errors import InvalidRequestError, MissingKeyError
from corelm.kl.estimators import Estimator
from corelm.kl.pairs import container_key
from corelm.kl.penalty import KLComputation, KLController
from corelm.policy.options import Keys
from corelm.policy.outputs import refuse_other_provenance
from corelm.policy.policy import LLMPolicy
from corelm.spec.provenance import Provenance
from corelm.validate import flag

_ADVICE = "Pass another log_probs_key (gen_log_probs_key of RetrieveKL), or overwrite=True to replace what is there"


class RetrieveLogProb(TensorDictModuleBase):
    """Score the tokens of the TensorDict with `policy` and write a `LogProbs`: values, scored mask, provenance.

    The tokens are scored, id for id, in their own columns or rows, so the result aligns with the log-probs of sampling.
    The engine may differ from the sampler's; the vocabulary must be the same. The result has no gradients; use
    ``policy.log_prob`` for those.

    Tokens that were sampled with top-k, top-p or min-p, by a policy with ``return_support=True`` and
    ``log_probs_mode="processed"``, are scored over the ids that were left for the sampler, at its temperature.

    The module writes under ``next`` if the TensorDict has one, else at the root; the tokens may be in either.

    Args:
        policy: an `LLMPolicy`, sampling or scoring. Its engine and its `log_probs_mode` are used.
        log_probs_key: where the result is written.
        tokens_key: the `Tokens`; None means the policy's own key.
        masks_key: the `Masks` of dense tokens; None means the policy's own key.
        overwrite: whether log-probs of sampling may be replaced by those of another provenance. Those under "log_probs"
            or the policy's own key are taken for such, and others that score responses and no token of a prompt. Other
            log-probs, such as those retrieved before, are replaced.
        support_key: the `LogProbs` of the sampler. If they are truncated and carry the ids that were left, tokens are
            scored over these. None scores over the whole vocabulary. The `support_key` of the policy goes first.

    Raises:
        InvalidRequestError: `policy` is not an `LLMPolicy`, or, on a call, the tokens or masks are of another type or
            do not fit, or log-probs of another provenance would be replaced.
        MissingKeyError: on a call, the tokens or the masks are missing.
        ProvenanceMismatchError: on a call, the rows were sampled at different temperatures, or with penalties.
        CapabilityError, EngineError, BackendTimeoutError, BackendClosedError: on a call, from the engine.
    """

    def __init__(
        self,
        policy: LLMPolicy,
        *,
        log_probs_key: NestedKey = "ref_log_probs",
        tokens_key: NestedKey | None = None,
        masks_key: NestedKey | None = None,
        overwrite: bool = False,
        support_key: NestedKey | None = "log_probs",
    ) -> None:
        super().__init__()
        if not isinstance(policy, LLMPolicy):
            raise InvalidRequestError(f"policy: expected an LLMPolicy, got {type(policy).__name__}", field="policy")
        self.tokens_key = policy.options.keys.tokens if tokens_key is None else tokens_key
        self.masks_key = policy.options.keys.masks if masks_key is None else masks_key
        self.log_probs_key = log_probs_key
        self._sampled_keys = {key_parts(key) for key in (Keys().log_probs, policy.options.keys.log_probs)}
        self.overwrite = flag("overwrite", overwrite)
        self.support_key = policy.options.support_key or support_key
        unwanted = dict.fromkeys(("return_text", "return_tokens", "return_masks", "return_history"), False)
        scorer = policy.replace(
            generate=False, input_mode="tokens", inplace=False, return_log_probs=True, support_key=None, **unwanted
        )
        # One scorer per layout, so that the scores come back in the layout of the tokens.
        self._scorers = {padded: scorer.replace(pad_output=padded) for padded in (False, True)}
        self.in_keys = [(*key_parts(self.tokens_key), "full")]
        self.out_keys = [(*key_parts(log_probs_key), name) for name in ("full", "scored_mask")]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        tokens, holder = find_entry(tensordict, self.tokens_key)
        if not isinstance(tokens, Tokens):
            raise InvalidRequestError(
                f"{self.tokens_key!r}: expected Tokens, got {type(tokens).__name__}", field=str(self.tokens_key)
            )
        scorer = self._scorers[tokens.padded]
        view = TensorDict({}, batch_size=tensordict.batch_size, device=tensordict.device)
        view[scorer.options.keys.tokens] = tokens
        # Rows of their own length need no masks.
        with suppress(MissingKeyError):
            view[scorer.options.keys.masks] = find_entry(tensordict, self.masks_key, first=holder)[0]
        target = next_or_root(tensordict)
        sampled, label = self._truncated(tensordict)
        if label is None:
            self._refuse_other(target, scorer.score_provenance)
        else:
            view["sampled"] = sampled
            sampling = {"temperature": label.temperature}
            scorer = scorer.replace(support_key="sampled", log_probs_mode="processed", sampling_params=sampling)
            scorer.backend.engine.require(
                "score_support",
                f"it cannot score over the ids that truncation left for the sampler of {self.support_key!r}; score "
                "with an engine that can, such as transformers, or pass support_key=None and compare with "
                "allow_mismatch=True",
            )
        scores = scorer(view)[scorer.options.keys.log_probs]
        # The weights may have changed in the meantime.
        self._refuse_other(target, provenance_of_rows(scores, scores.batch_size.numel()))
        target.set(self.log_probs_key, scores)
        return tensordict

    def _truncated(self, td: TensorDictBase) -> tuple[Any, Provenance | None]:
        """Return the sampler's log-probs and their first label of truncated support; None without ids to score over."""
        found = None
        if self.support_key is not None:
            with suppress(MissingKeyError):
                found, _ = find_entry(td, self.support_key)
        if not isinstance(found, LogProbs) or not carries_sets(found):
            return None, None
        labels = provenance_of_rows(found, found.batch_size.numel())
        return found, next((one for one in labels if one is not None and one.support == "truncated"), None)

    def _refuse_other(self, target: TensorDictBase, new: Provenance | tuple[Provenance | None, ...]) -> None:
        """Refuse to replace log-probs of sampling, which cannot be computed again, by those of another provenance."""
        if self.overwrite or self.log_probs_key not in target.keys(include_nested=True):
            return
        there = target.get(self.log_probs_key)
        if key_parts(self.log_probs_key) in self._sampled_keys or _score_responses_alone(there):
            refuse_other_provenance(there, new, self.log_probs_key, _ADVICE)


def _score_responses_alone(there: Any) -> bool:
    """Return whether these are `LogProbs` in which no token of a prompt is scored, as in those of sampling."""
    fields = set(there.keys()) if isinstance(there, LogProbs) else set()
    if "full" not in fields:
        return "response" in fields
    return {"prompt", "scored_mask"} <= fields and not any(
        bool(row.scored_mask[: row.prompt.shape[-1]].any()) for row in rows(there)
    )


class RetrieveKL(TensorDictModuleBase):
    """Score the tokens with the reference, as `RetrieveLogProb` does, then compute the KL, as `KLComputation` does.

    Args:
        ref_policy: the reference.
        gen_policy: a policy that scores the tokens too. None uses the log-probs of sampling. To keep these, pass
            another `gen_log_probs_key`.
        options: the other arguments of `KLComputation`: `detach`, `add_to_reward`, `assistant_only`, `mask_key`,
            `allow_mismatch`, `kl_key`, `reward_key`.

    `tokens_key` and `overwrite` are those of `RetrieveLogProb`, the other arguments those of `KLComputation`; the
    errors are those of both.
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
        overwrite: bool = False,
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
        scored = [] if gen_policy is None else [(gen_policy, gen_log_probs_key)]
        sampler = container_key(gen_log_probs_key) if gen_policy is None else Keys().log_probs
        self.scorings = [
            RetrieveLogProb(
                policy,
                log_probs_key=container_key(key),
                tokens_key=tokens_key,
                masks_key=masks_key,
                overwrite=overwrite,
                support_key=sampler,
            )
            for policy, key in [*scored, (ref_policy, ref_log_probs_key)]
        ]
        written = [key for scoring in self.scorings for key in scoring.out_keys]
        self.in_keys = self.scorings[0].in_keys + [key for key in self.kl.in_keys if key_parts(key) not in written]
        self.out_keys = [*written, *self.kl.out_keys]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        for scoring in self.scorings:
            tensordict = scoring(tensordict)
        result: TensorDictBase = self.kl(tensordict)
        return result


class KLRewardTransform(RetrieveKL):
    """Subtract coeff · KL against `ref_policy` from the reward: a `RetrieveKL` with ``add_to_reward=True``.

    It works on any TensorDict with a reward, with or without ``next``; no environment is needed. See `RetrieveKL`.
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
