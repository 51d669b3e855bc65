import threading

import pytest


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """Assert that each test ends the threads that it started."""
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before
