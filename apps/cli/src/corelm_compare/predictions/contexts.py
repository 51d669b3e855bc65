"""Another context: ids that the engine puts before the row, or leaves out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from corelm_compare.cases import Case, Prediction

#: How many ids are tried as a BOS that the engine may add.
_TRIED = 4
#: The least part of the tokens beyond a length that must differ.
_PERSISTENT = 0.5
#: How many lengths of a window are tried, in one call.
_LENGTHS = 64


def added(case: Case) -> Iterator[Prediction]:
    """An id that is put before every row, or before the rows that begin with it, or do not."""
    for token in case.special_ids[:_TRIED]:
        numbers = [row[1:] for row in case.scorer([[token, *row] for row in case.rows])]
        begins = [len(row) > 0 and row[0] == token for row in case.rows]
        choices = [(begins, all(begins), "every row")]
        if any(begins) and not all(begins):
            choices.append((begins, True, "every row that begins with it"))
            choices.append(([not each for each in begins], False, "every row that does not begin with it"))
        for number, (chosen, doubled, words) in enumerate(choices):
            yield Prediction(
                id="bos-doubled" if doubled else "bos-added",
                changed=f"id {token} before {words}",
                numbers=numbers if number == 0 else _where(chosen, numbers, case.truth),
                advice="the engine puts an id before those that it is given: turn that off (add_bos_token, "
                "add_special_tokens)",
                figures={"id": token},
            )


def dropped(case: Case) -> Iterator[Prediction]:
    """A first id that is left out, of every row or of those that begin with a special id."""
    usable = [list(row[1:]) if len(row) > 2 else list(row) for row in case.rows]
    numbers = []
    for row, found in zip(case.rows, case.scorer(usable), strict=True):
        moved = torch.full((len(row),), torch.nan)
        if len(row) > 2:
            moved[2:] = found[1:]
        numbers.append(moved)
    special = [len(row) > 0 and row[0] in case.special_ids for row in case.rows]
    advice = "the engine drops the first id that it is given: pass ids unchanged (add_bos_token)"
    yield Prediction(
        id="bos-missing" if all(special) else "first-token-dropped",
        changed="the first id of every row left out",
        numbers=numbers,
        advice=advice,
    )
    if any(special) and not all(special):
        yield Prediction(
            id="bos-missing",
            changed="the first id left out of every row that begins with a special one",
            numbers=_where(special, numbers, case.truth),
            advice=advice,
        )


def _where(chosen: Sequence[bool], changed: Sequence[Tensor], truth: Sequence[Tensor]) -> list[Tensor]:
    """Return the changed numbers of the chosen rows, and those of the reference for the others."""
    return [new if each else old for each, new, old in zip(chosen, changed, truth, strict=True)]


def truncated(case: Case) -> Iterator[Prediction]:
    """Long rows of which only the last tokens are read."""
    yield from _by_length(
        case,
        lambda row, size: (len(row) - size, row[len(row) - size :]),
        "truncation",
        "only the last {} ids of a row",
        "the engine cuts long rows on the left: raise its limit (max_model_len, context_length, truncation) to {more}",
    )


def chunked(case: Case) -> Iterator[Prediction]:
    """Long rows that are read in chunks which do not see one another."""
    yield from _by_length(
        case,
        lambda row, size: (size, row[size : 2 * size]),
        "chunked-prefill",
        "each chunk of {} ids read without the chunks before it",
        "the engine forgets the first chunk of a long prompt: turn chunked prefill off, or make its chunk longer than "
        "{more} ids (max_num_batched_tokens, chunked_prefill_size)",
    )


Cut = Callable[[Sequence[int], int], tuple[int, Sequence[int]]]


def _by_length(case: Case, cut: Cut, name: str, changed: str, advice: str) -> Iterator[Prediction]:
    low, high = lengths(case)
    if low is None or high is None:
        return
    longest = max(range(len(case.rows)), key=lambda index: len(case.rows[index]))
    row, size = list(case.rows[longest]), len(case.rows[longest])
    tried = list(range(max(low, 1), min(high, size - 1) + 1))[:_LENGTHS]
    if not tried:
        return
    parts = [cut(row, each) for each in tried]
    scored = case.scorer([list(ids) for _, ids in parts])
    fits = []
    for (start, ids), found in zip(parts, scored, strict=True):
        theirs = case.numbers[longest][start + 1 : start + len(ids)]
        gap = (theirs - found[1:]).abs()
        gap = gap[torch.isfinite(gap)]
        fits.append(float(gap.mean()) if len(gap) >= 2 else float("inf"))
    window = tried[min(range(len(fits)), key=fits.__getitem__)]
    yield Prediction(
        id=name,
        changed=changed.format(window),
        numbers=_with_window(case, cut, window, name == "chunked-prefill"),
        advice=advice.format(more=size),
        note=f"length {window}",
        figures={"length": window},
        fitted=1,
        directed=True,
    )


def _with_window(case: Case, cut: Cut, window: int, chunks: bool) -> list[Tensor]:
    numbers = []
    for row, truth in zip(case.rows, case.truth, strict=True):
        if len(row) <= window:
            numbers.append(truth)
            continue
        moved = torch.full((len(row),), torch.nan)
        if chunks:
            moved[:window] = truth[:window]
            for start in range(window, len(row), window):
                part = list(row[start : start + window])
                if len(part) > 1:
                    moved[start + 1 : start + len(part)] = case.scorer([part])[0][1:]
        else:
            start, ids = cut(row, window)
            moved[start + 1 :] = case.scorer([list(ids)])[0][1:]
        numbers.append(moved)
    return numbers


def lengths(case: Case) -> tuple[int | None, int | None]:
    """Return the lengths between which rows begin to differ: that of the longest row that agrees, and the least that
    can be wrong. None and None if no row agrees, or all do.
    """
    agree: list[int] = [0]
    differ: list[int] = []
    for row, numbers, truth in zip(case.rows, case.numbers, case.truth, strict=True):
        size = (numbers - truth).abs()
        known = torch.isfinite(size)
        if not bool(known.any()):
            continue
        off = (size > 10 * case.noise) & known
        (differ if bool(off.any()) else agree).append(len(row))
    if not differ or max(agree) >= min(differ):
        return None, None
    # A row that differs may do so from any length below its own on.
    return max(agree), max(min(differ), max(agree) + 1)


def onset(case: Case) -> int | None:
    """Return from which position on all longer rows differ, while none does before it; None if there is none."""
    wrong = []
    for numbers, truth in zip(case.numbers, case.truth, strict=True):
        size = (numbers - truth).abs()
        wrong.append(torch.isfinite(size) & (size > 10 * case.noise))
    firsts = [int(off.nonzero()[0]) for off in wrong if bool(off.any())]
    if not firsts or min(firsts) < 4 or max(firsts) - min(firsts) > 3:
        return None
    at = min(firsts)
    # A single wrong token begins somewhere too. What changes at a length changes for all rows and for what follows.
    after = [off[at:] for off in wrong if len(off) > at + 4]
    persistent = sum(int(off.sum()) for off in after) >= _PERSISTENT * sum(len(off) for off in after)
    return at if after and persistent else None
