"""Ids that a caller names at each position: those to normalise over (`support`), and those to score (`top_ids`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from corelm.backend.arguments import refuse_unreadable
from corelm.backend.check_results import set_problems
from corelm.errors import Problems, described
from corelm.tensors.ragged import Ragged
from corelm.tensors.token_sets import TokenSets
from corelm.validate import as_list, invalid, is_bool, shown


def given_support(given: Any, sequences: Ragged, starts: Tensor, vocab_size: int) -> tuple[TokenSets, Problems]:
    """Return sets as long as the sequences, each in ascending order, and the rows whose sets are wrong.

    Args:
        given: `TokenSets` or nested lists, one set a position: as many as the sequence has, or as many as are scored.
        sequences: the ids to score.
        starts: int64[rows]: where scoring starts.
        vocab_size: ids are below it.

    Raises:
        InvalidRequestError: something else was given, or another number of rows.
    """
    sets = _ascending(_token_sets(given))
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
    # What is missing comes before what is scored. Rows at fault get empty sets, so that the others can go on.
    kept = torch.where(fits, found, 0)
    if problems:
        sets = sets.slice(torch.zeros_like(kept), kept)
    if not torch.equal(kept, whole):
        sets = TokenSets.empty(whole - kept).join(sets)
    checked = sequences.positions >= starts[sequences.row_index]
    wrong = set_problems(sets, sequences, vocab_size, checked, empty=True)
    problems |= {row: f"support, position {position}: {what}" for row, (position, what) in wrong.items()}
    return sets, problems


def given_top_ids(given: Any, sequences: Ragged, starts: Tensor, vocab_size: int) -> tuple[Ragged, Problems]:
    """Return ids ``[total, k]`` as long as the sequences, -1 where nothing is scored, and the rows that are wrong.

    Args:
        given: a `Ragged` with ``values[total, k]``, a tensor ``[rows, time, k]``, or a list of tensors ``[time, k]``.
            A row has as many positions as its sequence, or as many as are scored.
        sequences: the ids to score.
        starts: int64[rows]: where scoring starts.
        vocab_size: ids are below it; -1 stands for no id.

    Raises:
        InvalidRequestError: something else was given, or another number of rows.
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
    if isinstance(given, TokenSets):
        refuse_unreadable(given.ids.values, "support")
        if given.ids.values.dtype != torch.int64 or given.ids.values.ndim != 1:
            raise invalid("support", f"expected ids in int64, got {given.ids.values.dtype}")
        try:
            # Build and validate new sets: the caller may have modified the lengths since they were checked.
            return TokenSets(Ragged(given.ids.values, given.ids.lengths), given.lengths)
        except ValueError as error:
            raise invalid("support", str(error)) from error
    listed = as_list(given)
    try:
        if not isinstance(listed, list):
            raise TypeError("not a list")
        rows = [list(row) for row in listed]
        for row, sets in enumerate(rows):
            for position, ids in enumerate(sets):
                # A mask over the vocabulary, for example: its values would be read as the ids 0 and 1.
                if _holds_bools(ids):
                    raise TypeError(f"row {row}, set {position} holds bools instead of ids")
        return TokenSets.from_list(rows)
    except Exception as error:  # the object's own methods may raise anything
        expected = "TokenSets such as kept_ids of a result, or a list of ids for each position of each row"
        raise invalid("support", f"expected {expected}, got {shown(given)}: {described(error)}") from error


def _holds_bools(ids: Any) -> bool:
    if isinstance(ids, Tensor):
        return ids.dtype == torch.bool
    return not {*map(type, ids)} <= {int} and any(map(is_bool, ids))


def _ascending(sets: TokenSets) -> TokenSets:
    ids, at = sets.ids.values.cpu(), sets.ids.row_index
    if bool(((ids.diff() < 0) & (at[1:] == at[:-1])).any()):
        # By position, then by id: a stable sort by position of what is sorted by id.
        order = ids.argsort()
        ids = ids[order[at[order].argsort(stable=True)]]
    return TokenSets(sets.ids.with_values(ids), sets.lengths)


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
