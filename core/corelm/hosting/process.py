"""`HostProcess`: starts a process of another interpreter that can hold an engine, and ends it."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from corelm._version import __version__
from corelm.errors import BackendImportError, BackendIncompatibleError, CoreLMError, EngineError, brief, printable
from corelm.hosting.channel import WIRE_VERSION, Channel
from corelm.hosting.connection import Connection
from corelm.spec.hookspecs import API_VERSION
from corelm.validate import invalid, shown

_log = logging.getLogger(__name__)

#: Seconds that a new process has to import core. Importing torch from a cold disk takes long.
STARTUP_TIMEOUT = 120.0
#: Seconds that an engine has to close before its process is killed.
CLOSE_TIMEOUT = 20.0
#: Seconds that a process has to end after its engine was closed.
_END_TIMEOUT = 2.0
#: Seconds between two looks whether a process has ended.
_PAUSE = 0.01
#: How much of a host's log an error repeats.
_LAST_LINES, _LAST_CHARACTERS = 20, 3000


class HostProcess:
    """A process that can hold an engine: a child of this one, with its own group, so that Ctrl-C does not reach it.

    Its output goes to a file, which is removed when the process has ended well.

    Args:
        python: the interpreter: the path of an executable, a name on the path, or the folder of an environment.
        env: variables to add to this process's environment; None as a value removes one.

    Attributes:
        python: the interpreter's executable.
        pid: the process.
        log: the file with its output.
        connection: calls into it.

    Raises:
        InvalidRequestError: `python` is no interpreter, or `env` is not a mapping of texts.
        BackendImportError: core is not installed there.
        BackendIncompatibleError: core there is of another version.
        EngineError: the process ended or did not say anything in time.
    """

    def __init__(self, python: str | os.PathLike[str], env: Mapping[str, str | None] | None = None) -> None:
        self.python = _interpreter(python)
        self._environment = environment = _environment(env)
        handle, path = tempfile.mkstemp(prefix="corelm-host-", suffix=".log")
        self.log = Path(path)
        here, there = socket.socketpair()
        try:
            with os.fdopen(handle, "wb") as output, there:
                command = [self.python, "-m", "corelm.hosting.child", str(there.fileno())]
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[there.fileno()],
                    env=environment,
                    start_new_session=True,
                )
        except BaseException as error:
            here.close()
            self.log.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise invalid("python", f"{self.python} cannot be run: {error}") from error
            raise
        self.pid = self._process.pid
        self._parent, self._ended_alone = os.getpid(), False
        self._ending = threading.Lock()
        self.connection = Connection(Channel(here), self._why_lost)
        _log.info("started the process %d of %s for an engine; its output is in %s", self.pid, self.python, self.log)
        try:
            self._check_versions()
        except BaseException:
            self.kill()
            raise

    def close(self) -> None:
        """Have the process end, and kill what is left of it. It should have closed its engine."""
        if os.getpid() == self._parent:
            self.connection.close()
            if self._end(_END_TIMEOUT):
                self.log.unlink(missing_ok=True)

    def kill(self) -> None:
        """Kill the process with all that it has started, and keep its log."""
        # Not in a fork, in which the interpreter ends like in the parent.
        if os.getpid() == self._parent:
            self._end(0.0)
            self.connection.close()

    def _end(self, patience: float) -> bool:
        """Kill the process and its group after `patience` seconds, or as soon as the process has ended by itself.

        Returns:
            Whether it has ended by itself.
        """
        with self._ending:
            if self._process.returncode is not None:
                return self._ended_alone
            end = time.monotonic() + patience
            while not self._has_ended() and time.monotonic() < end:
                time.sleep(_PAUSE)
            self._ended_alone = self._has_ended()
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            return self._ended_alone

    def _has_ended(self) -> bool:
        # WNOWAIT: until the process is reaped, no other one gets its id, so its group can be killed safely.
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def _check_versions(self) -> None:
        try:
            said: dict[str, Any] = self.connection.hello(STARTUP_TIMEOUT)
        except (EngineError, TimeoutError) as error:
            raise self._startup_error(error) from error
        if (said["api"], said["wire"]) != (API_VERSION, WIRE_VERSION):
            raise BackendIncompatibleError(
                f"this is core {__version__}, and {self.python} has core {said['core']}, which speaks another language "
                f"with the engine's process; install the same version there: {self.python} -m pip install "
                f'"core=={__version__}"'
            )

    def _startup_error(self, error: Exception) -> CoreLMError:
        """Return why the process did not begin to serve: what is installed there is the usual reason."""
        probe = "import corelm._version as v; print('corelm', v.__version__)"
        try:
            found = subprocess.run(
                [self.python, "-c", probe],
                capture_output=True,
                text=True,
                timeout=30,
                stdin=subprocess.DEVNULL,
                env=self._environment,
            )
        except (OSError, subprocess.SubprocessError) as failure:
            return invalid("python", f"{self.python} is not a Python interpreter that works: {failure}")
        name, _, version = found.stdout.strip().rpartition("corelm ")
        install = f'{self.python} -m pip install "core=={__version__}"'
        if found.returncode or name or not version:
            if "corelm" in found.stderr:
                return BackendImportError(f"core is not installed for {self.python}: {install}")
            what = brief(found.stderr.strip() or found.stdout.strip() or f"exit status {found.returncode}")
            return invalid("python", f"{self.python} is not a Python interpreter that works: {what}")
        if version != __version__:
            return BackendIncompatibleError(
                f"this is core {__version__}, and {self.python} has core {version}, which cannot hold an engine for "
                f"it: {install}"
            )
        return EngineError(f"the process of {self.python} did not begin to serve: {error}", usable=False)

    def _why_lost(self) -> str:
        """Return why the process has ended, with the last lines of its log. It is certain to have ended then."""
        # The socket closes a moment before the process is gone.
        alone, status = self._end(_END_TIMEOUT / 4), self._process.returncode
        how = f"ended with exit status {status}" if status >= 0 else f"was ended by {_signal_name(-status)}"
        if not alone:
            how = "closed its connection, and was killed"
        return f"the process {self.pid} that holds the engine {how}{self._last_lines()}"

    def _last_lines(self) -> str:
        try:
            text = self.log.read_bytes()[-_LAST_CHARACTERS:].decode(errors="replace").strip()
        except OSError:
            return ""
        lines = text.splitlines()[-_LAST_LINES:]
        return f"; the end of its log, {self.log}:\n{printable(chr(10).join(lines), keep=chr(10))}" if lines else ""


def _interpreter(python: Any) -> str:
    if not isinstance(python, (str, os.PathLike)) or not os.fspath(python):
        raise invalid("python", f"expected the path of a Python interpreter, got {shown(python)}")
    path = os.path.expanduser(os.fspath(python))
    if os.path.isdir(path):
        inside = os.path.join(path, "bin", "python")
        if not os.path.isfile(inside):
            raise invalid("python", f"{path} is a folder without bin/python; give the interpreter, or an environment")
        path = inside
    # Symbolic links are kept: an environment's interpreter is one, and knows its environment by its own path.
    found = shutil.which(path)
    if found is None:
        there = "it is not executable" if os.path.exists(path) else "there is no such file"
        raise invalid("python", f"{path} cannot be run: {there}")
    return os.path.abspath(found)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _environment(env: Any) -> dict[str, str]:
    environment = dict(os.environ)
    if env is None:
        return environment
    if not isinstance(env, Mapping):
        raise invalid("env", f"expected a mapping of names to texts, got {shown(env)}")
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, (str, type(None))):
            raise invalid("env", f"expected texts, got {shown(name)}: {shown(value)}")
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment
