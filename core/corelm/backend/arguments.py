"""From what a caller passes to a call that is ready to be made: `prepare_generation` and `prepare_scoring`.

Arguments are read and checked here, on the caller's thread, before a hook is called; one that is wrong is
refused with its name, so no plugin has to check its requests. The engine may then serve the call later, on
another thread, or together with other calls (`corelm.batching`). Functions named `…_problems` return
``{row: what is wrong}``, so that the caller can refuse all bad rows together, or skip them.
"""

from __future__ import annotations

import operator
import uuid
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from corelm import validate
from corelm.backend.check_results import refuse_failed, set_problems
from corelm.backend.continuing import PartialAnswers
from corelm.backend.engine import OpenEngine, PreparedCall
from corelm.backend.engine_call import Delivery, Listener, Origin
from corelm.backend.given_weights import checked_adapter
from corelm.backend.skipping import OnError, admitted, renumbering, spread
from corelm.errors import CapabilityError, InvalidRequestError, Problems, described, refuse, spelled_out
from corelm.spec.answer_text import skipped_texts
from corelm.spec.capabilities import Capabilities
from corelm.spec.other_libraries import instead_of
from corelm.spec.provenance import Adapter, Mode
from corelm.spec.records import GenerateRequest, GenerateResult, ScoreRequest, ScoreResult
from corelm.spec.sampling import ALIASES, DECLARED, FIELDS, SamplingParams
from corelm.spec.version_runs import renamed, with_runs
from corelm.tensors.ragged import Ragged, as_tensor, is_integer, unreadable
from corelm.tensors.token_sets import TokenSets, ascending
from corelm.validate import as_list, count, flag, invalid, is_bool, is_index, one_of, read_once, shown, unencodable

P = TypeVar("P", Ragged, TokenSets)
_NEUTRAL = SamplingParams()


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
    new_turn: bool = False,
) -> PreparedCall[GenerateResult]:
    """Check the arguments of `Backend.generate`, which documents them and the errors.

    Args:
        problems: rows that are known to be bad, and why.
        read: whether the rows are int64 already, as a policy reads them; the engine is given a copy.
        on_tokens: takes the tokens of the answers as they come.
        new_turn: whether the streamed text of an answer is a message, and does not continue the text of its prompt.
    """
    engine.require_open()
    capabilities, weights = engine.capabilities, engine.weights
    if not isinstance(sampling, SamplingParams):
        sampling = SamplingParams.make(sampling)
    rows = prompts.clone() if read else rows_of_ids(prompts, "prompts", engine, copy=True)
    sampling_is_honoured(sampling, engine)
    support_from_engine = return_support is not False and _support_comes_from_engine(return_support, sampling, engine)
    mode = generation_mode(logprobs, sampling, capabilities, engine.name, support_from_engine)
    if adapter is not None:
        adapter = _adapter(engine, adapter)
    asked, count, samples = sampling, rows.lengths.shape[0], sampling.num_samples or 1
    stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else engine.eos_token_ids)
    names = names_of_requests(request_ids, count * samples)
    if continue_from is not None:
        if on_tokens is not None:
            raise invalid("continue_from", "answers that go on cannot be streamed yet; call generate")
        label: dict[str, Any] = {"logprobs": logprobs, "return_support": return_support, "top_logprobs": top_logprobs}
        part = PartialAnswers(engine, continue_from, rows, sampling, stop_ids, adapter, **label)
        label |= {"adapter": adapter, "timeout": timeout, "on_error": on_error}
        seeds = seeds_of_call(engine, sampling, count, seeds)
        return _prepare_continuation(engine, part, seeds, names, problems or {}, **label)
    top_logprobs = 0 if top_logprobs == 0 else _most("top_logprobs", top_logprobs, "top_logprobs", engine)
    if top_logprobs and mode == "none":
        raise invalid("top_logprobs", "no log-probs were asked for; give logprobs='raw' or 'processed' as well")
    problems = {**row_problems(rows, capabilities, sampling), **(problems or {})}
    served = torch.arange(count)
    if problems or on_error != "raise":
        served = admitted(problems, count, on_error, "prompts")
    answers = served if samples == 1 else (served[:, None] * samples + torch.arange(samples)).flatten()
    seeds = seeds_of_call(engine, sampling, count, seeds)
    delivery = None
    if on_tokens is not None:
        before = [] if new_turn else rows.split()
        delivery = Delivery(on_tokens, answers.tolist(), capabilities.vocab_size, mode != "none", before, samples)
    if problems:
        rows, names = rows.select(served), tuple([names[row] for row in answers.tolist()])
        seeds = None if seeds is None else seeds[answers]
    if sampling.num_samples is not None:
        rows, sampling = rows.repeat(samples), SamplingParams.make(sampling, num_samples=None)
    request = GenerateRequest(
        prompts=rows,
        sampling=sampling,
        logprobs=mode,
        seeds=seeds,
        stop_ids=stop_ids,
        request_ids=names,
        timeout=engine.timeout if timeout is None else validate.seconds("timeout", timeout),
        on_tokens=delivery if capabilities.streaming else None,
        adapter=adapter,
        return_support=support_from_engine,
        top_logprobs=top_logprobs,
    )
    total = len(names)

    def finish(batch: GenerateResult) -> GenerateResult:
        if delivery is not None:
            delivery.compare(batch, engine.fault("generate"))
        if on_error == "raise" and "error" in batch.finish_reasons:
            refuse_failed(batch, samples, engine.name)
        # The turn is still held, so these are the weights that have answered.
        versions = tuple(batch.weight_versions or (weights.state.label,) * total)
        batch = replace(
            batch,
            mode=batch.mode if logprobs == "none" else logprobs,
            logprobs=None if logprobs == "none" else batch.logprobs,
            adapter=adapter,
            sampling=asked,
            weight_versions=versions if adapter is None else tuple([weights.named(adapter, each) for each in versions]),
        )
        if batch.version_runs is not None:
            name = partial(weights.named, adapter)
            batch = with_runs(batch, [renamed(runs, name) for runs in batch.version_runs])
        if return_support and not support_from_engine:
            batch = _with_known_support(batch, greedy=sampling.greedy)
        if problems:
            skipped = {row * samples + sample: why for row, why in problems.items() for sample in range(samples)}
            lengths = torch.zeros(count * samples, dtype=torch.int64).index_copy(0, answers, batch.ids.lengths)
            batch = spread(batch, answers, lengths, skipped, weights.version_with(adapter))
        if delivery is not None:
            delivery.complete(batch)
        return batch

    given, new = rows.values.shape[0], sampling.max_new_tokens
    # Without a limit an answer may fill the context.
    most = (capabilities.max_context or 0) * total if new is None else given + new * total
    return PreparedCall(
        engine=engine,
        hook="generate",
        request=request,
        finish=finish,
        caller_rows=answers // samples,
        rows=total,
        tokens=max(given, most),
        deliveries=() if delivery is None else (delivery,),
        origins=(Origin(total, {} if delivery is None else delivery.arrivals),) if engine.wrapped else (),
    )


