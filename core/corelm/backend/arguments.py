"""What callers pass, read and checked before a hook is called. An argument that is wrong is refused with its name.

No plugin has to check its requests. Functions that end in `_problems` return ``{row: what is wrong}``, so that the
caller can refuse all bad rows together, or skip them.
"""

from __future__ import annotations

import operator
import uuid
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from corelm.backend.check_results import set_problems
from corelm.backend.hooks import OpenPlugin
from corelm.errors import CapabilityError, InvalidRequestError, Problems, described, refuse, spelled_out
from corelm.spec.answer_text import skipped_texts
from corelm.spec.capabilities import Capabilities
from corelm.spec.provenance import Mode
from corelm.spec.records import GenerateResult
from corelm.spec.sampling import SamplingParams
from corelm.tensors.ragged import Ragged, as_tensor, is_integer, unreadable
from corelm.tensors.token_sets import TokenSets, ascending
from corelm.validate import as_list, count, flag, invalid, is_bool, is_index, one_of, read_once, shown, unencodable

_DEFAULT_MAX_NEW_TOKENS = SamplingParams().max_new_tokens
_WITHOUT_PADS = "pass a list with the ids of each row, without pads"

# Rows of ids ----------------------------------------------------------------------------------------------------------


def rows_of_ids(ids: Any, field: str, engine: OpenPlugin | None = None, *, copy: bool = False) -> Ragged:
    """Return int64 rows.

    Args:
        ids: a `Ragged`; a list or Series of lists, tensors or arrays; an integer tensor or array ``[rows,
            time]``; or a nested tensor, which has one row per sequence.
        field: the argument's name, for errors.
        engine: its pads are refused in a tensor or array, which has no mask here; None looks for no pads.
        copy: whether the rows must not share memory with `ids`, which the caller may write to while a request waits.

    Raises:
        InvalidRequestError: `ids` is of another kind; if some rows are at fault, `rows` names them.
    """
    if type(ids) is list and {*map(type, ids)} <= {list, tuple} and {*map(type, chain.from_iterable(ids))} <= {int}:
        # An id of more than 64 bits is looked for below.
        with suppress(OverflowError, RuntimeError, ValueError):
            return Ragged.from_list(ids)
    if hasattr(ids, "__array__") and not isinstance(ids, Tensor):
        # The elements of a Series of lists are no numbers.
        numbers = getattr(getattr(ids, "dtype", None), "kind", "O") in "biufc"
        ids = _tensor(ids, field) if numbers else as_list(ids)
    if isinstance(ids, Tensor) and ids.is_nested:
        ids = ids.unbind()
    if isinstance(ids, Tensor):
        refuse_unreadable(ids, field)
        if ids.ndim != 2:
            raise invalid(field, f"expected one row per sequence, got a tensor of shape {tuple(ids.shape)}")
        ids = Ragged(ids.reshape(-1), torch.full((ids.shape[0],), ids.shape[1]))
        if engine is not None:
            refuse_pads(ids, engine.tokenizer, engine.eos_token_ids, field, _WITHOUT_PADS)
    if not isinstance(ids, Ragged):
        return _from_rows(ids, field)
    for values, of_what in ((ids.values, "token"), (ids.lengths, "length")):
        if why := unreadable(values):
            raise invalid(field, f"expected a dense tensor, got {why}")
        if (values.dtype != torch.int64 and not is_integer(values)) or values.ndim != 1:
            raise invalid(field, f"expected one integer per {of_what}, got {values.dtype}{list(values.shape)}")
    try:
        # Build and validate new rows: the caller may have modified the lengths since they were checked.
        return Ragged(ids.values.to(torch.int64, copy=copy), ids.lengths.clone() if copy else ids.lengths)
    except ValueError as error:
        raise invalid(field, str(error)) from error


