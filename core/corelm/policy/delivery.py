"""Put results where `inplace` says, without losing what a TensorDict holds.

Generating in place writes a new answer: its containers replace those of an earlier one. Scoring in place adds to what
is there: fields that are there stay as they are, and missing ones are added. What cannot be put next to it (scores of
other tokens, log-probs of another provenance under the same key) is refused before the engine is asked.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from corelm import validate
from corelm.backend.backend import Backend
from corelm.containers.classes import ChatHistory, LogProbs, Masks, Text, Tokens
from corelm.containers.fields import TOP, flat
from corelm.containers.reading import carries_sets, key_parts, provenance_of_rows, ragged, token_sets
from corelm.errors import InvalidRequestError, refuse, spelled_out
from corelm.policy.options import Keys, PolicyOptions
from corelm.policy.outputs import ABOUT_IDS
from corelm.policy.rows import InputRows, find_value
from corelm.policy.tokens import nested_field
from corelm.spec.provenance import Provenance
from corelm.spec.records import ContainerRequest
from corelm.tensors.ragged import Ragged
from corelm.tensors.token_sets import TokenSets

_DEFAULT = Keys()
_CONTAINERS: dict[str, Any] = {
    "text": Text,
    "tokens": Tokens,
    "masks": Masks,
    "log_probs": LogProbs,
    "history": ChatHistory,
}
#: How far apart, in nats and on average, two scorings of the same tokens with the same weights may be. Rounding in
#: bfloat16 makes about a fifth of that.
_ROUNDING = 0.05
#: The same for the last tokens of a single row, and how many these are. Log-probs of an earlier answer differ there, if
#: prompts are much longer than answers, or if one row of many was replaced.
_ROUNDING_AT_END, _END = 0.25, 8


def must_fit(td: TensorDictBase, batch_size: tuple[int, ...], options: PolicyOptions) -> None:
    """Refuse a call whose results cannot go where `inplace` says, before anything is sampled."""
    where = options.writes_in_place
    if where is True and td.is_locked:
        raise validate.invalid("inplace", "the TensorDict is locked; unlock it, or pass inplace=False")
    if where is False or tuple(td.batch_size) == batch_size:
        return
    rest = td.exclude(*_replaced_keys(td, options)) if where is True else td.empty()
    try:
        rest.batch_size = torch.Size(batch_size)
    except RuntimeError as error:
        raise validate.invalid(
            "inplace", f"the results' batch {batch_size} does not fit the input; pass inplace=False: {error}"
        ) from error


def _replaced_keys(td: TensorDictBase, options: PolicyOptions) -> list[NestedKey]:
    """Return the key of a bare input, which the container that holds the input replaces."""
    key = getattr(options.keys, options.input_mode)
    merged = not options.generate and isinstance(find_value(td, key), _CONTAINERS[options.input_mode])
    return [] if merged or options.input_key is not None else [key]


# Before the engine is asked ------------------------------------------------------------------------------------------


def must_replace(td: TensorDictBase, options: PolicyOptions) -> None:
    """Refuse generating in place if it would leave a container of an earlier answer next to the new one."""
    for name, container in _CONTAINERS.items():
        if name in options.fields or (name == "history" and options.input_mode != "history"):
            continue
        there = find_value(td, getattr(options.keys, name))
        response = "all_response_mask" if name == "masks" else "response"
        if isinstance(there, container) and response in there.keys():
            raise validate.invalid(
                f"return_{name}",
                f"{_dotted(options, name)!r} holds that of an earlier answer, which this call would not replace; leave "
                f"return_{name}=False out, delete it from the TensorDict, or pass inplace=False",
            )
    _refuse_stale(td, options, "a new answer", answered=True)


def _refuse_stale(td: TensorDictBase, options: PolicyOptions, new: str, *, answered: bool = False) -> None:
    """Refuse a call that replaces tokens if it leaves containers that are as long as the old ones.

    Args:
        td: what the call writes into.
        options: those of the policy.
        new: what the call writes.
        answered: whether to look only at log-probs of an earlier answer.
    """
    keys = options.keys
    written = [getattr(keys, name) for name in options.fields]
    # A policy that writes log-probs elsewhere leaves those of the sampler, which are under the default key.
    looked_at = [_DEFAULT.log_probs] if keys.tokens == _DEFAULT.tokens else []
    looked_at += [] if answered else [keys.tokens, keys.masks]
    for key in looked_at:
        there = None if key in written else find_value(td, key)
        if isinstance(there, (LogProbs, Masks, Tokens)) and (not answered or "response" in there.keys()):
            name = ".".join(key_parts(key))
            raise validate.invalid(
                name,
                f"it belongs to the tokens that are there, and would stay next to {new}; delete it from the "
                "TensorDict, write it as well, or pass inplace=False",
            )


def must_keep(
    td: TensorDictBase, rows: InputRows, options: PolicyOptions, label: Provenance | tuple[Provenance, ...]
) -> None:
    """Refuse scoring in place if it would replace something that is there.

    Args:
        label: the expected provenance of the scores, of all rows or of each.

    Raises:
        InvalidRequestError: other tokens, log-probs of another provenance, or values of other kinds are there.
    """
    if options.overwrite:
        if rows.conflicts:
            _refuse_stale(td, options, "scores of other tokens")
        return
    if rows.conflicts:
        raise InvalidRequestError(
            f"{_dotted(options, 'tokens')}: {spelled_out(rows.conflicts)}. Scores of other tokens are not put next to "
            "them: another tokenizer or chat template made them, or the input was cut or has changed since. Pass "
            'input_mode="tokens" to score the tokens that are there, id for id; or inplace=False; or write elsewhere: '
            'keys=Keys(text="ref_text", tokens="ref_tokens", masks="ref_masks", log_probs="ref_log_probs"); or '
            "overwrite=True to replace them",
            field="tokens",
            problems=rows.conflicts,
        )
    for name in sorted(options.fields):
        there = find_value(td, getattr(options.keys, name))
        if there is None:
            continue
        if isinstance(there, LogProbs) and name == "log_probs" and rows.conflicts is not None:
            refuse_other_provenance(there, label, getattr(options.keys, name), _ADVICE)
            _read_log_probs(there, rows, options)
        elif loss := _loss(name, there, rows, options):
            elsewhere = 'log_probs_key="ref_log_probs"' if name == "log_probs" else f"keys=Keys({name}=…)"
            leave_out = "" if name == "log_probs" else f" or return_{name}=False"
            raise InvalidRequestError(
                f"{_dotted(options, name)}: {loss}. Scoring in place replaces nothing: pass {elsewhere}{leave_out}; or "
                "inplace=False; or overwrite=True to replace it",
                field=name,
            )
    for name in ("argmax", "is_greedy") if options.return_argmax else ():
        if find_value(td, name) is not None:
            raise InvalidRequestError(
                f"{name}: the TensorDict holds one already, and scoring in place replaces nothing; pass inplace=False, "
                "or overwrite=True to replace it",
                field=name,
            )
    there = find_value(td, "errors") if options.on_error == "skip" else None
    if there is not None and not _are_errors(there, rows):
        raise validate.invalid("errors", "the TensorDict holds something else under that key; pass inplace=False")


_ADVICE = (
    'Write these elsewhere: log_probs_key="ref_log_probs"; or pass overwrite=True to replace those that are there, or '
    "inplace=False to return these alone"
)


def refuse_other_provenance(
    there: Any, expected: Provenance | tuple[Provenance | None, ...], key: NestedKey, advice: str
) -> None:
    """Refuse to replace log-probs of another provenance, row by row. Anything but `LogProbs` is accepted.

    Args:
        there: what is under the key.
        expected: the provenance of the new log-probs, one for all rows or one per row.
        key: the key.
        advice: what to do instead.

    Raises:
        InvalidRequestError: `rows` are those of another provenance, or of an unknown one.
    """
    if not isinstance(there, LogProbs):
        return
    count = there.batch_size.numel()
    olds = provenance_of_rows(there, count)
    news = expected if isinstance(expected, tuple) else (expected,) * count
    problems = {
        row: f"the log-probs that are there come from {_source(old)}, the new ones from {_source(new)}"
        for row, (old, new) in enumerate(zip(olds, news, strict=False))
        if old != new
    }
    if problems:
        field = ".".join(key_parts(key))
        raise InvalidRequestError(f"{field}: {spelled_out(problems)}. {advice}", field=field, problems=problems)


def _source(one: Provenance | None) -> str:
    if one is None:
        return "an unknown source"
    how = one.mode if one.mode == "raw" else f"processed, temperature {one.temperature}, {one.support} support"
    return f"{one.backend} ({one.model!r}, weights {one.weight_version!r}, {how})"


def _loss(name: str, there: Any, rows: InputRows, options: PolicyOptions) -> str | None:
    """Return what would be lost of what is there; None if nothing would.

    Containers are kept if they say the same. The ids decide, if there are any: the text of an answer lacks the special
    tokens and the stop string that its ids have.
    """
    read = name == options.input_mode and options.input_key is None
    if _is_nested(there):
        lost = sorted({*there.keys()} - {"full", "padded"})
        which = f" of {', '.join(lost)}" if lost else ""
        return f"nested tensors{which} are there" if lost or not read else None
    if isinstance(there, TensorDictBase):
        written = {"full", "input_ids", "attention_mask"} if read else set()
        if read and rows.only_response:
            written |= {"prompt", "response"}
        if name == "masks":
            written = {"all_attention_mask"} | ({"all_assistant_mask"} if rows.assistant is not None else set())
        lost = sorted(map(str, set(there.keys()) - written))
        return f"a plain TensorDict with {', '.join(lost)} is there" if lost else None
    if not isinstance(there, _CONTAINERS[name]):
        kind = "list" if isinstance(there, list) else type(there).__name__
        return None if read else f"a {kind} is there, not a {_CONTAINERS[name].__name__}"
    if read or rows.conflicts is not None or name == "tokens":
        return None
    if name == "masks":
        return None if _fit(there, rows) else "masks of other tokens are there"
    if name == "history":
        same = "full" not in there.keys() or there.full.chats == rows.chats
    else:
        same = name == "text" and ("full" not in there.keys() or tuple(flat(there.full)) == rows.texts)
    what = "log-probs are" if name == "log_probs" else f"another {name} is"
    return None if same else f"{what} there, and no tokens to show that it belongs to what is scored"


def _fit(masks: Masks, rows: InputRows) -> bool:
    """Return whether masks have the layout and the lengths of the rows."""
    fields = [getattr(masks, name) for name in masks.keys() if name != "padded"]
    if masks.padded is not (rows.columns is not None):
        return False
    if rows.columns is not None:
        shape = (*rows.batch_size, rows.columns.mask.shape[-1])
        return all(field.shape == shape for field in fields)
    lengths = rows.ids.lengths.tolist()
    return all([len(row) for row in flat(field)] == lengths for field in fields)


def _is_nested(there: Any) -> bool:
    """Return whether these are `Tokens` of nested tensors, which are read like bare ones and replaced by rows."""
    return isinstance(there, Tokens) and nested_field(there, "full") is not None


def _are_errors(there: Any, rows: InputRows) -> bool:
    messages = flat(there)
    return len(messages) == len(rows.ids) and all(isinstance(one, str) for one in messages)


def _dotted(options: PolicyOptions, name: str) -> str:
    return ".".join(key_parts(getattr(options.keys, name)))


# After the engine has answered ---------------------------------------------------------------------------------------


def scores_are_dense(td: TensorDictBase, rows: InputRows, options: PolicyOptions) -> bool:
    """Return whether scores are written as dense tensors: in place like the tokens there, else as `pad_output` says."""
    if options.writes_in_place is True and _joins(rows, options):
        for name in ("tokens", "masks"):
            if isinstance(find_value(td, getattr(options.keys, name)), _CONTAINERS[name]):
                return rows.columns is not None
    return options.pad_output


def merged(td: TensorDictBase, rows: InputRows, request: ContainerRequest, options: PolicyOptions) -> ContainerRequest:
    """Return the scores together with those that are there: a log-prob that is there stays, new positions are added."""
    if options.writes_in_place is not True or options.overwrite:
        return request
    earlier = None if request.errors is None else find_value(td, "errors")
    if request.errors is not None and earlier is not None:
        pairs = zip(flat(earlier), request.errors, strict=True)
        request = replace(request, errors=tuple("; ".join(dict.fromkeys(filter(None, pair))) for pair in pairs))
    there = find_value(td, options.keys.log_probs)
    if not isinstance(there, LogProbs) or request.logprobs is None or request.scored is None:
        return request
    assert request.provenance is not None
    # The weights may have changed since the request was checked.
    refuse_other_provenance(there, request.provenance, options.keys.log_probs, _ADVICE)
    old, old_scored = _read_log_probs(there, rows, options)
    new = request.logprobs.values
    values, counts, new_counts = (one.values.to(new.device) for one in (old, old_scored, request.scored))
    both = counts & new_counts
    _must_agree(old.with_values(torch.where(both, values - new, 0.0)), both.cpu(), options)
    view, field = _with_masks(there, rows), _dotted(options, "log_probs")
    here, added = old.with_values(counts.cpu()), new_counts.cpu()
    return replace(
        _with_split(there, rows, request),
        **_joined_sets(view, request, here, added, field),
        **_joined_top(view, request, here.values, added, field),
        logprobs=old.with_values(torch.where(counts, values, new)),
        scored=old.with_values(counts | new_counts),
    )


def _read_log_probs(there: LogProbs, rows: InputRows, options: PolicyOptions) -> tuple[Ragged, Ragged]:
    """Return the log-probs that are there, and bool, as long: which of them are scored."""
    view = _with_masks(there, rows)
    values = ragged(view, ("log_probs", "full"))
    lengths = zip(values.lengths.tolist(), rows.ids.lengths.tolist(), strict=True)
    problems = {row: f"{n} log-probs are there for {m} tokens" for row, (n, m) in enumerate(lengths) if n != m}
    refuse(problems, _dotted(options, "log_probs"))
    if "scored_mask" in there.keys():
        return values, ragged(view, ("log_probs", "scored_mask"))
    return values, Ragged.full(values.lengths, True, torch.bool)


def _with_masks(there: LogProbs, rows: InputRows) -> TensorDict:
    """Return the log-probs with the masks that tell their tokens from pads, if they are dense."""
    held: dict[str, Any] = {"log_probs": there}
    if rows.columns is not None:
        mask = rows.columns.mask.reshape(*rows.batch_size, rows.columns.mask.shape[-1])
        held["masks"] = Masks(all_attention_mask=mask, batch_size=rows.batch_size)
    return TensorDict(held, batch_size=rows.batch_size)


def _with_split(there: LogProbs, rows: InputRows, request: ContainerRequest) -> ContainerRequest:
    """Return the request with the split into prompt and response that the log-probs there have, if it has none."""
    if rows.prompt_lengths is not None or "prompt" not in there.keys():
        return request
    lengths = ragged(_with_masks(there, rows), ("log_probs", "prompt")).lengths
    columns = rows.columns and replace(rows.columns, prompt_width=there.prompt.shape[-1])
    return replace(request, tokens=replace(rows, prompt_lengths=lengths).tokens, columns=columns)


def _must_agree(gaps: Ragged, both: Tensor, options: PolicyOptions) -> None:
    """Refuse scores that are further from those there than rounding explains, although their labels are the same.

    Args:
        gaps: the differences, as long as the rows; 0.0 where only one of the two is scored.
        both: bool, like the values: where both are scored.
        options: those of the policy.
    """
    # Where both are minus infinity, the gap is NaN, and they agree.
    far, row = gaps.values.nan_to_num(0.0, torch.inf, torch.inf).abs().cpu(), gaps.row_index
    mean = float(far.sum()) / max(int(both.sum()), 1)
    per_row = torch.zeros_like(gaps.lengths).index_add_(0, row, both.long())
    last = both & (per_row.cumsum(0)[row] - both.cumsum(0) < _END)
    at_end = torch.zeros(len(gaps), dtype=far.dtype).index_add_(0, row, torch.where(last, far, 0.0))
    at_end = at_end / per_row.clamp(1, _END)
    if mean <= _ROUNDING and bool((at_end <= _ROUNDING_AT_END).all()):
        return
    worst = int(far.argmax() if mean > _ROUNDING else torch.where(row == at_end.argmax(), far, -1.0).argmax())
    number, position = int(row[worst]), int(gaps.positions[worst])
    what = f"the log-prob of position {position} differs by {float(far[worst]):.3g} nats"
    key = _dotted(options, "log_probs")
    raise InvalidRequestError(
        f"{key}: row {number}: {what} from the one that is there (all differ by {mean:.3g} on average), although both "
        f"have the same provenance. Those that are there belong to other tokens, such as an earlier answer's; or the "
        f"models differ, or their weights do. {_ADVICE}",
        field=key,
        problems={number: what},
    )


def _joined_sets(
    view: TensorDict, request: ContainerRequest, here: Ragged, added: Tensor, field: str
) -> dict[str, Any]:
    """Return the ids over which tokens were normalised, with those that are there: where a token has a set, it stays.

    Args:
        view: holds the `log_probs` that are there, and their masks if they are dense.
        request: the new scores.
        here: bool: where the log-probs there are scored.
        added: bool, like the values of `here`: where the new ones are.
        field: the key of the log-probs, for errors.

    Raises:
        InvalidRequestError: a token was normalised over other ids.
    """
    held, new = view.get("log_probs"), request.kept_ids
    both = here.values & added
    if not carries_sets(held):
        if new is not None and bool((both & (new.ids.lengths > 0)).any()):
            raise validate.invalid(
                field,
                "the log-probs there do not say over which ids they were normalised, and the new ones do. "
                'Write these elsewhere: log_probs_key="ref_log_probs"; or pass overwrite=True',
            )
        return {"kept_ids": new}
    joined = old = token_sets(view).to("cpu").where(here.values)
    if new is not None:
        new = new.to("cpu")
        differ = (both & ~old.same_as(new)).nonzero().flatten().tolist()
        what = "the token at position {} was normalised over other ids there"
        refuse({int(here.row_index[at]): what.format(int(here.positions[at])) for at in reversed(differ)}, field)
        # Where both have a set, they are equal.
        index = torch.arange(len(old.ids)) + torch.where(here.values, 0, len(old.ids))
        joined = TokenSets(Ragged.cat([old.ids, new.ids]).select(index), old.lengths)
    made: dict[str, Any] = {"kept_ids": joined}
    if "kept_log_mass" in held.keys():
        mass = ragged(view, ("log_probs", "kept_log_mass"))
        made["kept_log_mass"] = mass.with_values(mass.values.masked_fill(~here.values.to(mass.values.device), 0.0))
    return made


def _joined_top(view: TensorDict, request: ContainerRequest, here: Tensor, added: Tensor, field: str) -> dict[str, Any]:
    """Return the most probable ids of tokens, with those that are there: where a token has them, they stay.

    Args:
        view: as for `_joined_sets`, and so are the others.
        here: bool: where the log-probs there are scored.

    Raises:
        InvalidRequestError: a token would have no ids, or another number of them than the others.
    """
    held, made = view.get("log_probs"), {}
    for name in TOP:
        of_request, _ = ABOUT_IDS[name]
        key, new, has = f"{field}.{name}", getattr(request, of_request), name in held.keys()
        if (new is not None and not has and bool((here & ~added).any())) or (
            has and new is None and bool((added & ~here).any())
        ):
            advice = "score with the top_k of the log-probs that are there" if has else "score without top_k"
            raise validate.invalid(
                key,
                f"some tokens would have these, and others would not; {advice}, or write elsewhere: "
                'log_probs_key="ref_log_probs"',
            )
        if has:
            old = ragged(view, ("log_probs", name))
            if new is not None and new.values.shape != old.values.shape:
                width = old.values.shape[-1]
                raise validate.invalid(
                    key,
                    f"{width} ids a token are there, the new scores have {new.values.shape[-1]}; pass top_k={width}, "
                    'or log_probs_key="ref_log_probs"',
                )
            if new is not None:
                keep = here.to(new.values.device).reshape(-1, *[1] * (new.values.ndim - 1))
                old = old.with_values(torch.where(keep, old.values.to(new.values.device), new.values))
            made[of_request] = old
    return made


def deliver(
    td: TensorDictBase, rows: InputRows, request: ContainerRequest, backend: Backend, options: PolicyOptions
) -> TensorDictBase:
    """Put the containers under the policy's keys, where `inplace` says."""
    made = backend.to_containers(request)
    device = options.device or td.device
    if device is not None:
        made = made.to(device)
    where = options.writes_in_place
    read = options.input_mode if options.input_key is None else None
    there: dict[str, Any] = {}
    if where is True and not options.generate:
        # Log-probs that are there are already part of the new ones.
        kept = [name for name in _CONTAINERS if name != "log_probs" and (name == read or _joins(rows, options))]
        there = {name: find_value(td, getattr(options.keys, name)) for name in kept}
    if where is False:
        out: TensorDictBase = TensorDict({}, batch_size=request.batch_size, device=device)
    else:
        out = td if where is True else td.empty()
        if tuple(out.batch_size) != tuple(request.batch_size):
            out.exclude(*_replaced_keys(td, options), inplace=True)
            out.batch_size = torch.Size(request.batch_size)
    for name, value in made.items():
        # Completions that get a `full` would be scored as whole sequences the next time.
        without = ("full",) if rows.only_response and name == read and there.get(name) is not None else ()
        if isinstance(there.get(name), _CONTAINERS.get(name, ())) and not _is_nested(there[name]):
            value = _completed(there[name], value, without)
        elif without:
            value = value.exclude(*without)
        out.set(getattr(options.keys, name, name), value)
    return out


def _joins(rows: InputRows, options: PolicyOptions) -> bool:
    """Return whether scores join what is there. With overwrite=True, containers of other tokens may be there."""
    return not options.overwrite or rows.conflicts == {}


def _completed(there: Any, new: Any, without: Collection[str] = ()) -> Any:
    """Return the container that is there, with the fields of the new one that it lacks, except those in `without`."""
    for field in new.keys():
        if field not in there.keys() and field not in without:
            # Fields without rows read as empty lists, which have no type.
            there.set(field, new.get(field) if 0 in new.batch_size else getattr(new, field))
    return there
