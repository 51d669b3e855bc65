"""Where an answer ends. The server does not end it at every stop that core promises, so that it is looked at again.

Its window for stop strings is as many tokens as it takes to write them, so a string spelt in more tokens is not seen;
it looks for none, and for no stop id, where `sampling.parameters` had to ask for that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from corelm.spec import SamplingParams

#: What a part of a character decodes to. The next token may turn it into the whole one.
_HALF = "\ufffd"


def first_stop(ids: Sequence[int], sampling: SamplingParams, stop_ids: frozenset[int], tokenizer: Any) -> int | None:
    """The length of the answer up to and with the token that ends it; None if nothing in it does."""
    ends = [index + 1 for index, token in enumerate(ids) if token in stop_ids][:1]
    if sampling.stop:
        ends += _first_string(ids[: ends[0]] if ends else ids, sampling, tokenizer)
    return min(ends, default=None)


def _first_string(ids: Sequence[int], sampling: SamplingParams, tokenizer: Any) -> list[int]:
    """The length at which the first stop string is complete, if one is after ``min_new_tokens - 1`` tokens."""

    def text(length: int) -> str:
        decoded: str = tokenizer.decode(list(ids[:length]), skip_special_tokens=sampling.skip_special_tokens)
        return decoded

    least = max(1, sampling.min_new_tokens)
    early = len(text(least - 1).rstrip(_HALF)) if least > 1 else 0

    def stopped(length: int) -> bool:
        found = text(length)
        return any(stop in found[max(0, early - len(stop) + 1) :] for stop in sampling.stop)

    if len(ids) < least or not stopped(len(ids)):
        return []
    # A longer answer's text goes on where a shorter one's ends, so the first length is found by halving.
    lengths = range(least, len(ids) + 1)
    return [lengths[bisect_left(lengths, True, key=stopped)]]
