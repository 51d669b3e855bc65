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
from corelm.backend.check_results import refuse_failed
from corelm.backend.continuing import prepare_continuation
from corelm.backend.delivery import Delivery, Listener
from corelm.backend.engine import OpenEngine
from corelm.backend.engine_call import Call, Origin
from corelm.backend.given_weights import checked_adapter
from corelm.backend.more_ids import ids_at_positions, support_comes_from_engine, top_of_answers, with_known_support
from corelm.backend.skipping import (
    OnError,
    admitted,
    renumbered,
    spread_answers,
    spread_scores,
)
from corelm.errors import CoreLMError, Problems
from corelm.spec.provenance import Adapter
from corelm.spec.records import GenerateRequest, GenerateResult, ScoreRequest, ScoreResult
from corelm.spec.row_results import generate_result, score_result
from corelm.spec.sampling import SamplingParams
from corelm.spec.version_runs import renamed, with_runs

R = TypeVar("R", GenerateResult, ScoreResult)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedCall(Call, Generic[R]):
    """One call to an engine that has not been made yet.

    Attributes:
        engine: the engine to call.
        hook: the hook to call with `request`.
        request: the checked request.
        finish: makes the caller's result from a checked result. Call it before the engine serves another call: it
            reads which weights are in force.
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
    finish: Callable[[Any], R]  # type: ignore[assignment]
    caller_rows: Tensor
    rows: int
    tokens: int
    origin: Origin | None
    delivery: Delivery | None = None
    on_caller_thread: bool = False

    @property
    def origins(self) -> Sequence[Origin]:
        return () if self.origin is None else (self.origin,)

    def nothing(self) -> R:
        if isinstance(self.request, GenerateRequest):
            return self.finish(generate_result(self.request, []))
        none = score_result(self.request, {})
        if self.request.return_logits:
            logits = torch.zeros(0, self.engine.capabilities.vocab_size)
            none = replace(none, logits=none.logprobs.with_values(logits))
        return self.finish(none)

    def failed(self, error: CoreLMError) -> CoreLMError:
        return renumbered(error, self.caller_rows)

    def run(self, timeout: float | None = None, attended: Callable[[], bool] | None = None) -> R:
        """Make the call on this thread and return its result. See `OpenEngine.call`."""
        result: R = self.engine.call(self, timeout, attended)
        return result


@torch.inference_mode(False)
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
    read: bool = False,
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
        problems: rows that are known to be bad, and why.
        read: whether the rows are int64 already, as a policy reads them; the engine is given a copy.
        on_tokens: takes the tokens of the answers as they come.
        on_answer: takes the row and the number of tokens of each answer that is complete, if the engine says so. Rows
            are those of the engine's result.
        new_turn: whether the streamed text of an answer is a message, and does not continue the text of its prompt.
    """
    engine.require_open()
    capabilities, sampling = engine.capabilities, SamplingParams.make(sampling)
    rows = prompts.clone() if read else arguments.rows_of_ids(prompts, "prompts", engine, copy=True)
    check_requests.sampling_is_honoured(sampling, engine)
    support_from_engine = return_support is not False and support_comes_from_engine(return_support, sampling, engine)
    mode = check_requests.generation_mode(logprobs, sampling, capabilities, engine.name, support_from_engine)
    if adapter is not None:
        adapter = _adapter(engine, adapter)
    if continue_from is not None:
        if on_tokens is not None:
            raise validate.invalid("continue_from", "answers that go on cannot be streamed yet; call generate")
        return prepare_continuation(
            prepare_generation,
            engine,
            rows,
            sampling,
            continue_from,
            seeds=seeds,
            request_ids=request_ids,
            problems=problems or {},
            label={
                **{"logprobs": logprobs, "adapter": adapter},
                **{"return_support": return_support, "top_logprobs": top_logprobs},
            },
            timeout=timeout,
            on_error=on_error,
            on_answer=on_answer,
        )
    top_logprobs = 0 if top_logprobs == 0 else top_of_answers(top_logprobs, mode, engine)
    asked, count, samples = sampling, rows.lengths.shape[0], sampling.num_samples or 1
    problems = {**check_requests.row_problems(rows, capabilities, sampling), **(problems or {})}
    served = admitted(problems, count, on_error, "prompts")
    answers = served if samples == 1 else served.repeat(samples)
    names = arguments.request_ids(request_ids, count * samples)
    seeds = arguments.seeds_of_call(engine, sampling, count, seeds)
    delivery = None
    if on_tokens is not None:
        before = [] if new_turn else rows.split()
        delivery = Delivery(on_tokens, answers.index.tolist(), capabilities.vocab_size, mode != "none", before, samples)
    if problems:
        rows, names = rows.select(served.index), tuple([names[row] for row in answers.index.tolist()])
        seeds = None if seeds is None else seeds[answers.index]
    if sampling.num_samples is not None:
        rows, sampling = rows.repeat(samples), SamplingParams.make(sampling, num_samples=None)
    request = GenerateRequest(
        prompts=rows,
        sampling=sampling,
        logprobs=mode,
        seeds=seeds,
        stop_ids=frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else engine.eos_token_ids),
        request_ids=names,
        timeout=engine.timeout if timeout is None else validate.seconds("timeout", timeout),
        on_tokens=delivery if capabilities.streaming else None,
        on_answer=on_answer,
        adapter=adapter,
        return_support=support_from_engine,
        top_logprobs=top_logprobs,
    )

    def finish(batch: GenerateResult) -> GenerateResult:
        if delivery is not None:
            delivery.compare(batch, engine.fault("generate"))
        if on_error == "raise" and "error" in batch.finish_reasons:
            refuse_failed(batch, samples, engine.name)
        batch = replace(
            batch,
            mode=batch.mode if logprobs == "none" else logprobs,
            logprobs=None if logprobs == "none" else batch.logprobs,
            adapter=adapter,
            sampling=asked,
            weight_versions=_versions(engine, batch, len(request.request_ids), adapter),
        )
        if batch.version_runs is not None:
            name = partial(engine.weights.named, adapter)
            batch = with_runs(batch, [renamed(runs, name) for runs in batch.version_runs])
        if return_support and not support_from_engine:
            batch = with_known_support(batch, greedy=sampling.greedy)
        if problems:
            batch = spread_answers(batch, answers, samples, problems, engine.version_with(adapter))
        if delivery is not None:
            delivery.complete(batch)
        return batch

    total, given, new = len(names), rows.values.shape[0], sampling.max_new_tokens
    # Without a limit an answer may fill the context.
    most = (capabilities.max_context or 0) * total if new is None else given + new * total
    return PreparedCall(
        engine=engine,
        hook="generate",
        request=request,
        finish=finish,
        caller_rows=answers.index // samples,
        rows=total,
        tokens=max(given, most),
        delivery=delivery,
        origin=Origin(total, {} if delivery is None else delivery.arrivals) if engine.wrapped else None,
    )


