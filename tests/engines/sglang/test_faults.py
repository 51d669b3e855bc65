"""A real server that hangs, is restarted or killed, or loses its parent."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import corelm
from corelm import Backend
from corelm.errors import BackendTimeoutError, EngineError
from corelm_engine_kit import HttpClient
from engines.sglang.restartable import KEY, RestartableServer
from helpers.processes import all_end, children, group, read_line, wait_until
from helpers.tiny_models import random_rows
from sglang_backend.launch import known_arguments

#: Servers that are killed and launched again take minutes.
pytestmark = pytest.mark.nightly

LONG = {"max_new_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(folder: Path, cpu: tuple[dict[str, str], dict[str, object]]) -> Iterator[RestartableServer]:
    environment, arguments = cpu
    # The server then publishes its load after every step.
    with RestartableServer(folder, environment, arguments | {"load_snapshot_publish_interval": 1}) as server:
        yield server


def test_a_hung_server_raises_a_timeout_and_then_serves_again(server: RestartableServer):
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


def test_a_restart_in_the_middle_of_a_call_loses_no_rows_but_loaded_weights_are_errors(
    server: RestartableServer, other_folder: Path
):
    prompts = random_rows(*range(3, 33))
    retrying = {"base_url": server.url, "api_key": KEY, "max_retries": 20}
    with (
        corelm.get_backend("sglang", **retrying) as plain,
        corelm.get_backend("sglang", **retrying) as tuned,
        ThreadPoolExecutor(2) as pool,
    ):
        # The restarted server has its first weights: those that `plain` expects and `tuned` does not.
        tuned.update_weights(other_folder, version="tuned")
        served, lost = (pool.submit(backend.generate, prompts, LONG, logprobs="none") for backend in (plain, tuned))
        load = HttpClient(server.url, KEY)
        assert wait_until(lambda: load.get("/v1/loads")["loads"][0]["num_running_reqs"] > len(prompts))
        load.close()
        server.kill()
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


def supervisor_of(url: str, program: int) -> int:
    """Return the child process of a program that ends the server at `url`. Its command line has the server's port."""
    port = url.rpartition(":")[2].encode()
    (found,) = (pid for pid in children(program) if port in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))
    return found


@pytest.mark.parametrize("victim", ["launch_server", "sglang::scheduler"])
def test_a_launched_server_of_which_a_process_was_killed_has_ended_for_this_call_and_the_next(
    launch: Callable[..., Backend], victim: str
):
    backend = launch()
    (leader,) = children(supervisor_of(backend.engine.plugin.launched.base_url, os.getpid()))
    family = group(leader)
    assert len(family) >= 3
    (pid,) = (each for each in family if victim.encode() in Path(f"/proc/{each}/cmdline").read_bytes())
    os.kill(pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(EngineError, match="the launched server has ended") as caught:
            backend.generate([[5, 6]], {"max_new_tokens": 2})
        assert caught.value.usable is False and not backend.health()
    assert all_end(family)
    backend.close()


PARENT = """
import signal, sys
sys.path[:0] = {path!r}
import corelm
backend = corelm.get_backend("sglang", {model!r}, env={env!r}, progress=False, **{arguments!r})
print(backend.engine.plugin.launched.base_url, flush=True)
signal.pause()
"""


def test_a_launched_server_ends_when_its_parent_is_killed(folder: Path, cpu: tuple[dict[str, str], dict[str, object]]):
    environment, arguments = cpu
    code = PARENT.format(path=sys.path, model=str(folder), env=environment, arguments=arguments)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        holder = supervisor_of(read_line(parent).strip(), parent.pid)
        family = {holder} | {pid for leader in children(holder) for pid in group(leader)}
        assert len(family) >= 4
        parent.kill()
        assert all_end(family)


def test_every_argument_that_sglang_has_is_known():
    from sglang.srt.server_args import ServerArgs

    class Parser(argparse.ArgumentParser):
        def add_argument(self, *names: str, **options: Any) -> Any:
            given.update(names)
            return super().add_argument(*names, **options)

    given: set[str] = set()
    ServerArgs.add_cli_args(Parser(add_help=False))
    assert len(given) > 300
    assert {name.lstrip("-").replace("-", "_") for name in given} <= known_arguments()
