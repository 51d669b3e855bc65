"""Launched servers: how they start, how they report failing to start, and that they never outlive this process.

The server is a fake one (`fake_launch_env`).
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import corelm
from corelm.errors import BackendTimeoutError, EngineError, InvalidRequestError
from corelm_engine_kit import HttpClient
from helpers.http_clients import echo
from helpers.http_server import FaultServer
from helpers.processes import all_end, free_port, group, read_line, runs, wait_until
from sglang_backend import supervisor
from sglang_backend.launch import LaunchedServer, owner_of_port

SUPERVISOR = supervisor.__file__


@pytest.fixture
def start(fake_launch_env: dict[str, str]) -> Iterator[Callable[..., tuple[LaunchedServer, dict[str, Any]]]]:
    """``start(**arguments)`` returns a launched fake server that is ready, and the page that it serves."""
    with ExitStack() as stack:

        def started(**arguments: Any) -> tuple[LaunchedServer, dict[str, Any]]:
            launched = LaunchedServer("a-model", arguments, fake_launch_env)
            stack.callback(launched.close)
            client = HttpClient(launched.base_url, launched.api_key, max_retries=0)
            stack.callback(client.close)
            launched.wait_until(lambda: client.answers("/"), 60.0, "fake", progress=False)
            return launched, client.get("/")

        yield started


# Starting -------------------------------------------------------------------------------------------------------------


def test_the_server_listens_on_loopback_and_requires_its_key(start):
    launched, page = start(number=3, flag=True)
    assert page["argv"][2:8:2] == ["--model-path", "--host", "--port"] and page["argv"][5] == "127.0.0.1"
    assert page["argv"][8:] == ["--number=3", "--flag"]
    stranger = HttpClient(launched.base_url, "another key", max_retries=0)
    assert not stranger.answers("/")
    stranger.close()


def test_the_key_is_in_no_log_repr_or_command_line(start):
    launched, page = start()
    assert wait_until(lambda: "the key is" in launched.log_tail())
    key = launched.api_key
    assert len(key) >= 32 and key not in launched.log_tail() and key not in repr(launched)
    assert not any(key in word for word in page["argv"])
    # The file that held the key is deleted.
    assert not Path(page["argv"][1]).exists()


def test_the_log_shows_no_part_of_the_key_wherever_it_is_cut(start, monkeypatch):
    launched, _ = start()
    assert wait_until(lambda: "the key is" in launched.log_tail())
    for size in range(100):
        monkeypatch.setattr("sglang_backend.launch._TAIL_BYTES", size)
        assert launched.api_key[-4:] not in launched.log_tail(), size


@pytest.mark.parametrize("inherited", [False, True])
def test_secrets_of_the_environment_are_in_no_error(folder, fake_launch_env, monkeypatch, inherited):
    token, env = "hf_a-secret-of-this-test", fake_launch_env
    if inherited:
        monkeypatch.setenv("HF_TOKEN", token)
    else:
        env = fake_launch_env | {"HF_TOKEN": token}
    with pytest.raises(EngineError, match="unrecognized") as caught:
        corelm.get_backend("sglang", folder, unknown=token, env=env, progress=False)
    assert "a-secret" not in str(caught.value)


def test_a_port_in_use_is_skipped(start, monkeypatch):
    free = free_port()
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = iter([other.getsockname()[1], free])
        monkeypatch.setattr("secrets.choice", lambda among: next(ports))
        launched, _ = start()
    assert launched.base_url == f"http://127.0.0.1:{free}"


def test_a_process_that_took_the_port_gets_no_key(fake_launch_env):
    launched = LaunchedServer("a-model", {"after": "never"}, fake_launch_env)
    client = HttpClient(launched.base_url, launched.api_key, max_retries=0)
    try:
        with FaultServer(echo, port=int(launched.base_url.rpartition(":")[2])) as thief:
            with pytest.raises(EngineError, match="another process listens on port"):
                launched.wait_until(lambda: client.answers("/"), 60.0, "", progress=False)
            assert thief.requests == []
    finally:
        client.close()
        launched.close()


def test_a_server_that_ends_in_a_call_is_named_with_its_last_words_and_not_asked_again(start):
    launched, page = start(number=3)
    waits = []

    async def sleep(seconds):
        waits.append(seconds)
        assert wait_until(lambda: not launched.alive)

    client = HttpClient(launched.base_url, launched.api_key, ended=launched.ended, sleep=sleep)
    try:
        assert client.answers("/")
        os.kill(page["pid"], signal.SIGKILL)
        with pytest.raises(EngineError, match=r"(?s)the launched server has ended.*the key is") as caught:
            client.get("/")
        assert caught.value.usable is False and len(waits) <= 1
        # Another process may listen at the port by now.
        with socket.create_server(("127.0.0.1", int(launched.base_url.rpartition(":")[2]))) as other:
            other.setblocking(False)
            with pytest.raises(EngineError, match=r"(?s)has ended.*the key is"):
                client.post("/generate", {})
            assert not client.answers("/")
            with pytest.raises(BlockingIOError):
                other.accept()
    finally:
        client.close()


def test_whose_a_port_is(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener, subprocess.Popen(["sleep", "60"]) as child:
        port = listener.getsockname()[1]
        assert owner_of_port(port, os.getpid()) == "ours" and owner_of_port(port, os.getppid()) == "ours"
        assert owner_of_port(port, child.pid) == "foreign"
        child.kill()
    assert owner_of_port(port, os.getpid()) == "none"
    monkeypatch.setattr("sys.platform", "darwin")
    assert owner_of_port(port, os.getpid()) == "unknown"


def test_whose_a_port_of_ipv6_is():
    try:
        listener = socket.create_server(("::", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"IPv6 is off on this machine: {error}")
    with listener:
        assert owner_of_port(listener.getsockname()[1], os.getpid()) == "ours"


def test_other_bind_errors_are_raised_at_once(monkeypatch):
    monkeypatch.setattr("sglang_backend.launch.HOST", "192.0.2.1")
    with pytest.raises(OSError) as caught:
        LaunchedServer("a-model", {}, {})
    assert caught.value.errno == errno.EADDRNOTAVAIL


def test_an_argument_that_sglang_does_not_have_is_refused_at_once(folder, fake_launch_env, monkeypatch):
    sources = Path(fake_launch_env["PYTHONPATH"], "sglang", "srt")
    (sources / "arg_groups").mkdir(parents=True)
    (sources / "server_args.py").write_text('class ServerArgs:\n    model_path: str\n\nadd("--disable-cuda-graph")\n')
    (sources / "arg_groups" / "memory.py").write_text("class Memory:\n    mem_fraction_static: float = 0.9\n")
    monkeypatch.syspath_prepend(fake_launch_env["PYTHONPATH"])
    for name, nearest in (("mem_fraction_statc", "mem_fraction_static"), ("disable_cuda_graf", "disable_cuda_graph")):
        with pytest.raises(InvalidRequestError, match=f"did you mean '{nearest}'") as caught:
            corelm.get_backend("sglang", folder, **{name: 1}, env=fake_launch_env, progress=False)
        assert caught.value.field == name and not Path(fake_launch_env["PID_FILE"]).exists()
    # What SGLang has goes to the server. The fake one does not know it.
    with pytest.raises(EngineError, match="unrecognized arguments: --mem-fraction-static"):
        corelm.get_backend("sglang", folder, mem_fraction_static=0.5, env=fake_launch_env, progress=False)


def test_the_error_says_what_to_type_if_sglang_is_not_installed(folder):
    if find_spec("sglang") is not None:
        pytest.skip("SGLang is installed")
    with pytest.raises(EngineError, match=r"plugins/sglang_backend\[engine\].* Or pass python= .* or base_url="):
        corelm.get_backend("sglang", folder, progress=False)


def test_a_server_that_is_not_ready_in_time_is_ended(folder, fake_launch_env):
    with pytest.raises(BackendTimeoutError):
        corelm.get_backend("sglang", folder, after="never", env=fake_launch_env, progress=False, startup_timeout=1.0)
    file = Path(fake_launch_env["PID_FILE"])
    pid = file.read_text() if file.exists() else ""
    assert not pid or all_end([int(pid)])


def test_progress_is_shown_unless_switched_off(fake_launch_env, capfd):
    for progress in (True, False):
        launched = LaunchedServer("a-model", {}, fake_launch_env)
        states = iter([False, False, True])
        launched.wait_until(lambda states=states: next(states), 60.0, "starting it", progress)
        launched.close()
        assert ("starting it" in capfd.readouterr().err) == progress


# Ending ---------------------------------------------------------------------------------------------------------------


def test_close_ends_the_server_and_its_children(start):
    launched, page = start(children=2)
    family = group(page["pid"])
    assert len(family) == 3 and launched.alive
    launched.close()
    assert not launched.alive and all_end(family)
    launched.close()


def test_children_of_a_killed_server_are_ended(start):
    launched, page = start(children=2)
    family = group(page["pid"])
    os.kill(page["pid"], signal.SIGKILL)
    assert wait_until(lambda: not launched.alive) and all_end(family)


PARENT = """
    import os, signal, sys
    from sglang_backend.launch import LaunchedServer, owner_of_port
    from corelm_engine_kit import HttpClient

    launched = LaunchedServer("a-model", {{"children": 1}}, {env!r})
    client = HttpClient(launched.base_url, launched.api_key, max_retries=0)
    launched.wait_until(lambda: client.answers("/"), 60.0, "", progress=False)
    {more}
    print(client.get("/")["pid"], flush=True)
    signal.pause()
