"""TorchRL 0.14: use an `LLMPolicy` in its environments, collectors and losses, and KL modules as its transforms.

The containers have TorchRL's keys and fields and need no conversion, except conversations: `to_torchrl` and
`from_torchrl`.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from corelm import Keys, LLMPolicy, LogProbs, MaskedCategorical, Masks, PolicyOptions, Tokens
from corelm.application import carries_sets, checked_policy, find_value, list_keys
from corelm.errors import InvalidRequestError, MissingKeyError, ProvenanceMismatchError, how_to_install, spelled_out
from corelm.spec import Provenance
from corelm.tensors.ragged import as_mask
from corelm.validate import invalid

try:
    from torchrl.envs.transforms import Transform

    from corelm_interop.torchrl_history import from_torchrl, to_torchrl, with_response
except ImportError as error:
    raise ImportError(f"corelm_interop.torchrl needs TorchRL: {how_to_install('torchrl>=0.14')}") from error

__all__ = ["EnvPolicy", "LossActor", "ModuleTransform", "ReferenceActor", "from_torchrl", "to_torchrl"]


class EnvPolicy(TensorDictModuleBase):
    """An `LLMPolicy` that answers in a TorchRL environment such as `ChatEnv`, alone or in an `LLMCollector`.

    It reads ``("history", "prompt")`` or ``("text", "prompt")`` as TorchRL wrote it and adds all containers. A history
    is returned as TorchRL's, for the environment and its transforms: the prompt as it was, placeholders included, and
    the full history as the prompt followed by the response. Rows with different numbers of messages get placeholders
    before the response, so that TorchRL's tool transforms can append to all of them. Sampled turns keep their ids (see
    `to_torchrl`), so the prompt of the next turn begins with the tokens of this one, id for id. All other containers
    are returned as the policy wrote them.

    Args:
        policy: a policy that generates from a history or from text, and returns that container. Rows of different
            lengths (``pad_output=False``) can be stacked over turns; dense rows of two turns have different widths.

    Raises:
        InvalidRequestError: the policy scores, reads tokens (`ChatEnv` gives no tokens for prompts of different
            lengths), has other keys, adds a batch dimension with `num_samples`, or continues assistant turns with
            `continue_final_message`.
    """

    def __init__(self, policy: LLMPolicy) -> None:
        super().__init__()
        options = checked_policy(policy).options
        if not options.generate or options.input_mode == "tokens" or options.input_mode not in options.fields:
            raise invalid(
                "policy", "expected a policy that generates from a history or from text, and returns that container"
            )
        if options.num_samples is not None:
            raise invalid(
                "policy",
                "num_samples adds a batch dimension, which the environment lacks; repeat the prompts instead",
            )
        if options.continue_final_message:
            raise invalid(
                "policy",
                "continue_final_message=True is not supported: the environment also samples for rows that have ended, "
                "and would continue their last turns. Continue turns with the LLMPolicy itself, and leave "
                "continue_final_message out here: after an assistant turn, a new turn is sampled",
            )
        # A row of an environment that has ended keeps its last turn, and is sampled on with the others.
        self.policy = _for_torchrl(policy).replace(continue_final_message=None)
        self.in_keys, self.out_keys = self.policy.in_keys, self.policy.out_keys

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Answer the prompts, and write the containers into `tensordict`.

        Raises:
            MissingKeyError: the TensorDict lacks the prompts.
        """
        mode = self.policy.options.input_mode
        prompt = getattr(tensordict.get(mode, None), "prompt", None)
        if prompt is None:
            raise MissingKeyError(
                f"the TensorDict has no {mode + '.prompt'!r}{list_keys(tensordict, (mode, 'prompt'))}. Give ChatEnv "
                "the input_mode of the policy",
                field=f"{mode}.prompt",
            )
        given = {mode: from_torchrl(prompt) if mode == "history" else prompt}
        out = self.policy(TensorDict(given, batch_size=tensordict.batch_size, device=tensordict.device))
        for name, value in out.items():
            tensordict.set(name, with_response(prompt, value.response) if name == "history" else value)
        return tensordict