def refuse_pads(ids: Ragged, tokenizer: Any, eos_ids: Collection[int], field: str, advice: str) -> None:
    """Refuse rows of a dense tensor without a mask that begin or end with the tokenizer's pad id.

    A tokenizer without a pad id pads with EOS, as dense results do. Many tokenizers pad with EOS or BOS, which may also
    be a token at an edge: if every row begins, or ends, with one, the first, or last, is no pad. Padding to the longest
    row leaves that row without pads.

    Args:
        ids: the rows, with their pads.
        eos_ids: all ids that end an answer.
        field: what is at fault, for the error.
        advice: what to do about it.
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
        raise InvalidRequestError(
            f"{field}: {spelled_out(problems)}. Without an attention mask, pads would be read as tokens; {advice}",
            field=field,
            problems=problems,
        )


def refuse_unreadable(values: Any, field: str) -> None:
    """Refuse what is not a plain tensor with values in memory."""
    if why := unreadable(values):
        raise invalid(field, f"expected a dense tensor, got {why}")


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
            raise invalid(
                field, f"expected rows of token ids, got {shown(rows)}, which fails: {described(error)}"
            ) from error
        return rows_of_ids(read, field)
    found: list[Tensor | array[int]] = []
    problems: Problems = {}
    for index, row in enumerate(rows):
        try:
            found.append(_row(row))
        except Exception:
            problems[index] = f"expected a list of token ids (int64), got {shown(row)}"
    refuse(problems, field)
    return Ragged.from_list(found)


def _row(row: Any) -> Tensor | array[int]:
    if hasattr(row, "__array__"):
        tensor = as_tensor(row)
        if unreadable(tensor) or tensor.ndim != 1 or not is_integer(tensor):
            raise TypeError
        return tensor
    if not isinstance(row, (list, tuple)):
        raise TypeError
    return array("q", map(_index, row))


def _tensor(array: Any, field: str) -> Tensor:
    try:
        return as_tensor(array)
    except TypeError as error:  # NumPy has types that torch lacks
        raise invalid(field, f"expected an array of integers: {error}") from error


# Texts ----------------------------------------------------------------------------------------------------------------


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
    return {row: what for row, value in enumerate(values) if (what := _not_a_text(value))}


def _not_a_text(value: Any) -> str | None:
    return unencodable(value) if isinstance(value, str) else f"expected a str, got {type(value).__name__}"


# One value per row ----------------------------------------------------------------------------------------------------


def request_ids(given: Sequence[str] | None, rows: int) -> tuple[str, ...]:
    """Return one unique name per row: the given names, or generated ones."""
    if given is None:
        return tuple([uuid.uuid4().hex for _ in range(rows)])
    names = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else []
    if not {*map(type, names)} <= {str} or not len(names) == len({*names}) == rows:
        raise invalid("request_ids", f"expected {rows} different names, got {shown(given)}")
    return tuple(names)


def starts(given: Any, rows: int) -> Tensor:
    """Return int64[rows], each at least 1: the position where scoring starts. Position 0 is never scored.

    Args:
        given: one position for all rows, or one per row; None scores every position from 1 on.
    """
    if given is None:
        return torch.ones(rows, dtype=torch.int64)
    return _integers([given] * rows if is_index(given) else given, rows, "score_from").clamp_min(1)


def _integers(given: Any, count: int, field: str) -> Tensor:
    """Return int64[count], in memory of its own."""
    try:
        found = as_tensor(given if hasattr(given, "__array__") else [_index(value) for value in given])
    except Exception:
        found = torch.empty(0, 0)
    if why := unreadable(found):
        raise invalid(field, f"expected {count} integers, got {why}")
    # torch makes floats of an empty list.
    if found.shape != (count,) or not (is_integer(found) or count == 0):
        raise invalid(field, f"expected {count} integers, got {shown(given)}")
    return found.to("cpu", torch.int64, copy=True)


def _index(given: Any) -> int:
    if is_bool(given):
        # Python would take it for 0 or 1.
        raise TypeError
    return operator.index(given)


# Seeds ----------------------------------------------------------------------------------------------------------------

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def seeds_of_call(engine: OpenPlugin, sampling: SamplingParams, rows: int, given: Any = None) -> Tensor | None:
    """Return int64[rows * samples], the seeds of a call's answers: those given, or derived from ``sampling.seed`` or
    torch's generator.

    None lets the engine choose. It is returned for an engine that takes no seeds, and, unless the caller gave
    a seed, for one whose seeds are costly.
    """
    capabilities, samples, greedy = engine.capabilities, sampling.num_samples or 1, sampling.temperature == 0.0
    if not capabilities.per_answer_seeds:
        if given is not None or (sampling.seed is not None and not greedy):
            engine.require("per_answer_seeds", "it does not honour seeds; leave the seed out")
        return None
    if given is not None:
        return seeds(given, rows * samples)
    if capabilities.seeds_are_costly and (sampling.seed is None or greedy):
        return None
    if greedy:
        # Greedy decoding draws nothing, so torch's generator is left as it was.
        return answer_seeds(0, range(rows), samples)
    # Without a seed torch.manual_seed governs the answers, as it governs everything else that a torch user samples.
    seed = int(torch.randint(2**62, ())) if sampling.seed is None else sampling.seed
    return answer_seeds(seed, range(rows), samples)


def seeds(given: Any, answers: int) -> Tensor:
    """Return int64[answers], each seed in [0, 2**63)."""
    found = _integers(given, answers, "seeds")
    if bool((found < 0).any()):
        raise invalid("seeds", "expected integers in [0, 2**63), got a negative one")
    return found


def answer_seeds(seed: int, rows: Iterable[int], samples: int = 1) -> Tensor:
    """int64[len(rows) * samples], each in [0, 2**63): one seed for sample s of row r, from (seed, r, s) and nothing
    else.

    So the other rows of a batch and the number of samples change no answer.

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
    return torch.tensor([state >> 1 for state in states], dtype=torch.int64)


