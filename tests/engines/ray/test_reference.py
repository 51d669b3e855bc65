"""The page that shows a reference model in an actor runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.pages import Page

PAGE = Page(Path(__file__).parents[3] / "docs" / "scaling.md")


@pytest.mark.nightly
def test_the_section_about_ray_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny-model").symlink_to(tiny_model)
    monkeypatch.chdir(tmp_path)
    blocks = PAGE.blocks("py")
    assert len(blocks) == 2
    names: dict[str, object] = {"__name__": "scaling"}
    for block in blocks:
        exec(compile(block, str(PAGE.path), "exec"), names)
    assert "tensor" in capsys.readouterr().out
