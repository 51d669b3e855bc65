"""`DenseLayout`: which columns the tokens of a batch get when its rows are padded, or padded to another width."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torch import Tensor

from corelm.containers.assemble import dense_columns, non_tensors
from corelm.containers.classes import LogProbs, Masks, PerToken, Tokens, ragged
from corelm.containers.field_shapes import NO_ID, SETS
from corelm.containers.reading import Path, dense_field, is_integer, masks_of, row_data, same_lengths
from corelm.errors import InvalidRequestError
from corelm.spec.records import Columns, Parts
from corelm.tensors.lazy_rows import lazy_rows
from corelm.tensors.ragged import Ragged

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseLayout:
    """The tokens of the containers that share one parent key.

    Attributes:
        lengths: int64[rows], of all tokens.
        prompt_lengths: int64[rows]; None if rows are not split.
        columns: the columns that the tokens get.
        before: bool[rows, width], the dense attention mask that they have; None if the rows are not dense, or are of
            different widths.
        device: where the tokens are.
    """

    lengths: Tensor
    prompt_lengths: Tensor | None
    columns: Columns
    before: Tensor | None
    device: torch.device

    @classmethod
    def of(cls, held: TensorDictBase, here: Mapping[Path, Any]) -> DenseLayout:
        """Read the lengths of all rows.

        Args:
            held: the TensorDict that holds the containers.
            here: the containers under one parent key.

        Raises:
            InvalidRequestError: no container says how long its rows are, or dense ones have no masks.
        """
        lengths: dict[str, Tensor] = {}
        before: Tensor | None = None
        device = torch.device("cpu")
        for path, container in here.items():
            masks = masks_of(held, path)
            for name in ("prompt", "response", "full", "all_attention_mask", "all_response_mask"):
                if name in container.keys() and name not in lengths:
                    values = ragged(held, (*path, name), masks=masks)
                    device = values.values.device
                    lengths[name] = _count(values) if name == "all_response_mask" else values.lengths
            if isinstance(container, Masks) and before is None:
                before = dense_mask(container)
        whole = lengths.get("full", lengths.get("all_attention_mask"))
        prompt, response = lengths.get("prompt"), lengths.get("response", lengths.get("all_response_mask"))
        if whole is None and prompt is not None and response is not None:
            whole = prompt + response
        if whole is None:
            # The only part that there is.
            whole = prompt if prompt is not None else response
        if whole is None:
            name = ".".join(next(iter(here)))
            raise InvalidRequestError(f"{name} has no field that says how long its rows are", field=name)
        if prompt is None and response is not None:
            prompt = whole - response
        columns = _columns(whole, prompt)
        return cls(lengths=whole, prompt_lengths=prompt, columns=columns, before=before, device=device)

    def dense(self, values: Ragged, key: Path, filler: Any, shape: Shape) -> Tensor:
        """Return the rows of a field as one tensor ``[*shape, width]``, or ``[*shape, width, k]``, with pads.

        Raises:
            InvalidRequestError: the rows do not have the lengths of the tokens.
        """
        if key[-1] == SETS:
            padded = values.to_padded(filler)
        elif self.prompt_lengths is not None and key[-1] == "prompt":
            same_lengths(values, self.prompt_lengths, key)
            padded = values.to_padded(filler, "left")
        elif self.prompt_lengths is not None and key[-1] == "response":
            same_lengths(values, self.lengths - self.prompt_lengths, key)
            padded = values.to_padded(filler, "right")
        else:
            same_lengths(values, self.lengths, key)
            padded = values.scatter(self.columns.mask, filler)
        return padded.reshape(*shape, *padded.shape[1:])

    def container(self, held: TensorDictBase, path: Path, *, pad_output: bool, pad_id: int) -> Any:
        """Return the container at `path` in the layout asked for. A dense `PerToken` is returned as a plain tensor."""
        container, shape = held.get(path), tuple(held.batch_size)
        masks = masks_of(held, path)
        # No rows are stored like dense ones, but not marked as padded.
        dense = pad_output or 0 in shape
        fields: dict[str, Any] = {}
        for name in container.keys():
            if name not in ("padded", "provenance"):
                values = ragged(held, (*path, name), masks=masks)
                filler = _filler(container, name, values, pad_id)
                fields[name] = self.dense(values, (*path, name), filler, shape) if dense else values
        if isinstance(container, PerToken) and pad_output:
            return fields["full"]
        labels = row_data(container, "provenance") if isinstance(container, LogProbs) else []
        if any(labels):
            fields["provenance"] = _dense_labels(labels, shape) if dense else labels
        if not dense:
            return type(container).from_tensordict(lazy_rows(fields, shape))
        if pad_output:
            fields["padded"] = NonTensorData(True, batch_size=shape)
        return type(container).from_tensordict(TensorDict(fields, batch_size=shape))

    def masks(self, shape: Shape) -> Masks:
        """Return dense masks that tell tokens from pads, and the responses from the prompts."""
        mask = self.columns.mask.to(self.device)
        mask = mask.reshape(*shape, mask.shape[-1])
        fields = {"all_attention_mask": mask}
        if self.columns.prompt_width is not None:
            fields["all_response_mask"] = mask.clone()
            fields["all_response_mask"][..., : self.columns.prompt_width] = False
        return Masks(**fields, batch_size=shape)


def dense_layouts(held: TensorDictBase, containers: Mapping[Path, Any]) -> dict[Path, DenseLayout]:
    """Return the layout under every parent key that holds containers with one value per token."""
    layouts: dict[Path, DenseLayout] = {}
    for parent in sorted({path[:-1] for path in containers}, key=len):
        made = DenseLayout.of(held, {path: value for path, value in containers.items() if path[:-1] == parent})
        root = layouts.get(())
        if root is not None and torch.equal(root.lengths, made.lengths):
            # Numbers under `next` belong to the tokens at the root.
            made = replace(
                root if made.prompt_lengths is None else made,
                before=made.before if made.before is not None else root.before,
            )
        layouts[parent] = made
    return layouts


def dense_mask(masks: Masks) -> Tensor | None:
    """Return bool[rows, width]: the attention mask of a dense batch, on the CPU. None if it is not one tensor."""
    mask = dense_field(masks, "all_attention_mask")
    return mask.reshape(masks.batch_size.numel(), mask.shape[-1]).cpu() if isinstance(mask, Tensor) else None


def _filler(container: Any, name: str, values: Ragged, pad_id: int) -> Any:
    """Return what stands in the pads of a field."""
    if isinstance(container, Tokens):
        return pad_id
    if isinstance(container, Masks):
        return False
    if isinstance(container, LogProbs):
        return NO_ID.get(name, 0)
    # 0 may be an id, so it would read as one.
    return -1 if isinstance(container, PerToken) and is_integer(values.values) else 0


def _columns(lengths: Tensor, prompt_lengths: Tensor | None) -> Columns:
    full = Ragged.full(lengths, True, torch.bool)
    if prompt_lengths is None:
        return dense_columns(Parts(None, None, full))
    zero = torch.zeros_like(prompt_lengths)
    return dense_columns(Parts(full.slice(zero, prompt_lengths), full.slice(prompt_lengths, lengths), full))


def _count(flags: Ragged) -> Tensor:
    """Return how many values of each row are True."""
    zero = flags.lengths.new_zeros(len(flags))
    return zero.index_add_(0, flags.row_index, flags.values.cpu().to(torch.int64))


def _dense_labels(labels: list[Any], shape: Shape) -> Any:
    if labels.count(labels[0]) == len(labels):
        return NonTensorData(labels[0], batch_size=shape)
    return non_tensors(labels, shape)
