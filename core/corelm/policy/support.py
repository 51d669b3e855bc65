"""Scores over the ids that truncation had left when each token was sampled: `with_support` reads these ids."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch
from tensordict import TensorDict, TensorDictBase

from corelm.containers.classes import LogProbs, Masks
from corelm.containers.reading import find_entry, key_parts, provenance_of_rows, token_sets
from corelm.errors import InvalidRequestError, MissingKeyError, Problems, ProvenanceMismatchError, refuse, spelled_out
from corelm.policy.inputs import InputRows
from corelm.policy.options import PolicyOptions
from corelm.spec.provenance import Provenance
from corelm.tensors.ragged import Ragged
from corelm.tensors.token_sets import TokenSets


def with_support(td: TensorDictBase, rows: InputRows, options: PolicyOptions, temperature: float) -> InputRows:
    """Return the sequences to score with the sets that the `LogProbs` under ``options.support_key`` carry.

    Rows whose sets are not those of their tokens are added to their problems if such rows are skipped. The sets were
    made at one temperature, which must be that of the scores.
    """
    assert options.support_key is not None
    name = ".".join(key_parts(options.support_key))
    try:
        held, holder = find_entry(td, options.support_key)
    except MissingKeyError as error:
        raise MissingKeyError(f"support_key: {error}", field=name) from None
    if not isinstance(held, LogProbs):
        what = f"is a {type(held).__name__}; expected the LogProbs that a policy wrote with return_support=True"
        raise InvalidRequestError(f"support_key: {name} {what}", field=name)
    if tuple(held.batch_size) != rows.batch_size:
        what = f"has the batch {tuple(held.batch_size)}, but that of the sequences is {rows.batch_size}"
        raise InvalidRequestError(f"support_key: {name} {what}", field=name)
    view = TensorDict({"log_probs": held}, batch_size=held.batch_size)
    masks = None
    with suppress(MissingKeyError):
        masks, _ = find_entry(td, options.keys.masks, first=holder)
    if isinstance(masks, Masks) and tuple(masks.batch_size) == rows.batch_size:
        view["masks"] = masks
    elif rows.columns is not None:
        mask = rows.columns.mask.reshape(*rows.batch_size, rows.columns.mask.shape[-1])
        view["masks"] = Masks(all_attention_mask=mask, batch_size=rows.batch_size)
    sets = token_sets(view).to("cpu")
    _must_be_normalised(held, sets, name, temperature)
    lengths, wanted = sets.lengths, rows.ids.lengths
    problems = {
        row: f"{name} has sets for {lengths[row]} tokens, but the sequence has {wanted[row]}"
        for row in (lengths != wanted).nonzero().flatten().tolist()
        if row not in rows.problems
    }
    if options.on_error == "raise":
        refuse(problems, name)
    kept = torch.where(lengths == wanted, lengths, 0)
    sets = sets.slice(torch.zeros_like(kept), kept).join(TokenSets.empty(wanted - kept))
    return replace(rows, support=sets, problems={**problems, **rows.problems})


def restricted(logits: Ragged, support: TokenSets) -> Ragged:
    """Return the logits ``values[total, vocab]``, minus infinity for the ids that are not in the sets."""
    ids = support.ids.to(logits.values.device)
    kept = torch.zeros_like(logits.values, dtype=torch.bool)
    kept[ids.row_index.to(kept.device), ids.values] = True
    kept |= (ids.lengths == 0).to(kept.device)[:, None]
    return logits.with_values(logits.values.masked_fill(~kept, -torch.inf))


def labelled(
    found: Provenance | tuple[Provenance, ...], support: TokenSets, temperature: float
) -> Provenance | tuple[Provenance, ...]:
    """Return what the engine says of all scores, or of each row's, with the support: rows without sets are of all."""
    cut = (support.flat.lengths > 0).tolist()
    labels = {on: Provenance.label_of_scores(temperature, truncated=on) for on in {*cut, False}}
    rows = found if isinstance(found, tuple) else (found,) * len(cut)
    made = tuple(replace(row, **labels[on]) for row, on in zip(rows, cut, strict=True))
    return made if len({*made}) > 1 else next(iter(made), found)


def _must_be_normalised(held: LogProbs, sets: TokenSets, name: str, temperature: float) -> None:
    """Refuse sets of another temperature than that of the scores. Rows without sets may be of any distribution."""
    problems: Problems = {}
    cut = (sets.flat.lengths > 0).tolist()
    labels = provenance_of_rows(held, len(cut))
    for row, (label, some) in enumerate(zip(labels, cut, strict=True)):
        if not some or label is None:
            continue
        if label.mode == "raw":
            problems[row] = "is raw, so it was not normalised over these ids"
        elif label.temperature == 0.0:
            problems[row] = "is greedy, so each token had one id to choose from"
        elif label.temperature != temperature:
            problems[row] = f"was sampled at temperature {label.temperature}, the scores are of {temperature}"
        elif label.penalties:
            problems[row] = "was sampled with penalties, which scores cannot reflect"
    if problems:
        temperatures = {one.temperature for one in labels if one is not None}
        first = next(iter(temperatures)) if len(temperatures) == 1 else "…"
        advice = (
            f'both with log_probs_mode="processed", the scores with sampling_params={{"temperature": {first}}}, or '
            "score without support_key"
        )
        if 0.0 in temperatures:
            advice = "greedy answers have the log-prob 0 under truncation; score without support_key"
        raise ProvenanceMismatchError(f"support_key: {name}: {spelled_out(problems)}; {advice}")
