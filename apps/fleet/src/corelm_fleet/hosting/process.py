"""`HostProcess`: starts a process of another interpreter that can hold an engine, and ends it."""

from __future__ import annotations

import json
import logging
import os
import re
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
from corelm.errors import (
    BackendImportError,
    BackendIncompatibleError,
    CoreLMError,
    EngineError,
    brief,
    how_to_install,
    printable,
)
from corelm.spec import API_VERSION
from corelm.validate import invalid, shown
from corelm_fleet.hosting.channel import WIRE_VERSION, Call, Callbacks, Channel
from corelm_fleet.hosting.connection import Connection

_log = logging.getLogger(__name__)

#: What a new process runs. Python would find modules in the current folder first: a checkout of an engine, for example.
_PROGRAM = (
    "import sys; sys.path[:] = filter(None, sys.path); from corelm_fleet.hosting.child import main; main(sys.argv[1])"
)
#: What an interpreter prints before what it has found.
_FOUND = "corelm-found "
#: Seconds that a new process has to import core. Importing torch from a cold disk takes long.
STARTUP_TIMEOUT = 120.0
#: Seconds that an engine has to close before its process is killed.
CLOSE_TIMEOUT = 20.0
#: Seconds that a process has to end after its engine was closed.
_END_TIMEOUT = 2.0
#: Seconds between two looks whether a process has ended.
_PAUSE = 0.01
#: How much of a host's log an error repeats, and how many lines with the message of an exception from further up, which
#: are looked for in so many bytes.
_LAST_LINES, _LAST_CHARACTERS, _ERRORS, _SEARCHED = 20, 3000, 5, 2**18
_SIGNALS = {each.value: each.name for each in signal.Signals}
_ERROR = re.compile(r"\b\w*(?:Error|Exception): \S")


