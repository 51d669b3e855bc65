"""docs/trl.md and docs/how-to/from-trl.md are run where TRL is installed, and what they name exists there."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.foreign_names import names_in_tables, unknown_names
from helpers.pages import Page

DOCS = Path(__file__).parents[2] / "docs"
MOVING = Page(DOCS / "how-to" / "from-trl.md")


@pytest.mark.parametrize("page", [Page(DOCS / "trl.md"), MOVING], ids=lambda page: page.path.name)
def test_every_python_block_runs(page, tiny_model, tmp_path, monkeypatch):
    (tmp_path / "tiny-model").symlink_to(tiny_model)
    monkeypatch.chdir(tmp_path)
    page.run()


def test_every_name_of_trl_exists():
    assert len([*names_in_tables(MOVING, "trl")]) > 30
    assert unknown_names(MOVING, "trl") == []
