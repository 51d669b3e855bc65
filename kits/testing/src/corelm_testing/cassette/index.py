"""Where the calls of a cassette are, in the order in which they began."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from corelm_testing.cassette.errors import CassetteError
from corelm_testing.cassette.file import CassetteReader
from corelm_testing.cassette.records import ORDERED, digest, error_of, result_of

#: How many calls are kept decoded, because their rows are read one by one.
_KEPT = 4


@dataclass(frozen=True, slots=True)
class IndexedCall:
    """A recorded call.

    Attributes:
        number: its place among the calls: the order in which they began.
        hook: the hook.
        line: the number of its line.
        keys: one for each of its rows, see `row_keys`; of a hook without rows, one.
        weights: the state of the weights when it began, see `WeightsHistory`.
        failed: whether the hook raised.
        version: the label of the weights, see `RecordedCall.weight_version`.
    """

    number: int
    hook: str
    line: int
    keys: tuple[str, ...]
    weights: str
    failed: bool
    version: str | None


@dataclass(frozen=True, slots=True, eq=False)
class RecordedCall:
    """A call as it is in the file.

    Attributes:
        request: what decided about the answer, as JSON.
        result: what the hook returned; None if it raised.
        error: what it raised, or None.
        stream: the chunks that it handed over, as JSON, in their order.
        weight_version: the label of the weights, of an engine that notices itself when they change; else None.
    """

    request: Any
    result: Any
    error: Exception | None
    stream: Sequence[Any]
    weight_version: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """What a recorded call contributes to the answer to a request.

    Attributes:
        call: the recorded call.
        rows: the rows of its request that count.
        places: the rows of the new request that these are.
    """

    call: RecordedCall
    rows: list[int]
    places: list[int]


class CassetteIndex:
    """Finds calls in a cassette by their number. Threads may share it.

    Args:
        reader: the file.

    Attributes:
        calls: the calls that come in an order, by number.
        tokenized: the calls of `tokenize`, by the key of their request.

    Raises:
        CassetteError: the file is damaged.
    """

    def __init__(self, reader: CassetteReader) -> None:
        self._reader = reader
        self.tokenized: dict[str, IndexedCall] = {}
        self.last = -1
        found = []
        for line, record in reader.records():
            if "call" not in record:
                continue
            call = _indexed(reader, line, record)
            self.last = max(self.last, call.number)
            if call.hook in ORDERED:
                found.append(call)
            elif call.hook == "tokenize" and not call.failed:
                self.tokenized[call.keys[0]] = call
        self.calls = sorted(found, key=lambda call: call.number)
        self._decoded = lru_cache(_KEPT)(self._decode)

    def read(self, call: IndexedCall) -> RecordedCall:
        """Return a call as it is in the file.

        Raises:
            CassetteError: it is damaged.
        """
        return self._decoded(call)

    def _decode(self, call: IndexedCall) -> RecordedCall:
        record = self._reader.read(call.line)
        error = error_of(record["error"]) if call.failed else None
        result = None if call.failed else result_of(call.hook, record.get("result"))
        return RecordedCall(record["request"], result, error, record.get("stream", ()), record.get("weight_version"))


def row_keys(hook: str, request: Any, weights: str, *, seeds: bool = True) -> tuple[str, ...]:
    """Return a key for each row of a request: rows with equal keys ask for the same.

    A row of `generate` is a prompt with all its answers.

    Args:
        request: see `request_json`.
        weights: the state of the weights, see `WeightsHistory`.
        seeds: whether the seeds count.
    """
    if hook == "generate":
        rows, samples = request["prompts"]["rows"], request["sampling"].get("num_samples") or 1
        given = request["seeds"]["data"] if request["seeds"] is not None and seeds else None
        common = digest([hook, weights, {**request, "prompts": None, "seeds": None}])
        parts = [None if given is None else given[row * samples : (row + 1) * samples] for row in range(len(rows))]
        return tuple(digest([common, prompt, part]) for prompt, part in zip(rows, parts, strict=True))
    if hook == "score_logprobs":
        rows, starts = request["sequences"]["rows"], request["score_from"]["data"]
        of_rows = dict.fromkeys(("sequences", "score_from", "support", "top_ids"))
        common = digest([hook, weights, {**request, **of_rows}])
        support = request["support"]["sets"] if request["support"] is not None else [None] * len(rows)
        top = _by_row(request["top_ids"], len(rows))
        return tuple(digest([common, *each]) for each in zip(rows, starts, support, top, strict=True))
    return (digest([hook, weights, {**request, "version": None} if hook == "update_weights" else request]),)


def answers_per_row(hook: str, request: Any) -> int:
    """Return how many rows of the result belong to each row of a request."""
    return (request["sampling"].get("num_samples") or 1) if hook == "generate" else 1


def _by_row(form: Any, rows: int) -> list[Any]:
    """Return the ids that a request names at each position, by row."""
    if form is None:
        return [None] * rows
    data, wide = form["values"]["data"], form["values"]["shape"][1]
    found, start = [], 0
    for length in form["lengths"]:
        found.append(data[start : start + length * wide])
        start += length * wide
    return found


def _indexed(reader: CassetteReader, line: int, record: dict[str, Any]) -> IndexedCall:
    try:
        hook, request, weights = record["hook"], record["request"], record.get("weights", "")
        return IndexedCall(
            number=int(record["call"]),
            hook=hook,
            line=line,
            keys=row_keys(hook, request, weights),
            weights=weights,
            failed="error" in record,
            version=record.get("weight_version"),
        )
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise CassetteError(
            f"cassette {reader.path}: call {record['call']} cannot be read ({type(error).__name__}: {error}); it is "
            "damaged, or was recorded by another version of core"
        ) from error
