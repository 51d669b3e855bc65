"""Two or more engines on the same prompts: how far apart their numbers are, and why.

`compare` opens the engines, asks each the same, and returns a `Comparison`: the gap between each two sides, each
side's distance to itself, what was tried, and the causes that were found.
"""

from corelm_compare.comparing import compare
from corelm_compare.records import (
    CAUSES,
    Cause,
    Comparison,
    Divergence,
    Experiment,
    Gap,
    Row,
    Side,
    WorstToken,
    from_json,
)
from corelm_compare.report import as_html, write_report
from corelm_compare.report_text import as_text
from corelm_compare.sides import SideSpec

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
