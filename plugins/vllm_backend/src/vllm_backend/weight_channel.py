"""`WeightChannel`: new weights for a server on another machine, over NCCL, so no disk has to be shared.

vLLM's own trainer class joins the server's workers in a group and sends the tensors. It waits for them without a limit,
and does not notice a server that refuses a step. So it works on a thread, and here each of its steps ends in time.

Not yet run on a GPU: written against the sources of vLLM 0.32 and tested with an imitation of that class.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from corelm.errors import (
    BackendClosedError,
    BackendTimeoutError,
    CapabilityError,
    CoreLMError,
    EngineError,
    InvalidRequestError,
    described,
    how_to_install,
)
from corelm.spec import whole_tensor
from corelm.validate import invalid
from corelm.waiting import next_item
from corelm_engine_kit import WeightGroup, buckets

if TYPE_CHECKING:
    from corelm_engine_kit import HttpClient

#: How a server has to be started.
FLAG = '--weight-transfer-config \'{"backend": "nccl"}\''

#: Seconds that the server's workers may take to join. vLLM gives up after 300 if one does not come, on both sides, and
#: its thread and port are free then.
JOIN_TIMEOUT = 330.0
#: Seconds that one step may take: announcing an update, sending some tensors, finishing.
STEP_TIMEOUT = 300.0
#: Seconds for each step of leaving a group.
LEAVE_TIMEOUT = 10.0
#: Seconds for what the server can answer at once, unless it is stuck.
ANSWER_TIMEOUT = 30.0
#: Seconds after which a request of a step that is over ends as well.
_GRACE = 5.0

#: Bytes that are sent at a time, or as many as one tensor has. They are packed into one more buffer on this GPU.
CHUNK = 1 << 29
#: vLLM would split what it is told to send into buffers of this size. It is told to send no more than one.
_ONE_BUFFER = 1 << 50


class WeightChannel:
    """Sends weights to the workers of one server. One call at a time; `leave` may come from another thread.

    Attributes:
        join_timeout: seconds that the workers may take to join.
        step_timeout: seconds that one step of an update may take.
        chunk: bytes that are sent at a time.
        device: where tensors are sent from. None until the first group is joined: then the GPU of the first tensor that
            is on one, or else the current GPU.
    """

    def __init__(self, client: HttpClient, group: WeightGroup) -> None:
        self.join_timeout, self.step_timeout, self.chunk = JOIN_TIMEOUT, STEP_TIMEOUT, CHUNK
        self.device: torch.device | None = None
        self._client = client
        self._group = group
        self._joined: _Group | None = None

    def join(self, tensors: Iterable[Tensor], *, again: bool) -> None:
        """Have the server's workers join this process in a group, unless they have. No weights change.

        Args:
            again: whether the server may have been restarted since.

        Raises:
            CapabilityError: this process has no vLLM, or no GPU. The server was not asked.
            InvalidRequestError: this process cannot be reached at the host and port of the group. Likewise.
            BackendTimeoutError: the workers did not come.
            EngineError: the server refused.
        """
        if self._joined is not None and not again:
            return
        self.leave()
        init_info, trainer, param_meta = nccl_trainer()
        if self.device is None:
            self.device = _gpu(tensors)
        host, port = self._address()
        page = self._client.get("/get_world_size", timeout=ANSWER_TIMEOUT)
        try:
            workers = int(page["world_size"])
        except (KeyError, TypeError, ValueError):
            raise EngineError(f"{self._client.base_url}: /get_world_size names no number of workers: {page}") from None
        info = init_info(
            rank=0,
            master_address=host,
            master_port=port,
            world_size=1 + workers,
            packed=True,
            packed_buffer_size_bytes=_ONE_BUFFER,
        )
        joined = _Group(self._client, self, param_meta)
        joined.engine = self._in_time(
            lambda: trainer.trainer_init(info, client=joined, source=joined),
            self.join_timeout,
            joined,
            f"its workers ({workers}) did not join this process at {host}:{port}",
            "Let its machine reach that address, and NCCL find a network between the two (NCCL_SOCKET_IFNAME)",
        )
        self._joined = joined

    def send(self, tensors: Iterable[tuple[str, Tensor]], *, reused: bool) -> None:
        """Send all tensors. They may be on any device, and are gathered from the ranks of a mesh on this thread.

        Args:
            reused: whether the memory of a tensor may be used for the next one.

        Raises:
            EngineError: they did not arrive, or reading them failed. The server has some of them.
            BackendTimeoutError: likewise, since a step was not done in time.
        """
        joined, self._joined = self._joined, None
        assert joined is not None, "join comes first"
        try:
            joined.post("/start_weight_update", {})
            there = ((name, whole_tensor(tensor).to(self.device, copy=reused)) for name, tensor in tensors)
            for chunk in buckets(there, self.chunk):
                joined.chunk = chunk
                if self.device is not None and self.device.type == "cuda":
                    # vLLM reads the tensors on streams of its own.
                    torch.cuda.current_stream(self.device).synchronize()
                self._in_time(
                    joined.engine.send_weights,
                    self.step_timeout,
                    joined,
                    "the new weights are not in force, since it did not take the tensors",
                    "Restart it",
                )
            joined.post("/finish_weight_update", {})
        except BaseException as error:
            self._joined = joined
            self.leave(half_way=True)
            typed = (BackendClosedError, BackendTimeoutError, EngineError)
            if isinstance(error, typed) or not isinstance(error, Exception):
                raise
            raise EngineError(f"the new weights are not in force: {described(error)}", usable=False) from error
        self._joined = joined

    def leave(self, half_way: bool = False) -> None:
        """Leave the group. Never raises, and ends in time.

        Args:
            half_way: whether an update was begun and not finished.
        """
        joined, self._joined = self._joined, None
        if joined is None:
            return
        # First here: it aborts NCCL's calls, so that a thread which waits in one ends.
        with suppress(CoreLMError):
            self._in_time(joined.engine.shutdown, LEAVE_TIMEOUT, joined, "the group is not left")
        with suppress(CoreLMError):
            if half_way:
                # Otherwise the server would refuse to start another update.
                with suppress(EngineError, InvalidRequestError):
                    joined.post("/finish_weight_update", {}, LEAVE_TIMEOUT)
            joined.post("/shutdown_weight_transfer_engine", {}, LEAVE_TIMEOUT)

    def _address(self) -> tuple[str, int]:
        """Return where this process waits. It is tried, since the server would wait for minutes in vain."""
        host, port = self._group.address()
        try:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        except OSError as error:
            raise invalid(
                "weight_group",
                f"this process cannot wait for the server at {host}:{port} ({error}); give an IPv4 "
                "address of this machine and a free port, or no port",
            ) from error
        return host, port

    def _in_time(self, job: Callable[[], Any], seconds: float, group: _Group, problem: str, cure: str = "") -> Any:
        """Run `job` on a thread of its own, and return its result.

        Args:
            problem: what it means if the job fails.
            cure: what to do if it takes too long.

        Raises:
            BackendTimeoutError: it is not done in time. The thread ends when NCCL lets it.
            EngineError: it failed, or the server refused a step, so that it would wait for nothing.
        """
        ends: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        group.failed = lambda error: ends.put((None, error))

        def run() -> None:
            try:
                if self.device is not None and self.device.type == "cuda":
                    torch.cuda.set_device(self.device)
                ends.put((job(), None))
            except BaseException as error:
                ends.put((None, error))

        Thread(target=run, name="corelm-nccl", daemon=True).start()
        where = self._client.base_url
        try:
            result, error = next_item(ends, seconds)
        except Empty:
            raise BackendTimeoutError(f"{where}: {problem} within {seconds:g} s. {cure}") from None
        if error is not None:
            raise EngineError(f"{where}: {problem}: {described(error)}") from error
        return result


class _Group:
    """A group of this process and a server's workers: vLLM's `VLLMWeightSyncClient` with the client of the backend,
    which has its key, its headers and its errors; and vLLM's `WeightSource` of the tensors that are sent next.

    Attributes:
        engine: vLLM's trainer class, once the workers have joined.
        chunk: the tensors that are sent next.
        failed: gets the error of a step that the server refused.
    """

    def __init__(self, client: HttpClient, channel: WeightChannel, param_meta: Any) -> None:
        self.engine: Any = None
        self.chunk: list[tuple[str, Tensor]] = []
        self.failed: Callable[[BaseException], None] = lambda error: None
        self._client, self._channel, self._param_meta = client, channel, param_meta

    def metadata(self) -> list[Any]:
        return [self._param_meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.chunk]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.chunk)

    def post(self, path: str, payload: Any, timeout: float | None = None) -> None:
        try:
            self._client.post(path, payload, timeout=timeout or self._channel.step_timeout)
        except BaseException as error:
            self.failed(error)
            raise

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.post("/init_weight_transfer_engine", {"init_info": init_info}, self._channel.join_timeout + _GRACE)

    def update_weights(self, update_info: Any) -> None:
        self.post("/update_weights", {"update_info": update_info}, self._channel.step_timeout + _GRACE)

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """An update has many parts, and vLLM's class takes each of them for a whole one."""

    start_weight_update = finish_weight_update = shutdown_weight_transfer_engine = _nothing


