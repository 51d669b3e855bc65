"""docs/trl.md is run where TRL is installed."""

from __future__ import annotations

from pathlib import Path

from helpers.pages import Page


def test_every_python_block_runs(tiny_model, tmp_path, monkeypatch):
    (tmp_path / "tiny-model").symlink_to(tiny_model)
    monkeypatch.chdir(tmp_path)
    Page(Path(__file__).parents[2] / "docs" / "trl.md").run()
