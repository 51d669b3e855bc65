"""`policy_for`: a policy that samples as the `GRPOConfig` of a TRL trainer says, and what is refused because TRL would
compare log-probs of different distributions.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from corelm import Backend, Keys, LLMPolicy
from corelm.spec import SamplingParams
from corelm.validate import invalid, shown

if TYPE_CHECKING:
    from trl import GRPOTrainer

#: Sampling parameters that leave the distribution as TRL computes it: the logits divided by the temperature. The others
#: that an engine is given would change it.
_LEAVE_IT = frozenset({"temperature", "stop"})
#: Other sampling parameters that are fields of `GRPOConfig`, with the values at which they do nothing.
_NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
_REPEATED = "TRL passes every prompt num_generations times"


def policy_for(trainer: GRPOTrainer, sampler: Backend | LLMPolicy) -> LLMPolicy:
    """Return a policy that reads conversations, and returns the log-probs that TRL compares with its own.

    A backend is sampled from as `GRPOConfig` says: `temperature`, `max_completion_length`, `chat_template_kwargs`, and
    `generation_kwargs`, whose names are those of `SamplingParams`. A policy keeps its own sampling parameters and chat
    template, but no answer is longer than `max_completion_length`. Prompts show the trainer's tools. Answers end where
    TRL's own would: at its EOS ids.

    Raises:
        InvalidRequestError: the config or the policy truncates, has penalties, changes the distribution in another way
            or is greedy; or the two temperatures differ; `field` is the parameter.
    """
    config = _sampling_of(trainer)
    _must_be_comparable(config, "leave it out of GRPOConfig(generation_kwargs=…)")
    if isinstance(sampler, LLMPolicy):
        policy, sampling = sampler, sampler.options.sampling
        _must_be_comparable(sampling, "leave it out of the policy's sampling_params")
        if sampling.temperature != config.temperature:
            raise invalid(
                "temperature",
                f"the policy samples at {sampling.temperature}, and TRL divides its logits by {config.temperature}; "
                f'give the policy sampling_params={{"temperature": {config.temperature}}}, or '
                f"GRPOConfig(temperature={sampling.temperature})",
            )
        lengths = [one for one in (sampling.max_new_tokens, config.max_new_tokens) if one is not None]
        sampling = dataclasses.replace(sampling, max_new_tokens=min(lengths, default=None))
    else:
        policy, sampling = LLMPolicy(sampler), config
    ends = dict.fromkeys((*sampling.stop_token_ids, *trainer.eos_token_ids)) if not sampling.ignore_eos else ()
    template, tools = policy.options.chat_template, {"tools": list(trainer.tools)} if trainer.tools else {}
    return policy.replace(
        sampling_params=dataclasses.replace(sampling, stop_token_ids=tuple(ends)),
        chat_template=_template_of(trainer) if template is None else template,
        template_kwargs={**tools, **trainer.chat_template_kwargs, **policy.options.template_kwargs},
        # At temperature 1 these are the raw ones.
        log_probs_mode="processed",
        return_log_probs=True,
        return_tokens=True,
        return_masks=True,
        return_history=None,
        pad_output=False,
        inplace=False,
    )


def must_answer_prompts(policy: LLMPolicy) -> None:
    """Refuse a policy that does not return one answer for every prompt under the default keys.

    Raises:
        InvalidRequestError: the option at fault is the `field`.
    """
    options = policy.options
    if not options.generate:
        raise invalid("generate", "the policy scores; pass one with generate=True, or its backend")
    if options.keys != Keys() or options.input_key is not None:
        raise invalid("keys", "a rollout is made under the default keys; leave out keys, log_probs_key and input_key")
    if options.num_samples is not None:
        raise invalid("num_samples", f"{_REPEATED}; leave num_samples out")
    if options.on_error != "raise":
        raise invalid("on_error", "TRL cannot train on rows that were skipped; leave on_error out")


def must_be_served(trainer: GRPOTrainer, *, has_vllm: bool, in_turns: bool) -> None:
    """Refuse settings of a trainer that a backend cannot serve in place of TRL's vLLM.

    Args:
        has_vllm: whether TRL has started its own vLLM.
        in_turns: whether the rollouts may have several turns.

    Raises:
        InvalidRequestError: the argument of the trainer or of `GRPOConfig` is the `field`.
    """
    if has_vllm:
        raise invalid("use_vllm", "TRL has started its own vLLM, which would sample nothing here; leave use_vllm out")
    if trainer.tools and in_turns:
        raise invalid("tools", "TRL calls tools after rollouts of one answer; leave out the conversation, or the tools")
    if len(trainer.environment_factories or {}) > 1:
        raise invalid("environment_factory", "with several environments, tools differ from prompt to prompt; pass one")
    if trainer.args.vllm_structured_outputs_regex is not None:
        raise invalid(
            "vllm_structured_outputs_regex",
            "only TRL's own vLLM reads it, and a grammar changes the distribution; leave it out",
        )
    mode = trainer.vllm_importance_sampling_mode
    if (
        trainer.loss_type == "vespo"
        and trainer.vllm_importance_sampling_correction
        and mode not in ("token_truncate", "token_mask")
    ):
        raise invalid(
            "vllm_importance_sampling_mode",
            f"{shown(mode)} makes one ratio for a sequence, and the loss 'vespo' needs one for each token; pass "
            'GRPOConfig(vllm_importance_sampling_mode="token_truncate")',
        )


def _sampling_of(trainer: GRPOTrainer) -> SamplingParams:
    args = trainer.args
    own = {**{name: getattr(args, name) for name in _NEUTRAL}, "temperature": args.temperature}
    own["min_p"] = own["min_p"] or 0.0
    sampling = SamplingParams.make(
        {**own, "max_new_tokens": args.max_completion_length}, **dict(args.generation_kwargs or {})
    )
    if sampling.num_samples is not None:
        raise invalid("num_samples", f"{_REPEATED}; leave it out of GRPOConfig(generation_kwargs=…)")
    return sampling


def _must_be_comparable(sampling: SamplingParams, leave_out: str) -> None:
    """Refuse everything that makes the distribution another one than TRL computes.

    Args:
        leave_out: where the parameters were given.
    """
    if sampling.greedy:
        raise invalid("temperature", "TRL divides its logits by the temperature, which must be above 0")
    for name, value in sampling.engine_parameters().items():
        if name not in _LEAVE_IT:
            is_field = name in _NEUTRAL and "GRPOConfig" in leave_out
            instead = f"pass GRPOConfig({name}={_NEUTRAL[name]})" if is_field else leave_out
            raise invalid(
                name,
                f"{shown(value)} changes the distribution that tokens are drawn from, and TRL computes its log-probs "
                f"with the temperature alone, so their ratio would have no meaning; {instead}",
            )


def _template_of(trainer: GRPOTrainer) -> str | None:
    found = trainer.chat_template or getattr(trainer.processing_class, "chat_template", None)
    return found if isinstance(found, str) else None
