"""Kept ids and the most probable ids: the arguments of `generate` and `score_logprobs` that are about them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from corelm.backend.check_results import set_problems
from corelm.backend.engine import OpenEngine
from corelm.errors import CapabilityError, Problems, described
from corelm.spec.records import GenerateResult
from corelm.spec.sampling import SamplingParams
from corelm.tensors.ragged import Ragged, unreadable
from corelm.tensors.token_sets import TokenSets, ascending
from corelm.validate import as_list, count, flag, invalid, is_bool, shown


def refuse_unreadable(values: Any, field: str) -> None:
    """Refuse what is not a plain tensor with values in memory."""
    if why := unreadable(values):
        raise invalid(field, f"expected a dense tensor, got {why}")


def support_comes_from_engine(return_support: Any, sampling: SamplingParams, engine: OpenEngine) -> bool:
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


def top_of_answers(given: Any, mode: Literal["none", "raw", "processed"], engine: OpenEngine) -> int:
    """Check the argument `top_logprobs` of `generate`."""
    k = _most("top_logprobs", given, "top_logprobs", engine)
    if k and mode == "none":
        raise invalid("top_logprobs", "no log-probs were asked for; give logprobs='raw' or 'processed' as well")
    return k


def ids_at_positions(
    engine: OpenEngine, sequences: Ragged, starts: Tensor, support: Any, top_k: Any, top_ids: Any
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


def _most(field: str, given: Any, capability: str, engine: OpenEngine) -> int:
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
