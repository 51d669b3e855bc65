"""Scores over the ids that truncation had left for the sampler."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredSupport:
    """The ids over which to normalise the score of each token.

    Attributes:
        sets: as long as the sequences, on the CPU; an empty set stands for the whole vocabulary.
        temperature: that of the scores.
    """

    sets: TokenSets
    temperature: float

    @property
    def for_engine(self) -> TokenSets | None:
        """The sets, or None if all of them are empty: an engine that knows no sets can score these rows."""
        return self.sets if self.sets.ids.values.shape[0] else None

    def restrict(self, logits: Ragged) -> Ragged:
        """Return the logits ``values[total, vocab]``, minus infinity for the ids that are not in the sets."""
        ids = self.sets.ids.to(logits.values.device)
        kept = torch.zeros_like(logits.values, dtype=torch.bool)
        kept[ids.row_index.to(kept.device), ids.values] = True
        kept |= (ids.lengths == 0).to(kept.device)[:, None]
        return logits.with_values(logits.values.masked_fill(~kept, -torch.inf))

    def label(self, found: Provenance | tuple[Provenance, ...]) -> Provenance | tuple[Provenance, ...]:
        """Return the provenance of the scores, of all rows or of each: rows without any set are of full support.

        Args:
            found: what the engine says of all rows, or of each.
        """
        cut = (self.sets.flat.lengths > 0).tolist()
        labels = {on: Provenance.label_of_scores(self.temperature, truncated=on) for on in {*cut, False}}
        rows = found if isinstance(found, tuple) else (found,) * len(cut)
        made = tuple(replace(row, **labels[on]) for row, on in zip(rows, cut, strict=True))
        return made if len({*made}) > 1 else next(iter(made), found)


def with_support(td: TensorDictBase, rows: InputRows, options: PolicyOptions, temperature: float) -> InputRows:
    """Return the sequences to score with the sets that the `LogProbs` under ``options.support_key`` carry.

    Rows whose sets are not those of their tokens are added to their problems if such rows are skipped.

    Args:
        td: holds the `LogProbs`, at the root or under ``next``.
        rows: the sequences.
        options: those of the policy that scores.
        temperature: that of the scores. The sets were made at one temperature, which has to be the same.

    Raises:
        MissingKeyError: there are no such log-probs, or they carry no sets.
        InvalidRequestError: they are of another batch, or of other tokens.
        ProvenanceMismatchError: the sets belong to a distribution that is not scored.
    """
    key = options.support_key
    assert key is not None
    name = ".".join(key_parts(key))
    try:
        held, holder = find_entry(td, key)
    except MissingKeyError as error:
        raise MissingKeyError(f"support_key: {error}", field=name) from None
    wrong = None
    if not isinstance(held, LogProbs):
        kind = type(held).__name__
        wrong = f"is a {kind}; expected the LogProbs that a policy wrote with return_support=True"
    elif tuple(held.batch_size) != rows.batch_size:
        wrong = f"has the batch {tuple(held.batch_size)}, but that of the sequences is {rows.batch_size}"
    if wrong:
        raise InvalidRequestError(f"support_key: {name} {wrong}", field=name)
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
    support = ScoredSupport(sets=sets, temperature=temperature)
    return replace(rows, support=support, problems={**problems, **rows.problems})


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
        wanted = {one.temperature for one in labels if one is not None}
        first = next(iter(wanted)) if len(wanted) == 1 else "…"
        advice = f'score with log_probs_mode="processed", sampling_params={{"temperature": {first}}}'
        if "raw" in next(iter(problems.values())):
            advice = 'sample with log_probs_mode="processed", or score without support_key'
        if 0.0 in wanted:
            advice = "greedy answers have the log-prob 0 under truncation; score without support_key"
        raise ProvenanceMismatchError(f"support_key: {name}: {spelled_out(problems)}; {advice}")
