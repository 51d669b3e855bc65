"""docs/trl.md is run where TRL is installed, and what it names exists there."""

from pathlib import Path

from helpers.foreign_names import names_in_tables, unknown_names
from helpers.pages import Page

PAGE = Page(Path(__file__).parents[2] / "docs" / "trl.md")


def test_every_python_block_runs(tiny_model, tmp_path, monkeypatch):
    (tmp_path / "tiny-model").symlink_to(tiny_model)
    monkeypatch.chdir(tmp_path)
    PAGE.run()


def test_every_name_of_trl_exists():
    assert len([*names_in_tables(PAGE, "trl")]) > 30
    assert unknown_names(PAGE, "trl") == []
