import threading

import pytest


def threads() -> set[threading.Thread]:
    """Return the threads that run.

    Python lists a thread that was started without `threading`, as an uninterrupted function is, from its first log
    record on, and still does so when it has ended.
    """
    return {thread for thread in threading.enumerate() if not thread.name.startswith("Dummy-")}


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """Assert that each test ends the threads that it started."""
    before = threads()
    yield
    assert threads() <= before
