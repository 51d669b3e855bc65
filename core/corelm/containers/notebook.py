"""How notebooks show results: as `corelm.summary` does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase

from corelm.containers.glance import containers_of
from corelm.containers.overview import Summary
from corelm.containers.reading import head


def result_or_none(td: TensorDictBase) -> str | None:
    """Return the HTML of a TensorDict with containers; of another what tensordict returns: None before 0.15.3."""
    try:
        if containers_of(head(td, 1)):
            return Summary(td)._repr_html_()
        of_tensordict: Callable[[], str | None] = getattr(td, "_repr_html_", lambda: None)
        return of_tensordict()
    except Exception:  # IPython would print the traceback above the result
        return None


def show_results() -> None:
    """Let a running IPython show a TensorDict with containers as HTML, unless it already has a way to show one.

    A result is a TensorDict, whose class is not ours, so IPython is told here.
    """
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None:
        return
    formatter = shell.display_formatter.formatters["text/html"]
    if TensorDictBase not in formatter.type_printers:
        formatter.for_type(TensorDictBase, result_or_none)