# Rows that an engine can serve ----------------------------------------------------------------------------------------


def row_problems(rows: Ragged, capabilities: Capabilities, sampling: SamplingParams | None = None) -> Problems:
    """Return the rows with ids outside the vocabulary, without tokens, or without room in the context.

    Args:
        sampling: what the rows are prompts for, which must leave room for the answer; None for rows to score.
    """
    may_be_empty, room = sampling is not None and capabilities.empty_prompt, 0
    if sampling is not None:
        # Without a limit the answer fills the context, so there must be room for at least one token.
        room = 1 if sampling.max_new_tokens is None else sampling.max_new_tokens
    limit, size, lengths = capabilities.max_context, capabilities.vocab_size, rows.lengths.tolist()
    outside = (rows.values < 0) | (rows.values >= size)
    too_long = limit is not None and max(lengths, default=0) + room > limit
    if not (too_long or bool(outside.any())) and (may_be_empty or 0 not in lengths):
        return {}
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
    default = f" ({new} is the default)" if new == _DEFAULT_MAX_NEW_TOKENS else ""
    return (
        f"{tokens} tokens and max_new_tokens={new}{default} do not fit the context of {limit}; give max_new_tokens="
        f"{left} or less, or {shorter}"
    )


# Sampling parameters --------------------------------------------------------------------------------------------------


def sampling_is_honoured(sampling: SamplingParams, engine: OpenPlugin) -> None:
    """Refuse a sampling parameter that the engine does not honour, or that could have no effect."""
    capabilities, given = engine.capabilities, sampling.engine_parameters()
    for name, value in given.items():
        if name not in capabilities.sampling:
            known = ", ".join(sorted(capabilities.sampling)) or "none"
            raise CapabilityError(
                f"backend {engine.name!r} does not honour {name}={shown(value)}; it honours: {known}", capability=name
            )
        legal = capabilities.sampling[name]
        if legal is not None and not legal[0] <= value <= legal[1]:
            raise InvalidRequestError(
                f"sampling parameter {name!r}: backend {engine.name!r} takes {legal[0]} to {legal[1]}, got {value}",
                field=name,
            )
    for token in sampling.stop_token_ids:
        if token >= capabilities.vocab_size:
            raise invalid("stop_token_ids", f"{token} is outside the vocabulary of {capabilities.vocab_size}")
    if sampling.stop and sampling.skip_special_tokens:
        specials = skipped_texts(engine.tokenizer)
        for stop in sampling.stop:
            if any(special in stop for special in specials):
                raise invalid(
                    "stop",
                    f"{shown(stop)} contains a special token, and special tokens are left out of the text; give its id "
                    "in stop_token_ids, or skip_special_tokens=False",
                )
    if sampling.num_beams > 1:
        # A temperature of 1 is the default, which a caller may have left alone.
        drawn = [name for name in ("top_k", "top_p", "min_p", "temperature") if name in given and given[name] != 0.0]
        if drawn:
            names = ", ".join(drawn)
            raise CapabilityError(
                f"beam search does not sample, so {names} would have no effect; drop {names} or num_beams",
                capability=drawn[0],
            )


