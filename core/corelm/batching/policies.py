"""What a policy asks of batching: to have a batcher in front of its backend, or to do without."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from corelm import validate
from corelm.backend.backend import Backend
from corelm.backend.prepared_call import B, PreparedCall
from corelm.batching.batcher import DynamicBatcher
from corelm.batching.futures import in_thread
from corelm.batching.scheduling import Limits


def check_limits(batching: bool, given: Mapping[str, Any]) -> None:
    """Raises:
    InvalidRequestError: limits that are not legal, or for what is not batched.
    """
    validate.one_of("batching", batching, (False, True))
    for name in given:
        if not batching:
            raise validate.invalid(name, "goes with batching=True")
    Limits.of(**given)


def batched(backend: Backend, limits: Mapping[str, Any]) -> DynamicBatcher:
    """A batcher in front of the backend; one that is there already is shared.

    Raises:
        InvalidRequestError: limits for a batcher that has its own.
    """
    if not isinstance(backend, DynamicBatcher):
        return DynamicBatcher(backend, **limits)
    for name in limits:
        raise validate.invalid(name, "this backend has a batcher already, which others share; set it there")
    return backend


def send(backend: Backend, prepared: PreparedCall[B]) -> Future[B]:
    """The result of a request, from a batcher's queue, or else from a thread of its own.

    Cancelling it aborts the request in an engine that can.
    """
    if isinstance(backend, DynamicBatcher):
        return backend.send(prepared, block=False)
    future = in_thread(partial(prepared.run, backend._hooks), f"corelm-{backend.name}")

    def abort(done: Future[B]) -> None:
        if done.cancelled():
            in_thread(partial(backend.abort, prepared.request.request_ids), f"corelm-{backend.name}-abort")

    if backend.capabilities.abort:
        future.add_done_callback(abort)
    return future
