"""A crowd in front of a real SGLang server."""

from corelm import Backend
from helpers.crowd import check_tasks, check_threads
from helpers.tiny_models import CONTEXT


def test_threads_share_the_server(shared: Backend):
    check_threads(shared)


def test_tasks_that_leave_harm_nobody(shared: Backend):
    check_tasks(shared, long=CONTEXT - 40)
