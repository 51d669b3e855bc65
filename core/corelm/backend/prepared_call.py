"""`prepare_generation` and `prepare_scoring`: from a caller's arguments to a call that is ready to be made.

A call is prepared on the caller's thread. The engine may then serve it later, on another thread, or together with other
calls (`corelm.batching`): everything before and after the engine's part belongs to this call alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from corelm import validate
from corelm.backend import arguments
from corelm.backend.check_results import refuse_failed, set_problems
from corelm.backend.engine import OpenEngine, PreparedCall
from corelm.backend.engine_call import Delivery, Listener, Origin
from corelm.backend.given_weights import checked_adapter
from corelm.backend.skipping import OnError, ServedRows, admitted, renumbering, spread_answers, spread_scores
from corelm.errors import Problems, ProvenanceMismatchError, refuse
from corelm.spec.answer_text import StopStrings
from corelm.spec.provenance import Adapter, Provenance, VersionRuns
from corelm.spec.records import GenerateRequest, GenerateResult, ScoreRequest, ScoreResult, fields_of_rows
from corelm.spec.sampling import SamplingParams
from corelm.spec.version_runs import backward, renamed, run_problems, with_runs
from corelm.tensors.ragged import Ragged
from corelm.tensors.token_sets import TokenSets
from corelm.validate import invalid


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
        on_answer: takes the row and the number of tokens of each answer that is complete, if the engine says
            so. Rows are those of the engine's result.
        new_turn: whether the streamed text of an answer is a message, and does not continue the text of its prompt.
    """
    engine.require_open()
    capabilities, sampling = engine.capabilities, SamplingParams.make(sampling)
    rows = prompts.clone() if read else arguments.rows_of_ids(prompts, "prompts", engine, copy=True)
    arguments.sampling_is_honoured(sampling, engine)
    support_from_engine = return_support is not False and arguments.support_comes_from_engine(
        return_support, sampling, engine
    )
    mode = arguments.generation_mode(logprobs, sampling, capabilities, engine.name, support_from_engine)
    if adapter is not None:
        adapter = _adapter(engine, adapter)
    if continue_from is not None:
        if on_tokens is not None:
            raise invalid("continue_from", "answers that go on cannot be streamed yet; call generate")
        return _prepare_continuation(
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
    top_logprobs = 0 if top_logprobs == 0 else arguments.top_of_answers(top_logprobs, mode, engine)
    asked, count, samples = sampling, rows.lengths.shape[0], sampling.num_samples or 1
    problems = {**arguments.row_problems(rows, capabilities, sampling), **(problems or {})}
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
            batch = arguments.with_known_support(batch, greedy=sampling.greedy)
        if problems:
            batch = spread_answers(batch, answers, samples, problems, engine.weights.version_with(adapter))
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
        named, wrong = arguments.ids_at_positions(engine, rows, starts, support, top_k, top_ids)
    problems = {**wrong, **arguments.row_problems(rows, capabilities), **(problems or {})}
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
            batch = spread_scores(batch, served, lengths, problems, engine.weights.version_with(adapter))
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


# Answers that go on ---------------------------------------------------------------------------------------------------

# Their ids are kept, never tokenized again. The engine is asked with each prompt and the ids that its answer has.
# It has one limit for all rows, so a row that needs fewer tokens than another may get too many: these are cut off here.
# So is what follows a stop string that begins in the old part and ends in the new one, which the engine cannot see.

#: Fields that a result has together or not at all.
_TOGETHER = (("kept_ids", "kept_log_mass"), ("top_ids", "top_logprobs", "tail_log_mass"))


def _prepare_continuation(
    engine: OpenEngine,
    prompts: Ragged,
    sampling: SamplingParams,
    old: Any,
    *,
    seeds: Any,
    request_ids: Any,
    problems: Mapping[int, str],
    label: Mapping[str, Any],
    **options: Any,
) -> PreparedCall[GenerateResult]:
    """Return a call for the answers that go on, whose result is all answers, whole.

    Args:
        old: the argument `continue_from`.
        label: the arguments that `_must_agree` takes.
        options: the other arguments of `prepare_generation`, which apply to the answers that go on as they are.

    Raises:
        InvalidRequestError: `old` is no result of these prompts, or cannot be continued like this.
        ProvenanceMismatchError: its log-probs are of another distribution than those that would follow.
    """
    samples, limit = sampling.num_samples or 1, sampling.max_new_tokens
    rows = len(prompts) * samples
    if not isinstance(old, GenerateResult):
        raise invalid("continue_from", f"expected a GenerateResult, got a {type(old).__name__}")
    if len(old.ids) != rows:
        raise invalid("continue_from", f"has {len(old.ids)} answers, but the call is for {rows}")
    _must_agree(old, sampling, **label)
    wrong = _field_problems(old, engine.capabilities.vocab_size)
    stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else engine.eos_token_ids)
    strings = StopStrings.of(sampling, engine.tokenizer)
    stops = [strings.after(prompt) for prompt in prompts.tolist() for _ in range(samples)]
    reasons, ended = _reasons(old, stop_ids, stops, limit)
    going = [row for row, reason in enumerate(reasons) if not reason]
    wrong |= ended | _version_problems(old, going, engine.weights.version_with(label["adapter"]))
    for row in going:
        # The engine would count these tokens from the seam on.
        if int(old.ids.lengths[row]) < sampling.min_new_tokens:
            wrong.setdefault(
                row,
                f"has fewer than min_new_tokens={sampling.min_new_tokens} tokens, and the engine would "
                "count only new ones; sample this row from its prompt",
            )
    refuse(wrong, "continue_from")
    index, lengths = torch.tensor(going, dtype=torch.int64), old.ids.lengths[going]
    if bool(lengths.any()):
        _refuse_penalties(sampling)
    repeated = prompts if samples == 1 else prompts.repeat(samples)
    joined = repeated.join(old.ids.to(prompts.values.device)).select(index)
    left = [None if limit is None else limit - length for length in lengths.tolist()]
    names = arguments.request_ids(request_ids, rows)
    given = arguments.seeds_of_call(engine, sampling, len(prompts), seeds)
    caller_rows = index // samples
    with renumbering(caller_rows):
        call = prepare_generation(
            engine,
            joined,
            SamplingParams.make(
                sampling,
                num_samples=None,
                min_new_tokens=0,
                max_new_tokens=_common_limit(left, joined.lengths, sampling, engine),
            ),
            seeds=None if given is None else arguments.continued_seeds(given[index], lengths),
            request_ids=[names[row] for row in going],
            read=True,
            problems={at: problems[row] for at, row in enumerate(caller_rows.tolist()) if row in problems},
            **label,
            **options,
        )
    answers = _Answers(old, reasons, ServedRows(index, rows), left, sampling, stops)

    def finish(batch: GenerateResult) -> GenerateResult:
        with renumbering(caller_rows):
            return answers.joined(call.finish(batch))

    return replace(call, finish=finish, caller_rows=caller_rows[call.caller_rows])


