"""What a caller asks for, made ready for the engine: a checked request, and what turns the answer into the result.

With the two halves apart, the engine's part can run at another time, on another thread, or together with other
requests (`corelm.batching`); everything before and after it belongs to the request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from corelm import validate
from corelm.backend import arguments, check_requests, check_results
from corelm.backend.hooks import EngineHooks
from corelm.backend.skipping import OnError, admitted, no_answers, no_scores, spread_answers, spread_scores
from corelm.spec.records import GenerateRequest, GenerateResult, ScoreRequest, ScoreResult
from corelm.spec.sampling import SamplingParams
from corelm.tensors.modes import no_inference_mode

if TYPE_CHECKING:
    from corelm.backend.backend import Backend

B = TypeVar("B", GenerateResult, ScoreResult)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedCall(Generic[B]):
    """One call to an engine, not yet made.

    Attributes:
        hook: the hook to call with `request`.
        check: holds the engine's answer against a request, this one or one that it is part of.
        finish: makes the caller's result of an answer that was checked. To be called while the engine is still this
            call's: it says which weights are in force.
        nothing: the result where no row is left to ask the engine about.
        rows: how many rows the engine's answer has.
        tokens: how many tokens the engine has to hold at most: what is given and what may be sampled.
    """

    hook: Literal["generate", "score_logprobs"]
    request: GenerateRequest | ScoreRequest
    check: Callable[[B, Any], None]
    finish: Callable[[B], B]
    nothing: Callable[[], B]
    rows: int
    tokens: int

    def run(self, hooks: EngineHooks, timeout: float | None = None) -> B:
        """Ask the engine, on this thread. `timeout` wins over the request's own."""
        if not self.rows:
            with no_inference_mode():
                return self.nothing()
        request = self.request if timeout is None else replace(self.request, timeout=timeout)
        result: B = hooks.call(self.hook, request, self.checked)
        return result

    def checked(self, batch: B) -> B:
        self.check(batch, self.request)
        return self.finish(batch)


@no_inference_mode()
def prepare_generation(
    backend: Backend,
    prompts: Any,
    sampling: SamplingParams | Mapping[str, Any] | None = None,
    *,
    logprobs: Literal["none", "raw", "processed"] = "raw",
    seeds: Tensor | Sequence[int] | None = None,
    request_ids: Sequence[str] | None = None,
    timeout: float | None = None,
    on_error: OnError = "raise",
    problems: Mapping[int, str] | None = None,
) -> PreparedCall[GenerateResult]:
    """Arguments and errors are those of `Backend.generate`."""
    hooks = backend._hooks
    hooks.require_open()
    sampling = SamplingParams.make(sampling)
    prompts = arguments.rows_of_ids(prompts, "prompts")
    capabilities = backend.capabilities
    check_requests.sampling_is_honoured(sampling, capabilities, backend.name)
    backend._stops_can_match(sampling)
    mode = check_requests.generation_mode(logprobs, sampling, capabilities, backend.name)
    samples = sampling.num_samples or 1
    seeds = backend._seeds(sampling, len(prompts), seeds)
    problems = {**check_requests.prompt_problems(prompts, capabilities, sampling), **(problems or {})}
    good = admitted(problems, len(prompts), on_error, "prompts")
    answers = (good[:, None] * samples + torch.arange(samples)).flatten() if samples > 1 else good
    # A copy, as the caller may write to the rows again while the request waits.
    names = arguments.request_ids(request_ids, len(prompts) * (1 if capabilities.native_samples else samples))
    prompts = prompts.select(good) if problems else prompts.clone()
    if not capabilities.native_samples and sampling.num_samples is not None:
        prompts = prompts.repeat(samples)
        sampling = SamplingParams.make(sampling, num_samples=None)
    request = GenerateRequest(
        prompts=prompts,
        sampling=sampling,
        logprobs=mode,
        seeds=None if seeds is None else seeds[answers],
        stop_ids=frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else backend.eos_token_ids),
        request_ids=tuple(names[row] for row in (good if capabilities.native_samples else answers).tolist()),
        timeout=backend._limit(timeout),
    )

    def check(batch: GenerateResult, asked: GenerateRequest) -> None:
        rows = len(asked.prompts) * (asked.sampling.num_samples or 1)
        check_results.check_generation(batch, asked, rows, capabilities.vocab_size, hooks.fault("generate"))

    def finish(batch: GenerateResult) -> GenerateResult:
        if on_error == "raise":
            check_results.every_row_was_served(batch, samples, backend.name)
        batch = replace(
            batch,
            mode=batch.mode if logprobs == "none" else logprobs,
            logprobs=None if logprobs == "none" else batch.logprobs,
            weight_versions=batch.weight_versions or (backend.weight_version,) * len(answers),
        )
        return spread_answers(batch, answers, samples, problems, backend.weight_version) if problems else batch

    new, room = sampling.max_new_tokens, capabilities.max_context or 0
    sampled = len(answers) * new if new is not None else int((room - prompts.lengths).clamp_min(0).sum())
    return PreparedCall(
        hook="generate",
        request=request,
        check=check,
        finish=finish,
        nothing=lambda: finish(no_answers(mode, sampling)),
        rows=len(answers),
        tokens=prompts.values.shape[0] + sampled,
    )


