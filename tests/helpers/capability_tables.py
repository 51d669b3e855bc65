"""What engines declare, as tables of Markdown: docs/engines.md has those of all engines, a backend's page has its own.

`.ci/engines_page.py` writes both, and tests/test_backend_pages.py compares them with each other and with engines that
can be opened here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from corelm import Backend, Capabilities
from corelm.testing.base import engine_facts

ENGINES = Path(__file__).parents[2] / "docs" / "engines.md"
#: Where the table of a page begins and ends.
BEGIN, END = "<!-- capabilities: written by .ci/engines_page.py -->\n", "<!-- end of the capabilities -->"
#: What depends on the model alone.
OF_THE_MODEL = ("vocab_size", "max_context", "eos_token_ids", "without_weights")
#: Fields that count ids: they may be as many as the model has.
_COUNTS = ("score_top_k", "top_logprobs")

Declared = Mapping[str, Any]


def cells(declares: Declared) -> dict[str, str]:
    """Return what an engine declares, in words.

    Args:
        declares: the fields of its `Capabilities`, as a report of the kit has them.
    """
    found = {}
    for name, value in declares.items():
        if name == "sampling":
            found |= {parameter: _range(value[parameter]) for parameter in sorted(value)}
        elif name in _COUNTS and value == declares["vocab_size"]:
            found[name] = f"{value}, all ids of the model"
        else:
            found[name] = _words(value)
    return found


def tables(engines: Mapping[str, Declared]) -> Iterator[str]:
    """Yield the lines of the two tables of docs/engines.md: capabilities, and parameters of sampling."""
    said = {name: cells(declares) for name, declares in engines.items()}
    parameters = sorted({parameter for declares in engines.values() for parameter in declares["sampling"]})
    fields = [name for name in next(iter(engines.values())) if name != "sampling"]
    for title, names in (("capability", fields), ("sampling parameter", parameters)):
        yield from (f"| {title} | {' | '.join(said)} |", "|---" * (len(said) + 1) + "|")
        for name in names:
            yield f"| `{name}` | {' | '.join(each.get(name, 'no') for each in said.values())} |"
        yield ""


def column(page: str, engine: str) -> dict[str, str]:
    """Return what docs/engines.md says that an engine declares: the cells of its column."""
    found = {}
    for table in re.findall(r"^\| (?:capability|sampling parameter) \|.*?\n\n", page, re.DOTALL | re.MULTILINE):
        head, _, *lines = (line.strip("| ").split(" | ") for line in table.strip().splitlines())
        found |= {line[0].strip("`"): line[head.index(engine)] for line in lines}
    return found


def assert_page_says(engine: str, backend: Backend, besides: Collection[str] = ()) -> None:
    """Check that docs/engines.md says of an engine what this backend declares.

    Args:
        besides: capabilities that the engine of the page lacks because it ran in a process of another environment.
    """
    own, said = cells(engine_facts(backend)["declares"]), column(ENGINES.read_text(), engine)
    differ = {name: (said.get(name, "no"), own.get(name, "no")) for name in {**said, **own}}
    differ = {name: pair for name, pair in differ.items() if pair[0] != pair[1] and name not in besides}
    assert not differ, f"(on the page, declared): {differ}; run .ci/engines_page.py {engine}"


def own_table(said: Mapping[str, str]) -> str:
    """Return the table of a backend's page, with what each capability means.

    Args:
        said: the cells of its column.
    """
    meant = meanings()
    honoured = {name: cell for name, cell in said.items() if name not in meant and cell != "no"}
    spelled = ", ".join(f"`{name}`{'' if cell == 'yes' else f' ({cell})'}" for name, cell in honoured.items())
    lines = ["| capability | | it means |", "|---|---|---|", f"| `sampling` | {spelled} | {meant['sampling']} |"]
    for name, meaning in meant.items():
        if name in said and name not in OF_THE_MODEL:
            lines.append(f"| `{name}` | {said[name]} | {meaning} |")
    return "\n".join(lines) + "\n"


def meanings() -> dict[str, str]:
    """Return the first sentence about each capability in the docstring of `Capabilities`."""
    text = (Capabilities.__doc__ or "").partition("Attributes:")[2].partition("Raises:")[0]
    entries = re.findall(r"^ {8}(\w+): (.*?)(?=^ {8}\w|\Z)", text, re.DOTALL | re.MULTILINE)
    sentences = {name: re.split(r"\.(?:\s|$)|; ", " ".join(entry.split()))[0] for name, entry in entries}
    return {name: sentence.replace("``", "`") for name, sentence in sentences.items()}


def with_table(page: str, said: Mapping[str, str]) -> str:
    """Return the text of a backend's page with its table made again."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, "the page does not say where its table is"
    return before + begin + own_table(said) + end + after


def _range(span: Any) -> str:
    return "yes" if span is None else f"{span[0]:g} to {span[1]:g}"


def _words(value: Any) -> str:
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    if value is True:
        return "yes"
    return "not said" if value is None else str(value or "no")
