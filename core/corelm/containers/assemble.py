"""Rows → the containers a user sees: core's own `to_containers`. The rows of every engine come out the same.

Two layouts, two small classes with one face. Dense: prompts stand at the left and are padded left, responses follow and
are padded right. Rows: every sample as long as it is, stacked lazily.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from tensordict import NonTensorData, NonTensorStack, TensorClass, TensorDict
from torch import Tensor

from corelm.containers.classes import ChatHistory, LogProbs, Masks, Text, Tokens
from corelm.containers.history import History
from corelm.errors import InvalidRequestError
from corelm.spec.provenance import Provenance
from corelm.spec.records import Columns, ContainerRequest, Parts
from corelm.tensors.lazy_rows import lazy_objects, lazy_rows
from corelm.tensors.ragged import Ragged

T = TypeVar("T")
C = TypeVar("C", bound=TensorClass)
Fields = Mapping[str, Any]


def assemble(request: ContainerRequest) -> TensorDict:
    """The containers named in ``request.fields``, with `finish_reason` and `errors` if the request has them.

    Every field owns its storage, and where rows are not padded every row does: one can be written to in place, kept or
    pickled without the others. (Rows are made when somebody asks for one, so what the request holds must stay as it
    is.) Gradients of ``request.logprobs`` reach all fields of `log_probs`.

    Raises:
        InvalidRequestError: a container is asked for without its data, or rows or their lengths do not agree.
    """
    _check(request)
    shape = tuple(request.batch_size)
    # Of no rows no stack can be made; they are held as dense ones are, only not marked as padded.
    layout: _Builder = _DenseBuilder(request) if request.pad_output or 0 in shape else _RowBuilder(request)
    out = TensorDict({}, batch_size=shape)
    if "text" in request.fields and request.texts is not None:
        out["text"] = _of_parts(Text, request.texts, lambda texts: non_tensors(texts, shape), shape)
    if "tokens" in request.fields:
        out["tokens"] = layout.wrap(Tokens, layout.parts(request.tokens.full, request.pad_id))
    if "masks" in request.fields:
        out["masks"] = layout.wrap(Masks, _masks(request, layout))
    if "log_probs" in request.fields:
        out["log_probs"] = layout.wrap(LogProbs, _log_probs(request, layout))
    if "history" in request.fields and request.chats is not None:
        out["history"] = _of_parts(ChatHistory, request.chats, lambda chats: History.of(chats, shape), shape)
    for name, values in (("finish_reason", request.finish_reasons), ("errors", request.errors)):
        if values is not None:
            out.set(name, non_tensors(values, shape))
    if request.retokenized is not None:
        out["retokenized"] = torch.tensor(request.retokenized, dtype=torch.bool).reshape(shape)
    return out


def dense_columns(tokens: Parts[Ragged]) -> Columns:
    """Where the tokens of a dense batch stand: prompts padded left, then responses padded right; unsplit rows right.

    Prompts ``[[1, 2], [3]]`` with responses ``[[4], [5, 6]]`` make four columns, two of them the prompts'::

        1 2 4 .
        . 3 5 6
    """
    if tokens.prompt is None or tokens.response is None:
        return Columns(tokens.full.mask("right"), None)
    prompt = tokens.prompt.mask("left")
    return Columns(torch.cat([prompt, tokens.response.mask("right")], -1), prompt.shape[-1])


def non_tensors(values: Sequence[Any], shape: tuple[int, ...]) -> NonTensorData | NonTensorStack:
    """One Python object a row, in C order of the batch `shape`."""
    if 0 in shape:
        # A stack of nothing can be neither saved nor indexed; one carrier for no rows can.
        return NonTensorData([], batch_size=shape)
    return lazy_objects(values, shape)


# The two layouts -----------------------------------------------------------------------------------------------------


class _Builder(ABC):
    def __init__(self, request: ContainerRequest) -> None:
        self.shape = tuple(request.batch_size)
        self.tokens = request.tokens

    @cached_property
    def in_response(self) -> Ragged | None:
        """bool, as long as the full rows: which positions come after the prompt; None where that is not told."""
        prompt, response, full = self.tokens.prompt, self.tokens.response, self.tokens.full
        return None if prompt is None or response is None else prompt.join_mask(response).to(full.values.device)

    @abstractmethod
    def attention(self) -> Any:
        """Where a token is, as one field."""

    @abstractmethod
    def responses(self) -> Any:
        """Where a token of a response is, as one field; None where that is not told."""

    @abstractmethod
    def field(self, rows: Ragged, filler: Any) -> Any:
        """Rows as long as ``tokens.full``, as one field."""

    @abstractmethod
    def parts(self, rows: Ragged, filler: Any) -> dict[str, Any]:
        """The same as `full`, and as `prompt` and `response` where these are told apart."""

    @abstractmethod
    def labels(self, values: Sequence[Any]) -> Any:
        """One Python object a row, as one field."""

    @abstractmethod
    def wrap(self, cls: type[C], fields: Fields) -> C:
        """The container of these fields."""


class _DenseBuilder(_Builder):
    def __init__(self, request: ContainerRequest) -> None:
        super().__init__(request)
        self.padded = request.pad_output
        kept = request.columns if request.pad_output else None
        self.columns = kept or dense_columns(request.tokens)

    def attention(self) -> Tensor:
        mask = self.columns.mask.to(self.tokens.full.values.device, copy=True)
        return mask.reshape(*self.shape, mask.shape[-1])

    def responses(self) -> Tensor | None:
        width = self.columns.prompt_width
        if width is None:
            return None if self.in_response is None else self.field(self.in_response, False)
        mask = self.attention()
        mask[..., :width] = False
        return mask

    def field(self, rows: Ragged, filler: Any) -> Tensor:
        return rows.scatter(self.columns.mask, filler).reshape(*self.shape, self.columns.mask.shape[-1])

    def parts(self, rows: Ragged, filler: Any) -> dict[str, Tensor]:
        full, width = self.field(rows, filler), self.columns.prompt_width
        split = {} if width is None else {"prompt": full[..., :width].clone(), "response": full[..., width:].clone()}
        return {**split, "full": full}

    def labels(self, values: Sequence[Any]) -> Any:
        same = values and list(values).count(values[0]) == len(values)
        return NonTensorData(values[0], batch_size=self.shape) if same else non_tensors(values, self.shape)

    def wrap(self, cls: type[C], fields: Fields) -> C:
        mark = {"padded": NonTensorData(True, batch_size=self.shape)} if self.padded else {}
        return cls.from_tensordict(TensorDict({**fields, **mark}, batch_size=self.shape))


class _RowBuilder(_Builder):
    """Every field is flat here, as the request has it; its rows are copies, made when somebody asks for one."""

    def attention(self) -> Ragged:
        full = self.tokens.full
        return full.with_values(torch.ones_like(full.values, dtype=torch.bool))

    def responses(self) -> Ragged | None:
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

    def labels(self, values: Sequence[Any]) -> Sequence[Any]:
        return values

    def wrap(self, cls: type[C], fields: Fields) -> C:
        return cls.from_tensordict(lazy_rows(fields, self.shape))


# The containers ------------------------------------------------------------------------------------------------------


def _masks(request: ContainerRequest, layout: _Builder) -> Fields:
    masks = {
        "all_attention_mask": layout.attention(),
        "all_response_mask": layout.responses(),
        "all_assistant_mask": None if request.assistant is None else layout.field(request.assistant, False),
    }
    return {name: mask for name, mask in masks.items() if mask is not None}


def _log_probs(request: ContainerRequest, layout: _Builder) -> Fields:
    logprobs, scored, provenance = request.logprobs, request.scored, request.provenance
    assert logprobs is not None and scored is not None
    values = logprobs.with_values(logprobs.values.masked_fill(~scored.values, 0.0))
    fields = {**layout.parts(values, 0.0), "scored_mask": layout.field(scored, False)}
    if isinstance(provenance, Provenance):
        fields["provenance"] = layout.labels([provenance.to_dict()] * len(logprobs))
    elif provenance is not None:
        # By identity, as hashing one for every row would take longer than all the rest.
        data = {key: one.to_dict() for key, one in {id(one): one for one in provenance}.items()}
        fields["provenance"] = layout.labels([data[id(one)] for one in provenance])
    return fields


def _of_parts(cls: type[C], parts: Parts[T], build: Callable[[T], Any], shape: tuple[int, ...]) -> C:
    fields = {name: build(part) for name, part in _given(parts)}
    return cls.from_tensordict(TensorDict(fields, batch_size=shape))


def _given(parts: Parts[T]) -> Iterator[tuple[str, T]]:
    named = (("prompt", parts.prompt), ("response", parts.response), ("full", parts.full))
    return ((name, part) for name, part in named if part is not None)


# What must hold ------------------------------------------------------------------------------------------------------


def _check(request: ContainerRequest) -> None:
    tokens, full = request.tokens, request.tokens.full
    scored = None if request.scored is None else request.logprobs
    data = {"tokens": tokens, "masks": tokens, "text": request.texts, "history": request.chats, "log_probs": scored}
    for name in sorted(request.fields):
        if data.get(name) is None:
            raise InvalidRequestError(f"{name!r} is asked for, but the request has no data for it", field=name)
    count = math.prod(request.batch_size)
    for name, values in _per_row(request):
        if len(values) != count:
            raise InvalidRequestError(
                f"{name} has {len(values)} rows; a batch of {tuple(request.batch_size)} has {count}", field=name
            )
    given = {"logprobs": request.logprobs, "scored": request.scored, "assistant": request.assistant}
    lengths = {name: rows.lengths for name, rows in given.items() if rows is not None}
    if tokens.prompt is not None and tokens.response is not None:
        lengths["prompt and response"] = tokens.prompt.lengths + tokens.response.lengths
    if request.columns is not None and request.pad_output:
        lengths["columns"] = request.columns.mask.sum(-1).cpu()
    for name, found in lengths.items():
        if torch.equal(found, full.lengths):
            continue
        problems = {
            row: f"{int(found[row])} long where tokens.full is {int(full.lengths[row])}"
            for row in (found != full.lengths).nonzero().flatten().tolist()
        }
        row, what = next(iter(problems.items()))
        raise InvalidRequestError(f"{name}: row {row} is {what}", field=name, problems=problems)


def _per_row(request: ContainerRequest) -> Iterator[tuple[str, Any]]:
    """Everything in the request that has one item a row."""
    for name in ("tokens", "texts", "chats"):
        parts = getattr(request, name)
        if parts is not None:
            yield from ((f"{name}.{part}", values) for part, values in _given(parts))
    for name in ("logprobs", "scored", "assistant", "finish_reasons", "errors"):
        if getattr(request, name) is not None:
            yield name, getattr(request, name)
    if isinstance(request.provenance, tuple):
        yield "provenance", request.provenance
    if request.columns is not None:
        yield "columns", request.columns.mask
