"""vLLM sleeps only on a GPU. These tests check what the plugin asks of it, on an imitation that keeps vLLM's rules."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from corelm import Backend, Capabilities
from corelm.errors import CapabilityError, InvalidRequestError
from corelm_engine_kit import EventLoopThread
from helpers.fake_vllm import PROMPTS, SAMPLING, Connect, FakeVLLM
from helpers.http_server import Reply, Request, json_reply
from helpers.tiny_models import VOCAB, tiny_model, tiny_tokenizer
from vllm_backend.capabilities import ModelInfo
from vllm_backend.engine_async import AsyncEngine
from vllm_backend.engine_sync import SyncEngine


class SleepyLLM:
    """An engine that sleeps as vLLM does: it schedules only when all of its memory is there.

    Attributes:
        asleep: what sleeps.
        calls: what was asked of it, in order.
    """

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.scheduling = True
        self.calls: list[str] = []

    def sleep(self, level: int = 1) -> None:
        self.calls.append(f"sleep {level}")
        self.asleep, self.scheduling = {"weights", "kv_cache"}, False

    def wake_up(self, tags: list[str]) -> bool:
        self.calls.append(f"wake {' '.join(tags)}")
        assert self.asleep.issuperset(tags), "vLLM ignores a tag that is awake, and then wakes nothing"
        self.asleep -= set(tags)
        self.scheduling = not self.asleep
        return self.scheduling

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.calls.append(method)
        assert "weights" not in self.asleep

    def reset_prefix_cache(self) -> bool:
        return True

    def resume(self) -> None:
        assert not self.asleep, "it would run without its KV cache"
        self.scheduling = True


class SleepyAsyncLLM:
    """The same behind coroutines, as `AsyncLLM` has them."""

    errored = False

    def __init__(self) -> None:
        self.inner = SleepyLLM()

    async def sleep(self, level: int = 1) -> None:
        self.inner.sleep(level)

    async def wake_up(self, tags: list[str]) -> bool:
        return self.inner.wake_up(tags)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.inner.scheduling = False

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.inner.collective_rpc(method, kwargs)

    async def reset_prefix_cache(self) -> bool:
        return True

    async def resume_generation(self) -> None:
        self.inner.resume()

    def shutdown(self, timeout: float) -> None:
        pass


@pytest.fixture(params=["async", "sync"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Backend, SleepyLLM]]:
    tiny_model().save_pretrained(tmp_path)
    can = Capabilities(
        vocab_size=VOCAB, max_context=64, score=True, update_weights=True, sleep_levels=frozenset({1, 2})
    )
    info = ModelInfo(capabilities=can, tokenizer=tiny_tokenizer(), checkpoint=tmp_path)
    engine: Any
    with ExitStack() as stack:
        if request.param == "async":
            outer = SleepyAsyncLLM()
            llm, engine = outer.inner, AsyncEngine(EventLoopThread("sleepy"), outer, info)
        else:
            llm = SleepyLLM()
            engine = SyncEngine(stack.enter_context(ThreadPoolExecutor(1)), llm, info, ExitStack())
        yield stack.enter_context(Backend.from_plugin(engine, "vllm")), llm


def test_all_of_it_sleeps_and_wakes(opened: tuple[Backend, SleepyLLM]) -> None:
    backend, llm = opened
    backend.sleep()
    assert not llm.scheduling
    backend.wake()
    assert llm.calls == ["sleep 1", "wake kv_cache weights"] and llm.scheduling


def test_weights_are_loaded_before_the_cache_wakes_and_nothing_runs_in_between(
    opened: tuple[Backend, SleepyLLM],
) -> None:
    backend, llm = opened
    backend.sleep(2)
    backend.wake("weights")
    backend.update_weights(tiny_model(seed=1).state_dict())
    assert not llm.scheduling
    backend.wake("kv_cache")
    assert llm.calls == ["sleep 2", "wake weights", "reload_weights", "wake kv_cache"] and llm.scheduling
    backend.update_weights(tiny_model(seed=1).state_dict())
    assert llm.scheduling


# Servers --------------------------------------------------------------------------------------------------------------


class SleepRoutes:
    """Adds the routes of vLLM's development mode to a `FakeVLLM`.

    Attributes:
        calls: the paths of the requests that change something, in order.
    """

    WEIGHTS = ("/collective_rpc", "/pause", "/reset_prefix_cache", "/resume", "/update_weight_version")

    def __init__(self, fake: FakeVLLM, enabled: bool) -> None:
        self.version = "default"
        self.calls: list[str] = []
        paths = fake.pages["/openapi.json"]["paths"]
        paths |= {path: {} for path in (*self.WEIGHTS, "/weight_info", "/sleep", "/wake_up", "/server_info")}
        self.info = {"vllm_config": {"model_config": {"enable_sleep_mode": enabled}}}
        fake.fault = self

    def __call__(self, request: Request) -> Reply | None:
        path = request.path.partition("?")[0]
        if path == "/server_info":
            assert request.path.endswith("?config_format=json")
            return json_reply(self.info)
        if path == "/weight_info":
            return json_reply({"weight_version": self.version})
        if path not in (*self.WEIGHTS, "/sleep", "/wake_up"):
            return None
        self.calls.append(request.path)
        if path == "/update_weight_version":
            self.version = request.body["new_version"]
        return json_reply({"success": True} if path == "/reset_prefix_cache" else {})


def test_a_server_sleeps_through_its_routes(fake: FakeVLLM, connect: Connect) -> None:
    routes = SleepRoutes(fake, enabled=True)
    backend = connect()
    before = backend.generate(PROMPTS, SAMPLING).ids.tolist()
    backend.sleep()
    backend.wake()
    backend.sleep(when="abort")
    backend.wake()
    assert routes.calls == [
        *("/sleep?level=1&mode=wait", "/wake_up?tags=kv_cache&tags=weights"),
        *("/sleep?level=1&mode=abort", "/wake_up?tags=kv_cache&tags=weights"),
    ]
    assert backend.generate(PROMPTS, SAMPLING).ids.tolist() == before


def test_a_server_is_not_resumed_before_its_cache_is_awake(fake: FakeVLLM, connect: Connect) -> None:
    routes = SleepRoutes(fake, enabled=True)
    backend = connect()
    backend.sleep(1)
    backend.wake("weights")
    backend.weights_changed()
    assert not any(call.startswith("/resume") for call in routes.calls)
    backend.wake()
    assert routes.calls[-1] == "/wake_up?tags=kv_cache"
    backend.weights_changed()
    assert routes.calls[-1] == "/resume"


@pytest.mark.parametrize("info", [{"vllm_config": "model='fake'"}, {"vllm_config": {"model_config": {}}}, {}, [], None])
def test_a_server_without_sleep_mode_does_not_sleep(fake: FakeVLLM, connect: Connect, info: Any) -> None:
    routes = SleepRoutes(fake, enabled=False)
    if info is not None:
        routes.info = info
    with pytest.raises(CapabilityError):
        connect().sleep()
    assert routes.calls == []


def test_a_server_that_takes_no_weights_sleeps_at_level_1_only(fake: FakeVLLM, connect: Connect) -> None:
    SleepRoutes(fake, enabled=True)
    del fake.pages["/openapi.json"]["paths"]["/collective_rpc"]
    with pytest.raises(InvalidRequestError, match="at level 1 only"):
        connect().sleep(2)


def test_a_server_that_refused_to_sleep_is_resumed_after_an_update(fake: FakeVLLM, connect: Connect) -> None:
    routes = SleepRoutes(fake, enabled=True)
    backend = connect()

    def refuse(request: Request) -> Reply | None:
        refused = json_reply({"error": {"message": "no such mode"}}, status=422)
        return refused if request.path.startswith("/sleep") else routes(request)

    fake.fault = refuse
    with pytest.raises(InvalidRequestError):
        backend.sleep()
    backend.weights_changed()
    assert routes.calls[-1] == "/resume"
