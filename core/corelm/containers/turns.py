"""`merge_turns`: one training row for a conversation of several sampled turns, and where its log-probs came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from corelm.containers.assemble import ABOUT_IDS, assemble
from corelm.containers.classes import SETS, LogProbs, Tokens
from corelm.containers.reading import about_ids, key_parts, list_keys, provenance_of_rows, ragged, token_ids
from corelm.errors import MissingKeyError, Problems, ProvenanceMismatchError, refuse, spelled_out
from corelm.spec.provenance import Provenance, VersionRuns
from corelm.spec.records import ContainerRequest, Parts
from corelm.tensors.lazy_rows import non_tensors
from corelm.tensors.ragged import Ragged
from corelm.tensors.token_sets import TokenSets
from corelm.validate import invalid

#: Fields of `LogProbs`, and the fields of a request that they become.
REQUEST_FIELDS = {"full": "logprobs", SETS: SETS, **{name: given for given, name in ABOUT_IDS.items()}}


def merge_turns(turns: Sequence[TensorDictBase], *, pad_output: bool = False, pad_id: int = 0) -> TensorDict:
    """Return one row per conversation, with the tokens, masks and log-probs of all its turns.

    The row of two turns, p for prompt, s for sampled, t for what a tool or a user said in between::

        turn 0                    p p p s s
        turn 1, whose prompt
        begins with turn 0        p p p s s t t t s s
        tokens.prompt             p p p
        tokens.response                 s s t t t s s
        all_response_mask         - - - x x x x x x x
        all_assistant_mask        - - - x x - - - x x     the loss mask of a multi-turn trainer
        log_probs.scored_mask     - - - x x - - - x x     if every sampled token has a log-prob
        log_probs.full            each turn's own numbers, from the time when it was sampled; likewise what they say
                                  about ids (`kept_ids`, `top_ids`, …)

    Other entries, such as rewards and texts, stay in the turns. If the conversations have different numbers
    of turns, merge those of each number separately, or one conversation at a time, and stack the results with
    `tensordict.lazy_stack`.

    Args:
        turns: what a policy wrote for every turn of the same conversations, in order, each of the same batch
            size. For a rollout of TorchRL, batch ``(B, T)``, pass ``td.unbind(1)``.
        pad_output: dense tensors (prompts padded left, responses right) instead of one row a conversation.
        pad_id: the id in the pads of dense tokens.

    Returns:
        A TensorDict with `tokens`, `masks`, `log_probs` if the turns have them, and then `weight_versions`:
        per row a tuple with the version of the weights that sampled each turn. The provenance of a row whose
        turns were sampled with different weights names all of them, such as "3, 4".

    Raises:
        MissingKeyError: a turn has no tokens, or only some turns have log-probs, or the ids that truncation left.
        InvalidRequestError: the turns have different batch sizes, or a turn skipped a row, or a prompt does
            not begin with the tokens of the turn before it, for example because the chat template rewrites
            earlier turns; `rows` are the conversations.
        ProvenanceMismatchError: the log-probs of a row's turns are of different distributions.
    """
    if isinstance(turns, TensorDictBase) or not turns:
        raise invalid("turns", "expected a list with the TensorDict of each turn; pass td.unbind(1) for a rollout")
    shapes = [tuple(td.batch_size) for td in turns]
    if len({*shapes}) > 1:
        raise invalid(
            "turns", f"the turns have the batch sizes {', '.join(map(str, shapes))}; merge rows of the same turns only"
        )
    tokens = [sampled_tokens(td, f"turn {number}") for number, td in enumerate(turns)]
    log_probs = [sampled_log_probs(td) for td in turns]
    for number, (earlier, later) in enumerate(pairwise(tokens)):
        _must_continue(earlier, later, number)
    names = _common_fields(log_probs)
    (full, _), (_, prompt_lengths) = tokens[-1], tokens[0]
    # Where the values of each token are among those of all turns, one after another. The last place holds no value.
    starts = [0, *accumulate(ids.values.shape[0] for ids, _ in tokens)]
    sampled = torch.zeros(full.values.shape, dtype=torch.bool)
    index = torch.full(full.values.shape, starts[-1])
    for start, (ids, split), found in zip(starts, tokens, log_probs, strict=False):
        here = full.offsets[:-1][ids.row_index] + ids.positions
        answered = scored = ids.positions >= split[ids.row_index]
        if found:
            scored = answered & found["scored_mask"].values
        sampled[here] |= answered
        index[here[scored]] = start + scored.nonzero().flatten()
    picked = {name: _picked([found[name] for found in log_probs], index, full) for name in names}
    about: dict[str, Any] = {REQUEST_FIELDS[name]: values for name, values in picked.items()}
    rows: list[tuple[SampledPart, ...]] = []
    if "full" in names:
        parts = [
            map(SampledPart, provenance_of_rows(td.get("log_probs"), len(ids)), split.tolist(), ids.lengths.tolist())
            for td, (ids, split) in zip(turns, tokens, strict=True)
        ]
        rows = list(zip(*parts, strict=True))
        about |= {"scored": full.with_values(index < starts[-1]), "provenance": _common_provenance(rows)}
    request = ContainerRequest(
        batch_size=shapes[0],
        fields=frozenset({"tokens", "masks", *(["log_probs"] if "full" in names else [])}),
        tokens=Parts(full.slice(stop=prompt_lengths), full.slice(prompt_lengths), full),
        assistant=full.with_values(sampled),
        pad_output=pad_output,
        pad_id=pad_id,
        **about,
    )
    out = assemble(request)
    if "full" in names:
        labels = [[part.provenance for part in row] for row in rows]
        versions = [tuple("" if one is None else one.weight_version for one in row) for row in labels]
        out.set("weight_versions", non_tensors(versions, shapes[0]))
    device = turns[0].device
    return out if device is None else out.to(device)


def sampled_tokens(
    td: TensorDictBase, what: str, field: str = "tokens", *, tokens: NestedKey = "tokens", masks: NestedKey = "masks"
) -> tuple[Ragged, Tensor]:
    """Return the ids that a policy wrote, prompts included, and int64[rows], the lengths of these.

    Errors call `td` `what`, and name the `field`.
    """
    held = td.get(tokens, None)
    if not isinstance(held, Tokens) or not {"prompt", "full"} <= set(held.keys()):
        raise MissingKeyError(f"{what}: there are no tokens.prompt and tokens.full{list_keys(td, tokens)}", field=field)
    ids, prompt_lengths = token_ids(td, key_parts(tokens), masks)
    assert prompt_lengths is not None
    return ids, prompt_lengths


def sampled_log_probs(td: TensorDictBase, key: NestedKey = "log_probs", masks: NestedKey = "masks") -> dict[str, Any]:
    """Return the fields of a `LogProbs` that are as long as the tokens, on the CPU; {} without one."""
    path = key_parts(key)
    if not isinstance(td.get(path, None), LogProbs):
        return {}
    found = {name: ragged(td, (*path, name), masks=masks) for name in ("full", "scored_mask")}
    return {name: rows.to("cpu") for name, rows in (found | about_ids(td, path, masks)).items()}


def _common_fields(turns: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the fields that the log-probs of all turns have, and refuse those that only some have."""
    names = [name for name in REQUEST_FIELDS if any(name in turn for turn in turns)]
    for name in names:
        what = "log_probs" if name == "full" else f"log_probs.{name}"
        if not all(name in turn for turn in turns):
            raise MissingKeyError(
                f"only some turns have {what}; sample all of them with the same return_log_probs, return_support and "
                "top_logprobs",
                field=what,
            )
        widths = {turn[name].values.shape[1:] for turn in turns if name != SETS}
        if len(widths) > 1:
            found = ", ".join(str(shape[-1]) for shape in sorted(widths))
            told = f"the turns have different numbers of ids a token ({found})"
            raise invalid(what, f"{told}; sample every turn with the same top_logprobs")
    return names


