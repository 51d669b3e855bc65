"""docs/how-to/from-vllm.md names what vLLM has."""

from __future__ import annotations

from pathlib import Path

from helpers.foreign_names import names_in_tables, unknown_names
from helpers.pages import Page


def test_every_name_of_vllm_exists() -> None:
    page = Page(Path(__file__).parents[3] / "docs" / "how-to" / "from-vllm.md")
    assert len([*names_in_tables(page, "vllm")]) > 40
    assert unknown_names(page, "vllm") == []