def _prepare_continuation(
    engine: OpenEngine,
    part: PartialAnswers,
    seeds: Tensor | None,
    names: Sequence[str],
    problems: Mapping[int, str],
    **options: Any,
) -> PreparedCall[GenerateResult]:
    """Return a call that continues the unfinished answers. Its result holds every answer from its first token on.

    `seeds` and `names` are those of all answers, and `options` the other arguments of `prepare_generation`.
    """
    rows = part.index // part.samples
    with renumbering(rows):
        call = prepare_generation(
            engine,
            part.joined_prompts,
            part.sampling_of_rest,
            seeds=None if seeds is None else continued_seeds(seeds[part.index], part.lengths),
            request_ids=[names[row] for row in part.index.tolist()],
            read=True,
            problems={at: problems[row] for at, row in enumerate(rows.tolist()) if row in problems},
            **options,
        )

    def finish(batch: GenerateResult) -> GenerateResult:
        with renumbering(rows):
            return part.joined(call.finish(batch))

    return replace(call, finish=finish, caller_rows=rows[call.caller_rows])


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
        problems, read: as for `prepare_generation`.
    """
    engine.require_open()
    capabilities, weights = engine.capabilities, engine.weights
    rows = sequences.clone() if read else rows_of_ids(sequences, "sequences", engine, copy=True)
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
    starts = torch.ones(count, dtype=torch.int64)
    if score_from is not None:
        given = [score_from] * count if is_index(score_from) else score_from
        starts = _integers(given, count, "score_from").clamp_min(1)
    named: dict[str, Any] = {}
    wrong: Problems = {}
    if support is not None or top_ids is not None or type(top_k) is not int or top_k:
        named, wrong = _ids_at_positions(engine, rows, starts, support, top_k, top_ids)
    problems = {**wrong, **row_problems(rows, capabilities), **(problems or {})}
    served = torch.arange(count)
    if problems or on_error != "raise":
        served = admitted(problems, count, on_error, "sequences")
    names = names_of_requests(request_ids, count)
    if problems:
        rows, starts = rows.select(served), starts[served]
        names = tuple([names[row] for row in served.tolist()])
        named = {name: ids if isinstance(ids, int) else ids.select(served) for name, ids in named.items()}
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
        versions = tuple(batch.weight_versions or (weights.state.label,) * len(names))
        if adapter is not None:
            versions = tuple([weights.named(adapter, each) for each in versions])
        batch = replace(batch, weight_versions=versions, adapter=adapter)
        return spread(batch, served, lengths, problems, weights.version_with(adapter)) if problems else batch

    return PreparedCall(
        engine=engine,
        hook="score_logprobs",
        request=request,
        finish=finish,
        caller_rows=served,
        rows=len(names),
        tokens=rows.values.shape[0],
        on_caller_thread=grad or return_logits,
        origins=(Origin(len(names)),) if engine.wrapped else (),
    )


def refuse_unknown(method: Callable[..., Any], given: Mapping[str, Any], *also: str) -> None:
    """Refuse keywords that neither a `method` of `Backend` has nor, as some `also`, the variant that passes them on."""
    known = method.__annotations__.keys() - {"unknown", "return"}
    if unknown := [name for name in given if name not in known.union(also)]:
        sampled = {ALIASES.get(each, each): given[each] for each in unknown if ALIASES.get(each, each) in FIELDS}
        instead = f"; give sampling={sampled}" if sampled and "sampling" in known else instead_of(unknown[0], known)
        raise TypeError(f"{method.__name__} has no argument {unknown[0]!r}{instead}")


def _adapter(engine: OpenEngine, given: Any) -> Adapter:
    adapter = checked_adapter(given)
    engine.require("adapters", f"leave out adapter={adapter!r}, or open it with adapters, as its README says")
    return adapter


# Rows of ids ----------------------------------------------------------------------------------------------------------


def rows_of_ids(ids: Any, field: str, engine: OpenEngine | None = None, *, copy: bool = False) -> Ragged:
    """Return int64 rows.

    Args:
        ids: a `Ragged`; a list or Series of lists, tensors or arrays; an integer tensor or array ``[rows,
            time]``; or a nested tensor, which has one row per sequence.
        engine: its pads are refused in a tensor or array, which has no mask here; None looks for no pads.
        copy: whether the rows must not share memory with `ids`, which the caller may write to while a request waits.
    """
    if type(ids) is list and {*map(type, ids)} <= {list, tuple} and {*map(type, chain.from_iterable(ids))} <= {int}:
        # An id of more than 64 bits is looked for below.
        with suppress(OverflowError, RuntimeError, ValueError):
            return Ragged.from_list(ids)
    if hasattr(ids, "__array__") and not isinstance(ids, Tensor):
        try:
            # The elements of a Series of lists are no numbers.
            numbers = getattr(getattr(ids, "dtype", None), "kind", "O") in "biufc"
            ids = as_tensor(ids) if numbers else as_list(ids)
        except TypeError as error:  # NumPy has types that torch lacks
            raise invalid(field, f"expected an array of integers: {error}") from error
    if isinstance(ids, Tensor) and ids.is_nested:
        ids = ids.unbind()
    if isinstance(ids, Tensor):
        _refuse_unreadable(ids, field)
        if ids.ndim != 2:
            raise invalid(field, f"expected one row per sequence, got a tensor of shape {tuple(ids.shape)}")
        ids = Ragged(ids.reshape(-1), torch.full((ids.shape[0],), ids.shape[1]))
        if engine is not None:
            advice = "pass a list with the ids of each row, without pads"
            refuse_pads(ids, engine.tokenizer, engine.eos_token_ids, field, advice)
    if not isinstance(ids, Ragged):
        return _from_rows(ids, field)
    for values, of_what in ((ids.values, "token"), (ids.lengths, "length")):
        _refuse_unreadable(values, field)
        if (values.dtype != torch.int64 and not is_integer(values)) or values.ndim != 1:
            raise invalid(field, f"expected one integer per {of_what}, got {values.dtype}{list(values.shape)}")
    try:
        # Build and validate new rows: the caller may have modified the lengths since they were checked.
        return Ragged(ids.values.to(torch.int64, copy=copy), ids.lengths.clone() if copy else ids.lengths)
    except ValueError as error:
        raise invalid(field, str(error)) from error


def _refuse_unreadable(values: Any, field: str) -> None:
    if why := unreadable(values):
        raise invalid(field, f"expected a dense tensor, got {why}")


def refuse_pads(ids: Ragged, tokenizer: Any, eos_ids: Collection[int], field: str, advice: str) -> None:
    """Refuse rows of a dense tensor without a mask that begin or end with the tokenizer's pad id.

    A tokenizer without a pad id pads with EOS, as dense results do. Many tokenizers pad with EOS or BOS,
    which may also be a token at an edge: if every row begins, or ends, with one, the first, or last, is no
    pad. Padding to the longest row leaves that row without pads.
    """
    eos, bos = getattr(tokenizer, "eos_token_id", None), getattr(tokenizer, "bos_token_id", None)
    pad = getattr(tokenizer, "pad_token_id", None)
    pad = eos if pad is None else pad
    if pad is None or not bool((ids.values == pad).any()):
        return
    problems: Problems = {}
    for edge, where in ((ids.to_padded(-1), "begins"), (ids.to_padded(-1, "left").flip(-1), "ends")):
        pads = (edge == pad).cumprod(-1).sum(-1)
        token = pad in {eos, bos, *eos_ids} and bool((pads > 0).all())
        for row in (pads > int(token)).nonzero().flatten().tolist():
            problems.setdefault(row, f"{where} with the pad id {pad}, {int(pads[row])} times")
    if problems:
        why = f"{spelled_out(problems)}. Without an attention mask, pads would be read as tokens; {advice}"
        raise InvalidRequestError(f"{field}: {why}", field=field, problems=problems)


def _from_rows(rows: Any, field: str) -> Ragged:
    if isinstance(rows, Mapping):
        what = type(rows).__name__
        raise invalid(field, f"expected rows of token ids, got {what}; pass its 'input_ids', tokenized without padding")
    if isinstance(rows, str) or not isinstance(rows, Iterable):
        raise invalid(field, f"expected rows of token ids, got {shown(rows)}; backend.tokenize turns texts into ids")
    if type(rows) is not list:
        try:
            read = list(rows)
        except Exception as error:
            failed = f"got {shown(rows)}, which fails: {described(error)}"
            raise invalid(field, f"expected rows of token ids, {failed}") from error
        return rows_of_ids(read, field)
    found: list[Tensor | array[int]] = []
    problems: Problems = {}
    for index, row in enumerate(rows):
        try:
            tensor = as_tensor(row) if hasattr(row, "__array__") else None
            if tensor is None and not isinstance(row, (list, tuple)):
                raise TypeError
            if tensor is not None and (unreadable(tensor) or tensor.ndim != 1 or not is_integer(tensor)):
                raise TypeError
            found.append(array("q", map(_index, row)) if tensor is None else tensor)
        except Exception:
            problems[index] = f"expected a list of token ids (int64), got {shown(row)}"
    refuse(problems, field)
    return Ragged.from_list(found)


def texts(given: Any) -> tuple[str, ...]:
    """Return one text per row of a sequence of texts (see `as_list`); a single str is one row."""
    given = [given] if isinstance(given, str) else as_list(given)
    if not isinstance(given, list):
        raise invalid("texts", f"expected a str or a list of str, got {shown(given)}{read_once(given)}")
    if problems := not_texts(given):
        refuse(problems, "texts")
    return tuple(given)


def not_texts(values: Sequence[Any]) -> Problems:
    """Return a problem for every row that is not a str, or that no tokenizer can encode."""
    if {*map(type, values)} <= {str} and all(map(str.isascii, values)):
        return {}
    problems: Problems = {}
    for row, value in enumerate(values):
        if what := unencodable(value) if isinstance(value, str) else f"expected a str, got {type(value).__name__}":
            problems[row] = what
    return problems


def names_of_requests(given: Sequence[str] | None, rows: int) -> tuple[str, ...]:
    """Return one unique name per row: the given names, or generated ones."""
    if given is None:
        return tuple(map(f"{uuid.uuid4().hex}-{{:08}}".format, range(rows)))
    names = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else []
    if not {*map(type, names)} <= {str} or not len(names) == len({*names}) == rows:
        raise invalid("request_ids", f"expected {rows} different names, got {shown(given)}")
    return tuple(names)


def _integers(given: Any, count: int, field: str) -> Tensor:
    """Return int64[count], in memory of its own."""
    try:
        found = as_tensor(given if hasattr(given, "__array__") else [_index(value) for value in given])
    except Exception:
        found = torch.empty(0, 0)
    # torch makes floats of an empty list.
    if (why := unreadable(found)) or found.shape != (count,) or not (is_integer(found) or count == 0):
        raise invalid(field, f"expected {count} integers, got {why or shown(given)}")
    return found.to("cpu", torch.int64, copy=True)


def _index(given: Any) -> int:
    if is_bool(given):
        # Python would take it for 0 or 1.
        raise TypeError
    return operator.index(given)


# Seeds ----------------------------------------------------------------------------------------------------------------

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def seeds_of_call(engine: OpenEngine, sampling: SamplingParams, rows: int, given: Any = None) -> Tensor | None:
    """Return int64[rows * samples], the seeds of a call's answers: those given, or derived from ``sampling.seed`` or
    torch's generator. None lets the engine choose: see ``GenerateRequest.seeds``.
    """
    capabilities, samples, greedy = engine.capabilities, sampling.num_samples or 1, sampling.temperature == 0.0
    if not capabilities.per_answer_seeds:
        if given is not None or (sampling.seed is not None and not greedy):
            engine.require("per_answer_seeds", "it does not honour seeds; leave the seed out")
        return None
    if given is not None:
        found = _integers(given, rows * samples, "seeds")
        if bool((found < 0).any()):
            raise invalid("seeds", "expected integers in [0, 2**63), got a negative one")
        return found
    if capabilities.seeds_are_costly and (sampling.seed is None or greedy):
        return None
    # Greedy decoding draws nothing, so torch's generator is left as it was. Otherwise, without a seed,
    # torch.manual_seed governs the answers, as it governs everything else that a torch user samples.
    seed = 0 if greedy else int(torch.randint(2**62, ())) if sampling.seed is None else sampling.seed
    return _mixed([seed], (0,), range(rows), range(samples))


def answer_seeds(seed: int, rows: Iterable[int], samples: int = 1) -> Tensor:
    """int64[len(rows) * samples], each in [0, 2**63): one seed for sample s of row r, from (seed, r, s) and nothing
    else. So the other rows of a batch and the number of samples change no answer.

    >>> bool(answer_seeds(7, [0, 1], 2)[2] == answer_seeds(7, [1], 4)[0])
    True
    """
    return _mixed([seed], (0,), rows, range(samples))


def continued_seeds(seeds: Tensor, lengths: Tensor) -> Tensor:
    """int64[answers]: seeds for answers that go on after so many tokens. With the old seed, an engine would draw the
    random numbers of the first tokens again. An answer without tokens keeps its seed.
    """
    made = [_mixed([seed], (length - 1,)) for seed, length in zip(seeds.tolist(), lengths.tolist(), strict=True)]
    return torch.where(lengths > 0, torch.cat([seeds.new_empty(0), *made]), seeds)


def _mixed(states: Sequence[int], *levels: Iterable[int]) -> Tensor:
    """int64, each in [0, 2**63): for each state, one new state for each number of the first level; and so on.

    The states are those of SplitMix64 (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195, fig. 19), whose
    finalizer makes every output bit depend on every input bit, the low 32 that torch's CPU generator keeps among them.
    """
    for numbers in levels:
        made: list[int] = []
        for state in states:
            for number in numbers:
                x = (state + (number + 1) * _GAMMA) & _MASK
                x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
                x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
                made.append(x ^ (x >> 31))
        states = made
    return torch.tensor(list(map(operator.rshift, states, repeat(1))), dtype=torch.int64)


# What an engine can serve ---------------------------------------------------------------------------------------------


def row_problems(rows: Ragged, capabilities: Capabilities, sampling: SamplingParams | None = None) -> Problems:
    """Return the rows with ids outside the vocabulary, without tokens, or without room in the context.

    With `sampling` they are prompts, which must leave room for the answer; without, they are to be scored.
    """
    may_be_empty, room = sampling is not None and capabilities.empty_prompt, 0
    if sampling is not None:
        # Without a limit the answer fills the context, so there must be room for at least one token.
        room = 1 if sampling.max_new_tokens is None else sampling.max_new_tokens
    limit, size, lengths = capabilities.max_context, capabilities.vocab_size, rows.lengths.tolist()
    low, high = torch.stack(rows.values.aminmax()).tolist() if any(lengths) else (0, 0)
    too_long = limit is not None and max(lengths, default=0) + room > limit
    if 0 <= low <= high < size and not too_long and (may_be_empty or 0 not in lengths):
        return {}
    outside = (rows.values < 0) | (rows.values >= size)
    problems: Problems = {}
    # In reverse, so that the first bad id of a row is reported.
    for index in outside.nonzero().flatten().tolist()[::-1]:
        row, position, found = (int(each[index]) for each in (rows.row_index, rows.positions, rows.values))
        problems[row] = f"id {found} at position {position} is outside the vocabulary of {size}"
    for row, length in enumerate(lengths):
        if not (length or may_be_empty):
            problems[row] = "has no tokens; give at least one"
        elif limit is not None and length + room > limit:
            problems[row] = _too_long(length, limit, sampling)
    return problems


def _too_long(tokens: int, limit: int, sampling: SamplingParams | None) -> str:
    if sampling is None:
        return f"{tokens} tokens do not fit the context of {limit}; shorten it"
    new, left = sampling.max_new_tokens, limit - tokens
    shorter = "shorten the prompt, or give the policy truncation='left', which drops its first tokens"
    if new is None or left < 1:
        answer = "an answer" if new is None else f"an answer of max_new_tokens={new}"
        return f"{tokens} tokens leave no room for {answer} in the context of {limit}; {shorter}"
    default = f" ({new} is the default)" if new == _NEUTRAL.max_new_tokens else ""
    misfit = f"{tokens} tokens and max_new_tokens={new}{default} do not fit the context of {limit}"
    return f"{misfit}; give max_new_tokens={left} or less, or {shorter}"


def sampling_is_honoured(sampling: SamplingParams, engine: OpenEngine) -> None:
    """Refuse a sampling parameter that the engine does not honour, or that could have no effect."""
    capabilities = engine.capabilities
    for name in DECLARED:
        value = getattr(sampling, name)
        if value == getattr(_NEUTRAL, name):
            continue
        if name not in capabilities.sampling:
            known = ", ".join(sorted(capabilities.sampling)) or "none"
            told = f"backend {engine.name!r} does not honour {name}={shown(value)}; it honours: {known}"
            raise CapabilityError(told, capability=name)
        legal = capabilities.sampling[name]
        if legal is not None and not legal[0] <= value <= legal[1]:
            told = f"backend {engine.name!r} takes {legal[0]} to {legal[1]}, got {value}"
            raise InvalidRequestError(f"sampling parameter {name!r}: {told}", field=name)
    for token in sampling.stop_token_ids:
        if token >= capabilities.vocab_size:
            raise invalid("stop_token_ids", f"{token} is outside the vocabulary of {capabilities.vocab_size}")
    if sampling.stop and sampling.skip_special_tokens:
        specials = skipped_texts(engine.tokenizer)
        if wrong := [stop for stop in sampling.stop if any(special in stop for special in specials)]:
            what = f"{shown(wrong[0])} contains a special token, and special tokens are left out of the text"
            raise invalid("stop", f"{what}; give its id in stop_token_ids, or skip_special_tokens=False")
    if sampling.num_beams > 1:
        # A temperature of 1 is the default, which a caller may have left alone.
        shaping = ("top_k", "top_p", "min_p", "temperature")
        drawn = [each for each in shaping if getattr(sampling, each) not in (0.0, getattr(_NEUTRAL, each))]
        if drawn:
            names = ", ".join(drawn)
            told = f"beam search does not sample, so {names} would have no effect; drop {names} or num_beams"
            raise CapabilityError(told, capability=drawn[0])


def generation_mode(
    wanted: Literal["none", "raw", "processed"],
    sampling: SamplingParams,
    capabilities: Capabilities,
    backend: str,
    with_support: bool = False,
) -> Literal["none", "raw", "processed"]:
    """Return the mode to request from the engine: `wanted`, or the other one if both give the same numbers.

    With `with_support`, the ids that truncation had left are returned as well, so that one kind of log-prob can
    be computed from the other.
    """
    if not isinstance(wanted, str) or wanted not in ("none", "raw", "processed"):
        one_of("logprobs", wanted, ("none", "raw", "processed"))
    if wanted == "none":
        return wanted
    if sampling.num_beams > 1:
        why = "beam search does not sample token by token, so its tokens have no log-probs"
        advice = "give the policy return_log_probs=False, or backend.generate logprobs='none'"
        raise CapabilityError(f"{why}; {advice}", capability="num_beams")
    modes = capabilities.generation_modes
    if wanted in modes or ("scaled" in modes and _scaled_is(wanted, sampling, with_support)):
        return wanted
    other: Mode = "processed" if wanted == "raw" else "raw"
    if other in modes and sampling.temperature == 1.0 and not (sampling.truncates_support or sampling.penalties):
        # Tokens are drawn from the model's own distribution.
        return other
    what = f"no {wanted} log-probs with these sampling parameters (its modes: {', '.join(sorted(modes)) or 'none'})"
    same = "at temperature 1 without truncation and penalties, raw and processed log-probs are the same"
    raise CapabilityError(f"backend {backend!r} returns {what}; {same}", capability="generation_modes")


def _scaled_is(mode: Mode, sampling: SamplingParams, with_support: bool) -> bool:
    """Return whether `scaled` log-probs, see `Capabilities`, are those of `mode`, or give them with the kept ids."""
    if sampling.penalties or sampling.min_new_tokens or sampling.engine_kwargs:
        # Engines differ in whether penalties and forbidden ids are applied before or after they compute the number.
        return False
    if mode == "raw":
        return sampling.temperature in (0.0, 1.0)
    return sampling.temperature > 0.0 and (with_support or not sampling.truncates)


# Kept ids and the most probable ids -----------------------------------------------------------------------------------


def _support_comes_from_engine(return_support: Any, sampling: SamplingParams, engine: OpenEngine) -> bool:
    """Check the argument `return_support` of `generate`. Return whether only the engine knows the support.

    Otherwise core does: in greedy decoding it is the sampled id, and without truncation the whole vocabulary.
    """
    if not flag("return_support", return_support):
        return False
    if sampling.num_beams > 1:
        why = "beam search does not sample token by token, so no token was drawn from a set of ids"
        raise CapabilityError(f"{why}; leave out return_support=True", capability="num_beams")
    if sampling.greedy:
        return False
    if sampling.engine_kwargs:
        why = "core does not know how engine_kwargs change the distribution, nor what a log-prob over these ids is of"
        raise invalid("return_support", f"{why}; leave out engine_kwargs or return_support=True")
    if sampling.truncates_support and not sampling.truncates:
        why = "min_new_tokens leaves nearly the whole vocabulary, and that would be returned for every token"
        raise invalid("return_support", f"{why}; give top_k, top_p or min_p as well, or leave out return_support=True")
    if sampling.truncates:
        why = "it does not say which ids truncation has left; leave out return_support=True"
        engine.require("return_support", why)
    return sampling.truncates


def _with_known_support(batch: GenerateResult, *, greedy: bool) -> GenerateResult:
    """Return the engine's result with the support that core knows; see `_support_comes_from_engine`."""
    ids = batch.ids
    kept = TokenSets.empty(ids.lengths).to(ids.values.device)
    if greedy:
        ones = torch.ones(ids.values.shape[0], dtype=torch.int64)
        kept = TokenSets(Ragged(ids.values.clone(), ones), ids.lengths)
    mass = ids.with_values(torch.zeros_like(ids.values, dtype=torch.float32))
    return replace(batch, kept_ids=kept, kept_log_mass=mass)


