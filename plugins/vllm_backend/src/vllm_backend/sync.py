"""The sync mode: vLLM's `LLMEngine` on one thread that owns it, one call at a time. For quick tests."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Lock
from typing import Any

from corelm.errors import CapabilityError, EngineError
from corelm.spec import AbortRequest
from vllm_backend.engine import DEAD, Engine, late, letting_go
from vllm_backend.model import Model, describe
from vllm_backend.outcomes import Unserved
from vllm_backend.requests import Outcome, Row

#: Where vLLM has no process of its own it keeps the engine among this one's globals: there is room for one.
_HERE = Lock()


class SyncEngine(Engine):
    """vLLM must not be entered by several threads, not even in turn, so one thread makes the engine and runs it."""

    def __init__(self, owner: ThreadPoolExecutor, llm: Any, model: Model, cleanup: ExitStack) -> None:
        super().__init__(model)
        self._owner = owner
        self.llm = llm
        self._cleanup = cleanup
        self._numbers = itertools.count()

    @classmethod
    def start(cls, arguments: Mapping[str, Any], tokenizer: Any) -> SyncEngine:
        from vllm import envs

        with ExitStack() as stack:
            if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
                if not _HERE.acquire(blocking=False):
                    raise CapabilityError(
                        "vLLM holds one engine in a process, and one is open already: close it, or leave "
                        "VLLM_ENABLE_V1_MULTIPROCESSING on",
                        capability="engine",
                    )
                stack.callback(_HERE.release)
            owner = stack.enter_context(ThreadPoolExecutor(1, "vllm"))
            llm = owner.submit(_start, arguments).result()
            stack.callback(lambda: owner.submit(llm.engine_core.shutdown).result())
            model = describe(llm.vllm_config, tokenizer, abort=False, concurrent_calls=False)
            return cls(owner, llm, model, stack.pop_all())

    def abort(self, request: AbortRequest) -> bool:
        raise CapabilityError("in the sync mode of vLLM requests cannot be aborted", capability="abort")

    def health(self) -> bool:
        return not (self._closed or self._broken)

    def close(self) -> None:
        self._closed = True
        self._cleanup.close()
        with letting_go():
            self.llm = None

    def _run(self, rows: Sequence[Row | Unserved], names: Sequence[str], timeout: float | None) -> list[Outcome]:
        self._usable()
        gone = Event()
        future = self._owner.submit(self._serve, rows, gone)
        try:
            return future.result(timeout)
        except FutureTimeout:
            raise late(timeout) from None
        finally:
            gone.set()

    def _serve(self, rows: Sequence[Row | Unserved], gone: Event) -> list[Outcome]:
        """On the owner's thread. When the caller has `gone`, what it asked for is aborted."""
        from vllm.exceptions import VLLMClientError

        self._usable()
        outcomes: list[Outcome] = list(rows)
        waiting: dict[str, int] = {}
        try:
            for number, row in enumerate(rows):
                if isinstance(row, Row):
                    key = str(next(self._numbers))
                    try:
                        self.llm.add_request(key, row.prompt, row.params)
                    except VLLMClientError as error:
                        outcomes[number] = Unserved(str(error))
                    else:
                        waiting[key] = number
            while waiting and not gone.is_set():
                for output in self.llm.step():
                    if output.finished:
                        outcomes[waiting.pop(output.request_id)] = output
            self.llm.abort_request(list(waiting))
        except Exception as error:
            # What was asked for is still queued in there, and a later call would get the answers.
            self._broken = True
            raise EngineError(f"{type(error).__name__}: {error}. {DEAD}", usable=False) from error
        return outcomes

    def _reload(self, folder: Path) -> None:
        self._owner.submit(self._reload_from, str(folder)).result()

    def _reload_from(self, folder: str) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache, which belongs to the old weights")


def _start(arguments: Mapping[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(EngineArgs(**arguments))
