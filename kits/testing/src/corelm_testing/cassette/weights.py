"""What a cassette knows of weights: a fingerprint of new ones, and the state that updates have led to.

A recording does not hold weights. It holds a hash of every byte of them, so a run that has computed other weights than
the recorded run is found out when it loads them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from corelm.spec import Adapter, WeightUpdate
from corelm_testing.cassette.records import hash_of

#: Bytes read from a file at a time.
_PIECE = 1 << 22


class TensorHashes:
    """The hashes of named tensors, in any order."""

    def __init__(self, tensors: Mapping[str, Any] | None = None) -> None:
        self._found: dict[str, str] = {}
        for name, tensor in (tensors or {}).items():
            self.add(name, tensor)

    def add(self, name: str, tensor: Any) -> None:
        """Add a tensor. Of one that is sharded, this process's part counts: gathering it is a call to all ranks."""
        if not isinstance(tensor, Tensor):
            # The engine refuses it.
            self._found[name] = type(tensor).__name__
            return
        local: Any = tensor.detach()
        plain = (local.to_local() if hasattr(local, "to_local") else local).cpu().contiguous()
        whole = hashlib.blake2b(f"{plain.dtype} {tuple(plain.shape)} ".encode(), digest_size=16)
        whole.update(plain.reshape(-1).view(torch.uint8).numpy())
        self._found[name] = whole.hexdigest()

    def reading(self, stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield what the stream yields, and add it."""
        for name, tensor in stream:
            self.add(name, tensor)
            yield name, tensor

    @property
    def joined(self) -> str:
        """One fingerprint of them all. That of a stream is known when it has been read."""
        return hash_of("".join(f"{name} {self._found[name]}\n" for name in sorted(self._found)))


def fingerprint(update: WeightUpdate) -> str | None:
    """Return a fingerprint of the weights of an update; None if there are none, or if they are a stream.

    The same tensors have the same fingerprint in a state dict and in a stream. A folder has that of its files: their
    names and all their bytes.
    """
    if (path := update.path) is None:
        return None if update.state_dict is None else TensorHashes(update.state_dict).joined
    whole = hashlib.blake2b(digest_size=16)
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    for file in files:
        whole.update(f"{file.relative_to(path).as_posix() if file != path else ''}\n".encode(errors="surrogatepass"))
        with file.open("rb") as opened:
            while piece := opened.read(_PIECE):
                whole.update(piece)
    return whole.hexdigest()


class WeightsHistory:
    """Names the state of the weights by the updates that led to it: answers of two states are never mixed up."""

    def __init__(self) -> None:
        self._base = ""
        self._adapters: dict[str, str] = {}

    def state(self, adapter: Adapter) -> str:
        """Return the state of the weights that answer a call with this adapter; "" as long as nothing has changed."""
        name = self._adapters.get(adapter, "") if isinstance(adapter, str) else ""
        return f"{self._base}+{name}" if name else self._base

    def update(self, form: Mapping[str, Any], *, failed: bool = False) -> None:
        """Take note of an update.

        Args:
            form: the request, see `request_json`.
            failed: whether the engine said that it failed half-way. Nobody knows the weights then.
        """
        told = f"{form['weights']} {form['adapter_config']} {failed}"
        adapter = form["adapter"]
        if adapter is None:
            self._base = hash_of(f"{self._base} {told}", 8)
        elif form["weights"] is None and not failed:
            self._adapters.pop(adapter, None)
        else:
            self._adapters[adapter] = hash_of(f"{self._adapters.get(adapter, '') if failed else ''} {told}", 8)