"""
FORK = """
    if os.fork() == 0:
        signal.pause()
"""


def test_the_server_ends_when_its_parent_is_killed_though_a_forked_child_lives(fake_launch_env):
    code = textwrap.dedent(PARENT).format(env=fake_launch_env, more=textwrap.dedent(FORK))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    pid = int(read_line(parent))
    family, relatives = group(pid), group(parent.pid)
    assert len(family) == 2
    parent.kill()
    try:
        assert all_end(family)
        assert {child for child in relatives if runs(child)} == relatives - {parent.pid}
    finally:
        parent.wait()
        parent.stdout.close()
        for child in relatives - {parent.pid}:
            os.kill(child, signal.SIGKILL)


# The supervisor alone -------------------------------------------------------------------------------------------------

PAUSE = "import os, signal; print(os.getpid(), flush=True); signal.pause()"


def supervised(code: str, run: str = SUPERVISOR) -> subprocess.Popen[bytes]:
    """Start a supervisor whose server runs `code`."""
    command = [sys.executable, run, sys.executable, "-c", code]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def pid_of(process: subprocess.Popen[bytes]) -> int:
    """Return the id of the server's process, which it prints first."""
    return int(read_line(process))


def test_the_supervisor_exits_with_the_servers_status():
    with supervised("import sys; sys.exit(7)") as process:
        assert process.wait(60) == 7


