"""`LaunchedServer`: an SGLang server on this machine's loopback address, which never outlives this process."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Literal

import psutil

from corelm.errors import BackendTimeoutError, EngineError, how_to_install
from corelm.validate import invalid
from corelm_engine_kit import Secrets, refuse_unknown_arguments

HOST = "127.0.0.1"
#: The server's arguments that the backend sets itself: where the server listens and which key it asks for.
RESERVED_ARGUMENTS = frozenset({"model_path", "host", "port", "api_key", "admin_api_key", "config"})
#: A field of the dataclasses that hold the server's arguments, or an option.
_ARGUMENT = re.compile(r'^    (\w+):|"--([a-z][\w-]*)"', re.MULTILINE)
#: The values of environment variables whose names end like this are secrets.
_SECRET_NAMES = ("KEY", "PASSWORD", "SECRET", "TOKEN")
#: Seconds between two checks whether a starting server is ready.
_POLL_INTERVAL = 0.25
#: How many bytes of the end of the log are read, and how many lines of them are shown.
_TAIL_BYTES, _TAIL_LINES = 16384, 25
#: Seconds that the supervisor may take to end. It kills the server after `supervisor.GRACE`, which is much shorter.
_CLOSE_TIMEOUT = 30.0


class LaunchedServer:
    """A server process under a supervisor, which ends it when this process closes it, ends or is killed.

    The port is in the server's command line long before the server listens on it, so any user of the machine could take
    it. On Linux the key is sent only once the port belongs to the server. Other systems do not say whose a port is.

    Attributes:
        base_url: where the server listens.
        api_key: a random key. The server refuses requests without it.
    """

    def __init__(self, model: str, arguments: Mapping[str, Any], env: Mapping[str, str]) -> None:
        """Start the server. `wait_until` returns when it is ready.

        Raises:
            InvalidRequestError: one of `RESERVED_ARGUMENTS`, or an argument that SGLang does not have.
        """
        for name in arguments:
            if name in RESERVED_ARGUMENTS:
                raise invalid(name, "the backend sets this itself; leave it out")
        if known := known_arguments():
            refuse_unknown_arguments("SGLang", arguments, known)
        self._port = port = _free_port()
        self.base_url = f"http://{HOST}:{port}"
        # Hexadecimal: the server turns its configuration into a command line, where a key that begins with "-" would
        # be read as an option.
        self.api_key = secrets.token_hex(32)
        environment = {**os.environ, **env}
        hidden = [value for name, value in environment.items() if name.upper().endswith(_SECRET_NAMES)]
        self._secrets = Secrets([self.api_key, *hidden])
        # The key goes into a file, since every user of the machine can read command lines.
        self._folder = tempfile.TemporaryDirectory(prefix="corelm-sglang-")
        config = Path(self._folder.name, "server.yaml")
        config.write_text(json.dumps({"api-key": self.api_key}))
        command = [sys.executable, "-m", "sglang.launch_server", "--config", str(config), "--model-path", model]
        command += ["--host", HOST, "--port", str(port), *command_line(arguments)]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        supervisor = str(Path(__file__).with_name("supervisor.py"))
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", supervisor, *command],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        assert self._supervisor.stdin is not None
        self._lifeline = self._supervisor.stdin
        _LIFELINES.add(self._lifeline)

    @property
    def alive(self) -> bool:
        return self._supervisor.poll() is None

    def ended(self) -> str:
        """Return that the server has ended, with the last lines of its log; "" while it runs."""
        if self.alive:
            return ""
        tail = "" if self._log.closed else "\n".join(["; the end of its log:", *self.log_tail().splitlines()[-8:]])
        return f"the launched server has ended; open the backend again{tail}"

    def wait_until(self, ready: Callable[[], bool], timeout: float, what: str, progress: bool) -> None:
        """Return once the server listens on its port and `ready` returns True.

        Raises:
            EngineError: the server ended instead; the message holds the end of its log. Or another process has taken
                the port.
            BackendTimeoutError: the server was not ready after `timeout` seconds.
        """
        from tqdm import tqdm

        deadline = time.monotonic() + timeout
        with tqdm(desc=what, bar_format="{desc}: {elapsed}", mininterval=1.0, disable=not progress) as bar:
            while True:
                owner = owner_of_port(self._port, self._supervisor.pid)
                if owner in ("ours", "unknown") and ready():
                    break
                if owner == "foreign":
                    raise EngineError(
                        f"another process listens on port {self._port}, which was chosen for the server; nothing was "
                        "sent to it. Open the backend again, and it gets another port",
                        usable=False,
                    )
                if not self._runs_after(_POLL_INTERVAL):
                    missing = (
                        f"\nSGLang is not installed for this Python: {how_to_install('core-sglang-backend[engine]')}. "
                        "Or pass python= of an environment that has it, or base_url= of a server that runs"
                    )
                    why = "" if find_spec("sglang") else missing
                    raise EngineError(f"the server ended while it started:\n{self.log_tail()}{why}", usable=False)
                if time.monotonic() > deadline:
                    raise BackendTimeoutError(
                        f"the server was not ready within {timeout:g} s. The first start compiles kernels; pass "
                        f"startup_timeout={2 * timeout:g} to wait longer:\n{self.log_tail()}"
                    )
                bar.update()
        # The server has read its key, so the file with it can go.
        self._folder.cleanup()

    def log_tail(self) -> str:
        """Return the last lines that the server wrote, with its key and the secrets in its environment masked."""
        size = os.fstat(self._log.fileno()).st_size
        # The server writes through the same open file, so reading must not move its position.
        read = os.pread(self._log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        text = self._secrets.masked(read.decode(errors="replace"))
        if size > _TAIL_BYTES:
            # The log may have been cut in the middle of a secret.
            text = text[self._secrets.longest :]
        return "\n".join([line for line in text.splitlines() if line.strip()][-_TAIL_LINES:])

    def close(self) -> None:
        """End the server and all its processes. Closing twice is fine."""
        self._lifeline.close()
        if self._runs_after(_CLOSE_TIMEOUT):
            pid = self._supervisor.pid
            raise EngineError(f"the server's supervisor (process {pid}) does not end; kill it", usable=False)
        self._folder.cleanup()
        self._log.close()

    def _runs_after(self, seconds: float) -> bool:
        try:
            self._supervisor.wait(seconds)
        except subprocess.TimeoutExpired:
            return True
        return False


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Return the server's command-line options for arguments in Python spelling.

    >>> command_line({"mem_fraction_static": 0.3, "disable_radix_cache": True, "revision": None, "stop": [1, 2]})
    ['--mem-fraction-static=0.3', '--disable-radix-cache', '--stop', '1', '2']
    """
    words: list[str] = []
    for name, value in arguments.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif isinstance(value, (list, tuple)):
            words += [option, *map(str, value)]
        elif value is not None and value is not False:
            # One word, since a value that begins with "-" would otherwise be read as an option.
            words.append(f"{option}={json.dumps(value) if isinstance(value, Mapping) else value}")
    return words


