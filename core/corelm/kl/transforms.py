"""Modules that score tokens, compute the KL of two scorings, and subtract it from the reward."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, Literal, Protocol

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from corelm.containers.classes import LogProbs, PerToken, Tokens, flat, rows
from corelm.containers.reading import (
    TokenRows,
    carries_sets,
    container_of,
    entry,
    find_entry,
    key_parts,
    list_keys,
    next_or_root,
    provenance_of_rows,
)
from corelm.errors import InvalidRequestError, MissingKeyError, Problems, level_of_caller, refuse, spelled_out
from corelm.kl.estimators import ESTIMATORS, Estimator
from corelm.kl.pairs import PairKeys, read_pair
from corelm.policy.options import Keys
from corelm.policy.policy import LLMPolicy, checked_policy
from corelm.spec.provenance import Provenance
from corelm.tensors.ragged import shape_of
from corelm.validate import checks_names, flag, invalid, number, one_of, positive, shown

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

    @checks_names()
    def __init__(self, coef: float) -> None:
        self._value = number("coef", coef, 0.0)

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
        self._value = number("value", state["value"], 0.0)

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

    @checks_names()
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
        measured, steps, most = number("kl", kl), positive("n_steps", n_steps), self.horizon / self.MAX_ERROR
        if not steps * self.MAX_ERROR < self.horizon:
            raise invalid("n_steps", f"expected a number above 0 and below {most:g}, got {shown(n_steps)}")
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
    ``td["kl_penalty"].full``. It is 0.0 where a token does not count. If `kl_key` is there before the reward is
    lowered, a warning says that this may be the second time; it is replaced.

    Args:
        estimator: `k1`, `k2`, `k3`, `abs`, `k1_st`, `k3_st`, or a function ``(gen, ref, mask) -> values`` of flat
            tensors; see `corelm.kl.estimators`. One that is biased in this use causes a `BiasedKLWarning`, once.
        coeff: a number of at least 0, or a controller whose `value` is read at every call.
        detach: detach `kl_key` and the reward from the gradient. Pass False for a loss.
        add_to_reward: subtract coeff · KL from the reward. Pass False if there is no reward.
        assistant_only: count the assistant's tokens in the response; if False, every token that both scored.
        mask_key: count the tokens of another mask instead, regardless of `assistant_only`: a field of a `Masks` such as
            ``("masks", "all_response_mask")``, or a dense bool tensor shaped like ``tokens.full``.
        allow_mismatch: compare log-probs even if they are of different distributions.
        gen_log_probs_key: the key of the policy's `LogProbs`, or of its field `full`.
        ref_log_probs_key: likewise that of the reference's.
        masks_key: the policy's `Masks`.
        kl_key: where the KL is written.
        reward_key: the reward, which is read and written.

    Raises:
        InvalidRequestError: an argument is invalid. On a call: the scorings have different layouts, a log-prob or a KL
            that counts is not finite, a reward is NaN, or the rewards have another shape (`rows` lists the rows at
            fault).
        MissingKeyError: on a call, a key is missing.
        ProvenanceMismatchError: on a call, the two scorings are of different distributions.
    """

    @checks_names()
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
        return number("coeff", getattr(self.coeff, "value", self.coeff), 0.0)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        estimate = ESTIMATORS[self.estimator] if isinstance(self.estimator, str) else self.estimator
        gen, ref, mask, tokens = read_pair(tensordict, self.keys)
        kl = estimate(gen, ref, mask)
        if not isinstance(kl, Tensor) or kl.shape != mask.shape:
            raise invalid("estimator", f"expected one value per token, shape {list(mask.shape)}; got {shape_of(kl)}")
        refuse(tokens.not_finite(kl, mask, "the estimated KL"), str(self.kl_key))
        kl = torch.where(mask, kl.detach() if self.detach else kl, 0.0)
        out = next_or_root(tensordict)
        # Compute everything before writing anything, so that an error leaves the TensorDict unchanged.
        if self.add_to_reward:
            coefficient = self.coefficient()
            penalty = coefficient * kl
            refuse(tokens.not_finite(penalty, mask, f"{coefficient:g} · KL"), str(self.reward_key))
            reward = _penalised(out, self.reward_key, penalty, tokens)
            if self.kl_key in out.keys(include_nested=True):
                warnings.warn(
                    f"{self.kl_key!r} is there already: if that KL was subtracted from {self.reward_key!r} before, "
                    "this call subtracts a second time. If it is meant, delete that key first or pass another kl_key",
                    stacklevel=level_of_caller(),
                )
        # The reward last: were the KL refused afterwards, a second call would penalise it again.
        out.set(self.kl_key, tokens.stored(kl))
        if self.add_to_reward:
            of_rows = isinstance(reward, list)
            for holder, one in zip(rows(out), reward, strict=True) if of_rows else [(out, reward)]:
                holder.set(self.reward_key, one)
        return tensordict


