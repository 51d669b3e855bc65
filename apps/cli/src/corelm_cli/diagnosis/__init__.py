"""What `corelm doctor` looks at: `Finding`, what was found; `probe`, which looks at it in a process that may crash.

No module here imports typer, so that other interpreters need core alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Literal

from corelm.errors import brief

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        about: what was looked at, such as ``torch`` or ``backend 'vllm'``.
        level: `ok`; `warning`, if some calls may fail or be slow; `problem`, if something cannot work.
        text: what was found.
        remedy: what to type or do; "" if there is nothing to do.
    """

    about: str
    level: Level
    text: str
    remedy: str = ""


#: The interpreter starts its answer with this, because modules that it imports may print lines of their own.
_MARK = "corelm-doctor:"
#: Python would find modules in the current folder first: a checkout of an engine, for example.
_PROGRAM = """
import json, sys
sys.path[:] = filter(None, sys.path)
{0}
print({1!r} + json.dumps(found))
"""


class ProbeError(Exception):
    """The process crashed, raised, or did not end in time; the message says which."""


def probe(lines: str, *, python: str = sys.executable, timeout: float = 180.0) -> Any:
    """Run `lines`, which assign something that JSON can hold to `found`, and return that.

    Args:
        python: the interpreter.
        timeout: seconds. The process is killed then.

    Raises:
        ProbeError: see there.
    """
    command = [python, "-c", _PROGRAM.format(lines, _MARK)]
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise ProbeError(f"it did not end within {timeout:g} seconds") from None
    except OSError as error:
        raise ProbeError(f"{python} cannot be run: {error}") from error
    answers = [line for line in done.stdout.decode(errors="replace").splitlines() if line.startswith(_MARK)]
    if done.returncode == 0 and answers:
        return json.loads(answers[-1][len(_MARK) :])
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it printed nothing"]
    how = f"was killed by signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
    raise ProbeError(last[0] if done.returncode == 1 else f"{how}: {brief(last[0])}")