class LossActor(TensorDictModuleBase):
    """An `LLMPolicy` as the `actor_network` of TorchRL's losses, which read the policy's output unchanged.

    `GRPOLoss` and related losses ask for the distribution of ``tokens.full`` at the positions of the response
    (``masking_strategy="sft"``), of the assistant ("rlhf") or of all tokens ("generic"). Only tokens that were scored
    during sampling count, so prompts and earlier turns do not enter the ratio with a placeholder of 0.0. Tokens that
    were sampled with top-k, top-p or min-p, and ``return_support=True``, get the distribution over the ids that were
    left: log-probs, ratio and entropy are those of the truncated distribution, as in sampling. `SFTLoss`
    calls the actor and gets the log-probs of ``history.full``, one row per sample; its masks must be rows too
    (``pad_output=False``).

    Other data needs ``tokens.full``, ``masks.all_attention_mask`` and ``log_probs.full``. With "sft", the response is
    found by ``tokens.response`` if there is no ``masks.all_response_mask`` (it has to be the last columns of
    ``tokens.full``), and all of it counts if there is no ``log_probs.scored_mask``. The other strategies need their
    mask and the `scored_mask`.

    Args:
        policy: its engine must support gradients and, for `GRPOLoss`, logits. Its `log_probs_mode` must be that of
            sampling.
        model: the model object that the policy's backend was opened with, wrapped or not. A policy has no parameters,
            so it is here for ``loss.parameters()`` and ``loss.state_dict()``; the losses work without it.

    Raises:
        InvalidRequestError: the policy has other keys, or `model` is not the one that gets the gradients.
    """

    generate = False

    def __init__(self, policy: LLMPolicy, model: nn.Module | None = None) -> None:
        super().__init__()
        scorer = _for_torchrl(policy, generate=False, return_log_probs=True, return_history=None)
        if model is not None and not (isinstance(model, nn.Module) and policy.backend.runs(model)):
            raise invalid(
                "model",
                f"the {type(model).__name__} is not the one that the policy's backend scores with, which gets the "
                'gradients; open the backend with the model object: get_backend("transformers", model)',
            )
        self.model = model
        self._tokens = scorer.replace(input_mode="tokens", pad_output=True)
        self._history = scorer.replace(input_mode="history", pad_output=False)
        self.in_keys = self._tokens.in_keys
        self.out_keys = [("log_probs", "full")]

    @property
    def tokenizer(self) -> Any:
        return self._tokens.backend.tokenizer

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return ``log_probs.full`` of ``history.full``, batch ``(B,)``, with gradients if the engine supports them.

        Raises:
            InvalidRequestError: the batch does not have exactly one dimension.
        """
        if tensordict.batch_dims != 1:
            shape = tuple(tensordict.batch_size)
            raise invalid(
                "tensordict", f"SFTLoss needs a batch of one dimension, got {shape}; flatten it with view(-1)"
            )
        history = from_torchrl(tensordict.get("history").full)
        given = TensorDict({"history": history}, batch_size=tensordict.batch_size)
        rows = self._history.log_prob(given)
        stacked = lazy_stack([TensorDict({"full": row}) for row in rows])
        return TensorDict({"log_probs": LogProbs.from_tensordict(stacked)}, batch_size=tensordict.batch_size)

    def get_dist(self, tensordict: TensorDictBase, mask: str = "all_attention_mask", **_: Any) -> MaskedCategorical:
        """Return the distributions of ``tokens.full``, ``[*batch, width]``, in the columns in which losses read tokens.

        Args:
            mask: the field of `Masks` that says which positions count.

        Raises:
            CapabilityError: the engine returns no logits.
            InvalidRequestError: a mask holds something other than True, False, 1 and 0; or there is no response mask,
                and the last columns of ``tokens.full`` do not hold the response.
            MissingKeyError: tokens, masks or log-probs are missing and cannot be derived.
            ProvenanceMismatchError: the tokens were scored under a distribution other than this policy's.
        """
        scorer, given = _to_score(tensordict, self._tokens)
        full, attention = given["tokens"].full, given["masks"].all_attention_mask
        return scorer.get_dist(given, attention & _counted(tensordict, mask, full, attention))

    # GRPOLoss calls these, one for each masking strategy.

    def _get_sft_dist(self, tensordict: TensorDictBase, **_: Any) -> MaskedCategorical:
        return self.get_dist(tensordict, "all_response_mask")

    def _get_rlhf_dist(self, tensordict: TensorDictBase, **_: Any) -> MaskedCategorical:
        return self.get_dist(tensordict, "all_assistant_mask")

    def _get_generic_dist(self, tensordict: TensorDictBase, **_: Any) -> MaskedCategorical:
        return self.get_dist(tensordict)


class ReferenceActor(TensorDictModuleBase):
    """An `LLMPolicy` as the `ref_model` of TorchRL's own `KLRewardTransform`, which subtracts the KL token by token.

    That transform reads dense tensors, so the policy that samples needs ``pad_output=True``; `KLRewardTransform` of
    `corelm.kl`, in a `ModuleTransform`, reads rows as well. Where nothing was scored during sampling, in prompts and
    earlier turns, the reference's log-prob is 0.0, as the sampler's is.

    Args:
        policy: its engine scores. `log_probs_mode` and temperature must be those of sampling.

    Raises:
        InvalidRequestError: the policy has other keys.
    """

    # What the transform reads of its reference.
    generate, input_mode, pad_output, log_probs_key = False, "tokens", True, "log_probs"

    def __init__(self, policy: LLMPolicy) -> None:
        super().__init__()
        changes = {"generate": False, "return_log_probs": True, "return_history": None}
        self._tokens = _for_torchrl(policy, **changes, input_mode="tokens", pad_output=True)
        self.in_keys, self.out_keys = [("tokens", "full")], [("log_probs", "full")]

    @property
    def tokenizer(self) -> Any:
        return self._tokens.backend.tokenizer

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return a TensorDict with the reference's ``log_probs.full``, float32 ``[*batch, width]``.

        Raises:
            InvalidRequestError: the tokens are rows of different lengths.
            MissingKeyError: tokens, masks or log-probs are missing.
            ProvenanceMismatchError: the tokens were sampled from a distribution other than this policy's.
        """
        scored = as_mask(_padded(tensordict, "log_probs", "scored_mask"), "log_probs.scored_mask")
        rows = find_value(tensordict, ("tokens", "full"))
        if isinstance(rows, list) and len({row.shape[-1] for row in rows}) > 1:
            raise invalid(
                "tokens",
                "TorchRL's KLRewardTransform reads dense tensors; sample with pad_output=True, or put "
                "corelm.kl.KLRewardTransform into a ModuleTransform, which reads rows",
            )
        scorer, given = _to_score(tensordict, self._tokens)
        found = scorer.replace(log_probs_key="reference", inplace=True)(given)["reference"].full
        full = found.masked_fill(~scored, 0.0)
        return TensorDict({"log_probs": {"full": full}}, batch_size=tensordict.batch_size)