@dataclass(frozen=True, slots=True, eq=False)
class _Answers:
    """Partial answers, and how the engine's answers join them.

    Attributes:
        old: the partial answers.
        reasons: their finish reasons; "" for those that go on.
        open: those that go on.
        left: how many tokens each of these may still get; None for no limit.
        sampling: how the call samples.
        stops: the stop strings of each answer.
    """

    old: GenerateResult
    reasons: Sequence[str]
    open: ServedRows
    left: Sequence[int | None]
    sampling: SamplingParams
    stops: Sequence[StopStrings]

    def joined(self, new: GenerateResult) -> GenerateResult:
        """Return all answers, whole, given what the engine has added to those that go on."""
        old, device = self.old, new.ids.values.device
        lengths, reasons = self._ends(old.ids.to(device).join(self.open.ragged(new.ids)), new)
        start = torch.zeros_like(lengths)
        fields = {
            name: getattr(old, name).to(device).join(self.open.ragged(rows)).slice(start, lengths)
            for name, rows in fields_of_rows(new).items()
            if isinstance(rows, (Ragged, TokenSets))
        }
        if old.logprobs is not None and old.support == "truncated":
            # What follows may be of full support: the minimum of new tokens has been reached.
            fields["support"] = old.support
        errors = self.open.values(new.errors or ("",) * len(self.open), "")
        fields |= {"finish_reasons": reasons, "errors": errors if any(errors) else None}
        # What the engine says of its cache is of longer prompts, which have the partial answers in them.
        whole = replace(new, **fields, sampling=self.sampling, cached_tokens=None)
        return with_runs(whole, self._runs(new, lengths.tolist()))

    def _ends(self, ids: Ragged, new: GenerateResult) -> tuple[Tensor, tuple[str, ...]]:
        """Return where each answer ends, int64[rows], and why."""
        lengths, reasons = ids.lengths.clone(), list(self.reasons)
        rows = ids.split()
        for at, row in enumerate(self.open.index.tolist()):
            length, reason, left = int(lengths[row]), new.finish_reasons[at], self.left[at]
            if left is not None and int(new.ids.lengths[at]) > left:
                length, reason = length - int(new.ids.lengths[at]) + left, "length"
            end = None if reason == "error" else self.stops[row].first_end(rows[row][:length].tolist())
            if end is not None:
                length, reason = end, "stop"
            lengths[row], reasons[row] = length, reason
        return lengths, tuple(reasons)

    def _runs(self, new: GenerateResult, lengths: Sequence[int]) -> list[VersionRuns]:
        found = [list(runs) for runs in _runs_of(self.old)]
        for row, runs in zip(self.open.index.tolist(), _runs_of(new), strict=True):
            before = int(self.old.ids.lengths[row])
            kept = found[row] if before else []
            found[row] = kept + [(version, before + first) for version, first in runs if before + first < lengths[row]]
            found[row] = found[row] or [runs[0]]
        return [renamed(tuple(runs), lambda version: version) for runs in found]


