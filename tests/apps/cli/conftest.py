"""What the tests of the commands for files share."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.command_line import write_prompts


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """An input file with `helpers.command_line.LINES`, and an output file, which does not exist."""
    return write_prompts(tmp_path)
