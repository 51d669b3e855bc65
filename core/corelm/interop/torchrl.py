"""TorchRL: an `LLMPolicy` in its environments, collectors and losses, our modules as its transforms, conversations both
ways. Written for TorchRL 0.14.

The containers need no conversion: their keys and fields are TorchRL's. What does is said where it is done.
"""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from corelm.containers.classes import LogProbs, Masks, Tokens
from corelm.errors import MissingKeyError, ProvenanceMismatchError
from corelm.policy.inputs import Keys
from corelm.policy.policy import LLMPolicy
from corelm.spec.provenance import Provenance
from corelm.tensors.categorical import MaskedCategorical
from corelm.validate import invalid

try:
    from torchrl.envs.transforms import Transform

    from corelm.interop.torchrl_history import from_torchrl, to_torchrl
except ImportError as error:
    raise ImportError(
        'corelm.interop.torchrl needs TorchRL, which core does not bring: pip install "torchrl>=0.14,<0.15"'
    ) from error

__all__ = ["EnvPolicy", "LossActor", "ModuleTransform", "from_torchrl", "to_torchrl"]


class EnvPolicy(TensorDictModuleBase):
    """An `LLMPolicy` that answers in a TorchRL environment: `ChatEnv` and its kin, alone or in an `LLMCollector`.

    It reads ``("history", "prompt")`` or ``("text", "prompt")`` as TorchRL wrote it and puts all containers beside it.
    A history comes back as TorchRL's, for the environment and its transforms; sampled turns keep their ids in there
    (see `to_torchrl`), so the next turn's prompt begins with the tokens of this one, id for id. Everything else is as
    the policy made it.

    Args:
        policy: generates from a history or from text, and writes that container. Rows of their own length
            (``pad_output=False``) stack over turns; dense ones of two turns have two widths.

    Raises:
        InvalidRequestError: a policy that scores, that has other keys, whose answers add a batch dimension, or that
            reads tokens (`ChatEnv` makes none of prompts that differ in length).
    """

    def __init__(self, policy: LLMPolicy) -> None:
        super().__init__()
        if (
            not policy.options.generate
            or policy.options.input_mode == "tokens"
            or policy.options.input_mode not in policy.options.fields
        ):
            raise invalid("policy", "expected one that generates from a history or from text, and returns it")
        if policy.options.num_samples is not None:
            raise invalid(
                "policy", "num_samples adds a dimension that the environment lacks; repeat its prompts instead"
            )
        self.policy = _for_torchrl(policy)
        self.in_keys, self.out_keys = self.policy.in_keys, self.policy.out_keys

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        mode = self.policy.options.input_mode
        prompt = tensordict.get(mode).prompt
        given = {mode: from_torchrl(prompt) if mode == "history" else prompt}
        out = self.policy(TensorDict(given, batch_size=tensordict.batch_size, device=tensordict.device))
        for name, value in out.items():
            tensordict.set(name, to_torchrl(value) if name == "history" else value)
        return tensordict


