"""Two or more engines on the same prompts: how far apart their numbers are, and why.

`compare` opens the engines, asks each the same, and returns a `Comparison`: the gap between each two sides, each
side's distance to itself, what was tried, and the causes that were found.
"""

from corelm.compare.causes import CAUSES
from corelm.compare.reading import from_json
from corelm.compare.records import (
    Cause,
    Comparison,
    Divergence,
    Experiment,
    Gap,
    Row,
    Side,
    WorstToken,
)
from corelm.compare.referee import compare
from corelm.compare.report import as_html, write_report
from corelm.compare.report_text import as_text
from corelm.compare.sides import SideSpec

__all__ = [
    "CAUSES",
    "Cause",
    "Comparison",
    "Divergence",
    "Experiment",
    "Gap",
    "Row",
    "Side",
    "SideSpec",
    "WorstToken",
    "as_html",
    "as_text",
    "compare",
    "from_json",
    "write_report",
]
