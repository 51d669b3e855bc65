"""What core logs about engines: one rule for names, lengths and secrets. `docs/logging.md` lists the messages."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tenacity

from corelm.errors import BackendTimeoutError, CoreLMError, brief, described
from corelm.spec.capabilities import Capabilities

#: Logs what happens to an engine.
logger = logging.getLogger(__name__)

#: Hooks that are not worth a message each: no engine computes in them.
_QUIET = frozenset({"tokenize", "to_containers", "health"})
#: User and password, query and fragment of a URL: keys may be in them.
_SECRET_PARTS = re.compile(r"(?<=://)[^/?#@]*@|[?#].*")


def place(model: str) -> str:
    """Return the name of a model or the URL of a server for a message, without what may be secret in a URL.

    >>> place("http://me:secret@gpu-node:8000/v1?key=secret")
    'http://gpu-node:8000/v1'
    """
    return brief(_SECRET_PARTS.sub("", model) if "://" in model else model)


def abilities(capabilities: Capabilities) -> str:
    """Return what an engine can do, for a message: sizes, log-probs, and the flags that are set."""
    flags = ("score", "logits", "gradients", "per_answer_seeds", "concurrent_calls", "streaming", "update_weights")
    declared = [name for name in (*flags, "abort") if getattr(capabilities, name)]
    context = "any length" if capabilities.max_context is None else f"context {capabilities.max_context}"
    modes = " and ".join(sorted(capabilities.generation_modes, reverse=True)) or "none"
    sizes = f"vocabulary {capabilities.vocab_size}, {context}"
    return "; ".join([sizes, f"log-probs {modes}", ", ".join(declared) or "samples only"])


@contextmanager
def logged(backend: str, hook: str, request: Any) -> Iterator[None]:
    """Log how a call to a hook ended: a timeout and a failure at INFO, a success at DEBUG."""
    if not logger.isEnabledFor(logging.INFO):
        yield
        return
    names = getattr(request, "request_ids", None)
    started, told = time.monotonic(), hook if names is None else f"{hook} of {len(names)} rows"
    try:
        yield
    except CoreLMError as error:
        seconds = f"{time.monotonic() - started:.3g} s"
        late = isinstance(error, BackendTimeoutError)
        how = f"timed out after {seconds}:" if late else f"failed after {seconds} with"
        logger.info("%s: %s %s %s", backend, told, how, brief(described(error)))
        raise
    if hook not in _QUIET:
        logger.debug("%s: %s took %.3g s", backend, told, time.monotonic() - started)


def log_retry(state: tenacity.RetryCallState) -> None:
    """Log that a failed call is about to be made again; a `before_sleep` of tenacity."""
    error = state.outcome.exception() if state.outcome is not None else None
    what = "" if error is None else f" failed with {brief(described(error))}"
    logger.warning("attempt %d%s; trying again in %.1f s", state.attempt_number, what, state.upcoming_sleep)