@torch.inference_mode(False)
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
    read: bool = False,
    adapter: Adapter = None,
    support: Any = None,
    top_k: int = 0,
    top_ids: Any = None,
) -> PreparedCall[ScoreResult]:
    """Check the arguments of `Backend.score_logprobs`, which documents them and the errors.

    Args:
        problems: rows that are known to be bad, and why.
        read: whether the rows are int64 already, as a policy reads them; the engine is given a copy.
    """
    engine.require_open()
    capabilities = engine.capabilities
    rows = sequences.clone() if read else arguments.rows_of_ids(sequences, "sequences", engine, copy=True)
    engine.require("score", "score_logprobs needs an engine that scores")
    if type(temperature) is not float or temperature != 1.0:
        # At 0 the distribution is a point mass: almost every given token would have log-prob -inf.
        temperature = validate.factor("temperature", temperature)
    if temperature != 1.0:
        engine.require("score_temperature", f"its scores ignore the temperature; leave out temperature={temperature}")
    if return_logits:
        engine.require("logits", "it returns no logits")
    if return_argmax:
        engine.require("argmax", "it does not say which ids are the most probable; leave out return_argmax=True")
    if grad:
        engine.require("gradients", "its scores carry no gradients")
    if adapter is not None:
        adapter = _adapter(engine, adapter)
    lengths, count = rows.lengths, rows.lengths.shape[0]
    starts = arguments.starts(score_from, count)
    named: dict[str, Any] = {}
    wrong: Problems = {}
    if support is not None or top_ids is not None or type(top_k) is not int or top_k:
        named, wrong = ids_at_positions(engine, rows, starts, support, top_k, top_ids)
    problems = {**wrong, **check_requests.row_problems(rows, capabilities), **(problems or {})}
    served = admitted(problems, count, on_error, "sequences")
    names = arguments.request_ids(request_ids, count)
    if problems:
        rows, starts = rows.select(served.index), starts[served.index]
        names = tuple([names[row] for row in served.index.tolist()])
        named = {name: ids if isinstance(ids, int) else ids.select(served.index) for name, ids in named.items()}
    request = ScoreRequest(
        sequences=rows,
        score_from=starts,
        temperature=temperature,
        return_logits=return_logits,
        return_argmax=return_argmax,
        grad=grad,
        device=None if device is None else validate.device(device),
        request_ids=names,
        timeout=engine.timeout if timeout is None else validate.seconds("timeout", timeout),
        adapter=adapter,
        **named,
    )

    def finish(batch: ScoreResult) -> ScoreResult:
        if on_error == "raise" and batch.errors is not None:
            refuse_failed(batch, 1, engine.name)
        batch = replace(batch, weight_versions=_versions(engine, batch, len(names), adapter), adapter=adapter)
        if problems:
            batch = spread_scores(batch, served, lengths, problems, engine.version_with(adapter))
        return batch

    return PreparedCall(
        engine=engine,
        hook="score_logprobs",
        request=request,
        finish=finish,
        caller_rows=served.index,
        rows=len(names),
        tokens=rows.values.shape[0],
        on_caller_thread=grad or return_logits,
        origin=Origin(len(names)) if engine.wrapped else None,
    )


def _adapter(engine: OpenEngine, given: Any) -> Adapter:
    """Return the adapter of a call, which only an engine with the capability `adapters` may be asked for."""
    adapter = checked_adapter(given)
    engine.require("adapters", f"leave out adapter={adapter!r}, or open it with adapters, as its README says")
    return adapter


def _versions(engine: OpenEngine, batch: GenerateResult | ScoreResult, rows: int, adapter: Adapter) -> tuple[str, ...]:
    """Return the labels of the weights of each row, the adapter included."""
    if batch.weight_versions is None:
        return (engine.weights.version_with(adapter),) * rows
    return tuple([engine.weights.named(adapter, version) for version in batch.weight_versions])
