"""TRL 1.16: `GRPORollout`, a `rollout_func` of its `GRPOTrainer` that samples from any backend.

TRL itself is not imported: the trainer brings it.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tensordict import TensorDict, TensorDictBase
from torch import nn

from corelm import Backend, History, Keys, LLMPolicy, merge_turns, ragged
from corelm.application import checked_backend
from corelm.errors import CapabilityError
from corelm.spec import SamplingParams
from corelm.validate import invalid, one_of, shown
from corelm_fleet.probes import probe_scores

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


Turns: TypeAlias = TensorDictBase | Sequence[TensorDictBase]
#: Makes the conversations of a rollout. See `GRPORollout`.
Conversation: TypeAlias = Callable[[LLMPolicy, TensorDict], Turns | tuple[Turns, Mapping[str, Sequence[Any]]]]


class GRPORollout:
    """Sample for TRL's `GRPOTrainer` from any backend, and give the backend the trained weights.

    ::

        backend = corelm.get_backend("sglang", model)
        GRPOTrainer(model, …, rollout_func=GRPORollout(backend)).train()

    Answers are sampled as the trainer's `GRPOConfig` says, and come with log-probs at its temperature. TRL compares
    these with its own, as it does with those of its own vLLM: `vllm_importance_sampling_correction`, which is on by
    default, and the other options of that name are in force, and TRL logs ``sampling/sampling_logp_difference``. TRL
    does this only where its `use_vllm` is on. So the first rollout turns it on and takes the place of TRL's vLLM in
    the trainer; TRL's loop of tool calls then samples from the backend, too.

    Before a rollout the backend is given the weights of the trainer's model, if they have changed since the last time
    (``update_weights``). Gradient accumulation and `num_iterations` cause no further updates. Nothing is handed over
    if the backend was opened with the model object that is trained. A backend with a canary is told what to expect.

    With several processes, each needs its own backend.

    Args:
        sampler: a `Backend`; or an `LLMPolicy`, to choose sampling parameters or a chat template other than those of
            `GRPOConfig`. Its temperature must be the trainer's. If it names an adapter, the trainer has to train one
            (LoRA, for example), and that alone is handed over, under this name (``load_adapter``).
        conversation: a function that makes conversations of several turns. It gets the policy and a TensorDict with
            ``history`` (``text`` for prompts that are strings), one row for each prompt. It returns what the policy
            returned for every turn, in order (see `merge_turns`), or a TensorDict in which these are merged; TRL
            trains on the sampled tokens alone. If it returns ``(turns, fields)``, each field, with a value for each
            row, is passed to the reward functions. None samples one answer.
        push_weights: "step", as above, or "never", for a backend whose weights the caller updates.

    Raises:
        InvalidRequestError: `sampler` is neither, or is a policy that scores, skips rows, returns several answers or
            has other keys.
    """

    def __init__(
        self,
        sampler: Backend | LLMPolicy,
        *,
        conversation: Conversation | None = None,
        push_weights: Literal["step", "never"] = "step",
    ) -> None:
        one_of("push_weights", push_weights, ("step", "never"))
        if isinstance(sampler, LLMPolicy):
            must_answer_prompts(sampler)
            self.backend = sampler.backend
        else:
            self.backend = checked_backend(sampler)
        self.sampler = sampler
        self._conversation = conversation
        self._pushes = push_weights == "step"
        # Whose weights the backend was given last, in which run, and when.
        self._pushed: tuple[Callable[[], Any], Callable[[], Any], Any] = (lambda: None, lambda: None, None)

    def __call__(self, prompts: Sequence[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        """Return what TRL expects of a `rollout_func`: a list with an entry for each prompt, under each key.

        ``prompt_ids``, ``completion_ids``, ``logprobs``; with a `conversation` also ``env_mask``, and its fields.

        Raises:
            InvalidRequestError: TRL could not compare the log-probs with its own (see `policy_for`), or the trainer has
                settings that a backend cannot serve (see `must_be_served`).
            CapabilityError, StaleWeightsError: as for `sync_weights`.
        """
        policy = policy_for(trainer, self.sampler)
        self._take_place(trainer)
        self.sync_weights(trainer)
        if isinstance(prompts[0], str):
            policy, td = policy.replace(input_mode="text"), TensorDict(text=list(prompts), batch_size=[len(prompts)])
        else:
            policy = policy.replace(input_mode="history")
            td = TensorDict(history=History.from_chats(prompts), batch_size=[len(prompts)])
        if self._conversation is None:
            return _rollout(policy(td))
        made = self._conversation(policy, td)
        turns, fields = made if isinstance(made, tuple) and isinstance(made[-1], Mapping) else (made, {})
        row = turns if isinstance(turns, TensorDictBase) else merge_turns(turns)
        if tuple(row.batch_size) != (len(prompts),):
            raise invalid(
                "conversation",
                f"expected a batch of {len(prompts)}, one row for each prompt, got {list(row.batch_size)}",
            )
        return {**_rollout(row), "env_mask": _sampled(row), **{name: list(values) for name, values in fields.items()}}

    def _take_place(self, trainer: GRPOTrainer) -> None:
        """Stand where TRL's own vLLM would, which makes TRL apply its importance sampling correction."""
        standing = getattr(trainer, "vllm_generation", None)
        ours = standing if isinstance(standing, _InPlaceOfVLLM) else None
        if ours is not None and ours.rollout is self:
            return
        must_be_served(trainer, has_vllm=trainer.use_vllm and ours is None, in_turns=self._conversation is not None)
        trainer.vllm_generation = _InPlaceOfVLLM(self, trainer)
        # TRL reads the limits of a vLLM in its process ("colocate"); there is none.
        trainer.vllm_mode = "server"
        trainer._last_loaded_step = trainer.state.global_step
        trainer.use_vllm = True

    def sync_weights(self, trainer: GRPOTrainer) -> None:
        """Give the backend the weights of the trainer's model, unless it has them. Every rollout begins with this.

        After ``trainer.train()``, call it for the weights of the last step.

        Raises:
            CapabilityError: the backend cannot load weights.
            StaleWeightsError: its canary found that it does not answer as the trained model does.
        """
        model: nn.Module = trainer.accelerator.unwrap_model(trainer.model)
        if not self._pushes or self.backend.runs(model):
            return
        # A step changes the weights, and so does what happens between two runs, which have a state each. No counter of
        # torch sees a fused optimizer; the counters are for checkpoints that are loaded after the last step.
        now = trainer.state.global_step, [parameter._version for parameter in model.parameters()]
        of_model, of_run, then = self._pushed
        if of_model() is model and of_run() is trainer.state and then == now:
            return
        try:
            self._hand_over(model)
        except CapabilityError as error:
            if error.capability != "update_weights":
                raise
            raise CapabilityError(
                f'{error}; to sample with the weights that it has, pass GRPORollout(…, push_weights="never")',
                capability=error.capability,
            ) from error
        self._pushed = weakref.ref(model), weakref.ref(trainer.state), now

    def _hand_over(self, model: nn.Module) -> None:
        adapter = self.sampler.options.adapter if isinstance(self.sampler, LLMPolicy) else None
        if isinstance(adapter, str):
            self.backend.load_adapter(adapter, model)
        else:
            expect = None if self.backend.engine.listener is None else probe_scores(model)
            self.backend.update_weights(model, expect=expect)