# Log-probs ------------------------------------------------------------------------------------------------------------


def generation_mode(
    wanted: Literal["none", "raw", "processed"],
    sampling: SamplingParams,
    capabilities: Capabilities,
    backend: str,
    with_support: bool = False,
) -> Literal["none", "raw", "processed"]:
    """Return the mode to request from the engine: `wanted`, or the other one if both give the same numbers.

    Args:
        with_support: whether the engine is asked for the ids that truncation has left as well.

    Raises:
        CapabilityError: the engine cannot return `wanted`, and none of its modes equals it here.
    """
    if not isinstance(wanted, str) or wanted not in ("none", "raw", "processed"):
        one_of("logprobs", wanted, ("none", "raw", "processed"))
    if wanted == "none":
        return wanted
    if sampling.num_beams > 1:
        raise CapabilityError(
            "beam search does not sample token by token, so its tokens have no log-probs; give the policy "
            "return_log_probs=False, or backend.generate logprobs='none'",
            capability="num_beams",
        )
    modes = capabilities.generation_modes
    if wanted in modes or ("scaled" in modes and _scaled_is(wanted, sampling, with_support)):
        return wanted
    other: Mode = "processed" if wanted == "raw" else "raw"
    if other in modes and sampling.temperature == 1.0 and not (sampling.truncates_support or sampling.penalties):
        # Tokens are drawn from the model's own distribution.
        return other
    raise CapabilityError(
        f"backend {backend!r} returns no {wanted} log-probs with these sampling parameters (its modes: "
        f"{', '.join(sorted(modes)) or 'none'}); at temperature 1 without truncation and penalties, raw and processed "
        "log-probs are the same",
        capability="generation_modes",
    )


def _scaled_is(mode: Mode, sampling: SamplingParams, with_support: bool) -> bool:
    """Return whether an engine with `scaled` log-probs has those of `mode`.

    Scaled log-probs are those of the logits divided by the temperature, or by 1 in greedy decoding. Those after
    truncation are these minus the log of the mass that truncation has left, which comes with the kept ids.
    """
    if sampling.penalties or sampling.min_new_tokens or sampling.engine_kwargs:
        # Engines differ in whether penalties and forbidden ids are applied before or after they compute the number.
        return False
    if mode == "raw":
        return sampling.temperature in (0.0, 1.0)
    return sampling.temperature > 0.0 and (with_support or not sampling.truncates)


# Kept ids and the most probable ids -----------------------------------------------------------------------------------


def support_comes_from_engine(return_support: Any, sampling: SamplingParams, engine: OpenPlugin) -> bool:
    """Check the argument `return_support` of `generate`. Return whether only the engine knows the support.

    Otherwise core does: in greedy decoding it is the sampled id, and without truncation the whole vocabulary.
    """
    if not flag("return_support", return_support):
        return False
    if sampling.num_beams > 1:
        raise CapabilityError(
            "beam search does not sample token by token, so no token was drawn from a set of ids; leave out "
            "return_support=True",
            capability="num_beams",
        )
    if sampling.greedy:
        return False
    if sampling.engine_kwargs:
        raise invalid(
            "return_support",
            "core does not know how engine_kwargs change the distribution, so the ids that are left would not say "
            "what a log-prob is of; leave out engine_kwargs or return_support=True",
        )
    if sampling.truncates_support and not sampling.truncates:
        raise invalid(
            "return_support",
            "min_new_tokens leaves nearly the whole vocabulary, and that would be returned for every token; give "
            "top_k, top_p or min_p as well, or leave out return_support=True",
        )
    if sampling.truncates:
        why = "it does not say which ids truncation has left; leave out return_support=True"
        engine.require("return_support", why)
    return sampling.truncates


