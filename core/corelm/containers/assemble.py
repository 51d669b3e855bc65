"""Wrap rows in the containers that users see: core's implementation of `to_containers`, the same for every engine.

There are two layouts. Dense: prompts come first and are padded on the left; responses follow and are padded on the
right. Rows: each row keeps its length, and rows are stacked lazily. `ContainerRequest` has a drawing of both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, TypeVar

import torch
from tensordict import NonTensorData, TensorClass, TensorDict
from torch import Tensor

from corelm.containers.classes import COUNTS, NO_ID, SETS, LogProbs, Masks, PerToken, Text, Tokens, must_have_lengths
from corelm.containers.history import ChatHistory, History
from corelm.spec.provenance import Provenance
from corelm.spec.records import Columns, ContainerRequest, Parts
from corelm.tensors.lazy_rows import Field, Shape, lazy_rows, non_tensors
from corelm.tensors.ragged import Ragged, is_integer
from corelm.validate import invalid

#: The fields of a request with one value, or k of them, per token, which go into `log_probs` next to the
#: numbers, and what they are called there.
ABOUT_IDS = {
    "kept_log_mass": "kept_log_mass",
    "top_ids": "top_ids",
    "top_logprobs": "top_log_probs",
    "tail_log_mass": "tail_log_mass",
}
_PER_ROW = ("greedy", "retokenized", "finish_reasons", "errors", "provenance")
_PER_TOKEN = ("logprobs", "scored", "argmax", "assistant", "kept_ids", *ABOUT_IDS)

C = TypeVar("C", bound=TensorClass)


def assemble(request: ContainerRequest) -> TensorDict:
    """Return the containers named in ``request.fields``, with `finish_reason` and `errors` if the request has them.

    Every field has its own storage. If rows are not padded, every row has: it can be modified in place, kept or pickled
    without the others. Do not modify the tensors and messages of the request: rows are copied lazily, on first access.
    Gradients flow from all fields of `log_probs` to ``request.logprobs``.

    Raises:
        InvalidRequestError: a container is requested without its data, or numbers of rows or their lengths differ.
    """
    _check(request)
    shape, tokens, wanted = tuple(request.batch_size), request.tokens, request.fields
    layout: dict[str, Any] = {"columns": None, "pad_id": request.pad_id}
    if request.pad_output:
        layout["columns"] = request.columns or dense_columns(tokens)
    dense, answered, ids = layout["columns"] is not None, None, {"full": tokens.full}
    if tokens.prompt is not None and tokens.response is not None:
        marks = tokens.prompt.join_mask(tokens.response).values
        answered = tokens.full.with_values(marks.to(tokens.full.values.device))
        # Dense ones are cut after padding.
        ids = ids if dense else {"prompt": tokens.prompt, "response": tokens.response, "full": tokens.full}
    out: dict[str, Any] = {}
    for name, cls, parts, stack in (
        ("text", Text, request.texts, non_tensors),
        ("history", ChatHistory, request.chats, History.wrap),
    ):
        if name in wanted and parts is not None:
            fields = {}
            for part in ("prompt", "response", "full"):
                if (values := getattr(parts, part)) is not None:
                    fields[part] = stack(values, shape)
            out[name] = cls.from_tensordict(TensorDict(fields, batch_size=shape))
    if "tokens" in wanted:
        out["tokens"] = container(Tokens, ids, shape, split=True, **layout)
    if "masks" in wanted:
        everywhere = tokens.full.with_values(torch.ones_like(tokens.full.values, dtype=torch.bool))
        masks = {"all_attention_mask": everywhere}
        masks |= {} if answered is None else {"all_response_mask": answered}
        masks |= {} if request.assistant is None else {"all_assistant_mask": request.assistant}
        out["masks"] = container(Masks, masks, shape, **layout)
    if "log_probs" in wanted:
        scores = _log_probs(request, None if dense else answered)
        out["log_probs"] = container(LogProbs, scores, shape, split=True, **layout)
    if request.argmax is not None:
        argmax = container(PerToken, {"full": request.argmax}, shape, **layout)
        out["argmax"] = argmax.full if dense else argmax
    for name, flags in (("is_greedy", request.greedy), ("retokenized", request.retokenized)):
        if flags is not None:
            out[name] = torch.tensor(flags, dtype=torch.bool).reshape(shape)
    for name, objects in (("finish_reason", request.finish_reasons), ("errors", request.errors)):
        if objects is not None:
            out[name] = non_tensors(objects, shape)
    return TensorDict(out, batch_size=shape)


def container(
    cls: type[C],
    fields: Mapping[str, Field],
    shape: Shape,
    *,
    columns: Columns | None,
    pad_id: int = 0,
    split: bool = False,
) -> C:
    """Return a container of the rows of its fields, which have no pads.

    Args:
        columns: where the tokens are in dense fields; None for a container that is not padded.
        pad_id: the id in the pads of `Tokens`.
        split: whether to cut a dense `prompt` and `response` from `full`, if `columns` is split.
    """
    if columns is None:
        return cls.from_tensordict(lazy_rows(fields, shape))
    dense = {name: _dense(cls, name, values, shape, columns, pad_id) for name, values in fields.items()}
    if split and columns.prompt_width is not None:
        full, width = dense["full"], columns.prompt_width
        dense = {"prompt": full[..., :width].clone(), "response": full[..., width:].clone(), **dense}
    dense["padded"] = NonTensorData(True, batch_size=shape)
    return cls.from_tensordict(TensorDict(dense, batch_size=shape))


def _dense(cls: Any, name: str, values: Field, shape: Shape, columns: Columns, pad_id: int) -> Any:
    """Return a field as one tensor ``[*shape, width]``, or ``[*shape, width, k]``, with pads."""
    if not isinstance(values, Ragged):
        same = values and list(values).count(values[0]) == len(values)
        return NonTensorData(values[0], batch_size=shape) if same else non_tensors(values, shape)
    filler = NO_ID.get(name, pad_id if cls is Tokens else 0)
    if cls is PerToken and is_integer(values.values):
        filler = -1  # 0 may be an id, so it would read as one
    mask, width = columns.mask, columns.prompt_width
    if name == SETS:
        mask = values.mask()
    elif name == "prompt" and width is not None:
        mask = mask[:, :width]
    elif name == "response" and width is not None:
        mask = mask[:, width:]
    dense = values.scatter(mask, filler)
    return dense.reshape(*shape, *dense.shape[1:])


def dense_columns(tokens: Parts[Ragged]) -> Columns:
    """Return the default columns of a dense batch: prompts padded left, responses right; rows without a split right.

    Prompts ``[[1, 2], [3]]`` with responses ``[[4], [5, 6]]`` take four columns, of which two are the prompt's::

        1 2 4 .
        . 3 5 6
    """
    if tokens.prompt is None or tokens.response is None:
        return Columns(tokens.full.mask("right"), None)
    prompt = tokens.prompt.mask("left")
    return Columns(torch.cat([prompt, tokens.response.mask("right")], -1), prompt.shape[-1])


def _log_probs(request: ContainerRequest, answered: Ragged | None) -> dict[str, Field]:
    """Return the fields of `LogProbs`: no ids, or 0, where nothing was scored; and the provenance of each row.

    Args:
        answered: where the responses are, to split `full` by; None leaves it whole.
    """
    logprobs, scored, tokens = request.logprobs, request.scored, request.tokens
    assert logprobs is not None and scored is not None
    unscored = ~scored.values
    values = logprobs.values.masked_fill(unscored, 0.0)
    fields: dict[str, Field] = {}
    if answered is not None and tokens.prompt is not None and tokens.response is not None:
        after = answered.values.to(values.device)
        fields["prompt"] = tokens.prompt.with_values(values[~after])
        fields["response"] = tokens.response.with_values(values[after])
    fields |= {"full": logprobs.with_values(values), "scored_mask": scored}
    if (kept := request.kept_ids) is not None:
        if bool((unscored.cpu() & (kept.ids.lengths > 0)).any()):
            kept = kept.where(~unscored)
        kept = kept.to(unscored.device)
        fields |= {SETS: kept.flat, COUNTS: kept.counts.to(unscored.device)}
    for given, name in ABOUT_IDS.items():
        if (rows := getattr(request, given)) is not None:
            mask = unscored.to(rows.values.device).reshape(-1, *[1] * (rows.values.ndim - 1))
            fields[name] = rows.with_values(rows.values.masked_fill(mask, NO_ID.get(name, 0)))
    if (label := request.provenance) is not None:
        labels = (label,) * math.prod(request.batch_size) if isinstance(label, Provenance) else label
        # Keyed by identity: hashing the provenance of every row would take longer than everything else.
        data: dict[int, Any] = {}
        for one in labels:
            if id(one) not in data:
                data[id(one)] = one and one.to_dict()
        fields["provenance"] = list(map(data.__getitem__, map(id, labels)))
    return fields


def _check(request: ContainerRequest) -> None:
    tokens, full, count = request.tokens, request.tokens.full, math.prod(request.batch_size)
    scored = None if request.scored is None else request.logprobs
    data = {"tokens": tokens, "masks": tokens, "text": request.texts, "history": request.chats, "log_probs": scored}
    for name in sorted(request.fields):
        if data.get(name) is None:
            raise invalid(name, "it is in fields, but the request has no data for it")
    given = dict(zip(_PER_ROW, attrgetter(*_PER_ROW)(request), strict=True))
    for name, parts in (("tokens", tokens), ("texts", request.texts), ("chats", request.chats)):
        for part in ("prompt", "response", "full"):
            values = getattr(parts, part, None)
            given[f"{name}.{part}"] = values.lengths if isinstance(values, Ragged) else values
    for name, values in given.items():
        if values is not None and not isinstance(values, Provenance) and len(values) != count:
            raise invalid(name, f"has {len(values)} rows, but a batch of {tuple(request.batch_size)} has {count}")
    lengths: dict[str, Tensor] = {}
    for name in _PER_TOKEN:
        if (rows := getattr(request, name)) is not None:
            lengths[name] = rows.lengths
    if tokens.prompt is not None and tokens.response is not None:
        lengths["prompt and response"] = tokens.prompt.lengths + tokens.response.lengths
    if request.columns is not None and request.pad_output:
        lengths["columns"] = request.columns.mask.sum(-1).cpu()
    for name, found in lengths.items():
        # Rows that `Ragged.with_values` made share their lengths.
        if found is not full.lengths and not torch.equal(found, full.lengths):
            must_have_lengths(found, full.lengths, name)
