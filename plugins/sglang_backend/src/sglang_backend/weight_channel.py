"""`WeightChannel`: sends tensors to the processes of a server on another machine, through a torch.distributed group.

The group is one of its own, so torch.distributed is neither set up nor changed here: a trainer uses it for its ranks.
SGLang makes its side with `init_custom_process_group`, which decides under which keys the processes find each other.

With NCCL, between GPUs, it was not yet run: that part is written against the sources of SGLang 0.5.23.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from corelm.errors import CoreLMError, EngineError
from corelm.validate import invalid
from corelm.waiting import done_within
from corelm_engine_kit import WeightGroup
from sglang_backend.handover import Pairs

#: Seconds that the server may take to leave a group.
_LEAVE_TIMEOUT = 10.0

#: Its classes are not declared to be exported.
_c10d: Any = distributed

#: ``tell(path, payload, timeout)`` posts to the server and raises unless it did what it was told.
Tell = Callable[[str, dict[str, Any], float], None]


class WeightChannel:
    """Sends tensors to a server. The server joins at the first ones, and again after a failure.

    Args:
        ranks: how many processes of the server join: all that hold a part of the model.
        timeout: seconds that the server may take to join, or to receive what one `send` sends.
    """

    def __init__(self, where: WeightGroup, *, ranks: int, on_gpu: bool, tell: Tell, timeout: float) -> None:
        self._where, self._ranks, self._tell, self._timeout = where, ranks, tell, timeout
        # Both sides have to name the same backend. gloo also carries tensors to a server on GPUs.
        self._nccl = on_gpu and torch.cuda.is_available() and distributed.is_nccl_available()
        self._group: _Group | None = None

    def send(self, bucket: Pairs) -> None:
        """Have the server load these tensors. It must be in a weight update.

        Raises:
            InvalidRequestError: nothing can listen at the port of ``weight_group``.
            BackendTimeoutError: the server took longer than `timeout` to join or to receive.
            EngineError: the server did not join, or did not load the tensors.
        """
        group = self._group or self._joined()
        sent = [tensor.to(group.device_of(tensor)).contiguous() for _, tensor in bucket]
        if sent[0].is_cuda:
            # They are sent from another thread, which knows nothing of what this one's stream still computes.
            torch.cuda.synchronize(sent[0].device)
        payload = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in sent],
            "shapes": [list(tensor.shape) for tensor in sent],
            "group_name": group.name,
            "flush_cache": False,
        }
        self._together(group, "/update_weights_from_distributed", payload, lambda: group.broadcast(sent))

    def leave(self) -> None:
        """Leave the group, if there is one, and tell the server to. The next tensors make another one."""
        group, self._group = self._group, None
        if group is not None:
            group.listener = None
            # The server first: gloo may wait for tensors that are being sent. One that was restarted has no group.
            with suppress(CoreLMError):
                self._tell("/destroy_weights_update_group", {"group_name": group.name}, _LEAVE_TIMEOUT)
            group.end()

    def _joined(self) -> _Group:
        self._group = group = _Group(self._where, self._ranks, nccl=self._nccl, timeout=self._timeout)
        payload = {
            "master_address": self._where.host,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": 1 + self._ranks,
            "group_name": group.name,
            "backend": "nccl" if self._nccl else "gloo",
        }
        self._together(group, "/init_weights_update_group", payload, group.join)
        return group

    def _together(self, group: _Group, path: str, payload: dict[str, Any], here: Callable[[], None]) -> None:
        """Tell the server to do its part, while a thread does this side's. If one fails, the other does not wait."""

        def part() -> None:
            try:
                here()
            except BaseException:
                group.end()
                raise

        with ThreadPoolExecutor(1, "corelm-weights") as pool:
            done = pool.submit(part)
            try:
                self._tell(path, payload, self._timeout)
                if not done_within(done, self._timeout):
                    raise EngineError(f"the server answered {path}, but this process did not finish its part")
                done.result()
            except BaseException as error:
                # The thread ends with the group.
                self.leave()
                if isinstance(error, Exception) and not isinstance(error, CoreLMError):
                    raise EngineError(f"the tensors were not sent to the server: {error}") from error
                raise


class _Group:
    """This process, as rank 0, and the processes of the server, which join at `port`.

    Attributes:
        name: a new one each time, because a server that has had a group of a name refuses another.
        listener: None ends the wait of processes that have not joined yet, here and in the server.
    """

    def __init__(self, where: WeightGroup, ranks: int, *, nccl: bool, timeout: float) -> None:
        self.name = f"corelm-{secrets.token_hex(8)}"
        self._ranks, self._nccl, self._limit = ranks, nccl, timedelta(seconds=timeout)
        self._group: Any = None
        self._device = None if nccl else torch.device("cpu")
        _, self.port = where.address()
        try:
            # Whoever waits in the store ends when the one that listens is gone, so that is not the one waited in.
            store = partial(_c10d.TCPStore, "localhost", self.port, wait_for_workers=False, timeout=self._limit)
            self.listener, self._store = store(is_master=True), store()
        except RuntimeError as error:
            raise invalid(
                "weight_group",
                f"this process cannot listen at port {self.port}; pass another one, or none for a free one ({error})",
            ) from error

    def join(self) -> None:
        """Wait for the server's processes."""
        device = "cuda" if self._nccl else "cpu"
        # The keys under which torch.distributed and SGLang let processes of a group find each other.
        store = self._store
        for prefix in (self.name, f"{self.name}/", f"{device}/"):
            store = _c10d.PrefixStore(prefix, store)
        if not self._nccl:
            self._group = distributed.ProcessGroupGloo(store, 0, 1 + self._ranks, self._limit)
            return
        options = distributed.ProcessGroupNCCL.Options()
        # NCCL ends the process when a call takes too long. The request to the server fails before that.
        options._timeout = 2 * self._limit
        self._group = distributed.ProcessGroupNCCL(store, 0, 1 + self._ranks, options)

    def device_of(self, tensor: Tensor) -> torch.device:
        """Return where a tensor has to be to be sent: for NCCL one GPU, that of the first tensor if it is on one."""
        if self._device is None:
            self._device = tensor.device if tensor.is_cuda else torch.device("cuda", torch.cuda.current_device())
        return self._device

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Send tensors to all other processes of the group, in this order."""
        options = distributed.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for work in [self._group.broadcast([tensor], options) for tensor in tensors]:
            work.wait()

    def end(self) -> None:
        """End whatever waits, here and in the server. Ending twice is fine."""
        self.listener = None
        group, self._group = self._group, None
        if group is not None:
            group.abort()
