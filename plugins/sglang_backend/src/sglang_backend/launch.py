"""`LaunchedServer`: an SGLang server of our own, on this machine's loopback, that lives no longer than we do."""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from corelm.errors import BackendTimeoutError, EngineError, InvalidRequestError

HOST = "127.0.0.1"
#: What is not the caller's to say: where the server listens and who may talk to it.
RESERVED = frozenset({"model_path", "host", "port", "api_key", "admin_api_key", "config"})
#: Seconds between two looks at a server that starts.
_GLANCE = 0.25
#: How much of the end of a log is read, and shown.
_TAIL_BYTES, _TAIL_LINES = 16384, 25
#: The supervisor kills what does not end within its own grace; this is beyond it.
_CLOSING = 30.0


class LaunchedServer:
    """A server process under a supervisor that ends it when this process closes it, ends or is killed.

    Attributes:
        base_url: where it listens. api_key: random; without it the server answers nobody.
    """

    def __init__(self, model: str, arguments: Mapping[str, Any], env: Mapping[str, str]) -> None:
        """Start it; see `wait_until`.

        Args:
            model: the folder or hub name. arguments: the server's own, in Python spelling. env: added to its
                environment.

        Raises:
            InvalidRequestError: an argument that is ours to give.
        """
        for name in arguments:
            if name in RESERVED:
                raise InvalidRequestError(f"{name}: decided by the backend, which owns the server", field=name)
        port = _free_port()
        self.base_url = f"http://{HOST}:{port}"
        # The server puts it into its command line, where a key that begins with "-" would be read as an option.
        self.api_key = secrets.token_hex(32)
        # In a file, since everybody can read a command line.
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
            env={**os.environ, **env},
            start_new_session=True,
        )
        assert self._supervisor.stdin is not None
        self._hold = self._supervisor.stdin
        _HELD.add(self._hold)

    def __repr__(self) -> str:
        return f"LaunchedServer({self.base_url!r}{'' if self.alive else ', ended'})"

    @property
    def alive(self) -> bool:
        return self._supervisor.poll() is None

    def wait_until(self, ready: Callable[[], bool], timeout: float, what: str, progress: bool) -> None:
        """Return once `ready` is true.

        Args:
            what: what the progress on standard error is called.

        Raises:
            EngineError: the server ended instead; the message holds the end of its log.
            BackendTimeoutError: it took longer than `timeout` seconds.
        """
        from tqdm import tqdm

        end = time.monotonic() + timeout
        with tqdm(desc=what, bar_format="{desc}: {elapsed}", mininterval=1.0, disable=not progress) as bar:
            while not ready():
                if not self._still_runs(_GLANCE):
                    raise EngineError(f"the server ended while it started:\n{self.log_tail()}", usable=False)
                if time.monotonic() > end:
                    raise BackendTimeoutError(
                        f"the server was not ready within {timeout:g} s (startup_timeout):\n{self.log_tail()}"
                    )
                bar.update()
        # The server has read the key.
        self._folder.cleanup()

    def log_tail(self) -> str:
        """The last lines that the server wrote, without its key."""
        size = os.fstat(self._log.fileno()).st_size
        # The server writes through the same open file: reading must not move its position.
        read = os.pread(self._log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        text = read.decode(errors="replace").replace(self.api_key, "***")
        return "\n".join([line for line in text.splitlines() if line.strip()][-_TAIL_LINES:])

    def close(self) -> None:
        """End the server and all its processes. Closing twice is fine.

        Raises:
            EngineError: it does not end.
        """
        self._hold.close()
        if self._still_runs(_CLOSING):
            raise EngineError(f"the server's supervisor (process {self._supervisor.pid}) does not end", usable=False)
        self._folder.cleanup()
        self._log.close()

    def _still_runs(self, seconds: float) -> bool:
        try:
            self._supervisor.wait(seconds)
        except subprocess.TimeoutExpired:
            return True
        return False


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Python's spelling of arguments as the command line's.

    >>> command_line({"mem_fraction_static": 0.3, "disable_radix_cache": True, "revision": None, "stop": [1, 2]})
    ['--mem-fraction-static=0.3', '--disable-radix-cache', '--stop', '1', '2']
    """
    words: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif isinstance(value, (list, tuple)):
            words += [option, *map(str, value)]
        else:
            # In one word, or a value that begins with "-" would be read as an option.
            words.append(f"{option}={json.dumps(value) if isinstance(value, Mapping) else value}")
    return words


def _free_port() -> int:
    """One below those that systems give to outgoing connections, any of which could take it before the server is up."""
    while True:
        port = secrets.choice(range(15000, 32000))
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
                return port
            except OSError as error:
                # Another one may be free; whatever else it is would be so again.
                if error.errno != errno.EADDRINUSE:
                    raise


#: The pipes that keep servers alive. A forked child (of a data loader, say) would hold on to its copies.
_HELD: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()


def _let_go() -> None:
    for pipe in list(_HELD):
        pipe.close()


os.register_at_fork(after_in_child=_let_go)
