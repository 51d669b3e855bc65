"""Real servers that answer for longer than they may be silent."""

import time
from collections.abc import Callable

from corelm import Backend
from corelm.errors import EngineError

#: Seconds of silence after which a client gives a server up. A healthy server makes progress within the first,
#: unless others use its cores as well; then the next is tried.
SILENCES = (2.0, 6.0, 18.0)


def outlasts_silence(connect: Callable[[float], Backend], tokens: int, rows: int) -> bool:
    """Return whether calls that take 2.5 times the read timeout are answered, for one of the timeouts.

    If nothing but answers counted as progress, the rows that wait longest in the server's queue would fail after
    twice the timeout, whatever it is.

    Args:
        connect: opens a backend with this read timeout, in seconds.
        tokens: how many tokens each answer has.
        rows: how many rows the first call has. Each further call has twice as many.
    """
    for silence in SILENCES:
        with connect(silence) as backend:
            try:
                _answer(backend, 2.5 * silence, tokens, rows)
            except EngineError as error:
                assert "no progress" in str(error)
            else:
                return True
    return False


def _answer(backend: Backend, seconds: float, tokens: int, rows: int) -> None:
    took = 0.0
    while took < seconds:
        start = time.monotonic()
        result = backend.generate([[5, 6]] * rows, {"max_new_tokens": tokens, "ignore_eos": True})
        took = time.monotonic() - start
        assert set(result.finish_reasons) == {"length"} and len(result.finish_reasons) == rows
        rows *= 2
