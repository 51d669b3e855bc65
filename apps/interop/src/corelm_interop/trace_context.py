"""`continued_trace`: the trace of a client that calls a server, as its headers name it. See `Telemetry`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_log = logging.getLogger(__name__)

#: The header of W3C that names a trace. Without it there is nothing to continue, and OpenTelemetry is not imported.
_TRACE = b"traceparent"


@contextmanager
def continued_trace(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[None]:
    """Make the trace that the headers name the current one in the block, for this thread and task.

    A span that is there already, such as that of an instrumentation of the server, remains the current one. Without
    OpenTelemetry this does nothing. A trace that cannot be read is left out.

    Args:
        headers: names, in lower case, and values.
    """
    found = dict(headers)
    if _TRACE not in found:
        yield
        return
    try:
        from opentelemetry import context, propagate, trace
    except ImportError:
        yield
        return
    token = None
    try:
        if not trace.get_current_span().get_span_context().is_valid:
            given = {name.decode("latin-1"): value.decode("latin-1") for name, value in found.items()}
            token = context.attach(propagate.extract(given))
    except Exception:
        _log.warning("the trace of a request cannot be read; the request is served without it", exc_info=True)
    try:
        yield
    finally:
        if token is not None:
            context.detach(token)