def _most(field: str, given: Any, capability: str, engine: OpenEngine) -> int:
    """Return how many ids to return at each position, at most as many as the engine can."""
    k = count(field, given)
    if k:
        engine.require(capability, f"it returns no log-probs of the most probable ids; leave out {field}={k}")
        most = min(getattr(engine.capabilities, capability), engine.capabilities.vocab_size)
        if k > most:
            raise invalid(field, f"this engine returns at most {most} ids at each position, got {k}")
    return k


def _ids_at_positions(
    engine: OpenEngine, sequences: Ragged, starts: Tensor, support: Any, top_k: Any, top_ids: Any
) -> tuple[dict[str, Any], Problems]:
    """Return the fields of a `ScoreRequest` that these arguments make, of which only one may be given, and the rows
    whose ids are wrong.
    """
    k = _most("top_k", top_k, "score_top_k", engine)
    asked = {"support": support, "top_ids": top_ids, "top_k": k or None}
    given = [name for name, one in asked.items() if one is not None]
    if len(given) > 1:
        raise invalid(given[-1], f"give only one of {' and '.join(given)} in a call")
    vocab, checked = engine.capabilities.vocab_size, sequences.positions >= starts[sequences.row_index]
    if support is not None:
        engine.require("score_support", "it normalises over the whole vocabulary; leave out support")
        sets, problems = _at_positions("support", _token_sets(support), sequences, starts, TokenSets.empty)
        wrong = set_problems(sets, sequences, vocab, checked, empty=True)
        problems |= {row: f"support, position {position}: {what}" for row, (position, what) in wrong.items()}
        return {"support": sets}, problems
    if top_ids is None:
        return {"top_k": k}, {}
    engine.require("score_top_ids", "it returns no log-probs of other ids than those given; leave out top_ids")
    rows, differ = _rows_of_top_ids(top_ids)
    k = rows.values.shape[1]
    ids, problems = _at_positions(
        "top_ids", rows, sequences, starts, lambda lengths: Ragged(torch.full((int(lengths.sum()), k), -1), lengths)
    )
    ids = ids.with_values(torch.where(checked[:, None], ids.values, -1))
    ordered = ids.values.sort(-1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(-1)
    outside = (ordered[:, 0] < -1) | (ordered[:, -1] >= vocab)
    for wrong_at, what in ((twice, "names an id twice"), (outside, f"names an id outside the vocabulary of {vocab}")):
        for index in wrong_at.nonzero().flatten().tolist():
            row, position = int(sequences.row_index[index]), int(sequences.positions[index])
            problems.setdefault(row, f"top_ids, position {position}: {what}")
    return {"top_ids": ids}, problems | differ


def _at_positions(
    field: str, given: P, sequences: Ragged, starts: Tensor, blank: Callable[[Tensor], P]
) -> tuple[P, Problems]:
    """Return rows as long as the sequences, and which of those given are of another length.

    A row has as many positions as its sequence, or as many as are scored. Blank ones stand before these, and
    in rows at fault, which are refused or skipped.
    """
    what = "sets" if field == "support" else "ids"
    if len(given) != len(sequences):
        raise invalid(field, f"expected {what} for {len(sequences)} rows, got {len(given)}")
    whole, found = sequences.lengths, given.lengths
    scored = (whole - starts).clamp_min(0)
    fits = (found == whole) | (found == scored)
    problems: Problems = {}
    for row in (~fits).nonzero().flatten().tolist():
        expected = f"expected one for each of its {int(whole[row])} ids, or for the {int(scored[row])} that are scored"
        problems[row] = f"{field}: has {what} for {int(found[row])} positions; {expected}"
    kept = torch.where(fits, found, 0)
    if problems:
        given = given.slice(torch.zeros_like(kept), kept)
    return given if torch.equal(kept, whole) else blank(whole - kept).join(given), problems


def _token_sets(given: Any) -> TokenSets:
    """Return sets of ascending ids in memory that the caller does not hold."""
    try:
        if isinstance(given, TokenSets):
            ids = given.ids.values
            if (why := unreadable(ids)) or ids.dtype != torch.int64 or ids.ndim != 1:
                raise TypeError(why or f"its ids are {ids.dtype}{list(ids.shape)}")
            # Build and validate new sets: the caller may have modified the lengths since they were checked.
            sets = TokenSets(Ragged(ids.clone(), given.ids.lengths.clone()), given.lengths.clone())
        else:
            rows = [list(row) for row in as_list(given)]
            for row, of_row in enumerate(rows):
                for position, ids in enumerate(of_row):
                    # A mask over the vocabulary, for example: its values would be read as the ids 0 and 1.
                    plain = isinstance(ids, Tensor) or {*map(type, ids)} <= {int}
                    if is_bool(ids) or (not plain and any(map(is_bool, ids))):
                        raise TypeError(f"row {row}, set {position} holds bools instead of ids")
            sets = TokenSets.from_list(rows)
    except Exception as error:
        expected = "TokenSets such as kept_ids of a result, or a list of ids for each position of each row"
        raise invalid("support", f"expected {expected}, got {shown(given)}: {described(error)}") from error
    return TokenSets(ascending(sets.ids.to("cpu")), sets.lengths)


def _rows_of_top_ids(given: Any) -> tuple[Ragged, Problems]:
    """Return ids ``[total, k]``, and the rows that name another number of ids than row 0, which are left empty."""
    expected = "expected a Ragged with values[total, k], or for each row a tensor [time, k], of ids in int64"
    if isinstance(given, Ragged):
        _refuse_unreadable(given.values, "top_ids")
        given = given.split()
    rows = list(given) if isinstance(given, (Tensor, list, tuple)) else [given]
    for number, row in enumerate(rows):
        if not isinstance(row, Tensor):
            raise invalid("top_ids", f"{expected}; row {number} is {shown(row)}, which is not a tensor")
        _refuse_unreadable(row, "top_ids")
        if row.ndim != 2 or row.dtype != torch.int64 or not row.shape[1]:
            raise invalid("top_ids", f"{expected}; row {number} is {row.dtype}{list(row.shape)}")
    k = rows[0].shape[1] if rows else 1
    differ = {
        number: f"top_ids: names {row.shape[1]} ids at each position, but row 0 names {k}"
        for number, row in enumerate(rows)
        if row.shape[1] != k
    }
    none = torch.empty(0, k, dtype=torch.int64)
    fit = [row.cpu() if row.shape[1] == k else none for row in rows]
    values = torch.cat([none, *fit])
    return Ragged(values, torch.tensor(list(map(len, fit)), dtype=torch.int64)), differ
