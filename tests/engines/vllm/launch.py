"""A real vLLM server for tests: a separate process on a free port of this machine."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import httpx2

from helpers.processes import free_port

#: Seconds that a server may take to start. It takes about 30 on two shared processors.
TIMEOUT = 300.0


class VLLMServerProcess:
    """``with VLLMServerProcess(folder, log) as server:`` serves the model in `folder` at ``server.url`` with the key
    ``server.key``, with the environment that this folder's conftest sets.

    Args:
        folder: the folder of the model and its tokenizer.
        log: the file that gets the server's output.
        arguments: further command-line arguments of vLLM.
        development: offer the routes that change weights.
        key: the key that the server asks for; None for a random one.
        environment: further variables of its environment.
        python: the interpreter that has vLLM.
    """

    def __init__(
        self,
        folder: Path,
        log: Path,
        *arguments: str,
        development: bool = True,
        key: str | None = None,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        self.key = key or secrets.token_urlsafe(16)
        self._log = log
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._command = [
            *(python, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(folder), "--host", "127.0.0.1", "--port", str(self._port)),
            *("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(1 << 26)),
            *("--generation-config", "vllm", "--disable-uvicorn-access-log"),
            *arguments,
        ]
        # The environment, because `ps` shows command lines.
        own = {"VLLM_API_KEY": self.key, "VLLM_SERVER_DEV_MODE": str(int(development))}
        self._environment = {**os.environ, **own, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> VLLMServerProcess:
        self.start()
        self.wait_until_ready()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )

    def wait_until_ready(self) -> None:
        assert self._process is not None
        end = time.monotonic() + TIMEOUT
        while time.monotonic() < end:
            with suppress(httpx2.TransportError):
                if httpx2.get(f"{self.url}/health", timeout=5, trust_env=False).is_success:
                    return
            try:
                code = self._process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
            raise RuntimeError(f"the server ended with {code}:\n{self._tail()}")
        self.kill()
        raise RuntimeError(f"the server did not come up within {TIMEOUT:g} s:\n{self._tail()}")

    def running(self) -> float:
        """Return how many requests the server works on, as its metrics say."""
        page = httpx2.get(f"{self.url}/metrics", timeout=5, trust_env=False).text
        lines = [line for line in page.splitlines() if line.startswith("vllm:num_requests_running")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def signal(self, number: int) -> None:
        """Send a signal to the server and every process that it has started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Kill the server and every process that it has started, and wait for the end."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]
