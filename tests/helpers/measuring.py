"""What must be measured of an engine with a prefix cache that streams its answers."""

import time

from corelm import Backend
from corelm_interop import Timing
from helpers.tiny_models import random_rows

#: Of several blocks of a cache. The seed is this file's own: rows of one seed begin alike, whatever their lengths.
PROMPT = random_rows(211, seed=2111)[0]
#: How many first ids a prompt of another test may have in common with it by chance. SGLang caches single ids.
BY_CHANCE = 2
SAMPLING = {"max_new_tokens": 8, "ignore_eos": True}


def observed(shared: Backend, timing: Timing) -> Backend:
    """Return another backend on the same engine. It is not closed, because the engine is others' as well."""
    return Backend.from_plugin(shared.engine.plugin, shared.name, wrappers=[timing])


def check_cache_hits(shared: Backend) -> None:
    """Check that the engine finds a prompt in its cache from the second time on, and that this is counted."""
    timing = Timing()
    backend = observed(shared, timing)
    (missed,) = backend.generate([PROMPT], SAMPLING).cached_tokens or (None,)
    assert missed is not None and missed <= BY_CHANCE
    (hit,) = backend.generate([PROMPT], SAMPLING).cached_tokens or (None,)
    # Whole blocks, and at least the last id is computed.
    assert hit is not None and 0.3 * len(PROMPT) < hit < len(PROMPT)
    (changed,) = backend.generate([[PROMPT[0] + 1, *PROMPT[1:]]], SAMPLING).cached_tokens or (None,)
    assert changed is not None and changed <= BY_CHANCE
    made = timing.summary().hooks["generate"]
    cached = missed + hit + changed
    assert made.cached_tokens == cached and made.cache_hits == cached / (3 * len(PROMPT))


def check_first_token(shared: Backend) -> None:
    """Check that the first token of streamed answers is timed between the wait and what their reader sees."""
    timing = Timing()
    began = time.monotonic()
    with observed(shared, timing).stream([PROMPT, PROMPT[:50]], {**SAMPLING, "max_new_tokens": 64}) as stream:
        next(stream)
        read = time.monotonic() - began
        list(stream)
    made = timing.summary().hooks["generate"]
    assert made.first_token is not None and made.token_interval is not None
    assert made.wait is not None and made.duration is not None
    assert made.first_token.count == made.token_interval.count == 2
    assert made.wait.most < made.first_token.least <= read
    assert made.first_token.most < made.wait.most + made.duration.most
    # The tokens after the first come within the call.
    assert 63 * made.token_interval.most < made.duration.most
