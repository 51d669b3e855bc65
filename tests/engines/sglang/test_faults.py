"""A real server that is killed, restarted, stopped, or orphaned."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

import corelm
from corelm import Backend
from corelm.errors import BackendTimeoutError, EngineError
from corelm.support.http import HttpClient
from helpers.processes import all_end, children, free_port, group, wait_until
from helpers.tiny_models import random_rows
from sglang_backend import supervisor
from sglang_backend.launch import command_line

KEY = "the key of the server that is restarted"
STARTUP = 300.0
LONG = {"max_new_tokens": 400, "ignore_eos": True}


class Restartable:
    """A server on a port of its own that somebody else, not the plugin, has started."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, supervisor.__file__, *command, "--port", str(self.port), "--api-key", KEY]
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=self._environment,
        )  # fmt: skip

    def wait(self) -> None:
        client = HttpClient(self.url, KEY, max_retries=0)
        assert wait_until(lambda: client.answers("/model_info"), STARTUP)
        client.close()

    @property
    def pids(self) -> set[int]:
        assert self._process is not None
        return {member for leader in children(self._process.pid) for member in group(leader)}

    def signal(self, number: int) -> None:
        for pid in self.pids:
            # When the first is dead the supervisor ends the others.
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@pytest.fixture(scope="module")
def server(folder: Path, cpu: tuple[dict[str, str], dict[str, object]]) -> Iterator[Restartable]:
    environment, arguments = cpu
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder), "--host", "127.0.0.1"]
    # It says how busy it is after every step.
    server = Restartable([*command, *command_line(arguments | {"load_snapshot_publish_interval": 1})], environment)
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def test_a_server_that_hangs_is_a_timeout_and_then_serves_again(server: Restartable):
    with corelm.get_backend("sglang", base_url=server.url, api_key=KEY) as backend:
        server.signal(signal.SIGSTOP)
        try:
            with pytest.raises(BackendTimeoutError):
                backend.generate([[5, 6]], {"max_new_tokens": 2}, timeout=2.0)
            assert not backend.health()
        finally:
            server.signal(signal.SIGCONT)
        batch = backend.generate([[5, 6]], {"max_new_tokens": 2, "ignore_eos": True}, timeout=60.0)
        assert batch.ids.lengths.tolist() == [2] and backend.health()


def test_a_wrong_key_says_so(server: Restartable):
    with pytest.raises(EngineError, match="api_key"):
        corelm.get_backend("sglang", base_url=server.url, api_key="another key")


def test_a_server_that_is_restarted_in_the_middle_serves_all_rows_but_not_with_lost_weights(
    server: Restartable, other_folder: Path
):
    prompts = random_rows(*range(3, 33))
    patient = {"base_url": server.url, "api_key": KEY, "max_retries": 20}
    with (
        corelm.get_backend("sglang", **patient) as plain,
        corelm.get_backend("sglang", **patient) as tuned,
        ThreadPoolExecutor(2) as pool,
    ):
        # The restarted server will have the weights of the one, and not those of the other.
        tuned.update_weights(other_folder, version="tuned")
        served, lost = (pool.submit(backend.generate, prompts, LONG, logprobs="none") for backend in (plain, tuned))
        busy = HttpClient(server.url, KEY)
        assert wait_until(lambda: busy.get("/v1/loads")["loads"][0]["num_running_reqs"] > len(prompts))
        busy.close()
        server.signal(signal.SIGKILL)
        server.stop()
        assert not (served.done() or lost.done() or plain.health())
        server.start()
        batch = served.result()
        assert batch.finish_reasons == ("length",) * len(prompts) and set(batch.ids.lengths.tolist()) == {400}
        with pytest.raises(EngineError, match="'default', but 'tuned' are in force"):
            lost.result()
        with pytest.raises(EngineError, match="restarted"):
            tuned.score_logprobs(prompts)
        tuned.update_weights(other_folder, version="tuned")
        assert tuned.score_logprobs(prompts).weight_versions == ("tuned",) * len(prompts)


def test_a_launched_server_that_dies_is_gone(launch: Callable[..., Backend]):
    backend = launch(max_retries=1)
    launched = backend.engine.plugin.launched
    (leader,) = children(launched._supervisor.pid)
    family = group(leader)
    assert len(family) >= 3
    os.kill(leader, signal.SIGKILL)
    with pytest.raises(EngineError) as caught:
        backend.generate([[5, 6]], {"max_new_tokens": 2})
    assert caught.value.usable is False and not backend.health()
    assert all_end(family)
    backend.close()


PARENT = """
import signal, sys
sys.path[:0] = {path!r}
import corelm
backend = corelm.get_backend("sglang", {model!r}, env={env!r}, progress=False, **{arguments!r})
print(backend.engine.plugin.launched._supervisor.pid, flush=True)
signal.pause()
"""


def test_a_parent_that_is_killed_takes_its_server_along(folder: Path, cpu: tuple[dict[str, str], dict[str, object]]):
    environment, arguments = cpu
    code = PARENT.format(path=sys.path, model=str(folder), env=environment, arguments=arguments)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        holder = int(parent.stdout.readline())
        family = {holder} | {pid for leader in children(holder) for pid in group(leader)}
        assert len(family) >= 4
        parent.kill()
        assert all_end(family)


def test_an_argument_that_the_server_does_not_know_is_refused_by_it(launch: Callable[..., Backend]):
    with pytest.raises(EngineError, match="unrecognized arguments: --no-such-argument"):
        launch(no_such_argument=1)