class LossActor(TensorDictModuleBase):
    """An `LLMPolicy` as the `actor_network` of TorchRL's losses, which take what the policy wrote as it is.

    `GRPOLoss` and its kin ask for the distribution of ``tokens.full`` at the response's positions
    (``masking_strategy="sft"``), the assistant's ("rlhf") or all of them ("generic"). Only tokens that were scored when
    they were sampled count, so neither prompts nor earlier turns enter the ratio with a made-up 0.0. `SFTLoss` calls
    it, and gets the log-probs of ``history.full``, a row a sample; its masks must be rows too (``pad_output=False``).

    Args:
        policy: its engine must have gradients and, for `GRPOLoss`, logits. `log_probs_mode` must be that of the
            log-probs that were sampled.
        model: the module that is trained, for ``loss.parameters()`` to find its parameters; the losses do without.

    Raises:
        InvalidRequestError: a policy with other keys.
    """

    generate = False

    def __init__(self, policy: LLMPolicy, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = model
        scorer = _for_torchrl(policy, generate=False, return_log_probs=True, return_history=None)
        self._tokens = scorer.replace(input_mode="tokens", pad_output=True)
        self._history = scorer.replace(input_mode="history", pad_output=False)
        self.in_keys = self._tokens.in_keys
        self.out_keys = [("log_probs", "full")]

    @property
    def tokenizer(self) -> Any:
        return self._tokens.backend.tokenizer

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """``log_probs.full`` of ``history.full``, batch ``(B,)``, with gradients where the engine has them.

        Raises:
            InvalidRequestError: a batch of another number of dimensions.
        """
        if tensordict.batch_dims != 1:
            shape = tuple(tensordict.batch_size)
            raise invalid(
                "tensordict", f"SFTLoss takes a batch of one dimension, not {shape}; flatten it with view(-1)"
            )
        history = from_torchrl(tensordict.get("history").full)
        given = TensorDict({"history": history}, batch_size=tensordict.batch_size)
        rows = self._history.log_prob(given)
        stacked = lazy_stack([TensorDict({"full": row}) for row in rows])
        return TensorDict({"log_probs": LogProbs.from_tensordict(stacked)}, batch_size=tensordict.batch_size)

    def get_dist(self, tensordict: TensorDictBase, mask: str = "all_attention_mask", **_: Any) -> MaskedCategorical:
        """The distributions of ``tokens.full``, ``[*batch, width]``, in the columns that the losses read tokens in.

        Args:
            mask: the field of `Masks` that says which positions count.

        Raises:
            CapabilityError: the engine returns no logits.
            MissingKeyError: the policy's tokens, masks or log-probs are not there.
            ProvenanceMismatchError: the tokens were scored under another distribution than this policy's.
        """
        self._must_match(tensordict)
        batch = tensordict.batch_size
        tokens = Tokens(full=_padded(tensordict, "tokens", "full"), batch_size=batch)
        attention = Masks(all_attention_mask=_padded(tensordict, "masks", "all_attention_mask"), batch_size=batch)
        counts = _padded(tensordict, "masks", mask) & _padded(tensordict, "log_probs", "scored_mask")
        return self._tokens.get_dist(TensorDict({"tokens": tokens, "masks": attention}, batch_size=batch), counts)

    # The names that GRPOLoss looks for, one for each masking strategy.

    def _get_sft_dist(self, tensordict: TensorDictBase, **_: Any) -> MaskedCategorical:
        return self.get_dist(tensordict, "all_response_mask")

    def _get_rlhf_dist(self, tensordict: TensorDictBase, **_: Any) -> MaskedCategorical:
        return self.get_dist(tensordict, "all_assistant_mask")

    def _get_generic_dist(self, tensordict: TensorDictBase, **_: Any) -> MaskedCategorical:
        return self.get_dist(tensordict)

    def _must_match(self, tensordict: TensorDictBase) -> None:
        mode = self._tokens.options.log_probs_mode
        temperature = self._tokens.options.sampling.temperature if mode == "processed" else 1.0
        own = Provenance("", "", "", mode, temperature)
        found = getattr(tensordict.get("log_probs", None), "provenance", None) or ()
        for sampled in found if isinstance(found, tuple) else (found,):
            if not own.matches(sampled):
                raise ProvenanceMismatchError(
                    f"the log-probs are {sampled.mode}, temperature {sampled.temperature}, support {sampled.support}; "
                    f"this actor's are {mode}, temperature {temperature}, and their ratio means nothing. Sample with "
                    'log_probs_mode="raw", or give the actor the log_probs_mode and temperature of the sampler'
                )


class ModuleTransform(Transform):
    """A module of `corelm.kl` (or another that works on a TensorDict with a ``next``) as a transform of TorchRL.

    In an environment it acts on every step, with the step's results under ``next``; on a replay buffer or as a
    collector's `postproc`, on what comes by. Resets pass it.
    """

    def __init__(self, module: TensorDictModuleBase) -> None:
        # Keys would have to be declared to the environment's specs, and containers of varying length have none.
        super().__init__()
        self.module = module

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        result: TensorDictBase = self.module(tensordict)
        return result

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        result: TensorDictBase = self.module(tensordict.copy().set("next", next_tensordict)).get("next")
        return result

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return tensordict_reset


def _for_torchrl(policy: LLMPolicy, **changes: Any) -> LLMPolicy:
    if policy.options.keys != Keys():
        raise invalid("policy", "TorchRL reads the containers under their usual keys, and this policy has others")
    return policy.replace(**changes, inplace=False)


def _padded(tensordict: TensorDictBase, container: str, field: str) -> Tensor:
    """A field of rows, dense: as it is, or padded left, which is what the losses do to the tokens."""
    found = tensordict.get((container, field), None, as_padded_tensor=True, padding_side="left", padding_value=0)
    if not isinstance(found, Tensor):
        raise MissingKeyError(f"there is no {container}.{field}, which LLMPolicy writes", field=f"{container}.{field}")
    return found