@pytest.mark.parametrize("first", ["", "os.kill(os.getpid(), signal.SIGSTOP)"], ids=["running", "stopped"])
def test_the_server_ends_when_the_supervisors_input_closes(first):
    with supervised(PAUSE.replace("signal.pause()", f"{first}; signal.pause()".lstrip("; "))) as process:
        pid = pid_of(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) != 0 and not runs(pid)


def test_the_server_ends_when_the_supervisor_gets_sigterm():
    with supervised(PAUSE) as process:
        pid = pid_of(process)
        process.terminate()
        assert process.wait(60) != 0 and not runs(pid)


def test_a_server_that_ignores_sigterm_is_killed(tmp_path):
    impatient = tmp_path / "impatient.py"
    impatient.write_text(Path(SUPERVISOR).read_text().replace("GRACE = 2.0", "GRACE = 0.1"))
    ignoring = PAUSE.replace("print(", "signal.signal(signal.SIGTERM, signal.SIG_IGN); print(")
    with supervised(ignoring, str(impatient)) as process:
        pid = pid_of(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) != 0 and not runs(pid)


def test_the_server_sees_the_gpus_that_were_named_and_no_others(folder, fake_launch_env, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    with pytest.raises(EngineError, match="the GPUs are 6,4"):
        corelm.get_backend("sglang", folder, devices=[2, 0], no_such_thing=1, env=fake_launch_env, progress=False)
    with pytest.raises(InvalidRequestError, match="this process sees 3 GPUs"):
        corelm.get_backend("sglang", folder, devices=3, env=fake_launch_env, progress=False)
    with pytest.raises(InvalidRequestError):
        corelm.get_backend("sglang", base_url="http://127.0.0.1:9", devices=3)