def _must_agree(
    old: GenerateResult,
    sampling: SamplingParams,
    *,
    logprobs: Any,
    adapter: Adapter,
    return_support: bool,
    top_logprobs: int,
) -> None:
    """Refuse partial answers that were not sampled for what this call asks for: its arguments of these names."""
    if old.texts is not None:
        raise invalid("continue_from", "this engine's texts are not what its ids decode to, so they cannot be joined")
    if old.adapter != adapter:
        raise invalid("continue_from", f"was sampled with adapter={old.adapter!r}; give the same")
    if (old.logprobs is None) != (logprobs == "none"):
        has = "no log-probs" if old.logprobs is None else "log-probs"
        raise invalid("continue_from", f"has {has}, but logprobs={logprobs!r} was asked for; ask for the same")
    if (old.kept_ids is None) == return_support:
        raise invalid("continue_from", "return_support must be what it was when these answers were begun")
    k = 0 if old.top_ids is None else old.top_ids.values.shape[-1]
    if k != top_logprobs:
        raise invalid("continue_from", f"was sampled with top_logprobs={k}; give the same")
    if old.logprobs is None:
        return
    wanted = dict(Provenance.label(logprobs, sampling))
    found = {"mode": old.mode, "temperature": old.temperature, "support": old.support}
    if found != wanted:
        raise ProvenanceMismatchError(
            f"continue_from: its log-probs are {_words(found)}, and those that follow would be {_words(wanted)}; "
            "sample as these answers were begun"
        )
    # One label names the penalties of all tokens.
    before = sampling.penalties if old.sampling is None else old.sampling.penalties
    if old.mode == "processed" and before != sampling.penalties:
        raise ProvenanceMismatchError(
            f"continue_from: its log-probs were sampled with the penalties {dict(before)}, and those that follow "
            f"would be with {dict(sampling.penalties)}; give the same"
        )


def _words(label: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value!r}" for name, value in label.items())


