"""A real SGLang server for tests, on a free port of this machine, that can be stopped, killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from corelm_engine_kit import HttpClient
from helpers.processes import children, free_port, group, wait_until
from sglang_backend import supervisor
from sglang_backend.launch import command_line

KEY = "the key of the server that is restarted"
#: Seconds that a server may take to start.
STARTUP = 300.0


class RestartableServer:
    """A server that the test starts and the plugin only connects to. It keeps its port over restarts.

    ``with RestartableServer(…) as server:`` starts it, waits for it, and ends it.

    Args:
        folder: the folder of the model and its tokenizer.
        environment: variables to add to the server's environment.
        arguments: the server's arguments in Python spelling.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], arguments: Mapping[str, Any]) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder), "--host", "127.0.0.1"]
        command += [*command_line(dict(arguments)), "--port", str(self._port), "--api-key", KEY]
        self._command = [sys.executable, supervisor.__file__, *command]
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RestartableServer:
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=self._environment,
        )  # fmt: skip

    def wait_until_ready(self) -> None:
        client = HttpClient(self.url, KEY, max_retries=0)
        assert wait_until(lambda: client.answers("/model_info"), STARTUP)
        client.close()

    @property
    def pids(self) -> set[int]:
        assert self._process is not None
        return {member for leader in children(self._process.pid) for member in group(leader)}

    def signal(self, number: int) -> None:
        for pid in self.pids:
            # The supervisor ends the others as soon as the first is dead.
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Kill all of its processes, and wait for their end."""
        self.signal(signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        """Have the supervisor end the server."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
