"""Tables of what engines declare and of what the conformance kit found, made from docs/_reports.

    ```{capabilities} vllm
    ```

shows what one engine declares, with the meaning of each capability. The directive ``engines`` compares those of
`ENGINES`. Its argument is ``summary``, ``capabilities``, ``themes`` or ``broken``. `.ci/engines_page.py` writes the
reports.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

from corelm import Capabilities

REPORTS = Path(__file__).parents[1] / "_reports"
#: The columns of the comparison, in order.
ENGINES = ("transformers", "vllm", "sglang", "openai", "ray")
#: The engine of a backend that works with several.
ENGINE_OF = {"openai": "a vLLM server", "ray": "transformers in an actor"}
#: Fields that depend on the model alone.
OF_THE_MODEL = ("vocab_size", "max_context", "eos_token_ids", "without_weights")
#: Fields that count ids. Their largest value is the vocabulary size.
COUNTS = ("score_top_k", "top_logprobs")

Declared = Mapping[str, Any]
Report = Mapping[str, Any]


def read_report(engine: str) -> Report:
    found: Report = json.loads((REPORTS / f"{engine}.json").read_text())
    return found


def cells(declares: Declared) -> dict[str, str]:
    """Return what an engine declares in words; sampling parameters are entries like the other capabilities."""
    found = {}
    for name, value in declares.items():
        if name == "sampling":
            found |= {parameter: _range(value[parameter]) for parameter in sorted(value)}
        elif name in COUNTS and value == declares["vocab_size"]:
            found[name] = f"{value}, all ids of the model"
        else:
            found[name] = _words(value)
    return found


def meanings() -> dict[str, str]:
    """Return the first sentence about each capability in the docstring of `Capabilities`."""
    text = (Capabilities.__doc__ or "").partition("Attributes:")[2].partition("Raises:")[0]
    entries = re.findall(r"^ {8}(\w+): (.*?)(?=^ {8}\w|\Z)", text, re.DOTALL | re.MULTILINE)
    sentences = {name: re.split(r"\.(?:\s|$)|; ", " ".join(entry.split()))[0] for name, entry in entries}
    return {name: sentence.replace("``", "`") for name, sentence in sentences.items()}


def capability_table(declares: Declared) -> Iterator[str]:
    """Yield the lines of the table for one engine, in Markdown."""
    said, meant = cells(declares), meanings()
    spans = {name: said[name] for name in sorted(declares["sampling"])}
    spelled = ", ".join(f"`{name}`{'' if span == 'yes' else f' ({span})'}" for name, span in spans.items())
    yield from ("| capability | | it means |", "|---|---|---|", f"| `sampling` | {spelled} | {meant['sampling']} |")
    for name, meaning in meant.items():
        if name in said and name not in OF_THE_MODEL:
            yield f"| `{name}` | {said[name]} | {meaning} |"


def summary(reports: Mapping[str, Report]) -> Iterator[str]:
    """Yield the software of each engine, the outcomes of its tests and its largest difference."""
    yield from ("| engine | plugin and engine | tests | largest difference, nats |", "|---|---|---|---|")
    for name, report in reports.items():
        software = ", ".join(filter(None, [report["software"], ENGINE_OF.get(name)]))
        counts = dict(sorted(report["counts"].items(), key=lambda entry: (entry[0] != "passed", entry[0])))
        yield f"| {name} | {software} | {_outcomes(counts)} | {report['largest_difference']:.1e} |"


def capabilities(reports: Mapping[str, Report]) -> Iterator[str]:
    """Yield the table of capabilities, and the table of sampling parameters."""
    said = {name: cells(report["declares"]) for name, report in reports.items()}
    parameters = sorted({parameter for report in reports.values() for parameter in report["declares"]["sampling"]})
    fields = [name for name in next(iter(reports.values()))["declares"] if name != "sampling"]
    for title, names in (("capability", fields), ("sampling parameter", parameters)):
        yield from (f"| {title} | {' | '.join(said)} |", "|---" * (len(said) + 1) + "|")
        for name in names:
            yield f"| `{name}` | {' | '.join(each.get(name, 'no') for each in said.values())} |"
        yield ""


def themes(reports: Mapping[str, Report]) -> Iterator[str]:
    """Yield the outcomes of the tests of each theme."""
    yield from (f"| theme | {' | '.join(reports)} |", "|---" * (len(reports) + 1) + "|")
    for theme in sorted({theme for report in reports.values() for theme in report["themes"]}):
        found = [_outcomes(report["themes"].get(theme, {})) or "–" for report in reports.values()]
        yield f"| {theme} | {' | '.join(found)} |"


def broken(reports: Mapping[str, Report]) -> Iterator[str]:
    """Yield a list of the promises that were not kept."""
    wrong = [f"- {name}, {line}" for name, report in reports.items() for line in report["broken"]]
    yield from wrong or ["Every promise that applies was kept."]


TABLES = {each.__name__: each for each in (summary, capabilities, themes, broken)}


def _outcomes(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.items())


def _range(span: Any) -> str:
    return "yes" if span is None else f"{span[0]:g} to {span[1]:g}"


def _words(value: Any) -> str:
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    if value is True:
        return "yes"
    return "not said" if value is None else str(value or "no")


class EngineDirective(SphinxDirective):
    """A directive that shows Markdown made from reports."""

    required_arguments = 1

    def lines(self) -> Iterator[str]:
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        for path in REPORTS.glob("*.json"):
            self.env.note_dependency(str(path))
        found: list[nodes.Node] = self.parse_text_to_nodes("\n".join(self.lines()))
        return found


class CapabilitiesOf(EngineDirective):
    def lines(self) -> Iterator[str]:
        return capability_table(read_report(self.arguments[0])["declares"])


class Engines(EngineDirective):
    def lines(self) -> Iterator[str]:
        table = TABLES[directives.choice(self.arguments[0], tuple(TABLES))]
        return table({name: read_report(name) for name in ENGINES})


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("capabilities", CapabilitiesOf)
    app.add_directive("engines", Engines)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