class ModuleTransform(Transform):
    """A module of `corelm.kl`, or another module that reads a TensorDict with ``next``, as a transform of TorchRL.

    In an environment it is applied to every step, with the step's results under ``next``; on a replay buffer or as the
    `postproc` of a collector, to every batch. Resets are passed through unchanged.
    """

    def __init__(self, module: TensorDictModuleBase) -> None:
        # No keys: they would need entries in the environment's specs, which containers of varying length do not have.
        super().__init__()
        if isinstance(module, type) or not callable(module):
            kind = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
            raise invalid("module", f"expected a module, such as RetrieveLogProb(policy), got {kind}")
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
    if checked_policy(policy).options.keys != Keys() or policy.options.input_key is not None:
        raise invalid("policy", "TorchRL reads the containers under their default keys, which this policy changes")
    return policy.replace(**changes, inplace=False)


def _to_score(tensordict: TensorDictBase, scorer: LLMPolicy) -> tuple[LLMPolicy, TensorDict]:
    """Return what to score, dense in the columns in which the losses read tokens, and the policy that scores it."""
    replays = _must_match(tensordict, scorer.options)
    batch = tensordict.batch_size
    tokens = Tokens(full=_padded(tensordict, "tokens", "full"), batch_size=batch)
    attention = as_mask(_padded(tensordict, "masks", "all_attention_mask"), "masks.all_attention_mask")
    if attention.shape != tokens.full.shape:
        found = f"bool{list(tokens.full.shape)}, as long as tokens.full, got {list(attention.shape)}"
        raise invalid("masks.all_attention_mask", f"expected {found}")
    masks = Masks(all_attention_mask=attention, batch_size=batch)
    given = TensorDict({"tokens": tokens, "masks": masks}, batch_size=batch)
    if not replays:
        return scorer, given
    given["log_probs"] = tensordict["log_probs"]
    return scorer.replace(support_key="log_probs"), given


