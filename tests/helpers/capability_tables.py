"""What the reports in docs/_reports say that an engine declares: the pages of the backends are made from them."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from corelm import Backend
from corelm_testing.base import engine_facts

REPORTS = Path(__file__).parents[2] / "docs" / "_reports"


def assert_page_says(engine: str, backend: Backend, besides: Collection[str] = ()) -> None:
    """Check that the report of an engine has what this backend declares.

    Args:
        besides: capabilities that the engine of the report lacks because it ran in a process of another environment.
    """
    differ = {name: pair for name, pair in differences(engine, backend).items() if name not in besides}
    assert not differ, f"(in docs/_reports, declared): {differ}; run .ci/engines_page.py {engine}"


def differences(engine: str, backend: Backend) -> dict[str, tuple[Any, Any]]:
    """Return, for each capability that differs, what the report says and what the backend declares."""
    said = json.loads((REPORTS / f"{engine}.json").read_text())["declares"]
    own = engine_facts(backend)["declares"]
    return {
        name: (said.get(name), own.get(name))
        for name in {**said, **own}
        if name not in said or name not in own or said[name] != own[name]
    }
