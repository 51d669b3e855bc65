"""`PreparedCall`: a checked request, and how the engine's result becomes the caller's.

A call is prepared on the caller's thread. The engine may then serve it later, on another thread, or together with other
calls (`corelm.batching`): everything before and after the engine's part belongs to this call alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from corelm import validate
from corelm.backend import arguments, check_requests
from corelm.backend.check_results import checked_generation, checked_scores, every_row_was_served
from corelm.backend.continuing import Continuation, label_of_call
from corelm.backend.delivery import Delivery, Listener
from corelm.backend.engine import OpenEngine
from corelm.backend.engine_call import Call, Origin
from corelm.backend.given_weights import checked_adapter
from corelm.backend.more_ids import IdsAtPositions, SupportOfAnswers, top_of_answers
from corelm.backend.seeds import seeds_of_call
from corelm.backend.skipping import (
    OnError,
    admitted,
    no_answers,
    no_scores,
    renumbered,
    spread_answers,
    spread_scores,
)
from corelm.errors import CoreLMError
from corelm.spec.provenance import Adapter
from corelm.spec.records import GenerateRequest, GenerateResult, ScoreRequest, ScoreResult
from corelm.spec.sampling import SamplingParams
from corelm.spec.version_runs import versions_of
from corelm.tensors.modes import no_inference_mode

R = TypeVar("R", GenerateResult, ScoreResult)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedCall(Call, Generic[R]):
    """One call to an engine that has not been made yet.

    Attributes:
        engine: the engine to call.
        hook: the hook to call with `request`.
        request: the checked request.
        checked: returns a hook's result, checked and in storage of its own. It may be the result of a larger request
            that this one is part of, which is passed as well.
        finish: makes the caller's result from a checked result. Call it before the engine serves another call: it
            reads which weights are in force.
        nothing: makes the result of a call without rows; None for a call that the engine has to serve.
        caller_rows: int64: the caller's row for each row of the request.
        rows: number of rows in the engine's result.
        tokens: most tokens that the engine has to hold: those given and those that may be sampled.
        delivery: takes the tokens of the answers to a caller that reads along; None without such a caller.
        on_caller_thread: the call has to be made on its caller's own thread, where autograd's settings are.
        origin: who made the call and when; None if the engine has no wrappers, which could measure it.
    """

    engine: OpenEngine
    hook: Literal["generate", "score_logprobs"]
    request: GenerateRequest | ScoreRequest
    checked: Callable[[Any, Any], R]
    finish: Callable[[Any], R]
    nothing: Callable[[], R] | None
    caller_rows: Tensor
    rows: int
    tokens: int
    origin: Origin | None
    delivery: Delivery | None = None
    on_caller_thread: bool = False

    @property
    def origins(self) -> Sequence[Origin]:
        return () if self.origin is None else (self.origin,)

    def finished(self, result: Any) -> R:
        return self.finish(self.checked(result, self.request))

    def failed(self, error: CoreLMError) -> CoreLMError:
        return renumbered(error, self.caller_rows)

    def run(self, timeout: float | None = None, attended: Callable[[], bool] | None = None) -> R:
        """Make the call on this thread and return its result. See `OpenEngine.call`."""
        result: R = self.engine.call(self, timeout, attended)
        return result


@no_inference_mode()
def prepare_generation(
    engine: OpenEngine,
    prompts: Any,
    sampling: SamplingParams | Mapping[str, Any] | None = None,
    *,
    logprobs: Literal["none", "raw", "processed"] = "raw",
    seeds: Tensor | Sequence[int] | None = None,
    request_ids: Sequence[str] | None = None,
    timeout: float | None = None,
    on_error: OnError = "raise",
    problems: Mapping[int, str] | None = None,
    adapter: Adapter = None,
    return_support: bool = False,
    top_logprobs: int = 0,
    continue_from: GenerateResult | None = None,
    on_tokens: Listener | None = None,
    on_answer: Callable[[int, int], None] | None = None,
    new_turn: bool = False,
) -> PreparedCall[GenerateResult]:
    """Check the arguments of `Backend.generate`, which documents them and the errors.

    Args:
        on_tokens: takes the tokens of the answers as they come.
        on_answer: takes the row and the number of tokens of each answer that is complete, if the engine says so. Rows
            are those of the engine's result.
        new_turn: whether the streamed text of an answer is a message, and does not continue the text of its prompt.
    """
    engine.require_open()
    sampling = SamplingParams.make(sampling)
    prompts = arguments.rows_of_ids(prompts, "prompts", engine)
    count, capabilities = len(prompts), engine.capabilities
    check_requests.sampling_is_honoured(sampling, capabilities, engine.name)
    if sampling.stop:
        check_requests.stop_strings_can_match(sampling, engine.tokenizer)
    support = SupportOfAnswers.of(return_support, sampling, engine)
    mode = check_requests.generation_mode(logprobs, sampling, capabilities, engine.name, support.from_engine)
    adapter = None if adapter is None else _adapter(engine, adapter)
    if continue_from is not None:
        if on_tokens is not None:
            raise validate.invalid("continue_from", "answers that go on cannot be streamed yet; call generate")
        label = label_of_call(logprobs, adapter, return_support, top_logprobs)
        going = Continuation.of(engine, prompts, sampling, continue_from, seeds, label)
        return _continued(
            going,
            partial(
                prepare_generation,
                engine,
                going.prompts,
                going.sampling,
                logprobs=logprobs,
                seeds=going.seeds,
                request_ids=going.request_ids(request_ids),
                timeout=timeout,
                on_error=on_error,
                problems=going.problems(problems),
                adapter=adapter,
                return_support=return_support,
                top_logprobs=top_logprobs,
                on_answer=on_answer,
            ),
        )
    top_logprobs = 0 if top_logprobs == 0 else top_of_answers(top_logprobs, mode, engine)
    asked, samples = sampling, sampling.num_samples or 1
    seeds = seeds_of_call(engine, sampling, count, seeds)
    problems = {**check_requests.prompt_problems(prompts, capabilities, sampling), **(problems or {})}
    served = admitted(problems, count, on_error, "prompts")
    answers = served.repeat(samples)
    total = len(answers)
    names = arguments.request_ids(request_ids, count * samples)
    # A copy, as the caller may write to the rows again while the request waits.
    given = prompts.clone().split() if on_tokens is not None else []
    prompts = prompts.select(served.index) if problems else prompts.clone()
    if sampling.num_samples is not None:
        prompts = prompts.repeat(samples)
        sampling = SamplingParams.make(sampling, num_samples=None)
    delivery = None
    if on_tokens is not None:
        delivery = Delivery(
            on_tokens,
            answers.index.tolist(),
            capabilities.vocab_size,
            with_logprobs=mode != "none",
            prompt_of=lambda row: () if new_turn else given[row // samples].tolist(),
        )
    request = GenerateRequest(
        prompts=prompts,
        sampling=sampling,
        logprobs=mode,
        seeds=None if seeds is None else seeds[answers.index],
        stop_ids=frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else engine.eos_token_ids),
        request_ids=tuple([names[row] for row in answers.index.tolist()]) if problems else names,
        timeout=engine.time_limit(timeout),
        on_tokens=delivery if capabilities.streaming else None,
        on_answer=on_answer,
        adapter=adapter,
        return_support=support.from_engine,
        top_logprobs=top_logprobs,
    )

    def checked(batch: GenerateResult, whole: GenerateRequest) -> GenerateResult:
        return checked_generation(batch, whole, capabilities, engine.tokenizer, engine.fault("generate"))

    def finish(batch: GenerateResult) -> GenerateResult:
        if delivery is not None:
            delivery.compare(batch, engine.fault("generate"))
        if on_error == "raise":
            every_row_was_served(batch, samples, engine.name)
        batch = replace(
            batch,
            mode=batch.mode if logprobs == "none" else logprobs,
            logprobs=None if logprobs == "none" else batch.logprobs,
            adapter=adapter,
            sampling=asked,
        )
        batch = versions_of(batch, engine.version_with(adapter), lambda each: engine.weights.named(adapter, each))
        batch = support.added(batch)
        if problems:
            batch = spread_answers(batch, answers, samples, problems, engine.version_with(adapter))
        if delivery is not None:
            delivery.complete(batch)
        return batch

    new, room = sampling.max_new_tokens, capabilities.max_context or 0
    sampled = total * new if new is not None else int((room - prompts.lengths).clamp_min(0).sum())
    return PreparedCall(
        engine=engine,
        hook="generate",
        request=request,
        checked=checked,
        finish=finish,
        nothing=None
        if total
        else lambda: finish(no_answers(mode, sampling, support=support.from_engine, top_logprobs=top_logprobs)),
        caller_rows=answers.index // samples,
        rows=total,
        tokens=prompts.values.shape[0] + sampled,
        delivery=delivery,
        origin=Origin(total, {} if delivery is None else delivery.arrivals) if engine.wrapped else None,
    )


def _continued(
    going: Continuation, prepare: Callable[[], PreparedCall[GenerateResult]]
) -> PreparedCall[GenerateResult]:
    """Return the call that completes partial answers.

    Args:
        going: the answers.
        prepare: makes the call for what is missing of them. Its rows are those that go on.
    """
    rows = going.caller_rows
    try:
        call = prepare()
    except CoreLMError as error:
        told = renumbered(error, rows)
        if told is error:
            raise
        raise told from error
    nothing = call.nothing

    def finish(batch: GenerateResult) -> GenerateResult:
        try:
            return going.joined(call.finish(batch))
        except CoreLMError as error:
            told = renumbered(error, rows)
            if told is error:
                raise
            raise told from error

    return replace(
        call,
        finish=finish,
        nothing=None if nothing is None else lambda: going.joined(nothing()),
        caller_rows=rows[call.caller_rows],
    )


@no_inference_mode()
def prepare_scoring(
    engine: OpenEngine,
    sequences: Any,
    *,
    temperature: float = 1.0,
    score_from: Any = None,
    return_logits: bool = False,
    return_argmax: bool = False,
    grad: bool = False,
    device: torch.device | str | None = None,
    request_ids: Sequence[str] | None = None,
    timeout: float | None = None,
    on_error: OnError = "raise",
    problems: Mapping[int, str] | None = None,
    adapter: Adapter = None,
    support: Any = None,
    top_k: int = 0,
    top_ids: Any = None,
) -> PreparedCall[ScoreResult]:
    """Check the arguments of `Backend.score_logprobs`, which documents them and the errors."""
    engine.require_open()
    sequences = arguments.rows_of_ids(sequences, "sequences", engine)
    capabilities = engine.capabilities
    # At 0 the distribution is a point mass: almost every given token would have log-prob -inf.
    temperature = validate.factor("temperature", temperature)
    engine.require("score", "score_logprobs needs an engine that scores")
    if temperature != 1.0:
        engine.require("score_temperature", f"its scores ignore the temperature; leave out temperature={temperature}")
    if return_logits:
        engine.require("logits", "it returns no logits")
    if return_argmax:
        engine.require("argmax", "it does not say which ids are the most probable; leave out return_argmax=True")
    if grad:
        engine.require("gradients", "its scores carry no gradients")
    adapter = None if adapter is None else _adapter(engine, adapter)
    count = len(sequences)
    starts, lengths = arguments.starts(score_from, count), sequences.lengths.clone()
    named = IdsAtPositions.of(engine, sequences, starts, support, top_k, top_ids)
    found = check_requests.sequence_problems(sequences, capabilities)
    problems = {**named.problems, **found, **(problems or {})}
    served = admitted(problems, count, on_error, "sequences")
    rows = sequences.select(served.index) if problems else sequences.clone()
    names = arguments.request_ids(request_ids, count)
    request = ScoreRequest(
        sequences=rows,
        score_from=starts[served.index],
        temperature=temperature,
        return_logits=return_logits,
        return_argmax=return_argmax,
        grad=grad,
        device=validate.device(device),
        request_ids=tuple(names[row] for row in served.index.tolist()),
        timeout=engine.time_limit(timeout),
        adapter=adapter,
        **named.of_rows(served),
    )

    def checked(batch: ScoreResult, whole: ScoreRequest) -> ScoreResult:
        return checked_scores(batch, whole, capabilities.vocab_size, engine.fault("score_logprobs"))

    def finish(batch: ScoreResult) -> ScoreResult:
        if on_error == "raise":
            every_row_was_served(batch, 1, engine.name)
        return spread(replace(batch, weight_versions=_versions(engine, batch, len(served), adapter), adapter=adapter))

    def spread(batch: ScoreResult) -> ScoreResult:
        if not problems:
            return batch
        return spread_scores(batch, served, lengths, problems, engine.version_with(adapter))

    def nothing() -> ScoreResult:
        vocab = capabilities.vocab_size
        truncated = named.support is not None
        return spread(no_scores(temperature, vocab, argmax=return_argmax, support=truncated, top_ids=named.k))

    return PreparedCall(
        engine=engine,
        hook="score_logprobs",
        request=request,
        checked=checked,
        finish=finish,
        nothing=None if len(served) else nothing,
        caller_rows=served.index,
        rows=len(served),
        tokens=rows.values.shape[0],
        on_caller_thread=grad or return_logits,
        origin=Origin(len(served)) if engine.wrapped else None,
    )


def _adapter(engine: OpenEngine, given: Any) -> Adapter:
    """Return the adapter of a call, which only an engine with the capability `adapters` may be asked for."""
    adapter = checked_adapter(given)
    if adapter is not None:
        engine.require("adapters", f"leave out adapter={adapter!r}, or open it with adapters, as its README says")
    return adapter


def _versions(engine: OpenEngine, batch: Any, rows: int, adapter: Adapter) -> tuple[str, ...]:
    """Return the labels of the weights of each row, the adapter included."""
    if batch.weight_versions is None:
        return (engine.version_with(adapter),) * rows
    return tuple(engine.weights.named(adapter, each) for each in batch.weight_versions)
