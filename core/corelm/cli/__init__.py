"""The `corelm` command. It needs the extra `cli`, and says what to install if that is missing."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    """Run the command; the entry point of the console script."""
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        sys.exit(f'the corelm command needs {" and ".join(missing)}: pip install "core[cli]"')
    from corelm.cli.app import app

    app()