def with_known_support(batch: GenerateResult, *, greedy: bool) -> GenerateResult:
    """Return the engine's result with the support that core knows; see `support_comes_from_engine`."""
    ids = batch.ids
    kept = TokenSets.empty(ids.lengths).to(ids.values.device)
    if greedy:
        ones = torch.ones(ids.values.shape[0], dtype=torch.int64)
        kept = TokenSets(Ragged(ids.values.clone(), ones), ids.lengths)
    mass = torch.zeros(ids.values.shape, dtype=torch.float32, device=ids.values.device)
    return replace(batch, kept_ids=kept, kept_log_mass=ids.with_values(mass))


def top_of_answers(given: Any, mode: Literal["none", "raw", "processed"], engine: OpenPlugin) -> int:
    """Check the argument `top_logprobs` of `generate`."""
    k = _most("top_logprobs", given, "top_logprobs", engine)
    if k and mode == "none":
        raise invalid("top_logprobs", "no log-probs were asked for; give logprobs='raw' or 'processed' as well")
    return k


def ids_at_positions(
    engine: OpenPlugin, sequences: Ragged, starts: Tensor, support: Any, top_k: Any, top_ids: Any
) -> tuple[dict[str, Any], Problems]:
    """Check the arguments of `score_logprobs` of these names, of which only one may be given.

    Returns:
        The fields of a `ScoreRequest` that they make, and the rows whose ids are wrong.
    """
    k = _most("top_k", top_k, "score_top_k", engine)
    given = [name for name, one in (("support", support), ("top_ids", top_ids)) if one is not None]
    given += ["top_k"] if k else []
    if len(given) > 1:
        raise invalid(given[-1], f"give only one of {' and '.join(given)} in a call")
    vocab = engine.capabilities.vocab_size
    if support is not None:
        engine.require("score_support", "it normalises over the whole vocabulary; leave out support")
        sets, problems = _given_support(support, sequences, starts, vocab)
        return {"support": sets}, problems
    if top_ids is not None:
        engine.require("score_top_ids", "it returns no log-probs of other ids than those given; leave out top_ids")
        ids, problems = _given_top_ids(top_ids, sequences, starts, vocab)
        return {"top_ids": ids}, problems
    return {"top_k": k}, {}


def _most(field: str, given: Any, capability: str, engine: OpenPlugin) -> int:
    """Return how many ids to return at each position, at most as many as the engine can."""
    k = count(field, given)
    if k:
        engine.require(capability, f"it returns no log-probs of the most probable ids; leave out {field}={k}")
        most = min(getattr(engine.capabilities, capability), engine.capabilities.vocab_size)
        if k > most:
            raise invalid(field, f"this engine returns at most {most} ids at each position, got {k}")
    return k


def _given_support(given: Any, sequences: Ragged, starts: Tensor, vocab_size: int) -> tuple[TokenSets, Problems]:
    """Return one set for each position of the sequences, its ids ascending, and the rows whose sets are wrong.

    Args:
        given: `TokenSets` or nested lists, one set a position: as many as the sequence has, or as many as are scored.
        starts: int64[rows]: where scoring starts.
    """
    sets = _token_sets(given)
    sets = TokenSets(ascending(sets.ids.to("cpu")), sets.lengths)
    if len(sets) != len(sequences):
        raise invalid("support", f"expected sets for {len(sequences)} rows, got {len(sets)}")
    whole, scored = sequences.lengths, (sequences.lengths - starts).clamp_min(0)
    found = sets.lengths
    fits = (found == whole) | (found == scored)
    problems: Problems = {
        row: f"support: has sets for {int(found[row])} positions; expected one for each of its {int(whole[row])} ids, "
        f"or for the {int(scored[row])} that are scored"
        for row in (~fits).nonzero().flatten().tolist()
    }
    # Empty sets fill the positions before those that are scored, and the rows at fault, which are refused or skipped.
    kept = torch.where(fits, found, 0)
    if problems:
        sets = sets.slice(torch.zeros_like(kept), kept)
    if not torch.equal(kept, whole):
        sets = TokenSets.empty(whole - kept).join(sets)
    checked = sequences.positions >= starts[sequences.row_index]
    wrong = set_problems(sets, sequences, vocab_size, checked, empty=True)
    problems |= {row: f"support, position {position}: {what}" for row, (position, what) in wrong.items()}
    return sets, problems