def _picked(parts: Sequence[Any], index: Tensor, full: Ragged) -> Any:
    """Return the values of all turns at these places, as long as `full`; no ids, or 0, at the place after the last."""
    if isinstance(parts[0], TokenSets):
        sets = [part.ids for part in parts]
        return TokenSets(Ragged.cat([*sets, Ragged.from_list([[]])]).select(index), full.lengths)
    values = [part.values for part in parts]
    return full.with_values(torch.cat([*values, values[0].new_zeros((1, *values[0].shape[1:]))])[index])


def _must_continue(earlier: tuple[Ragged, Tensor], later: tuple[Ragged, Tensor], number: int) -> None:
    """Refuse rows that a turn skipped, and rows whose prompt does not begin with the tokens of the turn before."""
    skipped, differing = Problems(), Problems()
    prompts = later[0].slice(stop=later[1])
    for row, (before, prompt) in enumerate(zip(earlier[0].split(), prompts.split(), strict=True)):
        same = min(len(before), len(prompt))
        if bool(len(before)) is not bool(len(prompt)):
            skipped[row] = (
                f"turn {number + bool(len(before))} has no tokens, because the policy skipped the row (see its "
                "`errors`); leave the conversation out of all turns, or merge only the turns before"
            )
        elif len(prompt) < len(before) or not torch.equal(before, prompt[:same]):
            at = next(iter((before[:same] != prompt[:same]).nonzero().flatten().tolist()), same)
            differing[row] = (
                f"the prompt of turn {number + 1} differs from the tokens of turn {number} at position {at}: the chat "
                "template rewrites earlier turns, or the prompt was changed; train on these turns as separate rows"
            )
    refuse(skipped or differing, "turns")


