"""`ContentPlayer`: every row by its content, so that the order of calls and their batches do not matter."""

from __future__ import annotations

import os
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from corelm.errors import own, spelled_out
from corelm.spec import Adapter
from corelm.validate import shown
from corelm_testing.cassette.errors import NotRecordedError
from corelm_testing.cassette.index import CassetteIndex, IndexedCall, Played, row_keys
from corelm_testing.cassette.weights import WeightsHistory

#: The field of a request with one row of ids for each row.
_ROWS = {"generate": "prompts", "score_logprobs": "sequences"}
#: How many calls are looked through for what is nearest to a row that is not recorded.
_LOOKED_THROUGH = 1000

#: A recorded row: the call, and which of its rows.
_Place = tuple[IndexedCall, int]


class ContentPlayer:
    """Finds the rows of a request among all recorded rows: same ids, parameters, seed, and state of the weights.

    A row that was recorded several times is played in the order of the recording. After that, its last answer is played
    again and again if the row decides about it (it has a seed, is greedy or is a score); otherwise it counts as not
    recorded. A call that failed is played for a request that has all of its rows, and for its other rows only if
    nothing else was recorded of them: the batcher asks again for each row of a shared call that failed.

    Args:
        path: the folder of the cassette, for messages.
        index: its calls.
        seeds: whether seeds count. If not, the answers to a row are played in the order of the recording.
        explains: whether to look through the recording for what is nearest to a row that is not recorded.

    Attributes:
        weights: the updates so far.
    """

    def __init__(self, path: Path, index: CassetteIndex, *, seeds: bool = True, explains: bool = True) -> None:
        self._path, self._index, self._seeds = path, index, seeds
        self._explains = explains
        self.weights = WeightsHistory()
        self._places: dict[str, list[_Place]] = defaultdict(list)
        self._played: dict[str, int] = defaultdict(int)
        self._mutex = threading.Lock()
        for call in index.calls if seeds else map(self._unseeded, index.calls):
            for row, key in enumerate(call.keys):
                self._places[key].append((call, row))

    def play(self, hook: str, request: Any, adapter: Adapter = None) -> list[Played]:
        """Return the recorded calls that hold the rows of a request.

        Args:
            request: see `request_json`.
            adapter: the adapter of the call.

        Raises:
            NotRecordedError: rows are not recorded; `problems` names them.
        """
        keys = row_keys(hook, request, self.weights.state(adapter), seeds=self._seeds)
        with self._mutex:
            before = Counter[str]()
            lacking = []
            for row, key in enumerate(keys):
                if not self._has(key, before[key], hook, request):
                    lacking.append(row)
                before[key] += 1
            if lacking:
                raise self._not_recorded(hook, {row: self._why(hook, request, row) for row in lacking})
            places = [self._take(key, {*keys}) for key in keys]
        found: dict[int, tuple[IndexedCall, list[int], list[int]]] = {}
        for at, (call, row) in enumerate(places):
            _, rows, wanted = found.setdefault(call.number, (call, [], []))
            rows.append(row)
            wanted.append(at)
        return [Played(self._index.read(call), rows, wanted) for call, rows, wanted in found.values()]

    def _has(self, key: str, before: int, hook: str, request: Any) -> bool:
        """Return whether there is an answer to a row, after those to as many equal rows `before` it."""
        places = self._places.get(key, [])
        if self._played[key] + before < len(places):
            return True
        if hook == "generate" and request["sampling"]["temperature"] and not (self._seeds and request["seeds"]):
            return False
        # An engine that notices itself when its weights change has given one row other answers each time.
        return len({call.version for call, _ in places}) == 1

    def _take(self, key: str, asked: set[str]) -> _Place:
        places = self._places[key]
        last = len(places) - 1
        number = min(self._played[key], last)
        while number < last and places[number][0].failed and not asked.issuperset(places[number][0].keys):
            number += 1
        self._played[key] = number + 1
        return places[number]

    def _why(self, hook: str, request: Any, row: int) -> str:
        if hook == "update_weights":
            return "no such update is recorded here; the run has computed other weights than the recorded one"
        if hook not in _ROWS:
            return f"{hook} is not recorded with {shown(request)}"
        ids = request[_ROWS[hook]]["rows"][row]
        near = self._near(hook, request, row) if self._explains else ""
        return f"{_ROWS[hook]} {shown(ids)}: {near or 'no row with these ids is recorded'}"

    def _near(self, hook: str, request: Any, row: int) -> str:
        """Return how the last recorded row with the same ids differs; "" if there is none."""
        ids = request[_ROWS[hook]]["rows"][row]
        calls = [call for call in self._index.calls if call.hook == hook][-_LOOKED_THROUGH:]
        for call in reversed(calls):
            recorded = self._index.read(call).request
            if ids not in recorded[_ROWS[hook]]["rows"]:
                continue
            at = recorded[_ROWS[hook]]["rows"].index(ids)
            for name in recorded:
                was, now = _of_row(recorded[name], at), _of_row(request.get(name), row)
                if name != _ROWS[hook] and was != now and (name != "seeds" or self._seeds):
                    return f"these ids are recorded in call {call.number} with other {name}: {_difference(was, now)}"
            return f"this row is recorded in call {call.number}, for other weights or fewer times"
        return ""

    def _not_recorded(self, hook: str, missing: dict[int, str]) -> NotRecordedError:
        hint = " Rows without seed= get another seed each time; match_seeds=False passes over seeds."
        seeds = hint if any("other seeds" in why for why in missing.values()) else ""
        return NotRecordedError(
            f"cassette {self._path}: {hook} asks for {len(missing)} rows that are not recorded: {spelled_out(missing)}."
            f"{seeds} To add them, record with CassetteRecorder({os.fspath(self._path)!r}, record_mode='new_episodes')",
            problems=missing,
        )

    def _unseeded(self, call: IndexedCall) -> IndexedCall:
        if call.hook != "generate":
            return call
        record = self._index.read(call)
        return replace(call, keys=row_keys(call.hook, record.request, call.weights, seeds=False))


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


def for_rows(error: Exception, rows: Sequence[int], places: Sequence[int]) -> Exception:
    """Return a recorded error with the numbers of its rows in this request. One may occur twice."""
    made = own(error)
    problems = getattr(error, "problems", None)
    if not problems:
        return made
    pairs = zip(rows, places, strict=True)
    made.__dict__["problems"] = {place: problems[row] for row, place in pairs if row in problems}
    return made
