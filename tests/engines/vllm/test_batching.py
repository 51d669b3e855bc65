"""A crowd in front of a real vLLM."""

from __future__ import annotations

from corelm import Backend
from helpers.crowd import check_tasks, check_threads
from helpers.tiny_models import CONTEXT
from vllm_backend.engine import AsyncEngine


def test_threads_share_the_engine(shared: Backend) -> None:
    check_threads(shared)


def test_tasks_that_leave_are_ended_in_the_engine(shared: Backend, engine: AsyncEngine) -> None:
    check_tasks(shared, long=CONTEXT - 20)
    assert engine.llm.get_num_unfinished_requests() == 0