def _penalised(td: TensorDictBase, key: NestedKey, penalty: Tensor, tokens: TokenRows) -> Any:
    """Return the reward under `key` minus the flat `penalty`, in the layout and dtype of the reward.

    One reward per token is of shape ``[*batch, width]``, as wide as ``tokens.full`` (or as ``pad_output=True`` would
    make them), or one row per sample, bare or in a `PerToken`. From a single reward of a row, the sum is subtracted.
    """
    if key not in td.keys(include_nested=True):
        raise MissingKeyError(
            f"the TensorDict has no {key!r} to subtract the penalty from{list_keys(td, key)}. Write it, give another "
            "reward_key, or leave rewards unchanged: KLComputation or RetrieveKL with add_to_reward=False",
            field=str(key),
        )
    reward = entry(td, key)
    if not isinstance(reward, PerToken):
        return _less(reward, key, penalty, tokens)
    given, reduced = reward.full, reward.clone(False)
    dense = isinstance(given, Tensor) and reward.padded
    reduced.full = _less(given if dense else flat(given), key, penalty, tokens)
    return reduced


def _less(reward: Any, key: NestedKey, penalty: Tensor, tokens: TokenRows) -> Any:
    """Return a dense reward, or a list of rows, minus the flat `penalty`. A NaN is refused as that of a log-prob is."""
    if isinstance(reward, list):
        parts = tokens.ragged(penalty).split()
        if len(reward) != len(parts):
            raise invalid(str(key), f"got {len(reward)} rows of rewards for {len(parts)} rows of tokens")
        pairs = list(zip(reward, parts, strict=True))
        problems = {
            row: f"expected {len(part)} rewards, one per token of tokens.full, or a single one; got {list(one.shape)}"
            for row, (one, part) in enumerate(pairs)
            if one.numel() not in (1, len(part)) or one.ndim > 2
        }
        refuse(problems | _nans(reward), str(key))
        return [_minus(one, part if one.numel() == len(part) else part.sum()) for one, part in pairs]
    batch, width = tokens.shape, tokens.columns.mask.shape[-1]
    shape = tuple(reward.shape) if isinstance(reward, Tensor) else (-1,)
    if shape[: len(batch)] == batch and math.prod(shape[len(batch) :]) == 1:
        refuse(_nans(reward.flatten()), str(key))
        return _minus(reward, tokens.row_sums(penalty))
    if shape in ((*batch, width), (*batch, width, 1)):
        real = tokens.columns.mask.to(reward.device)
        refuse(_nans(reward.reshape(real.shape).masked_fill(~real, 0)), str(key))
        return _minus(reward, tokens.dense(penalty))
    raise invalid(
        str(key),
        f"expected one reward per sequence, {list(batch)} or {[*batch, 1]}, or one per token of tokens.full, "
        f"{[*batch, width]} or {[*batch, width, 1]}; got {shape_of(reward)}",
    )


def _nans(rewards: Iterable[Tensor]) -> Problems:
    return {row: "a reward is NaN" for row, one in enumerate(rewards) if one.isnan().any()}


def _minus(reward: Tensor, penalty: Tensor) -> Tensor:
    """Return ``reward − penalty`` as a new tensor; rewards that are not floats become float32."""
    dtype = reward.dtype if reward.dtype.is_floating_point else penalty.dtype
    finer = torch.promote_types(dtype, penalty.dtype)
    return (reward.to(finer) - penalty.to(reward.device).reshape(reward.shape)).to(dtype)


