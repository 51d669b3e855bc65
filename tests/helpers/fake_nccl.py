"""A stand-in for vLLM's trainer class, and for the workers that it meets. It waits where the real one waits.

It is in place of `vllm.distributed.weight_transfer` where vLLM is not installed, and where no GPU is.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec
from queue import SimpleQueue
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from helpers.fake_vllm import FakeVLLM
from helpers.http_server import PATIENCE, Reply, Request, json_reply

_PACKAGE = "vllm.distributed.weight_transfer"


class Wire:
    """What connects the trainer with the workers of a server: a barrier for joining, and tensors in their order."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)
        self.tensors: SimpleQueue[Tensor] = SimpleQueue()


class NcclRoutes:
    """Adds the routes of a server that takes tensors over NCCL to a `FakeVLLM`. Its workers load what they receive.

    Attributes:
        wire: where the workers meet the trainer.
        workers: how many there are.
        version: the server's name for its weights.
        loaded: the weights that the workers have.
        calls: the path and the body of each request that changes weights, in order.
        refused: paths that are answered with a status of 500.
        active: whether an update was started and not finished.
    """

    PATHS = (
        *("/collective_rpc", "/pause", "/reset_prefix_cache", "/resume", "/update_weight_version"),
        *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
        "/shutdown_weight_transfer_engine",
    )

    def __init__(self, fake: FakeVLLM, wire: Wire, workers: int = 4) -> None:
        self.wire, self.workers = wire, workers
        self.version, self.active = "default", False
        self.loaded: dict[str, Tensor] = {}
        self.calls: list[tuple[str, Any]] = []
        self.refused: set[str] = set()
        fake.pages["/openapi.json"]["paths"] |= {
            path: {} for path in (*self.PATHS, "/weight_info", "/get_world_size", "/server_info")
        }
        fake.pages["/server_info?config_format=json"] = {"vllm_config": {"weight_transfer_config": {"backend": "nccl"}}}
        fake.pages["/get_world_size"] = {"world_size": workers}
        fake.fault = self

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def __call__(self, request: Request) -> Reply | None:
        path = request.path.partition("?")[0]
        if path == "/weight_info":
            return json_reply({"weight_version": self.version})
        if path not in self.PATHS:
            return None
        self.calls.append((path, request.body))
        if path in self.refused:
            return json_reply({"error": {"message": f"{path} failed in this test"}}, 500)
        if path == "/update_weight_version":
            self.version = request.body["new_version"]
        elif path == "/init_weight_transfer_engine":
            self.wire.barrier.wait(PATIENCE)
        elif path in ("/start_weight_update", "/finish_weight_update"):
            starts = path == "/start_weight_update"
            if self.active is starts:
                return json_reply({"error": {"message": f"active: {self.active}"}}, 500)
            self.active = starts
        elif path == "/update_weights":
            self._receive(**request.body["update_info"])
        return json_reply({"success": True} if path == "/reset_prefix_cache" else {})

    def _receive(self, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> None:
        for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
            tensor = self.wire.tensors.get(timeout=PATIENCE)
            assert (str(tensor.dtype), list(tensor.shape)) == (f"torch.{dtype}", shape)
            self.loaded[name] = tensor


@dataclass
class ParamMeta:
    """As vLLM's."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(kw_only=True)
class NCCLTrainerInitInfo:
    """As vLLM's."""

    rank: int
    master_address: str
    master_port: int
    world_size: int
    packed: bool = True
    packed_buffer_size_bytes: int = 1 << 30
    packed_num_buffers: int = 2


class NCCLTrainerWeightTransferEngine:
    """Makes the calls of vLLM's class in its order, and waits for the workers as it does: at the same time, not after.

    Attributes:
        wire: set by `stand_in`.
        log: what every engine has done.
        before_send: called before the tensors of a part are sent.
    """

    wire: ClassVar[Wire]
    log: ClassVar[list[str]]
    before_send: ClassVar[Callable[[], object]]

    def __init__(self, client: Any, source: Any) -> None:
        self.client, self.source = client, source

    @classmethod
    def trainer_init(cls, init_info: NCCLTrainerInitInfo, *, client: Any, source: Any = None) -> Any:
        cls.log.append("join")
        assert init_info.rank == 0 and source is not None
        payload = {"rank_offset": 1, **{name: value for name, value in asdict(init_info).items() if name != "rank"}}
        with ThreadPoolExecutor(max_workers=1) as pool:
            asked = pool.submit(client.init_weight_transfer_engine, payload)
            cls.wire.barrier.wait(PATIENCE)
            asked.result()
        return cls(client, source)

    def send_weights(self) -> None:
        self.log.append("send")
        meta = self.source.metadata()
        assert all(isinstance(each, ParamMeta) for each in meta)
        info = {
            "names": [each.name for each in meta],
            "dtype_names": [str(each.dtype).split(".")[-1] for each in meta],
            "shapes": [list(each.shape) for each in meta],
        }
        self.client.start_weight_update()
        pool = ThreadPoolExecutor(max_workers=1)
        try:
            asked = pool.submit(self.client.update_weights, info)
            self.before_send()
            for each, (name, tensor) in zip(meta, self.source, strict=True):
                assert each == ParamMeta(name, tensor.dtype, tuple(tensor.shape))
                self.wire.tensors.put(tensor.clone())
            asked.result()
        finally:
            pool.shutdown(wait=False)
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        self.log.append("leave")


def stand_in(wire: Wire) -> tuple[dict[str, ModuleType], type[NCCLTrainerWeightTransferEngine]]:
    """Return modules to put into `sys.modules`, and the class in them."""
    engine = type("NCCLTrainerWeightTransferEngine", (NCCLTrainerWeightTransferEngine,), {})
    engine.wire, engine.log, engine.before_send = wire, [], staticmethod(lambda: None)
    contents: dict[str, dict[str, Any]] = {
        **{name: {} for name in _parents()},
        f"{_PACKAGE}.base": {"ParamMeta": ParamMeta},
        f"{_PACKAGE}.nccl_engine": {
            "NCCLTrainerInitInfo": NCCLTrainerInitInfo,
            "NCCLTrainerWeightTransferEngine": engine,
        },
    }
    modules = {name: ModuleType(name) for name in contents}
    for name, module in modules.items():
        vars(module).update(contents[name], __spec__=ModuleSpec(name, None))
    return modules, engine


def _parents() -> Iterator[str]:
    parts = _PACKAGE.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))
