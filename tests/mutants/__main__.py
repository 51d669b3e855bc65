"""``python -m tests.mutants [NAME …]``: break the code with each patch of this folder; `make test` must then fail.

A patch is a plausible slip in core or in the transformers plugin. Its first line says what is wrong and which folders
should find it. These run first, and the whole first tier runs only if they pass. Everything happens in a copy of the
tracked files. At the end, every test that found a mutant runs on the unbroken copy, where it must pass.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
#: Folders of the copy that come before the installed packages, also in processes that tests start.
SOURCES = ("core", "kits/*/src", "plugins/*/src", "apps/*/src")
MARKS = ("-m", "not process and not nightly")


def first_tier() -> list[str]:
    """Return the folders and files that `make test` runs: the variable TEST of the Makefile."""
    lines = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    found = re.search(r"^TEST\s*:=(.*)$", lines, re.MULTILINE)
    if found is None:
        sys.exit("the Makefile has no line TEST := …")
    return found[1].split()


def copy_of_tracked_files(into: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)


def environment(copy: Path) -> dict[str, str]:
    sources = [str(folder) for pattern in SOURCES for folder in sorted(copy.glob(pattern))]
    # If a folder above the copy is a repository, `git apply` skips the patch without an error.
    own = {"PYTHONPATH": os.pathsep.join(sources), "GIT_CEILING_DIRECTORIES": str(copy.parent)}
    return {"OMP_NUM_THREADS": "1", "HYPOTHESIS_PROFILE": "ci", **os.environ, **own}


def run(copy: Path, tests: list[str]) -> tuple[int, str]:
    """Return pytest's exit code and the first test that failed."""
    # pytest would leave out a file that is also in a folder of `tests`, and not run it first.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider", "--keep-duplicates"]
    done = subprocess.run([*command, *MARKS, *tests], cwd=copy, env=environment(copy), capture_output=True, text=True)
    # Tests that run pytest in pytest may print summaries of tests that are not those of this run.
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    own = [test for test in failed if (copy / test.partition("::")[0]).is_file()]
    return done.returncode, own[0] if own else done.stdout[-2000:] + done.stderr[-2000:]


def found_by(patch: Path, copy: Path, tier: list[str]) -> tuple[str, str]:
    """Return what happened to the mutant, and the test that killed it, or "" if none did."""
    header, *lines = patch.read_text().splitlines()
    (changed,) = [line.removeprefix("+++ b/") for line in lines if line.startswith("+++ ")]
    named = [test for test in header.partition("Found in: ")[2].split() if (copy / test).exists()]
    first = [test for test in named if any(test == each or test.startswith(f"{each}/") for each in tier)]
    if subprocess.run(["git", "apply", patch], cwd=copy, env=environment(copy)).returncode:
        return "NO LONGER APPLIES", ""
    try:
        for tests in filter(None, (first, tier)):
            code, test = run(copy, tests)
            if code == 1:
                return f"killed by {test}", test
            # 0: all tests passed. 5: the marks left no test to run.
            if code not in (0, 5):
                return f"NOT TESTED: pytest ended with {code}: {test}", ""
        return "SURVIVED", ""
    finally:
        shutil.copy2(ROOT / changed, copy / changed)


def main() -> int:
    patches = {patch.stem: patch for patch in sorted(HERE.glob("*.patch"))}
    names = sys.argv[1:] or list(patches)
    if unknown := [name for name in names if name not in patches]:
        sys.exit(f"there is no mutant {', '.join(unknown)}; there are: {', '.join(patches)}")
    tier, killers, wrong = first_tier(), [], 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder).resolve()
        copy_of_tracked_files(copy)
        where = subprocess.run(
            [sys.executable, "-c", "import corelm, transformers_backend, corelm_testing.toy as t; print(corelm, t)"],
            env=environment(copy), cwd=copy, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert where.count(str(copy)) == 2, f"the tests would import other packages than those of the copy: {where}"
        for name in names:
            said, test = found_by(patches[name], copy, tier)
            print(f"{name}: {said}", flush=True)
            wrong += not test
            # All cases of the test: `run` cuts a name at the first space, and ids of parameters may contain spaces.
            killers += [test.partition("[")[0]] if test else []
        if killers:
            code, failed = run(copy, sorted({*killers}))
            if code:
                print(f"FAILS WITHOUT A MUTANT: on the unbroken code pytest ended with {code}: {failed}")
                wrong += 1
    print(f"{len(names)} mutants, {len(killers)} killed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
