"""A server of our own starts, says why if it does not, and never outlives us: with a stand-in for the real one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import corelm
from corelm.errors import BackendTimeoutError, EngineError
from corelm.support.http import HttpClient
from helpers.processes import all_end, free_port, group, runs, wait_until
from sglang_backend import supervisor
from sglang_backend.launch import LaunchedServer

SUPERVISOR = supervisor.__file__


@pytest.fixture
def start(stand_in: dict[str, str]) -> Iterator[Callable[..., tuple[LaunchedServer, dict[str, Any]]]]:
    """``start(**arguments)``: a stand-in server that is ready, and what it says of itself."""
    with ExitStack() as stack:

        def started(**arguments: Any) -> tuple[LaunchedServer, dict[str, Any]]:
            launched = LaunchedServer("a-model", arguments, stand_in)
            stack.callback(launched.close)
            client = HttpClient(launched.base_url, launched.api_key, max_retries=0)
            stack.callback(client.close)
            launched.wait_until(lambda: client.answers("/"), 60.0, "stand-in", progress=False)
            return launched, client.get("/")

        yield started


# Starting -------------------------------------------------------------------------------------------------------------


def test_it_listens_to_this_machine_and_to_the_key_alone(start):
    launched, said = start(number=3, flag=True)
    assert said["argv"][2:8:2] == ["--model-path", "--host", "--port"] and said["argv"][5] == "127.0.0.1"
    assert said["argv"][8:] == ["--number=3", "--flag"]
    stranger = HttpClient(launched.base_url, "another key", max_retries=0)
    assert not stranger.answers("/")
    stranger.close()


def test_the_key_is_told_nobody(start):
    launched, said = start()
    assert wait_until(lambda: "the key is" in launched.log_tail())
    key = launched.api_key
    assert len(key) >= 32 and key not in launched.log_tail() and key not in repr(launched)
    assert not any(key in word for word in said["argv"])
    # The file it was read from is gone.
    assert not Path(said["argv"][1]).exists()


def test_no_key_and_no_value_is_taken_for_an_option(start, monkeypatch):
    # In base64 these bytes would begin with "-".
    monkeypatch.setattr("secrets.token_bytes", lambda size: b"\xfb" * size)
    _, said = start(number="-x")
    assert said["argv"][8:] == ["--number=-x"]


def test_a_port_that_is_taken_is_left_alone(start, monkeypatch):
    free = free_port()
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = iter([other.getsockname()[1], free])
        monkeypatch.setattr("secrets.choice", lambda among: next(ports))
        launched, _ = start()
    assert launched.base_url == f"http://127.0.0.1:{free}"


def test_an_address_that_cannot_be_had_is_asked_for_once(monkeypatch):
    monkeypatch.setattr("sglang_backend.launch.HOST", "192.0.2.1")
    with pytest.raises(OSError, match="assign requested address"):
        LaunchedServer("a-model", {}, {})


def test_an_argument_that_the_server_does_not_know_is_its_own_error(folder, stand_in):
    with pytest.raises(EngineError, match="unrecognized arguments: --no-such-thing=1") as caught:
        corelm.get_backend("sglang", folder, no_such_thing=1, env=stand_in, progress=False)
    assert caught.value.usable is False


def test_one_that_takes_too_long_is_ended(folder, stand_in):
    with pytest.raises(BackendTimeoutError, match="startup_timeout"):
        corelm.get_backend("sglang", folder, after="never", env=stand_in, progress=False, startup_timeout=1.0)
    file = Path(stand_in["PID_FILE"])
    pid = file.read_text() if file.exists() else ""
    assert not pid or all_end([int(pid)])


def test_progress_is_shown_unless_it_is_switched_off(stand_in, capfd):
    for progress in (True, False):
        launched = LaunchedServer("a-model", {}, stand_in)
        looks = iter([False, False, True])
        launched.wait_until(lambda looks=looks: next(looks), 60.0, "starting it", progress)
        launched.close()
        assert ("starting it" in capfd.readouterr().err) == progress


# Ending ---------------------------------------------------------------------------------------------------------------


def test_closing_ends_it_and_its_children(start):
    launched, said = start(children=2)
    family = group(said["pid"])
    assert len(family) == 3 and launched.alive
    launched.close()
    assert not launched.alive and all_end(family)
    launched.close()


def test_children_of_a_server_that_dies_are_ended(start):
    launched, said = start(children=2)
    family = group(said["pid"])
    os.kill(said["pid"], signal.SIGKILL)
    assert wait_until(lambda: not launched.alive) and all_end(family)


PARENT = """
    import os, signal, sys
    from sglang_backend.launch import LaunchedServer
    from corelm.http import HttpClient

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


@pytest.mark.parametrize("more", ["", FORK], ids=["alone", "with-a-forked-child"])
def test_a_parent_that_is_killed_takes_it_along(stand_in, more):
    code = textwrap.dedent(PARENT).format(env=stand_in, more=textwrap.dedent(more))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
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
    """A supervisor whose server is a line of Python."""
    command = [sys.executable, run, sys.executable, "-c", code]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def pid_of(process: subprocess.Popen[bytes]) -> int:
    """The server's own, which is the first thing it says."""
    assert process.stdout is not None
    return int(process.stdout.readline())


def test_it_ends_as_its_server_ends():
    with supervised("import sys; sys.exit(7)") as process:
        assert process.wait(60) == 7


@pytest.mark.parametrize("also", ["", "os.kill(os.getpid(), signal.SIGSTOP)"], ids=["running", "stopped"])
def test_its_server_ends_when_its_input_closes(also):
    with supervised(PAUSE.replace("signal.pause()", f"{also}; signal.pause()".lstrip("; "))) as process:
        pid = pid_of(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) != 0 and not runs(pid)


def test_its_server_ends_when_it_is_asked_to():
    with supervised(PAUSE) as process:
        pid = pid_of(process)
        process.terminate()
        assert process.wait(60) != 0 and not runs(pid)


def test_a_server_that_does_not_listen_is_killed(tmp_path):
    impatient = tmp_path / "impatient.py"
    impatient.write_text(Path(SUPERVISOR).read_text().replace("GRACE = 2.0", "GRACE = 0.1"))
    deaf = PAUSE.replace("print(", "signal.signal(signal.SIGTERM, signal.SIG_IGN); print(")
    with supervised(deaf, str(impatient)) as process:
        pid = pid_of(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) != 0 and not runs(pid)
