"""The table of all rows, and the verdict on it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from .cases import Row
from .checks import Outcome

#: case → the ways, "scoring" and "generating", that were right.
RIGHT = Path(__file__).with_name("right.json")


def used_to_be_right() -> dict[str, list[str]]:
    """Read what was right when the file was written."""
    found: dict[str, list[str]] = json.loads(RIGHT.read_text(encoding="utf-8")) if RIGHT.exists() else {}
    return found


def remember(rows: Iterable[Row]) -> None:
    """Replace what the file says about these rows by what is right now."""
    right = used_to_be_right()
    for row in rows:
        right[row.name] = [way for way, outcome in ways(row) if outcome.verdict == "right"]
    lines = [f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in sorted(right.items()) if found]
    RIGHT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def ways(row: Row) -> list[tuple[str, Outcome]]:
    """Return the outcomes of a row by name."""
    both = {"scoring": row.scoring, "generating": row.generating}
    return [(way, outcome) for way, outcome in both.items() if outcome is not None]


def problems(row: Row, right: dict[str, list[str]]) -> list[str]:
    """Return what does not hold in a row, one line each."""
    before = right.get(row.name, [])
    found = [
        f"{way}: {outcome.verdict}: {outcome.detail}" + (" (it used to be right)" if way in before else "")
        for way, outcome in ways(row)
        if outcome.verdict not in ("right", "refused") or (outcome.verdict == "refused" and way in before)
    ]
    if row.not_built and before:
        found.append(f"not built: {row.not_built} (it used to be right)")
    return found


def line(row: Row) -> str:
    """Return a row of the table."""
    if row.not_built:
        return f"{row.name:34} {'not built':30} {row.seconds:5.1f} s  {row.not_built}"
    columns = "".join(f"{_short(outcome):15}" for _, outcome in ways(row))
    details = "; ".join(dict.fromkeys(f"{way}: {outcome.detail}" for way, outcome in ways(row) if outcome.detail))
    return f"{row.name:34} {columns} {row.seconds:5.1f} s  {details}"


def summary(rows: Sequence[Row], right: dict[str, list[str]]) -> tuple[str, bool]:
    """Return the end of the table, and whether everything holds."""
    built = [row for row in rows if not row.not_built]
    failed = {row.name: found for row in rows if (found := problems(row, right))}
    count = {
        way: sum(found == way and outcome.verdict == "right" for row in built for found, outcome in ways(row))
        for way in ("scoring", "generating")
    }
    lines = [f"{name}: {problem}" for name, found in sorted(failed.items()) for problem in found]
    lines += [
        "",
        f"{len(rows)} rows, {len(built)} built; right: scoring {count['scoring']}, generating {count['generating']}",
        f"{sum(row.name not in failed for row in built)} of {len(built)} hold",
    ]
    return "\n".join(lines), not failed


def _short(outcome: Outcome) -> str:
    return f"{outcome.verdict} {outcome.off:.0e}" if outcome.verdict in ("right", "WRONG") else outcome.verdict
