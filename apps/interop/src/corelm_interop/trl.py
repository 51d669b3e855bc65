"""TRL 1.16: `GRPORollout`, a `rollout_func` of its `GRPOTrainer` that samples from any backend.

TRL itself is not imported: the trainer brings it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tensordict import TensorDict, TensorDictBase
from torch import nn

from corelm import Backend, History, LLMPolicy, merge_turns, ragged
from corelm.application import checked_backend
from corelm.errors import CapabilityError
from corelm.validate import invalid, one_of
from corelm_fleet.probes import probe_scores
from corelm_interop.trl_config import must_answer_prompts, must_be_served, policy_for

if TYPE_CHECKING:
    from trl import GRPOTrainer

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