def nccl_trainer() -> tuple[Any, Any, Any]:
    """Return vLLM's class of the settings of a trainer that sends weights over NCCL, the trainer's, and a tensor's.

    Raises:
        CapabilityError: there is no vLLM in this process.
    """
    try:
        from vllm.distributed.weight_transfer.base import ParamMeta
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine
    except ImportError as error:
        raise CapabilityError(
            f"weight_group: this process needs vLLM as well, to send tensors over NCCL ({error}); install it here: "
            f"{how_to_install('core-vllm-backend[engine]')}",
            capability="update_weights",
        ) from error
    return NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine, ParamMeta


def _gpu(tensors: Iterable[Tensor]) -> torch.device:
    for tensor in tensors:
        if tensor.is_cuda:
            return tensor.device
    if not torch.cuda.is_available():
        raise CapabilityError(
            "weight_group: tensors are sent from a GPU of this process, which has none; save the weights to a folder "
            "that the server can read and give the path",
            capability="update_weights",
        )
    return torch.device("cuda", torch.cuda.current_device())


def require_transfer(backend: str | None) -> None:
    """Refuse a server that takes no tensors over NCCL, as far as it says."""
    if backend != "nccl":
        says = "" if backend is None else f"; its backend is {backend!r}"
        raise invalid(
            "weight_group",
            f"the server does not take tensors over NCCL{says}; start it with {FLAG}, and with "
            "VLLM_SERVER_DEV_MODE=1 in its environment, or leave the option out",
        )
