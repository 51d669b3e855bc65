"""The table of all rows, and the verdict on it."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

from .cases import Row
from .checks import Outcome, Verdict

#: case → the ways, "scoring" and "generating", that were right.
RIGHT = Path(__file__).with_name("right.json")
VERDICTS = get_args(Verdict)


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
    failed = {row.name: found for row in rows if (found := problems(row, right))}
    built = [row for row in rows if not row.not_built]
    lines = [f"{name}: {problem}" for name, found in sorted(failed.items()) for problem in found]
    lines += ["", *_counts(rows), ""]
    lines.append(f"{sum(row.name not in failed for row in built)} of {len(built)} hold; {len(failed)} rows fail")
    return "\n".join(lines), not failed


def _counts(rows: Sequence[Row]) -> list[str]:
    columns = ("rows", "not built", *VERDICTS)
    lines = [" " * 30 + "".join(f"{column:>10}" for column in columns)]
    for kind, special in (("model types", False), ("special cases", True)):
        these = [row for row in rows if ("/" in row.name) == special]
        for way in ("scoring", "generating"):
            verdicts = Counter(outcome.verdict for row in these for found, outcome in ways(row) if found == way)
            not_built = sum(bool(row.not_built) for row in these)
            counts = (len(these), not_built, *(verdicts[verdict] for verdict in VERDICTS))
            lines.append(f"{kind + ', ' + way:30}" + "".join(f"{count:10}" for count in counts))
    return lines


def _short(outcome: Outcome) -> str:
    return f"{outcome.verdict} {outcome.off:.0e}" if outcome.verdict in ("right", "WRONG") else outcome.verdict