def _reasons(
    old: GenerateResult, stop_ids: frozenset[int], stops: Sequence[StopStrings], limit: int | None
) -> tuple[list[str], Problems]:
    """Return the finish reason of each partial answer, "" for those that go on, and what is wrong with some."""
    found, problems = [], Problems()
    for row, (ids, reason) in enumerate(zip(old.ids.tolist(), old.finish_reasons, strict=True)):
        at = next((position for position, token in enumerate(ids) if token in stop_ids), None)
        if at is not None and at < len(ids) - 1:
            problems[row] = f"has the stop id {ids[at]} at position {at}, and tokens after it"
        if reason == "stop" or at is not None:
            found.append("stop")
        elif limit is not None and len(ids) > limit:
            problems[row] = f"has {len(ids)} tokens, but max_new_tokens is {limit}"
            found.append("length")
        elif limit == len(ids):
            found.append("length")
        else:
            if (end := stops[row].first_end(ids)) is not None:
                problems[row] = f"holds a stop string, which ends at position {end - 1}"
            found.append("")
    return found, problems


def _refuse_penalties(sampling: SamplingParams) -> None:
    for name, value in sampling.penalties:
        if name != "repetition_penalty":
            # A repetition penalty counts the prompt as well, so it sees them.
            raise invalid(
                name,
                f"{name}={value} counts the tokens of an answer, and the engine would count only new ones; sample "
                "these answers from their prompts",
            )


def _common_limit(
    left: Sequence[int | None], lengths: Tensor, sampling: SamplingParams, engine: OpenEngine
) -> int | None:
    """Return one limit for all rows: that of the row that needs most; none if some would not fit the context then."""
    limits = [each for each in left if each is not None]
    if not limits:
        return sampling.max_new_tokens
    most, context = max(limits), engine.capabilities.max_context
    return None if context is not None and int(lengths.max()) + most > context else most


# Whether partial answers can be what they say: a caller may have saved them, cut them, or put them together -----------


def _field_problems(old: GenerateResult, vocab_size: int) -> Problems:
    """Return the rows with another number of values than tokens, or with a set that cannot be that of its token.

    An empty set stands for the whole vocabulary.

    Raises:
        InvalidRequestError: the result lacks a field which another one needs, or an entry for a row.
    """
    for names in _TOGETHER:
        if len({getattr(old, name) is None for name in names}) > 1:
            has = f"has not all of {', '.join(names)}"
            raise invalid("continue_from", f"{has}, which belong together; give the result as generate returned it")
    lengths, problems = old.ids.lengths, Problems()
    for name, rows in fields_of_rows(old).items():
        if len(rows) != len(lengths):
            raise invalid("continue_from", f"has {name} of {len(rows)} answers for {len(lengths)}")
        differ = rows.lengths != lengths if isinstance(rows, (Ragged, TokenSets)) else torch.zeros(0)
        for row in differ.nonzero().flatten().tolist():
            problems.setdefault(row, f"has {name} at {int(rows.lengths[row])} positions for {int(lengths[row])} tokens")
    if old.kept_ids is None or problems:
        return problems
    everywhere = torch.ones(len(old.kept_ids.ids), dtype=torch.bool)
    wrong = set_problems(old.kept_ids, old.ids, vocab_size, everywhere, empty=True)
    return {row: f"kept_ids, position {position}: {what}" for row, (position, what) in wrong.items()}


def _version_problems(old: GenerateResult, going: Sequence[int], in_force: str) -> Problems:
    """Return the rows whose runs do not ascend, or whose weights go backwards, also from the old part to the new one,
    which has the weights that are `in_force`.
    """
    problems = Problems()
    lengths = old.ids.lengths.tolist()
    for row, runs in enumerate(old.version_runs or ()):
        if why := run_problems(runs, lengths[row]) or backward(runs):
            problems[row] = f"version_runs: {why}"
    known = _runs_of(old)
    for row in going:
        if row in problems or not lengths[row]:
            continue
        if backward(((known[row][-1][0], 0), (in_force, lengths[row]))):
            problems[row] = (
                f"was sampled with the weights {known[row][-1][0]} up to position {lengths[row] - 1}, and would go on "
                f"with the older weights {in_force}; sample it from its prompt, or, if the weights in force are newer, "
                "say so: weights_changed(version=…)"
            )
    return problems


def _runs_of(batch: GenerateResult) -> Sequence[VersionRuns]:
    """Return the runs of each row; one run for a row of one version, which is called "" if it is not known."""
    if batch.version_runs is not None:
        return batch.version_runs
    return [((version, 0),) for version in batch.weight_versions or ("",) * len(batch.ids)]
