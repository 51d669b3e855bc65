"""Access to what is behind a `Backend`, for tests that look at vLLM itself."""

from __future__ import annotations

from corelm import Backend
from vllm_backend.engine_async import AsyncEngine
from vllm_backend.engine_sync import SyncEngine


def plugin_engine(backend: Backend) -> AsyncEngine | SyncEngine:
    """Return the plugin's engine in this process."""
    plugin = backend.engine.plugin
    assert isinstance(plugin, (AsyncEngine, SyncEngine))
    return plugin


def async_engine(backend: Backend) -> AsyncEngine:
    engine = plugin_engine(backend)
    assert isinstance(engine, AsyncEngine)
    return engine


def sync_engine(backend: Backend) -> SyncEngine:
    engine = plugin_engine(backend)
    assert isinstance(engine, SyncEngine)
    return engine


def unfinished_requests(backend: Backend) -> int:
    """Return how many requests vLLM holds."""
    count: int = plugin_engine(backend).llm.get_num_unfinished_requests()
    return count
