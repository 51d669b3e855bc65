"""The most probable ids of a position, as SGLang returns them: as lists, or as arrays where the server knows these."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from corelm.spec import TopIds
from corelm_engine_kit import RowError, checked_argmax, checked_ids, checked_top_ids

Side = Literal["input", "output"]

#: SGLang writes the smallest float32 for the log-prob of an id that has no probability.
_NOTHING = -1e30


def candidate_fields(side: Side, k: int, *, streamed: bool = False) -> dict[str, Any]:
    """Return the fields that ask for the `k` most probable ids of each position.

    Args:
        streamed: whether the answer is streamed. The server then refuses to return arrays of it.
    """
    fields: dict[str, Any] = {"top_logprobs_num": k}
    if not streamed:
        # Asks for arrays instead of nested lists. Older servers ignore these fields.
        flat = "return_flat_raw_top_logprobs" if side == "input" else "return_flat_raw_output_top_logprobs"
        fields |= {flat: True, "return_flat_raw_top_logprobs_b64": True}
    return fields


def argmax_of(meta: Any, ids: Sequence[int], logprobs: Sequence[float], k: int, vocab_size: int) -> list[int]:
    """Return the most probable id at the position of each scored id."""
    # Here SGLang does not write the last id of the vocabulary as 0; see `protocol._check_echo`.
    best, values = _columns(meta, "input", len(ids), k, "leave out return_argmax=True")
    argmax = checked_ids(best[:, 0].tolist(), vocab_size=vocab_size, limit=len(ids))
    return checked_argmax(argmax, values[:, 0].tolist(), ids, logprobs)


def top_ids_of(meta: Any, side: Side, count: int, k: int, vocab_size: int) -> TopIds:
    """Return the `k` most probable ids at each of the first `count` sampled, or of all `count` scored ids."""
    remedy = "leave out top_k" if side == "input" else "leave out top_logprobs"
    ids, values = _columns(meta, side, count, k, remedy)
    return checked_top_ids(ids, values.masked_fill(values <= _NOTHING, -torch.inf), k, vocab_size)


def _columns(meta: Any, side: Side, count: int, k: int, remedy: str) -> tuple[Tensor, Tensor]:
    """Return int64[count, k] and float32[count, k]: the ids and the log-probs of the first positions of one side.

    Args:
        remedy: what the caller may do if there are not `k` of them for each position.
    """
    missing = RowError(f"it does not have {side}_top_logprobs for every token; {remedy}")
    # The first id of a prompt follows nothing.
    skipped = 1 if side == "input" else 0
    name = f"{side}_top_logprobs"
    if f"{name}_shape" in meta:
        (rows, columns), before = meta[f"{name}_shape"], meta[f"{name}_null_prefix"]
        ids, values = _array(meta, f"{name}_idx_flat", torch.int32), _array(meta, f"{name}_val_flat", torch.float32)
        known = (rows == count if side == "input" else rows >= count) and columns == k and before == skipped
        if not known or len(ids) != rows * k or len(values) != rows * k:
            raise missing
        return ids.view(rows, k)[:count].long(), values.view(rows, k)[:count].float()
    top = meta.get(name)
    if not isinstance(top, list) or len(top) < count + skipped or (side == "input" and len(top) > count + skipped):
        raise missing
    found = top[skipped : count + skipped]
    if any(not each or len(each) != k for each in found):
        raise missing
    named = checked_ids([token for each in found for _, token, *_ in each], vocab_size=2**63, limit=count * k)
    numbers = [value for each in found for value, *_ in each]
    if None in numbers:
        raise RowError(f"the log-prob at position {numbers.index(None) // k} is None, expected a number of at most 0")
    best, values = torch.tensor(named, dtype=torch.int64), torch.tensor(numbers, dtype=torch.float32)
    return best.view(count, k), values.view(count, k)


def _array(meta: Any, name: str, dtype: torch.dtype) -> Tensor:
    """Return an array of a reply. A server that cannot write it in base64 sends a list."""
    if name in meta:
        return torch.tensor(meta[name], dtype=dtype)
    if meta[f"{name}_b64_dtype"] != str(dtype).removeprefix("torch."):
        raise ValueError(f"{name} is {meta[f'{name}_b64_dtype']}")
    data = bytearray(base64.b64decode(meta[f"{name}_b64"], validate=True))
    # An empty buffer has no tensor.
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
