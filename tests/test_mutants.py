"""The patches of tests/mutants apply to the code as it is; make nightly demands that make test finds each."""

import subprocess
from pathlib import Path

MUTANTS = Path(__file__).parent / "mutants"


def test_every_patch_applies() -> None:
    patches = sorted(MUTANTS.glob("*.patch"))
    assert len(patches) > 60
    for patch in patches:
        subprocess.run(["git", "apply", "--check", patch], cwd=MUTANTS.parents[1], check=True)
