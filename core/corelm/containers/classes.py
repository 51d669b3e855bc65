"""`Text`, `Tokens`, `Masks`, `LogProbs`, `ChatHistory`: what every engine fills in the same way; `PerToken`, what is
computed from them; and `ragged`.

Each is a TensorClass: it slices, stacks, saves and moves with the TensorDict it lives in. A field reads as what a
person expects. With batch ``(B,)``::

    td["tokens"].response         # dense: int64[B, width]; one row a sample: a list of B tensors
    td["text"].response           # a list of B strings
    td["log_probs"].provenance    # one Provenance, or a tuple of them if rows differ

For batch ``()`` there is one tensor and one string, for ``(B, n)`` a list of lists. A field that does not exist for
these rows reads as None and is not among the keys. What a field gives it also takes. A container made by hand is dense
unless it is given ``padded=False``. Code that wants flat values, whatever the layout, calls `ragged`.
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    TensorDictBase,
)
from torch import Tensor

from corelm.containers.field_access import as_stored, data_of, field_readers, flat, is_padded, rows, strings, tensors
from corelm.containers.history import History
from corelm.errors import InvalidRequestError
from corelm.spec.provenance import Provenance
from corelm.tensors.lazy_rows import FlatRows, flat_source
from corelm.tensors.ragged import Ragged

Strings = Any  # str, list[str], list[list[str]] …: nested like the batch
Tensors = Any  # Tensor, or list[Tensor], list[list[Tensor]] …: nested like the batch


@field_readers(strings)
class Text(TensorClass["nocast"]):
    """`full` is the prompt and the response as the model saw them, or the whole text where there is no split."""

    prompt: Strings = None
    response: Strings = None
    full: Strings = None


@field_readers(tensors, padded=is_padded)
class Tokens(TensorClass["nocast"]):
    """int64 token ids, time last. ``full == prompt + response``, always; dense, with pads on both sides of the two."""

    prompt: Tensors = None
    response: Tensors = None
    full: Tensors = None
    padded: bool = True


@field_readers(tensors, padded=is_padded)
class Masks(TensorClass["nocast"]):
    """bool, shaped as ``tokens.full``: where a token is; where it is the assistant's; where it is the response's."""

    all_attention_mask: Tensors = None
    all_assistant_mask: Tensors = None
    all_response_mask: Tensors = None
    padded: bool = True


def _provenance(container: Any, name: str) -> Any:
    """The one all rows share, else a tuple of the distinct ones in order of appearance. None if there is none."""
    # Rows made together share their datum, and most are, so each datum is read once.
    data = {id(datum): datum for datum in data_of(container._tensordict, name) if datum}
    found = tuple(dict.fromkeys(map(_as_provenance, data.values())))
    return found if len(found) > 1 else next(iter(found), None)


def _as_provenance(datum: Mapping[str, Any]) -> Provenance:
    return Provenance(**{**datum, "penalties": tuple(map(tuple, datum["penalties"]))})


@field_readers(tensors, padded=is_padded, provenance=_provenance)
class LogProbs(TensorClass["nocast"]):
    """float32, in nats, shaped as the `Tokens` fields of the same name.

    Where `scored_mask` (shaped as `full`) is False the value is 0.0 and means nothing.
    """

    prompt: Tensors = None
    response: Tensors = None
    full: Tensors = None
    scored_mask: Tensors = None
    padded: bool = True
    provenance: Provenance | tuple[Provenance, ...] | None = None

    # Held as plain data, so that memmap writes JSON where it would pickle.
    def set(self, key: NestedKey, value: Any, *args: Any, **kwargs: Any) -> LogProbs:
        value = value.to_dict() if isinstance(value, Provenance) else value
        return super().set(key, value, *args, **kwargs)


@field_readers(tensors, padded=is_padded)
class PerToken(TensorClass["nocast"]):
    """A float for every token of ``tokens.full``, 0.0 where it means nothing: a penalty, a weight. It is for rows of
    their own length, which a TensorDict cannot hold bare; dense ones are plain tensors.
    """

    full: Tensors = None
    padded: bool = True


@field_readers(as_stored)
class ChatHistory(TensorClass["nocast"]):
    """Conversations. Append a message to `full` and it is the next turn's prompt."""

    prompt: History | None = None
    response: History | None = None
    full: History | None = None


#: What ``torch.serialization.add_safe_globals`` needs before ``torch.load(file, weights_only=True)`` reads containers.
SAFE_GLOBALS = (
    *(Text, Tokens, Masks, LogProbs, PerToken, ChatHistory, History),
    *(TensorDict, LazyStackedTensorDict, NonTensorData, NonTensorStack),
    copyreg.dispatch_table[TensorDict](TensorDict({}))[0],  # the function that tensordict rebuilds itself with
)


def ragged(td: TensorDictBase, key: NestedKey, *, masks: NestedKey = "masks") -> Ragged:
    """The rows of a `Tokens`, `Masks`, `LogProbs` or `PerToken` field without pads, in C order, whatever their layout
    and batch.

    Args:
        td: holds the container; a single row, of batch shape (), will do.
        key: container and field, as in ``("tokens", "response")``.
        masks: where the `Masks` are that tell tokens from pads in a dense field. Rows that are not dense need none.

    Raises:
        InvalidRequestError: there is no such container or field, or a dense one has no masks beside it.
    """
    *path, name = (key,) if isinstance(key, str) else key
    container = td.get(tuple(path), None) if path else None
    if not isinstance(container, (Tokens, Masks, LogProbs, PerToken)) or name not in container.keys():
        raise InvalidRequestError(
            f"{key!r} is not a field of a Tokens, Masks, LogProbs or PerToken here; "
            f"there are: {sorted(map(str, td.keys(include_nested=True)))}",
            field=str(key),
        )
    source = flat_source(container._tensordict)
    if isinstance(source, FlatRows) and isinstance(field := source.fields[name], Ragged):
        # Somebody may write to what is returned.
        return field.clone()
    try:
        padded, values = container.padded, getattr(container, name)
        attention = getattr(td.get(masks, None), "all_attention_mask", None) if padded else None
    except InvalidRequestError:  # rows of both kinds, or dense ones of different widths
        return Ragged.cat([ragged(row, key, masks=masks) for row in rows(td)])
    if padded:
        mask = _beside(values, attention, name, masks)
        return Ragged(values[mask], mask.sum(-1).flatten())
    # Of no rows, the tensor that is stored still knows dtype and device.
    each = flat(values)
    stored = torch.cat(each) if each else container._tensordict.get(name).flatten()
    return Ragged(stored, torch.tensor([row.shape[0] for row in each], dtype=torch.int64))


def _beside(values: Tensor, attention: Any, name: str, masks: NestedKey) -> Tensor:
    """The columns of the attention mask that belong to a dense field: prompts stand first and responses last."""
    width = values.shape[-1]
    if isinstance(attention, Tensor):
        start = attention.shape[-1] - width if name == "response" else 0
        stop = width if name == "prompt" else attention.shape[-1]
        mask = attention[..., max(start, 0) : stop]
        if mask.shape == values.shape:
            return mask.to(values.device, torch.bool)
    found = tuple(attention.shape) if isinstance(attention, Tensor) else "none that is dense"
    raise InvalidRequestError(
        f"the dense field {name!r} of shape {tuple(values.shape)} needs the attention mask of its rows, "
        f"to tell tokens from pads; under {masks!r} there is: {found}",
        field=str(masks),
    )
