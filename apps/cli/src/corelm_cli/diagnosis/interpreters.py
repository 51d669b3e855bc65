"""`local_findings`: all about this interpreter. `findings_of`: the same about another one, asked in its own process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict

from corelm.application import scan
from corelm.errors import CoreLMError
from corelm_cli.diagnosis import Finding, ProbeError, probe
from corelm_cli.diagnosis.devices import devices
from corelm_cli.diagnosis.engines import engines
from corelm_cli.diagnosis.installation import installation

_REMOTE = "from corelm_cli.diagnosis.interpreters import as_dicts; found = as_dicts()"
#: Seconds in which another interpreter has imported its engines, one after another.
_TIMEOUT = 900.0


def local_findings() -> Iterator[Finding]:
    """Yield what is found about this interpreter."""
    found = scan()
    yield from installation(found)
    yield from devices()
    yield from engines(found)


def as_dicts() -> list[dict[str, str]]:
    """Return `local_findings` as dicts. `findings_of` calls it in the other interpreter."""
    return [asdict(finding) for finding in local_findings()]


def findings_of(python: str | os.PathLike[str]) -> Iterator[Finding]:
    """Yield whether that interpreter can hold an engine for this one (`python=`), and what is found about it."""
    # Imports torch, which this command otherwise leaves to other processes.
    from corelm_fleet.hosting.process import HostProcess

    try:
        host = HostProcess(python)
    except CoreLMError as error:
        yield Finding("interpreter", "problem", str(error))
        return
    host.close()
    try:
        found = probe(_REMOTE, python=host.python, timeout=_TIMEOUT)
    except ProbeError as error:
        yield Finding("interpreter", "problem", f"{host.python}: {error}", "install the core of this interpreter there")
        return
    yield Finding("interpreter", "ok", f"{host.python} can hold an engine for this interpreter")
    # The core there may be newer, and say more of a finding.
    yield from (Finding(each["about"], each["level"], each["text"], each["remedy"]) for each in found)
