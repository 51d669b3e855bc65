"""How notebooks show results: as `corelm_interop.summary` does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase

from corelm.application import CONTAINERS
from corelm_interop.display.first_rows import head
from corelm_interop.display.glance import containers_of
from corelm_interop.display.html import container_html
from corelm_interop.display.overview import Summary


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
    """Let a running IPython show containers, and a TensorDict with some, as HTML, unless it has a way to show one."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None:
        return
    formatter = shell.display_formatter.formatters["text/html"]
    for kind, show in ((TensorDictBase, result_or_none), *((each, container_html) for each in CONTAINERS)):
        if kind not in formatter.type_printers:
            formatter.for_type(kind, show)