def _given_top_ids(given: Any, sequences: Ragged, starts: Tensor, vocab_size: int) -> tuple[Ragged, Problems]:
    """Return ids ``[total, k]`` as long as the sequences, -1 where nothing is scored, and the rows that are wrong.

    Args:
        given: a `Ragged` with ``values[total, k]``, a tensor ``[rows, time, k]``, or a list of tensors ``[time, k]``.
            A row has as many positions as its sequence, or as many as are scored; -1 stands for no id.
        starts: int64[rows]: where scoring starts.
    """
    rows = _rows_of_top_ids(given)
    if len(rows) != len(sequences):
        raise invalid("top_ids", f"expected ids for {len(sequences)} rows, got {len(rows)}")
    k = rows[0].shape[1] if rows else 1
    problems: Problems = {}
    out = torch.full((sequences.values.shape[0], k), -1)
    for row, (ids, first, end, start) in enumerate(
        zip(rows, sequences.offsets[:-1].tolist(), sequences.offsets[1:].tolist(), starts.tolist(), strict=True)
    ):
        whole, scored = end - first, max(0, end - first - start)
        if ids.shape[1] != k:
            problems[row] = f"top_ids: names {ids.shape[1]} ids at each position, but row 0 names {k}"
        elif len(ids) not in (whole, scored):
            problems[row] = (
                f"top_ids: names ids at {len(ids)} positions; expected {whole}, or the {scored} that are scored"
            )
        else:
            out[end - scored : end] = ids[len(ids) - scored :]
    ordered = out.sort(-1).values
    twice = ((ordered.diff(dim=-1) == 0) & (ordered[:, 1:] >= 0)).any(-1)
    outside = ((out < -1) | (out >= vocab_size)).any(-1)
    for wrong, what in ((twice, "names an id twice"), (outside, f"names an id outside the vocabulary of {vocab_size}")):
        for index in wrong.nonzero().flatten().tolist():
            row = int(sequences.row_index[index])
            problems.setdefault(row, f"top_ids, position {int(sequences.positions[index])}: {what}")
    return Ragged(out, sequences.lengths), problems


def _token_sets(given: Any) -> TokenSets:
    """Return sets in memory that the caller does not hold."""
    if isinstance(given, TokenSets):
        refuse_unreadable(given.ids.values, "support")
        if given.ids.values.dtype != torch.int64 or given.ids.values.ndim != 1:
            raise invalid("support", f"expected ids in int64, got {given.ids.values.dtype}")
        try:
            # Build and validate new sets: the caller may have modified the lengths since they were checked.
            return TokenSets(Ragged(given.ids.values.clone(), given.ids.lengths.clone()), given.lengths.clone())
        except ValueError as error:
            raise invalid("support", str(error)) from error
    try:
        rows = [list(row) for row in as_list(given)]
        for row, sets in enumerate(rows):
            for position, ids in enumerate(sets):
                # A mask over the vocabulary, for example: its values would be read as the ids 0 and 1.
                if _holds_bools(ids):
                    raise TypeError(f"row {row}, set {position} holds bools instead of ids")
        return TokenSets.from_list(rows)
    except Exception as error:
        expected = "TokenSets such as kept_ids of a result, or a list of ids for each position of each row"
        raise invalid("support", f"expected {expected}, got {shown(given)}: {described(error)}") from error


def _holds_bools(ids: Any) -> bool:
    if isinstance(ids, Tensor):
        return ids.dtype == torch.bool
    return not {*map(type, ids)} <= {int} and any(map(is_bool, ids))


def _rows_of_top_ids(given: Any) -> list[Tensor]:
    expected = "expected a Ragged with values[total, k], or for each row a tensor [time, k], of ids in int64"
    if isinstance(given, Ragged):
        refuse_unreadable(given.values, "top_ids")
        rows = list(given.split())
    else:
        rows = list(given) if isinstance(given, (Tensor, list, tuple)) else [given]
    for number, row in enumerate(rows):
        if not isinstance(row, Tensor):
            raise invalid("top_ids", f"{expected}; row {number} is {shown(row)}, which is not a tensor")
        refuse_unreadable(row, "top_ids")
        if row.ndim != 2 or row.dtype != torch.int64 or not row.shape[1]:
            raise invalid("top_ids", f"{expected}; row {number} is {row.dtype}{list(row.shape)}")
    return [row.cpu() for row in rows]
