"""An asynchronous engine that does not start leaves nothing behind. vLLM is replaced by stand-ins."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any

import pytest

from corelm_engine_kit import EventLoopThread
from helpers.processes import wait_until
from vllm_backend.engine_async import AsyncEngine


def loops() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("vllm")]


def test_a_loop_that_cannot_be_given_work_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(loop: EventLoopThread, coroutine: Any) -> Any:
        coroutine.close()
        raise RuntimeError("no more work")

    monkeypatch.setattr(EventLoopThread, "submit", submit)
    with pytest.raises(RuntimeError, match="no more work"):
        AsyncEngine.start({}, None)
    assert wait_until(lambda: not loops())


class Engine:
    """Starts, and fails when it is asked for the first time."""

    shut_down = 0

    @classmethod
    def from_engine_args(cls, args: Any, usage_context: Any) -> Engine:
        return cls()

    async def get_supported_tasks(self) -> None:
        raise RuntimeError("no tasks")

    def shutdown(self, timeout: float) -> None:
        Engine.shut_down += 1


def test_an_engine_whose_first_question_fails_is_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, members in {
        "vllm.engine.arg_utils": {"AsyncEngineArgs": dict},
        "vllm.usage.usage_lib": {"UsageContext": type("UsageContext", (), {"LLM_CLASS": None})},
        "vllm.v1.engine.async_llm": {"AsyncLLM": Engine},
    }.items():
        parts = name.split(".")
        for count in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(parts[count - 1]))
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(RuntimeError, match="no tasks"):
        AsyncEngine.start({}, None)
    assert Engine.shut_down == 1 and wait_until(lambda: not loops())