class _InPlaceOfVLLM:
    """What the trainer asks of its vLLM, answered by a backend."""

    def __init__(self, rollout: GRPORollout, trainer: GRPOTrainer) -> None:
        self.rollout = rollout
        self._trainer = weakref.ref(trainer)

    def sync_weights(self) -> None:
        """Do nothing: the rollout that follows hands over the weights."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[Any] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> tuple[Any, Any, Any, None]:
        """Return one answer for each prompt, in the form of TRL's vLLM, after tools were called.

        TRL cuts what is longer than its `max_completion_length`.
        """
        trainer = self._trainer()
        assert trainer is not None, "the trainer makes this call"
        if images is not None:
            raise invalid("images", "a rollout cannot read images; let the tools return text")
        policy = policy_for(trainer, self.rollout.sampler)
        sampling, adapter = policy.options.sampling, policy.options.adapter
        answers: dict[int, tuple[list[int], list[float]]] = {}
        with profiler or nullcontext():
            # A conversation that has nearly filled the context shortens its own answer, and not those of the others.
            for limit, rows in _rows_by_limit(prompts, sampling.max_new_tokens, policy.backend).items():
                made = policy.backend.generate(
                    [prompts[row] for row in rows],
                    replace(sampling, max_new_tokens=limit),
                    logprobs="processed",
                    adapter=adapter,
                )
                assert made.logprobs is not None, "it was asked for them"
                answers.update(zip(rows, zip(made.ids.tolist(), made.logprobs.tolist(), strict=True), strict=True))
        found = [answers[row] for row in range(len(prompts))]
        return prompts, [ids for ids, _ in found], [[[number] for number in numbers] for _, numbers in found], None


def _rows_by_limit(
    prompts: Sequence[Sequence[int]], longest: int | None, backend: Backend
) -> dict[int | None, list[int]]:
    """Return the rows whose answers may have as many tokens, by that number. A full context has room for one."""
    context = backend.capabilities.max_context
    rows: dict[int | None, list[int]] = {}
    for row, prompt in enumerate(prompts):
        limit = longest
        if longest is not None and context is not None:
            limit = max(min(longest, context - len(prompt)), 1)
        rows.setdefault(limit, []).append(row)
    return rows


def _rollout(row: TensorDictBase) -> dict[str, Any]:
    return {
        "prompt_ids": ragged(row, ("tokens", "prompt")).tolist(),
        "completion_ids": ragged(row, ("tokens", "response")).tolist(),
        "logprobs": ragged(row, ("log_probs", "response")).tolist(),
    }


def _sampled(row: TensorDictBase) -> list[list[bool]]:
    """Return for each token of the completions whether it was sampled."""
    prompts = ragged(row, ("tokens", "prompt")).lengths
    sampled = ragged(row, ("masks", "all_assistant_mask"))
    return sampled.slice(prompts, sampled.lengths).tolist()
