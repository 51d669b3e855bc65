"""The `corelm` command. Its libraries come with the extra `cli`; without them it says so and does nothing else."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    """Entry point of the console script."""
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        sys.exit(f'the corelm command needs {" and ".join(missing)}: pip install "core[cli]"')
    from corelm.cli.app import app

    app()