class HostProcess:
    """A process that can hold an engine: a child of this one, with its own group, so that Ctrl-C does not reach it.

    Its output goes to a file, which is removed unless something went wrong.

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
        self.python = find_interpreter(python)
        self._environment = environment = _environment(env)
        here, there = socket.socketpair()
        channel = Channel(here)
        handle, path = tempfile.mkstemp(prefix="corelm-host-", suffix=".log")
        self.log = Path(path)
        try:
            with os.fdopen(handle, "wb") as output, there:
                command = [self.python, "-c", _PROGRAM, str(there.fileno())]
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
            channel.close()
            self.log.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise invalid("python", f"{self.python} cannot be run: {error}") from error
            raise
        self.pid = self._process.pid
        self._parent, self._ended_alone, self._closed = os.getpid(), False, False
        # Reentrant: the garbage collector may call `kill` on a thread that is in `_end`.
        self._ending = threading.RLock()
        self.connection = Connection(channel, self._why_lost)
        _log.info("started the process %d of %s for an engine; its output is in %s", self.pid, self.python, self.log)
        try:
            self._check_versions()
        except BaseException:
            self.kill()
            raise

    @property
    def lost(self) -> bool:
        return self.connection.lost

    def call(self, call: Call, timeout: float | None = None, callbacks: Callbacks | None = None) -> Any:
        return self.connection.call(call, timeout, callbacks)

    def close(self) -> None:
        """Have the process end, and kill what is left of it. It should have closed its engine."""
        if os.getpid() == self._parent:
            lost, self._closed = self.connection.lost, True
            self.connection.close()
            if self._end(_END_TIMEOUT) and not lost:
                self.log.unlink(missing_ok=True)

    def kill(self, keep_log: bool = False) -> None:
        """Kill the process with all that it has started. Its log stays if it had ended by itself, or if asked to."""
        # Not in a fork, in which the interpreter ends like in the parent.
        if os.getpid() == self._parent:
            alone = self._end(0.0)
            self.connection.close()
            if not (alone or keep_log):
                self.log.unlink(missing_ok=True)

    def _end(self, timeout: float) -> bool:
        """Kill the process and its group after `timeout` seconds, or as soon as the process has ended by itself.

        Returns:
            Whether it has ended by itself.
        """
        with self._ending:
            if self._process.returncode is not None:
                return self._ended_alone
            end = time.monotonic() + timeout
            # `poll` also knows a process that other code has waited for, and macOS has it in each version of Python.
            while self._process.poll() is None and time.monotonic() < end:
                time.sleep(_PAUSE)
            self._ended_alone = self._process.poll() is not None
            # Processes that are left in the group keep its number from being given to another one.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            return self._ended_alone

    def _check_versions(self) -> None:
        try:
            said: dict[str, Any] = self.connection.hello(STARTUP_TIMEOUT)
        except (EngineError, TimeoutError) as error:
            raise self._startup_error(error) from error
        if (said["api"], said["wire"]) != (API_VERSION, WIRE_VERSION):
            raise BackendIncompatibleError(
                f"this is core {__version__}, and {self.python} has core {said['core']}, which speaks another language "
                f"with the engine's process; {how_to_install('core-fleet', python=self.python)}"
            )

    def _startup_error(self, error: Exception) -> CoreLMError:
        """Return why the process did not begin to serve: what is installed there is the usual reason."""
        program = "from corelm._version import __version__; found['core'] = __version__"
        found = ask_interpreter(self.python, program, 30, self._environment)
        install = how_to_install("core-fleet", python=self.python)
        if "missing" in found:
            return BackendImportError(f"core is not installed for {self.python} ({found['missing']}); {install}")
        if found["core"] != __version__:
            return BackendIncompatibleError(
                f"this is core {__version__}, and {self.python} has core {found['core']}, which cannot hold an engine "
                f"for it; {install}"
            )
        return EngineError(f"the process of {self.python} did not begin to serve: {error}", usable=False)

    def _why_lost(self) -> str:
        """Return why the process has ended, with the last lines of its log. It is certain to have ended then."""
        # The socket closes a moment before the process is gone.
        alone, status = self._end(_END_TIMEOUT if self._closed else _END_TIMEOUT / 4), self._process.returncode
        if self._closed:
            return "the backend is closed, and the process that held its engine has ended"
        ended_by = _SIGNALS.get(-status, f"signal {-status}")
        how = f"ended with exit status {status}" if status >= 0 else f"was ended by {ended_by}"
        if not alone:
            how = "closed its connection, and was killed"
        return f"the process {self.pid} that holds the engine {how}{self.last_lines()}"

    def last_lines(self) -> str:
        """Return the end of the log and the path of its file, to be added to a message; "" if it is empty.

        It ends with the errors further up: an engine with processes of its own says last only that one of them failed.
        """
        try:
            with self.log.open("rb") as log:
                # It may be larger than the memory.
                log.seek(max(0, log.seek(0, os.SEEK_END) - _SEARCHED))
                text = log.read(_SEARCHED).decode(errors="replace").strip()
        except OSError:
            return ""
        last = text[-_LAST_CHARACTERS:].splitlines()[-_LAST_LINES:]
        if not last:
            return ""
        above = text.removesuffix("\n".join(last)).splitlines()
        errors = [*dict.fromkeys(brief(line.strip()) for line in above if _ERROR.search(line))][-_ERRORS:]
        told = [*last, "errors further up in the log:", *errors] if errors else last
        return f"; the end of its log, {self.log}:\n{printable(chr(10).join(told), keep=chr(10))}"


def find_interpreter(python: Any) -> str:
    """Return the absolute path of an interpreter.

    Args:
        python: the path of an executable, a name on the path, or the folder of an environment.

    Raises:
        InvalidRequestError: there is no such file, or it is not executable.
    """
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


def ask_interpreter(python: str, program: str, timeout: float, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a program in another interpreter, and return what it puts into the dict ``found``.

    Args:
        python: the interpreter.
        program: a line of Python. If it cannot import something, ``found["missing"]`` says what.
        timeout: the seconds that it has.
        env: the environment of the process; None for that of this one.

    Raises:
        InvalidRequestError: it is not an interpreter that works.
    """
    lines = ["import json; found = {}", "try:", f"    {program}", "except ImportError as error:"]
    lines += ["    found['missing'] = str(error)", f"print({_FOUND!r} + json.dumps(found))"]
    command = [python, "-c", "\n".join(lines)]
    try:
        said = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL, env=env
        )
        # What runs when the interpreter starts may print, too.
        _, marker, answer = said.stdout.rpartition(_FOUND)
        if said.returncode or not marker:
            raise OSError(brief(said.stderr.strip() or said.stdout.strip() or f"exit status {said.returncode}"))
    except (OSError, subprocess.SubprocessError) as error:
        raise invalid("python", f"{python} is not a Python interpreter that works: {error}") from error
    # What runs when it ends may print as well.
    found: dict[str, Any] = json.JSONDecoder().raw_decode(answer)[0]
    return found


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
