"""`Player`: answers a request from the calls of a cassette, row by row.

Every row is found by its content, so the order of calls and their batches do not matter.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

from corelm import Ragged, TokenSets
from corelm.errors import own, spelled_out
from corelm.spec import TokenizeRequest, TokenizeResult
from corelm.validate import shown
from corelm_engine_kit.joining import Part, joined, rows_of_result
from corelm_testing.cassette.file import CassetteError, CassetteReader, NotRecordedError
from corelm_testing.cassette.records import WeightsHistory, chunk_of, digest, error_of, request_json, result_of

#: The field of a request with one row of ids for each row.
_ROWS = {"generate": "prompts", "score_logprobs": "sequences"}
#: How many calls are looked through for what is nearest to a row that is not recorded.
_LOOKED_THROUGH = 1000
#: How many calls are kept decoded, because their rows are read one by one.
_KEPT = 4


@dataclass(frozen=True, slots=True)
class IndexedCall:
    """Where a recorded call is.

    Attributes:
        number: its place among the calls: the order in which they began.
        line: the number of its line.
        keys: one for each of its rows, see `row_keys`; of a hook without rows, one.
        weights: the state of the weights when it began, see `WeightsHistory`.
        failed: whether the hook raised.
        version: the label of the weights, of an engine that notices itself when they change; else None.
    """

    number: int
    hook: str
    line: int
    keys: tuple[str, ...]
    weights: str
    failed: bool
    version: str | None


class _Recorded(NamedTuple):
    """What a call asked for, as JSON; what the hook returned or raised; and the chunks it handed over, as JSON."""

    request: Any
    result: Any
    error: Exception | None
    stream: Sequence[Any]


class Player:
    """Finds the rows of a request among all recorded rows: same ids, parameters, seed, and state of the weights.

    A row that was recorded several times is played in the order of the recording. After that, its last answer is played
    again and again if the row decides about it (it has a seed, is greedy or is a score); otherwise it counts as not
    recorded. A call that failed is played for a request that has all of its rows, and for its other rows only if
    nothing else was recorded of them: the batcher asks again for each row of a shared call that failed.

    Args:
        reader: the cassette. Threads may share the player.
        seeds: whether seeds count. If not, the answers to a row are played in the order of the recording.
        explains: whether to look through the recording for what is nearest to a row that is not recorded.

    Attributes:
        calls: the recorded calls, by number.
        weights: the updates so far.

    Raises:
        CassetteError: the file is damaged.
    """

    def __init__(self, reader: CassetteReader, *, seeds: bool = True, explains: bool = True) -> None:
        self._reader, self._seeds, self._explains = reader, seeds, explains
        self.weights = WeightsHistory()
        records = (each for each in reader.records() if "call" in each[1])
        self.calls = sorted((_indexed(reader, *each, seeds=seeds) for each in records), key=lambda call: call.number)
        self._recorded: dict[str, list[tuple[IndexedCall, int]]] = defaultdict(list)
        for call in self.calls:
            if not (call.hook == "tokenize" and call.failed):
                for row, key in enumerate(call.keys):
                    self._recorded[key].append((call, row))
        self._played = Counter[str]()
        self._mutex = threading.Lock()
        self._read = lru_cache(_KEPT)(self._decoded)

    def tokenized(self, request: TokenizeRequest) -> TokenizeResult | None:
        """Return the ids that were recorded for the texts of a request; None if none were."""
        (key,) = row_keys("tokenize", request_json("tokenize", request), "")
        found = self._recorded.get(key)
        result: TokenizeResult | None = self._read(found[-1][0]).result if found else None
        return result

    def answer(self, hook: str, request: Any, weights: str | None = None) -> Any:
        """Return what was recorded for a request, and hand its tokens over in the recorded order.

        Args:
            weights: the fingerprint of new weights, see `request_json`.

        Raises:
            NotRecordedError: rows are not recorded; `problems` names them.
            CassetteError: the cassette is damaged, or only some of the recorded rows name their weights.
            EngineError: the recorded rows are of different distributions.
            Exception: what was raised when it was recorded.
        """
        form, parts = request_json(hook, request, weights), []
        # How many rows of the result belong to each row of the request.
        samples = range(form["sampling"].get("num_samples") or 1) if hook == "generate" else range(1)
        for call, rows, indices in self._found(hook, form, self.weights.state(getattr(request, "adapter", None))):
            recorded = self._read(call)
            these, those = ([row * len(samples) + each for row in some for each in samples] for some in (rows, indices))
            _hand_over(recorded.stream, these, those, request)
            if recorded.error is not None:
                raise _for_rows(recorded.error, rows, indices)
            result = recorded.result
            if call.version is not None and not _names_weights(result):
                # Nothing else tells a replay which weights answered.
                result = replace(result, weight_versions=(call.version,) * len(rows_of_result(result)))
            parts.append(Part(result, these, those))
        if isinstance(parts[0].result, bool):
            return parts[0].result
        if len({_names_weights(part.result) for part in parts}) > 1:
            raise CassetteError("the recorded rows do not belong together: some name their weights; record them again")
        whole: Any = joined(parts, "")
        named = {each.name: getattr(whole, each.name) for each in fields(whole)}
        device = getattr(request, "device", None)
        moved = {name: each.to(device) for name, each in named.items() if isinstance(each, (Ragged, TokenSets))}
        return replace(whole, **moved)

    def _found(self, hook: str, form: Any, state: str) -> list[tuple[IndexedCall, list[int], list[int]]]:
        """Return the calls that hold the rows of a request: which of their rows, and which of its rows these are."""
        keys = row_keys(hook, form, state, seeds=self._seeds)
        with self._mutex:
            before = Counter[str]()
            lacking = []
            for row, key in enumerate(keys):
                if not self._has(key, before[key], hook, form):
                    lacking.append(row)
                before[key] += 1
            if lacking:
                raise self._not_recorded(hook, {row: self._why(hook, form, row) for row in lacking})
            taken = [self._take(key, {*keys}) for key in keys]
        found: dict[int, tuple[IndexedCall, list[int], list[int]]] = {}
        for place, (call, row) in enumerate(taken):
            _, rows, indices = found.setdefault(call.number, (call, [], []))
            rows.append(row)
            indices.append(place)
        return [*found.values()]

    def _decoded(self, call: IndexedCall) -> _Recorded:
        record = self._reader.read(call.line)
        error = error_of(record["error"]) if call.failed else None
        result = None if call.failed else result_of(call.hook, record.get("result"))
        return _Recorded(record["request"], result, error, record.get("stream", ()))

    def _has(self, key: str, before: int, hook: str, form: Any) -> bool:
        """Return whether there is an answer to a row, after those to as many equal rows `before` it."""
        recorded = self._recorded.get(key, [])
        if self._played[key] + before < len(recorded):
            return True
        if hook == "generate" and form["sampling"]["temperature"] and not (self._seeds and form["seeds"]):
            return False
        # An engine that notices itself when its weights change has given one row other answers each time.
        return len({call.version for call, _ in recorded}) == 1

    def _take(self, key: str, asked: set[str]) -> tuple[IndexedCall, int]:
        recorded = self._recorded[key]
        last = len(recorded) - 1
        number = min(self._played[key], last)
        while number < last and recorded[number][0].failed and not asked.issuperset(recorded[number][0].keys):
            number += 1
        self._played[key] = number + 1
        return recorded[number]

    def _why(self, hook: str, form: Any, row: int) -> str:
        if hook == "update_weights":
            return "no such update is recorded here; the run has computed other weights than the recorded one"
        if hook not in _ROWS:
            return f"{hook} is not recorded with {shown(form)}"
        near = self._near(hook, form, row) if self._explains else ""
        ids = form[_ROWS[hook]]["rows"][row]
        return f"{_ROWS[hook]} {shown(ids)}: {near or 'no row with these ids is recorded'}"

    def _near(self, hook: str, form: Any, row: int) -> str:
        """Return how the last recorded row with the same ids differs; "" if there is none."""
        name_of_ids = _ROWS[hook]
        ids = form[name_of_ids]["rows"][row]
        calls = [call for call in self.calls if call.hook == hook][-_LOOKED_THROUGH:]
        for call in reversed(calls):
            recorded = self._read(call).request
            if ids not in recorded[name_of_ids]["rows"]:
                continue
            at = recorded[name_of_ids]["rows"].index(ids)
            for name in recorded:
                was, now = _of_row(recorded[name], at), _of_row(form.get(name), row)
                if name != name_of_ids and was != now and (name != "seeds" or self._seeds):
                    return f"these ids are recorded in call {call.number} with other {name}: {_difference(was, now)}"
            return f"this row is recorded in call {call.number}, for other weights or fewer times"
        return ""

    def _not_recorded(self, hook: str, missing: dict[int, str]) -> NotRecordedError:
        hint = " Rows without seed= get another seed each time; match_seeds=False passes over seeds."
        seeds = hint if any("other seeds" in why for why in missing.values()) else ""
        path = self._reader.path
        return NotRecordedError(
            f"cassette {path}: {hook} asks for {len(missing)} rows that are not recorded: {spelled_out(missing)}."
            f"{seeds} To add them, record with CassetteRecorder({os.fspath(path)!r}, record_mode='new_episodes')",
            problems=missing,
        )


def row_keys(hook: str, form: Any, weights: str, *, seeds: bool = True) -> tuple[str, ...]:
    """Return a key for each row of a request: rows with equal keys ask for the same.

    A row of `generate` is a prompt with all its answers.

    Args:
        form: the request, see `request_json`.
        weights: the state of the weights, see `WeightsHistory`.
        seeds: whether the seeds count.
    """
    if hook == "generate":
        rows, samples = form["prompts"]["rows"], form["sampling"].get("num_samples") or 1
        given = form["seeds"]["data"] if form["seeds"] is not None and seeds else None
        common = digest([hook, weights, {**form, "prompts": None, "seeds": None}])
        parts = [None if given is None else given[row * samples : (row + 1) * samples] for row in range(len(rows))]
        return tuple(digest([common, prompt, part]) for prompt, part in zip(rows, parts, strict=True))
    if hook == "score_logprobs":
        rows, starts = form["sequences"]["rows"], form["score_from"]["data"]
        common = digest([hook, weights, form | dict.fromkeys(("sequences", "score_from", "support", "top_ids"))])
        support = form["support"]["sets"] if form["support"] is not None else [None] * len(rows)
        top = _by_row(form["top_ids"], len(rows))
        return tuple(digest([common, *each]) for each in zip(rows, starts, support, top, strict=True))
    # Weights do not change what a text is tokenized to.
    weights = "" if hook == "tokenize" else weights
    return (digest([hook, weights, {**form, "version": None} if hook == "update_weights" else form]),)


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


def _indexed(reader: CassetteReader, line: int, record: dict[str, Any], *, seeds: bool) -> IndexedCall:
    try:
        hook, weights = record["hook"], record.get("weights", "")
        return IndexedCall(
            number=int(record["call"]),
            hook=hook,
            line=line,
            keys=row_keys(hook, record["request"], weights, seeds=seeds),
            weights=weights,
            failed="error" in record,
            version=record.get("weight_version"),
        )
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise CassetteError(
            f"cassette {reader.path}: call {record['call']} cannot be read ({type(error).__name__}: {error}); it is "
            "damaged, or was recorded by another version of core"
        ) from error


def _names_weights(result: Any) -> bool:
    return any(getattr(result, name, None) is not None for name in ("weight_versions", "version_runs"))


def _hand_over(stream: Sequence[Any], rows: list[int], indices: list[int], request: Any) -> None:
    if (on_tokens := getattr(request, "on_tokens", None)) is None:
        return
    # A row may be asked for more than once.
    listening: dict[int, list[int]] = defaultdict(list)
    for row, place in zip(rows, indices, strict=True):
        listening[row].append(place)
    for chunk in map(chunk_of, stream):
        for place in listening.get(chunk.row, ()):
            on_tokens(replace(chunk, row=place))


def _difference(recorded: Any, given: Any) -> str:
    """Return how what a field says of one row differs: the first parameter, or all of it."""
    if isinstance(recorded, dict) and isinstance(given, dict):
        for name in dict.fromkeys((*recorded, *given)):
            if recorded.get(name) != given.get(name):
                was, now = (shown(each[name]) if name in each else "its default" for each in (recorded, given))
                return f"{name}: recorded {was}, got {now}"
    return f"recorded {shown(recorded)}, got {shown(given)}"


def _of_row(form: Any, row: int) -> Any:
    """Return what a field of a request says of one row: all of it, if it is about all rows alike."""
    if isinstance(form, dict):
        found = form.get("rows", form.get("sets", form.get("data")))
        return found[row] if isinstance(found, list) else form
    return form


def _for_rows(error: Exception, rows: Sequence[int], indices: Sequence[int]) -> Exception:
    """Return a recorded error with the numbers of its rows in this request. One may occur twice."""
    made = own(error)
    if problems := getattr(error, "problems", None):
        pairs = zip(rows, indices, strict=True)
        made.__dict__["problems"] = {place: problems[row] for row, place in pairs if row in problems}
    return made
