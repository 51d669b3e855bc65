"""Many concurrent callers of a real SGLang server."""

from corelm import Backend
from helpers.crowd import check_tasks, check_threads
from helpers.tiny_models import CONTEXT


def test_threads_share_the_server(shared: Backend):
    check_threads(shared)


def test_cancelled_tasks_leave_the_others_alone(shared: Backend):
    check_tasks(shared, long=CONTEXT - 40)
