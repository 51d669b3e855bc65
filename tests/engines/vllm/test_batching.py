"""Many callers of a `DynamicBatcher` share a real vLLM."""

from __future__ import annotations

from corelm import Backend
from engines.vllm.engine_access import unfinished_requests
from helpers.crowd import check_tasks, check_threads
from helpers.tiny_models import CONTEXT


def test_threads_share_the_engine(shared: Backend) -> None:
    check_threads(shared)


def test_requests_of_cancelled_tasks_end_in_the_engine(shared: Backend) -> None:
    check_tasks(shared, long=CONTEXT - 20)
    assert unfinished_requests(shared) == 0
