"""New environments that have what this one has, into which a test installs a project."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


def new_environment(folder: Path) -> Path:
    """Make an environment that has what this one has, core included, and return its interpreter."""
    venv.create(folder)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (packages / "tests.pth").write_text("\n".join(path for path in sys.path if path))
    return folder / "bin" / "python"


def install(python: Path, project: Path, what: str = ".") -> None:
    """Install a project with ``pip install -e``. What it requires is there already; tests use no index."""
    command = (sys.executable, "-m", "pip", "--isolated", "--python", python, "install", "-e", what)
    run_in(project, *command, "--no-build-isolation", "--no-index")


def run_in(folder: Path, *command: object) -> str:
    """Run a command in a folder, outside of any checkout, and return what it prints."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [str(part) for part in command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