def _must_match(tensordict: TensorDictBase, options: PolicyOptions) -> bool:
    """Return whether the tokens are to be scored over the ids that were left when they were sampled."""
    mode = options.log_probs_mode
    temperature = options.sampling.temperature if mode == "processed" else 1.0
    log_probs = tensordict.get("log_probs", None)
    carries = isinstance(log_probs, LogProbs) and carries_sets(log_probs)
    found = getattr(log_probs, "provenance", None) or ()
    found = found if isinstance(found, tuple) else (found,)
    for sampled in found:
        truncated = carries and sampled.support == "truncated"
        own = Provenance("", "", "", **Provenance.label_of_scores(temperature, truncated=truncated))
        if not own.matches(sampled):
            sets = ", and return_support=True for truncated sampling" if sampled.support == "truncated" else ""
            raise ProvenanceMismatchError(
                f"the log-probs are {sampled.mode}, temperature {sampled.temperature}, support {sampled.support}; "
                f"this actor's are {mode}, temperature {temperature}; their ratio has no meaning. Sample with "
                'log_probs_mode="raw", or give the actor the log_probs_mode and temperature of the sampler'
                f"{sets}"
            )
    return carries and any(sampled.support == "truncated" for sampled in found)


def _counted(tensordict: TensorDictBase, mask: str, full: Tensor, attention: Tensor) -> Tensor:
    """Return bool ``[*batch, width]``: the positions that the mask selects and that were scored during sampling."""
    response = mask == "all_response_mask"
    selected = _find_padded(tensordict, "masks", mask)
    if selected is None and response:
        selected = _response_columns(tensordict, full, attention)
    if selected is None:
        derive = ", and no tokens.response to derive it from" if response else ""
        raise _missing(f"masks.{mask}", f"{derive}; let an LLMPolicy write it, or set it: bool, as long as tokens.full")
    selected = as_mask(selected, f"masks.{mask}")
    scored = _find_padded(tensordict, "log_probs", "scored_mask")
    if scored is not None:
        return selected & as_mask(scored, "log_probs.scored_mask")
    if response:
        return selected
    raise _missing(
        "log_probs.scored_mask",
        ", so it is not known which of the log-probs were scored; set it (bool, as long as tokens.full), or pass "
        'masking_strategy="sft" to the loss, which counts the response',
    )


def _response_columns(tensordict: TensorDictBase, full: Tensor, attention: Tensor) -> Tensor | None:
    """Return bool ``[*batch, width]``: where ``tokens.full`` holds the response; None without a ``tokens.response``.

    The response has to be in the last columns of ``tokens.full``, column by column. If it is dense, its pads may be
    ids: then the attention mask alone tells them from tokens.

    Raises:
        InvalidRequestError: ``tokens.full`` is laid out in another way; `rows` are those that show it.
    """
    # A negative number is no id, so it marks the pads of rows, and those of dense data padded with -100, for example.
    answer = _find_padded(tensordict, "tokens", "response", padding_value=-1)
    if answer is None:
        return None
    width = answer.shape[-1]
    start = full.shape[-1] - width
    said, shown = answer >= 0, attention[..., max(start, 0) :]
    if start < 0:
        wrong = said.new_ones(said.shape[:-1])
    else:
        # A prompt may reach into these columns, but only before the response.
        differs = shown & torch.where(said, full[..., start:] != answer, said.cumsum(-1) > 0)
        missing = attention.any(-1) & said.any(-1) & ~(said & shown).any(-1)
        wrong = differs.any(-1) | missing
    if rows := wrong.flatten().nonzero().flatten().tolist():
        problems = dict.fromkeys(rows, f"the last {width} columns of tokens.full do not hold the response")
        raise InvalidRequestError(
            f"tokens.response: {spelled_out(problems)}; set masks.all_response_mask: bool, as long as tokens.full",
            field="masks.all_response_mask",
            problems=problems,
        )
    selected = torch.zeros_like(attention)
    selected[..., start:] = said
    return selected


def _padded(tensordict: TensorDictBase, container: str, field: str) -> Tensor:
    """Return a field as a dense tensor; rows are padded on the left, as the losses pad the tokens."""
    found = _find_padded(tensordict, container, field)
    if found is None:
        raise _missing(f"{container}.{field}", "; run the LLMPolicy on it first")
    return found


def _find_padded(tensordict: TensorDictBase, container: str, field: str, *, padding_value: int = 0) -> Tensor | None:
    key = (container, field)
    found = tensordict.get(key, None, as_padded_tensor=True, padding_side="left", padding_value=padding_value)
    return found if isinstance(found, Tensor) else None


def _missing(field: str, what: str) -> MissingKeyError:
    return MissingKeyError(f"the TensorDict has no {field}{what}", field=field)
