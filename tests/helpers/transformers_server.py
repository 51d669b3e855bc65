"""A real `transformers serve`, a server of the OpenAI protocol of another make, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2

from helpers.processes import free_port, wait_until

#: Seconds that a server may take to start: it imports torch and transformers, on a machine that other tests use.
PATIENCE = 180.0
#: Has the server sample, from the whole distribution. By default it follows the model's own generation config.
SAMPLES: dict[str, Any] = {"generation_config": '{"do_sample": true, "top_k": 0, "eos_token_id": 2}'}
#: The same for answers that nothing ends.
ENDLESS: dict[str, Any] = {"generation_config": '{"do_sample": true, "top_k": 0, "eos_token_id": 100000}'}


class TransformersServer:
    """``with TransformersServer(log) as server:`` serves every model that a request names, at ``server.url``.

    Args:
        log: the file that gets the server's output.
    """

    def __init__(self, log: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._command = [
            *(sys.executable, "-m", "transformers.cli.transformers", "serve", "--host", "127.0.0.1"),
            *("--port", str(port), "--device", "cpu", "--dtype", "float32", "--log-level", "error"),
        ]

    def __enter__(self) -> TransformersServer:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            ended = lambda: self._process.poll() is not None  # noqa: E731
            assert wait_until(lambda: ended() or self._answers(), PATIENCE) and not ended(), self._tail()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answers(self) -> bool:
        try:
            return httpx2.get(f"{self.url}/health", timeout=5, trust_env=False).is_success
        except httpx2.TransportError:
            return False

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]
