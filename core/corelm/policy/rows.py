"""`InputRows`: what was read from a user's TensorDict, as flat rows; and the ids over which scores are normalised."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from corelm.backend.backend import Backend
from corelm.containers.classes import LogProbs, Masks
from corelm.containers.reading import find_entry, key_parts, provenance_of_rows, token_sets
from corelm.errors import InvalidRequestError, MissingKeyError, Problems, ProvenanceMismatchError, refuse, spelled_out
from corelm.policy.options import PolicyOptions
from corelm.spec.capabilities import Capabilities
from corelm.spec.message import Chat, Message
from corelm.spec.provenance import Provenance
from corelm.spec.records import Columns, Parts
from corelm.spec.sampling import SamplingParams
from corelm.tensors.ragged import Ragged
from corelm.tensors.token_sets import TokenSets
from corelm.validate import invalid


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputRows:
    """The rows that were read, one per prompt or sequence, in C order of `batch_size`.

    Attributes:
        batch_size: the shape of the batch.
        ids: the prompts, or the whole sequences.
        texts: the texts that were tokenized; None where tokens were read.
        chats: the conversations that were rendered; None where no history was read.
        begun: for each conversation the assistant turn at its end that the answer continues, with its ids, or
            None; None where no answer continues a turn.
        tools: for each conversation its own tools, or None; None where no conversation has any.
        assistant: bool, as long as `ids`: tokens that the assistant said; None where this is not known.
        prompt_lengths: int64[rows], if the input tells prompt and response apart.
        columns: the dense layout that the sequences came in.
        retokenized: whether sampled turns of a row were rendered from their text and so lost their ids; None
            where this cannot happen.
        only_response: whether the input is prompts and their completions, of which only the completions are scored.
        parts: the texts of prompts and completions, if such were read.
        problems: rows that could not be read, which are empty, and rows that have nothing to score; and why.
        support: the ids over which the score of each token is normalised, on the CPU; an empty set, and None for all
            tokens, stand for the whole vocabulary.
        conflicts: rows whose ids differ from the `Tokens` in the TensorDict, and how; None if it holds no `Tokens`.
        there: the containers in the TensorDict that scores join, by name.
    """

    batch_size: tuple[int, ...]
    ids: Ragged
    texts: tuple[str, ...] | None = None
    chats: tuple[Chat, ...] | None = None
    begun: tuple[Message | None, ...] | None = None
    tools: tuple[Any, ...] | None = None
    assistant: Ragged | None = None
    prompt_lengths: Tensor | None = None
    columns: Columns | None = None
    retokenized: tuple[bool, ...] | None = None
    only_response: bool = False
    parts: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    problems: Mapping[int, str] = field(default_factory=dict)
    support: TokenSets | None = None
    conflicts: Problems | None = None
    there: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> Parts[Ragged]:
        """The ids, split into prompt and response if the input tells them apart."""
        if self.prompt_lengths is None:
            return Parts(None, None, self.ids)
        return Parts(self.ids.slice(stop=self.prompt_lengths), self.ids.slice(self.prompt_lengths), self.ids)

    def repeat(self, n: int) -> InputRows:
        """Return every prompt `n` times, under a new last batch dimension."""
        found: dict[str, Any] = {}
        for name in ("texts", "chats", "begun", "tools", "retokenized"):
            if (values := getattr(self, name)) is not None:
                found[name] = tuple([value for value in values for _ in range(n)])
        if self.assistant is not None:
            found["assistant"] = self.assistant.repeat(n)
        return replace(self, batch_size=(*self.batch_size, n), ids=self.ids.repeat(n), **found)


def room_for_prompts(sampling: SamplingParams, capabilities: Capabilities) -> int | None:
    """Return how many tokens a prompt may have; None without a limit. Refuse an answer that fills the context."""
    context = capabilities.max_context
    if context is None:
        return None
    room = context - (sampling.max_new_tokens or 1)
    if room < 1:
        raise invalid(
            "max_new_tokens",
            f"{sampling.max_new_tokens} tokens leave no room for a prompt in a context of {context}; lower it",
        )
    return room


def last_tokens(ids: Ragged, limit: int | None) -> Ragged:
    """Return the last `limit` tokens of every row; all tokens if `limit` is None."""
    return ids if limit is None else ids.slice(ids.lengths - limit)


def truncate_left(rows: InputRows, limit: int | None, backend: Backend) -> InputRows:
    """Keep the last `limit` tokens of every prompt. The text of a prompt that was cut is decoded again."""
    if limit is None or not bool((cut := rows.ids.lengths > limit).any()):
        return rows
    ids, texts = last_tokens(rows.ids, limit), rows.texts
    if texts is not None:
        decoded = iter(backend.detokenize(ids.select(cut.nonzero().flatten()), skip_special_tokens=False))
        texts = tuple(next(decoded) if was else text for was, text in zip(cut.tolist(), texts, strict=True))
    assistant = None if rows.assistant is None else last_tokens(rows.assistant, limit)
    return replace(rows, ids=ids, texts=texts, assistant=assistant)


# Scores over some ids ----------------------------------------------------------------------------------------------


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