# Scoring by another policy --------------------------------------------------------------------------------------------

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
        overwrite: whether log-probs may be replaced by those of another backend, model or adapter, and those of
            sampling, which cannot be computed again, by any of another provenance: those under "log_probs" or the
            policy's own key, and others that score responses and no token of a prompt.
        support_key: the `LogProbs` of the sampler. If they are truncated and carry the ids that were left, tokens are
            scored over these. None scores over the whole vocabulary. The `support_key` of the policy goes first.

    Raises:
        InvalidRequestError: `policy` is not an `LLMPolicy`, or, on a call, the tokens or masks are of another type or
            do not fit, or log-probs of another model would be replaced.
        MissingKeyError: on a call, the tokens or the masks are missing.
        ProvenanceMismatchError: on a call, the rows were sampled at different temperatures, or with penalties.
        CapabilityError, EngineError, BackendTimeoutError, BackendClosedError: on a call, from the engine.
    """

    @checks_names()
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
        checked_policy(policy)
        self.tokens_key = policy.options.keys.tokens if tokens_key is None else tokens_key
        self.masks_key = policy.options.keys.masks if masks_key is None else masks_key
        self.log_probs_key = container_of(log_probs_key)
        self._sampled_keys = {key_parts(key) for key in (Keys().log_probs, policy.options.keys.log_probs)}
        self.overwrite = flag("overwrite", overwrite)
        support_key = policy.options.support_key or support_key
        self.support_key = None if support_key is None else container_of(support_key)
        unwanted = dict.fromkeys(("return_text", "return_tokens", "return_masks", "return_history"), False)
        scorer = policy.replace(
            generate=False, input_mode="tokens", inplace=False, return_log_probs=True, support_key=None, **unwanted
        )
        # One scorer per layout, so that the scores come back in the layout of the tokens.
        self._scorers = {padded: scorer.replace(pad_output=padded) for padded in (False, True)}
        self.in_keys = [(*key_parts(self.tokens_key), "full")]
        self.out_keys = [(*key_parts(self.log_probs_key), name) for name in ("full", "scored_mask")]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        tokens, holder = find_entry(tensordict, self.tokens_key)
        if not isinstance(tokens, Tokens):
            raise invalid(str(self.tokens_key), f"expected Tokens, got {type(tokens).__name__}")
        scorer = self._scorers[tokens.padded]
        view = TensorDict({}, batch_size=tensordict.batch_size, device=tensordict.device)
        view[scorer.options.keys.tokens] = tokens
        # Rows of their own length need no masks.
        with suppress(MissingKeyError):
            view[scorer.options.keys.masks] = find_entry(tensordict, self.masks_key, first=holder)[0]
        target = next_or_root(tensordict)
        sampled, label = self._truncated(tensordict)
        if label is None:
            self._refuse_other(target, (scorer.score_provenance,) * tokens.batch_size.numel())
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

    def _refuse_other(self, target: TensorDictBase, new: Sequence[Provenance | None]) -> None:
        """Refuse to replace log-probs by those of another model, or, if they are of sampling, another provenance."""
        of_model = attrgetter("backend", "model", "adapter")
        there = target.get(self.log_probs_key, None)
        if self.overwrite or not isinstance(there, LogProbs):
            return
        sampled = key_parts(self.log_probs_key) in self._sampled_keys or _score_responses_alone(there)
        olds = provenance_of_rows(there, there.batch_size.numel())
        problems = {
            row: f"the log-probs that are there are of {_unlike(old, one)}, the new ones of {_unlike(one, old)}"
            for row, (old, one) in enumerate(zip(olds, new, strict=False))
            if old != one and (sampled or (old and one and of_model(old) != of_model(one)))
        }
        if problems:
            field = ".".join(key_parts(self.log_probs_key))
            raise InvalidRequestError(f"{field}: {spelled_out(problems)}. {_ADVICE}", field=field, problems=problems)


def _unlike(one: Provenance | None, other: Provenance | None) -> str:
    """Return the fields of a provenance in which it differs from another one."""
    if one is None:
        return "an unknown source"
    theirs = {} if other is None else other.to_dict()
    fields = {name: value for name, value in one.to_dict().items() if name not in theirs or theirs[name] != value}
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())


def _score_responses_alone(there: LogProbs) -> bool:
    """Return whether no token of a prompt is scored, as in log-probs of sampling."""
    if "full" not in there.keys():
        return "response" in there.keys()
    return {"prompt", "scored_mask"} <= set(there.keys()) and not any(
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

    @checks_names(KLComputation.__init__)
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
        sampler = gen_log_probs_key if gen_policy is None else Keys().log_probs
        self.scorings = [
            RetrieveLogProb(
                policy,
                log_probs_key=key,
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
        modules: list[Any] = [*self.scorings, self.kl]
        for module in modules:
            tensordict = module(tensordict)
        return tensordict


class KLRewardTransform(RetrieveKL):
    """Subtract coeff · KL against `ref_policy` from the reward: a `RetrieveKL` with ``add_to_reward=True``.

    It works on any TensorDict with a reward, with or without ``next``; no environment is needed. See `RetrieveKL`.
    """

    @checks_names(RetrieveKL.__init__, KLComputation.__init__)
    def __init__(
        self,
        ref_policy: LLMPolicy,
        coeff: float | KLController = 1.0,
        *,
        estimator: str | Estimator = "k1",
        **options: Any,
    ) -> None:
        super().__init__(ref_policy, estimator=estimator, coeff=coeff, **options, add_to_reward=True)