@no_inference_mode()
def prepare_scoring(
    backend: Backend,
    sequences: Any,
    *,
    temperature: float = 1.0,
    score_from: Any = None,
    return_logits: bool = False,
    grad: bool = False,
    device: torch.device | str | None = None,
    request_ids: Sequence[str] | None = None,
    timeout: float | None = None,
    on_error: OnError = "raise",
    problems: Mapping[int, str] | None = None,
) -> PreparedCall[ScoreResult]:
    """Arguments and errors are those of `Backend.score_logprobs`."""
    hooks = backend._hooks
    hooks.require_open()
    sequences = arguments.rows_of_ids(sequences, "sequences")
    capabilities = backend.capabilities
    # At 0 the distribution is a point mass: almost every given token would have log-prob -inf.
    temperature = validate.positive(temperature, "temperature")
    backend._needs("score", "score_logprobs works on engines that score")
    if temperature != 1.0:
        backend._needs("score_temperature", f"its scores ignore the temperature, so {temperature} is refused")
    if return_logits:
        backend._needs("logits", "it returns no logits")
    if grad:
        backend._needs("gradients", "its scores carry no gradients")
    starts, lengths = arguments.starts(score_from, len(sequences)), sequences.lengths.clone()
    found = check_requests.sequence_problems(sequences, capabilities, may_be_empty=False)
    problems = {**found, **(problems or {})}
    good = admitted(problems, len(sequences), on_error, "sequences")
    served = sequences.select(good) if problems else sequences.clone()
    names = arguments.request_ids(request_ids, len(sequences))
    request = ScoreRequest(
        sequences=served,
        score_from=starts[good],
        temperature=temperature,
        return_logits=return_logits,
        grad=grad,
        device=validate.device(device),
        request_ids=tuple(names[row] for row in good.tolist()),
        timeout=backend._limit(timeout),
    )

    def check(batch: ScoreResult, asked: ScoreRequest) -> None:
        check_results.check_scores(batch, asked, capabilities.vocab_size, hooks.fault("score_logprobs"))

    def finish(batch: ScoreResult) -> ScoreResult:
        if on_error == "raise":
            check_results.every_row_was_served(batch, 1, backend.name)
        return spread(replace(batch, weight_versions=batch.weight_versions or (backend.weight_version,) * len(good)))

    def spread(batch: ScoreResult) -> ScoreResult:
        if not problems:
            return batch
        return spread_scores(batch, lengths, good, problems, backend.weight_version)

    return PreparedCall(
        hook="score_logprobs",
        request=request,
        check=check,
        finish=finish,
        nothing=lambda: spread(no_scores(temperature, capabilities.vocab_size)),
        rows=len(good),
        tokens=served.values.shape[0],
    )
