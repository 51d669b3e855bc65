"""How results are shown: `summary` prints a screen, and `show_results` lets a notebook show every token.

`container_html` is what a notebook shows of a container alone.
"""

from corelm_interop.display.html import container_html
from corelm_interop.display.notebook import show_results
from corelm_interop.display.overview import Summary, summary

__all__ = ["Summary", "container_html", "show_results", "summary"]