def _common_provenance(rows: Sequence[Sequence[SampledPart]]) -> tuple[Provenance, ...] | None:
    """Return the provenance of every row; None if that of a turn is not known.

    All turns of a row whose provenance is known must be of one distribution.
    """
    problems = {row: what for row, parts in enumerate(rows) if (what := disagreement(parts))}
    if problems:
        raise ProvenanceMismatchError(
            f"the log-probs of the turns are of different distributions: {spelled_out(problems)}; sample every turn "
            'with the same sampling parameters, or with log_probs_mode="raw"'
        )
    merged = [one for parts in rows if (one := provenance_of_parts(parts)) is not None]
    return tuple(merged) if merged and len(merged) == len(rows) else None


# Provenance ---------------------------------------------------------------------------------------------------------


class SampledPart(NamedTuple):
    """The tokens of a row that one answer sampled.

    Attributes:
        provenance: that of the answer; None if it is not known.
        start: the position of its first token in the row.
        stop: the position after its last token; `start` for an answer without tokens.
    """

    provenance: Provenance | None
    start: int
    stop: int


def disagreement(parts: Sequence[SampledPart]) -> str:
    """Return the distributions of the parts if their log-probs may not stand in one row, else ""."""
    known = [part.provenance for part in parts if part.provenance is not None]
    if all(one.matches(known[0]) for one in known):
        return ""
    return ", ".join(f"{one.mode} at temperature {one.temperature} ({one.support})" for one in known)


def provenance_of_parts(parts: Sequence[SampledPart]) -> Provenance | None:
    """Return the provenance of a row: that of its last answer, with the versions of all weights that sampled the row.

    The parts are in order, and their distributions agree. None if one is not known, or without parts.
    """
    known = [part.provenance for part in parts if part.provenance is not None]
    if not known or len(known) < len(parts):
        return None
    # An answer that was aborted before its first token is of no weights.
    sampled = [one for part, one in zip(parts, known, strict=True) if part.start < part.stop] or known[-1:]
    versions = dict.fromkeys(one.weight_version for one in sampled)
    return replace(known[-1], weight_version=", ".join(versions), version_runs=_runs(parts, known))


def _runs(parts: Sequence[SampledPart], known: Sequence[Provenance]) -> VersionRuns:
    """Return which weights sampled the tokens of a row, from the first token of its first answer on; () if all one."""
    found: list[tuple[str, int]] = []
    for part, one in zip(parts, known, strict=True):
        if part.start == part.stop:
            continue
        before = part.start - parts[0].start
        for version, first in one.version_runs or ((one.weight_version, 0),):
            # A part may be the beginning of an answer.
            if part.start + first < part.stop and (not found or found[-1][0] != version):
                # Runs begin at 0: what is before the first sampled token belongs to no weights, and is counted with it.
                found.append((version, before + first if found else 0))
    return tuple(found) if len(found) > 1 else ()
