"""The directive ``results``: a figure of what `make bench` measured, drawn while the site is built.

    ```{results} generation
    :works: 64 sampled tokens for 8 prompts*; 16 sampled tokens for 32 prompts*
    :ways: raw generate = model.generate; policy, text = core

    What is compared.
    ```

The argument is a key of benchmarks/results/full.json, and the pieces of an option are divided by semicolons. Each way
has a label; those that begin with ``core`` get the colour of the site. ``way @ work`` takes a way from works of a
pattern. ``measure`` is ``ratio`` (to the baseline; the default), ``seconds``, ``mib`` or ``share`` (of what the machine
can do, in percent). With ``lines``, the number in the name of a work is the x-axis.
"""

from __future__ import annotations

import io
import json
import re
import textwrap
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import matplotlib
from docutils import nodes
from docutils.parsers.rst import directives
from matplotlib.figure import Figure
from matplotlib.transforms import blended_transform_factory
from sphinx.util.docutils import SphinxDirective

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "full.json"
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
LIBRARIES = ("python", "torch", "transformers", "tensordict", "torchrl")
SHARE = "percent of what the machine can do"
MEASURES = {"ratio": "time relative to {}", "seconds": "seconds", "mib": "MiB at the peak", "share": SHARE}

Row = dict[str, Any]


def pieces(text: str) -> list[str]:
    return [piece.strip() for piece in text.split(";")]


class Results(SphinxDirective):
    required_arguments = 1
    has_content = True
    option_spec = {  # noqa: RUF012
        "works": directives.unchanged_required,
        "ways": directives.unchanged_required,
        "measure": lambda value: directives.choice(value, tuple(MEASURES)),
        "lines": directives.flag,
    }

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(RESULTS))
        section = json.loads(RESULTS.read_text())[self.arguments[0]]
        measure = self.options.get("measure", "ratio")
        ways = [re.split(r"\s+=\s+", way) for way in pieces(self.options["ways"])]
        if measure == "share" and not any(row.get("share") for row in section["figures"]):
            return [nodes.paragraph("", "These shares have not been measured yet.", classes=["machine"])]
        scale = 100 if measure == "share" else 1
        rows = [
            {**row, "label": label, "value": scale * row[measure], "first": label == ways[0][1]}
            for work in pieces(self.options["works"])
            for way, label in ways
            for row in section["figures"]
            if fnmatchcase(row["work"], work) and row.get(measure) is not None and is_way(row, way)
        ]
        if missing := {label for _, label in ways} - {row["label"] for row in rows}:
            raise self.error(f"not measured: {', '.join(sorted(missing))}")
        axis = MEASURES[measure].format(next((label for way, label in ways if way == rows[0]["baseline"]), "one batch"))
        canvas = (lines if "lines" in self.options else bars)(rows, axis)
        figure = nodes.container(classes=["results"])
        picture = svg(canvas, self.arguments[0] + self.options["works"], " ".join(self.content))
        figure += nodes.raw("", picture, format="html")
        figure += self.parse_content_to_nodes()
        figure += nodes.paragraph("", machine(section, measure), classes=["machine"])
        return [figure]


def is_way(row: Row, way: str) -> bool:
    """Tell whether a figure is of a way, which may name a pattern of works after an @."""
    name, _, work = way.partition(" @ ")
    return row["way"] == name and fnmatchcase(row["work"], work or "*")


def machine(section: Row, measure: str) -> str:
    """Return when and on what the figures of a section were measured and, for shares, what the machine can do."""
    at, versions = section["machine"], section["versions"]
    libraries = ", ".join(f"{name} {versions[name]}" for name in LIBRARIES if name in versions)
    most = ""
    if measure == "share" and (roof := section.get("roof")):
        rates = " and ".join(f"{rate / 1e9:.0f} GFLOP/s in {dtype}" for dtype, rate in roof["rates"].items())
        most = f" The machine can do {rates}, and {max(roof['bandwidths'].values()) / 1e9:.1f} GB/s."
    return (
        f"Measured on {section['date']} on a CPU ({at['processor']}, {at['cores']} cores, of which torch used "
        f"{at['threads of torch']}; {at['system']}), with {libraries}.{most}"
    )


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
                if row["ratio"] == end and row["way"] != row["baseline"]:
                    axes.plot(row["spread"], [at, at], color=TEXT, linewidth=1)
                    end = max(row["spread"])
                shown = f"{row['value']:.2f}" if row["value"] < 100 else f"{row['value']:,.0f}"
                if axis == SHARE:
                    shown = f"{row['value']:.0f} %"
                axes.text(end + longest / 60, at, shown, va="center")
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
        if axis.startswith("time"):
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


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("results", Results)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
