"""Wrap rows in the containers that users see: core's implementation of `to_containers`, the same for every engine.

There are two layouts, and a builder for each. Dense: prompts come first and are padded on the left; responses follow
and are padded on the right. Rows: each row keeps its length, and rows are stacked lazily. `ContainerRequest` has a
drawing of both.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from tensordict import NonTensorData, NonTensorStack, TensorClass, TensorDict
from torch import Tensor

from corelm.containers.classes import ChatHistory, LogProbs, Masks, PerToken, Text, Tokens
from corelm.containers.field_shapes import COUNTS, NO_ID, SETS
from corelm.containers.history import History
from corelm.errors import InvalidRequestError
from corelm.spec.provenance import Provenance
from corelm.spec.records import Columns, ContainerRequest, Parts
from corelm.tensors.lazy_rows import lazy_objects, lazy_rows
from corelm.tensors.ragged import Ragged

#: The fields of a request that go into `log_probs` next to the numbers.
_SUPPORT = ("kept_ids", "kept_log_mass", "top_ids", "top_logprobs", "tail_log_mass")

T = TypeVar("T")
C = TypeVar("C", bound=TensorClass)
Fields = Mapping[str, Any]


def assemble(request: ContainerRequest) -> TensorDict:
    """Return the containers named in ``request.fields``, with `finish_reason` and `errors` if the request has them.

    Every field has its own storage. If rows are not padded, every row has: it can be modified in place, kept or pickled
    without the others. Do not modify the tensors of the request: rows are copied from them lazily, on first access.
    Gradients flow from all fields of `log_probs` to ``request.logprobs``.

    Raises:
        InvalidRequestError: a container is requested without its data, or numbers of rows or their lengths differ.
    """
    _check(request)
    shape = tuple(request.batch_size)
    # A stack needs at least one row. No rows are stored like dense ones, but not marked as padded.
    builder: _Builder = _DenseBuilder(request) if request.pad_output or 0 in shape else _RowBuilder(request)
    out = TensorDict({}, batch_size=shape)
    if "text" in request.fields and request.texts is not None:
        out["text"] = _wrap_parts(Text, request.texts, lambda texts: non_tensors(texts, shape), shape)
    if "tokens" in request.fields:
        out["tokens"] = builder.wrap(Tokens, builder.parts(request.tokens.full, request.pad_id))
    if "masks" in request.fields:
        out["masks"] = builder.wrap(Masks, _masks(request, builder))
    if "log_probs" in request.fields:
        out["log_probs"] = builder.wrap(LogProbs, _log_probs(request, builder))
    if "history" in request.fields and request.chats is not None:
        out["history"] = _wrap_parts(ChatHistory, request.chats, lambda chats: History.of(chats, shape), shape)
    if request.argmax is not None:
        argmax = builder.field(request.argmax, -1)
        out["argmax"] = argmax if isinstance(argmax, Tensor) else builder.wrap(PerToken, {"full": argmax})
    if request.greedy is not None:
        out["is_greedy"] = torch.tensor(request.greedy, dtype=torch.bool).reshape(shape)
    for name, values in (("finish_reason", request.finish_reasons), ("errors", request.errors)):
        if values is not None:
            out.set(name, non_tensors(values, shape))
    if request.retokenized is not None:
        out["retokenized"] = torch.tensor(request.retokenized, dtype=torch.bool).reshape(shape)
    return out


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


def non_tensors(values: Sequence[Any], shape: tuple[int, ...]) -> NonTensorData | NonTensorStack:
    """Wrap one Python object per row, in C order of the batch `shape`."""
    if 0 in shape:
        # An empty stack can be neither saved nor indexed; a single NonTensorData with an empty batch can.
        return NonTensorData([], batch_size=shape)
    return lazy_objects(values, shape)


# The two layouts -----------------------------------------------------------------------------------------------------


class _Builder(ABC):
    """Builds the fields and containers of a request in one layout."""

    def __init__(self, request: ContainerRequest) -> None:
        self.shape = tuple(request.batch_size)
        self.tokens = request.tokens

    @cached_property
    def in_response(self) -> Ragged | None:
        """bool, as long as ``tokens.full``: True after the prompt. None if rows are not split."""
        prompt, response, full = self.tokens.prompt, self.tokens.response, self.tokens.full
        return None if prompt is None or response is None else prompt.join_mask(response).to(full.values.device)

    @abstractmethod
    def attention_mask(self) -> Any:
        """Return the field that is True where there is a token."""

    @abstractmethod
    def response_mask(self) -> Any:
        """Return the field that is True where a token of the response is. None if rows are not split."""

    @abstractmethod
    def field(self, rows: Ragged, filler: Any) -> Any:
        """Return rows as long as ``tokens.full`` as a field, with `filler` in pads."""

    @abstractmethod
    def parts(self, rows: Ragged, filler: Any) -> dict[str, Any]:
        """Return such rows as the field `full` and, if rows are split, as `prompt` and `response`."""

    @abstractmethod
    def sets(self, rows: Ragged, filler: Any) -> Any:
        """Return rows of lengths other than those of ``tokens.full`` as a field, with `filler` in pads on the right."""

    @abstractmethod
    def objects(self, values: Sequence[Any]) -> Any:
        """Return one Python object per row as a field."""

    @abstractmethod
    def wrap(self, cls: type[C], fields: Fields) -> C:
        """Return a container with these fields."""


class _DenseBuilder(_Builder):
    def __init__(self, request: ContainerRequest) -> None:
        super().__init__(request)
        self.padded = request.pad_output
        columns = request.columns if request.pad_output else None
        self.columns = columns or dense_columns(request.tokens)

    def attention_mask(self) -> Tensor:
        mask = self.columns.mask.to(self.tokens.full.values.device, copy=True)
        return mask.reshape(*self.shape, mask.shape[-1])

    def response_mask(self) -> Tensor | None:
        width = self.columns.prompt_width
        if width is None:
            return None if self.in_response is None else self.field(self.in_response, False)
        mask = self.attention_mask()
        mask[..., :width] = False
        return mask

    def field(self, rows: Ragged, filler: Any) -> Tensor:
        dense = rows.scatter(self.columns.mask, filler)
        return dense.reshape(*self.shape, *dense.shape[1:])

    def parts(self, rows: Ragged, filler: Any) -> dict[str, Tensor]:
        full, width = self.field(rows, filler), self.columns.prompt_width
        split = {} if width is None else {"prompt": full[..., :width].clone(), "response": full[..., width:].clone()}
        return {**split, "full": full}

    def sets(self, rows: Ragged, filler: Any) -> Tensor:
        dense = rows.to_padded(filler)
        return dense.reshape(*self.shape, dense.shape[-1])

    def objects(self, values: Sequence[Any]) -> Any:
        same = values and list(values).count(values[0]) == len(values)
        return NonTensorData(values[0], batch_size=self.shape) if same else non_tensors(values, self.shape)

    def wrap(self, cls: type[C], fields: Fields) -> C:
        mark = {"padded": NonTensorData(True, batch_size=self.shape)} if self.padded else {}
        return cls.from_tensordict(TensorDict({**fields, **mark}, batch_size=self.shape))


class _RowBuilder(_Builder):
    """Keeps fields flat, as the request has them. Their rows are copies, made on first access."""

    def attention_mask(self) -> Ragged:
        full = self.tokens.full
        return full.with_values(torch.ones_like(full.values, dtype=torch.bool))

    def response_mask(self) -> Ragged | None:
        return self.in_response

    def field(self, rows: Ragged, filler: Any) -> Ragged:
        return rows

    def parts(self, rows: Ragged, filler: Any) -> dict[str, Ragged]:
        prompt, response = self.tokens.prompt, self.tokens.response
        if prompt is None or response is None:
            return {"full": rows}
        if rows is not self.tokens.full:
            assert self.in_response is not None
            after = self.in_response.values.to(rows.values.device)
            prompt, response = prompt.with_values(rows.values[~after]), response.with_values(rows.values[after])
        return {"prompt": prompt, "response": response, "full": rows}

    def sets(self, rows: Ragged, filler: Any) -> Ragged:
        return rows

    def objects(self, values: Sequence[Any]) -> Sequence[Any]:
        return values

    def wrap(self, cls: type[C], fields: Fields) -> C:
        return cls.from_tensordict(lazy_rows(fields, self.shape))


# The containers ------------------------------------------------------------------------------------------------------


def _masks(request: ContainerRequest, builder: _Builder) -> Fields:
    masks = {
        "all_attention_mask": builder.attention_mask(),
        "all_response_mask": builder.response_mask(),
        "all_assistant_mask": None if request.assistant is None else builder.field(request.assistant, False),
    }
    return {name: mask for name, mask in masks.items() if mask is not None}


def _log_probs(request: ContainerRequest, builder: _Builder) -> Fields:
    logprobs, scored, provenance = request.logprobs, request.scored, request.provenance
    assert logprobs is not None and scored is not None
    values = logprobs.with_values(logprobs.values.masked_fill(~scored.values, 0.0))
    fields = {**builder.parts(values, 0.0), "scored_mask": builder.field(scored, False)}
    fields |= _support(request, builder, scored)
    if isinstance(provenance, Provenance):
        fields["provenance"] = builder.objects([provenance.to_dict()] * len(logprobs))
    elif provenance is not None:
        # Keyed by identity, because hashing the provenance of every row would take longer than everything else.
        distinct = {id(one): one for one in provenance}
        data = {key: None if one is None else one.to_dict() for key, one in distinct.items()}
        fields["provenance"] = builder.objects([data[id(one)] for one in provenance])
    return fields


def _support(request: ContainerRequest, builder: _Builder, scored: Ragged) -> dict[str, Any]:
    """Return the fields that name ids: those that truncation had left, and the most probable ones."""
    fields: dict[str, Any] = {}
    unscored = ~scored.values
    if request.kept_ids is not None:
        kept = request.kept_ids
        if bool((unscored.cpu() & (kept.ids.lengths > 0)).any()):
            kept = kept.where(~unscored)
        kept = kept.to(scored.values.device)
        counts = kept.counts.to(scored.values.device)
        fields = {SETS: builder.sets(kept.flat, NO_ID[SETS]), COUNTS: builder.field(counts, 0)}
    per_token = {
        "kept_log_mass": request.kept_log_mass,
        "top_ids": request.top_ids,
        "top_log_probs": request.top_logprobs,
        "tail_log_mass": request.tail_log_mass,
    }
    for name, rows in per_token.items():
        if rows is not None:
            filler, values = NO_ID.get(name, 0), rows.values
            mask = unscored.to(values.device).reshape(-1, *[1] * (values.ndim - 1))
            fields[name] = builder.field(rows.with_values(values.masked_fill(mask, filler)), filler)
    return fields


def _wrap_parts(cls: type[C], parts: Parts[T], build: Callable[[T], Any], shape: tuple[int, ...]) -> C:
    fields = {name: build(part) for name, part in _present(parts).items()}
    return cls.from_tensordict(TensorDict(fields, batch_size=shape))


def _present(parts: Parts[T]) -> dict[str, T]:
    named = {"prompt": parts.prompt, "response": parts.response, "full": parts.full}
    return {name: part for name, part in named.items() if part is not None}


# Checks --------------------------------------------------------------------------------------------------------------


def _check(request: ContainerRequest) -> None:
    tokens, full = request.tokens, request.tokens.full
    scored = None if request.scored is None else request.logprobs
    data = {"tokens": tokens, "masks": tokens, "text": request.texts, "history": request.chats, "log_probs": scored}
    for name in sorted(request.fields):
        if data.get(name) is None:
            raise InvalidRequestError(f"{name!r} is in fields, but the request has no data for it", field=name)
    count = math.prod(request.batch_size)
    for name, values in _per_row(request).items():
        if len(values) != count:
            raise InvalidRequestError(
                f"{name} has {len(values)} rows, but a batch of {tuple(request.batch_size)} has {count}", field=name
            )
    per_token = {"logprobs": request.logprobs, "scored": request.scored, "argmax": request.argmax}
    per_token["assistant"] = request.assistant
    per_token |= {name: getattr(request, name) for name in _SUPPORT}
    lengths = {name: rows.lengths for name, rows in per_token.items() if rows is not None}
    if tokens.prompt is not None and tokens.response is not None:
        lengths["prompt and response"] = tokens.prompt.lengths + tokens.response.lengths
    if request.columns is not None and request.pad_output:
        lengths["columns"] = request.columns.mask.sum(-1).cpu()
    for name, found in lengths.items():
        if torch.equal(found, full.lengths):
            continue
        problems = {
            row: f"{int(found[row])} tokens long, but tokens.full has {int(full.lengths[row])}"
            for row in (found != full.lengths).nonzero().flatten().tolist()
        }
        row, what = next(iter(problems.items()))
        raise InvalidRequestError(f"{name}: row {row} is {what}", field=name, problems=problems)


def _per_row(request: ContainerRequest) -> dict[str, Any]:
    """Return everything in the request that has one item per row, by name."""
    found: dict[str, Any] = {}
    for name in ("tokens", "texts", "chats"):
        if (parts := getattr(request, name)) is not None:
            found |= {f"{name}.{part}": values for part, values in _present(parts).items()}
    for name in ("logprobs", "scored", "argmax", "greedy", "assistant", "finish_reasons", "errors", *_SUPPORT):
        if (values := getattr(request, name)) is not None:
            found[name] = values
    if isinstance(request.provenance, tuple):
        found["provenance"] = request.provenance
    if request.columns is not None:
        found["columns"] = request.columns.mask
    return found