def known_arguments() -> set[str]:
    """Return the names of the server's arguments, in Python spelling; none if they cannot be found.

    They are read from SGLang's source, since importing it takes ten seconds or more.
    """
    found = find_spec("sglang")
    if found is None or found.origin is None:
        return set()
    folder = Path(found.origin).parent / "srt"
    files = [folder / "server_args.py", *(folder / "arg_groups").rglob("*.py")]
    text = "\n".join(file.read_text(errors="replace") for file in files if file.is_file())
    names = {(field or option).replace("-", "_") for field, option in _ARGUMENT.findall(text)}
    # Some flags also have a negation.
    return {*names, *(f"no_{name}" for name in names)} if "model_path" in names else set()


def owner_of_port(port: int, ancestor: int) -> Literal["none", "ours", "foreign", "unknown"]:
    """Return whose the sockets are that listen on `port`, on any address.

    Only Linux tells it without the rights of an administrator; it names no process of another user, which is foreign.

    Args:
        ancestor: a process id: sockets of this process and of its descendants are ours.
    """
    if not sys.platform.startswith("linux"):
        return "unknown"
    found = psutil.net_connections("tcp")
    pids = {each.pid for each in found if each.status == psutil.CONN_LISTEN and each.laddr.port == port}
    family = {ancestor}
    with suppress(psutil.NoSuchProcess):
        family |= {each.pid for each in psutil.Process(ancestor).children(recursive=True)}
    return "none" if not pids else "ours" if pids <= family else "foreign"


def _free_port() -> int:
    """Return a free port below those that systems give to outgoing connections.

    One of those connections could take a higher port before the server listens on it.
    """
    while True:
        port = secrets.choice(range(15000, 32000))
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
                return port
            except OSError as error:
                # Another port may be free. Any other error would come again.
                if error.errno != errno.EADDRINUSE:
                    raise


#: The pipes to supervisors: a server ends when the last copy of its pipe is closed.
_LIFELINES: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()


def _close_lifelines() -> None:
    for pipe in list(_LIFELINES):
        pipe.close()


# A forked child (of a data loader, for example) inherits copies, which would keep the servers alive after this process.
os.register_at_fork(after_in_child=_close_lifelines)
