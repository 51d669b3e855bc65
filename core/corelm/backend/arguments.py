"""Coerce what callers pass to what the records hold. An argument of another kind is refused with its name."""

from __future__ import annotations

import operator
import uuid
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from corelm.backend.engine import OpenEngine
from corelm.errors import InvalidRequestError, Problems, described, refuse, spelled_out
from corelm.spec.sampling import SamplingParams
from corelm.tensors.ragged import Ragged, as_tensor, unreadable
from corelm.validate import as_list, invalid, is_bool, is_index, read_once, shown, unencodable

_WITHOUT_PADS = "pass a list with the ids of each row, without pads"

# Rows of ids ---------------------------------------------------------------------------------------------------------


def rows_of_ids(ids: Any, field: str, engine: OpenEngine | None = None, *, copy: bool = False) -> Ragged:
    """Return int64 rows.

    Args:
        ids: a `Ragged`; a list or Series of lists, tensors or arrays; an integer tensor or array ``[rows, time]``; or
            a nested tensor, which has one row per sequence.
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
        refuse_unreadable(values, field)
        if not _is_integer(values) or values.ndim != 1:
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
    eos, bos = (getattr(tokenizer, name, None) for name in ("eos_token_id", "bos_token_id"))
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
        if unreadable(tensor) or tensor.ndim != 1 or not _is_integer(tensor):
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


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool)


# Texts ---------------------------------------------------------------------------------------------------------------


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


# One value per row ---------------------------------------------------------------------------------------------------


def request_ids(given: Sequence[str] | None, rows: int) -> tuple[str, ...]:
    """Return one unique name per row: the given names, or generated ones."""
    if given is None:
        made: list[str] = []
        for _ in range(rows):
            made.append(uuid.uuid4().hex)
        return tuple(made)
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
    if found.shape != (count,) or not (_is_integer(found) or count == 0):
        raise invalid(field, f"expected {count} integers, got {shown(given)}")
    return found.to("cpu", torch.int64, copy=True)


def _index(given: Any) -> int:
    if is_bool(given):
        # Python would take it for 0 or 1.
        raise TypeError
    return operator.index(given)


# Seeds ---------------------------------------------------------------------------------------------------------------

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def seeds_of_call(engine: OpenEngine, sampling: SamplingParams, rows: int, given: Any = None) -> Tensor | None:
    """Return int64[rows * samples], the seeds of a call's answers: those given, or derived from ``sampling.seed`` or
    torch's generator.

    None lets the engine choose. It is returned for an engine that takes no seeds, and, unless the caller gave a seed,
    for one whose seeds are costly.
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
    halves: list[int] = []
    for state in states:
        halves.append(state >> 1)
    return torch.tensor(halves, dtype=torch.int64)
