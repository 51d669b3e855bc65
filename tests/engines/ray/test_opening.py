"""Opening: what cannot be had is refused before anything hangs, and actors with a name are shared by what is alike."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from torch import nn

import corelm
from corelm.errors import (
    BackendImportError,
    BackendNotFoundError,
    CapabilityError,
    EngineError,
    InvalidRequestError,
)
from engines.ray.conftest import Open, await_healthy
from helpers.capability_tables import assert_page_says
from helpers.insides import pids
from helpers.processes import children, runs, wait_until
from ray_backend.cluster import CLUSTER

SAMPLING: dict[str, Any] = {"max_new_tokens": 6, "seed": 3}


@pytest.mark.parametrize(
    ("options", "field", "match"),
    [
        ({"num_cpus": 1000}, "num_cpus", r"1000 CPU each, and the cluster has .* CPU on 1 node"),
        ({"num_gpus": 99}, "num_gpus", "99 GPU each"),
        ({"resources": {"unicorns": 1}}, "resources", "1 unicorns each, and the cluster has 0 unicorns"),
        ({"replicas": 5000, "num_cpus": 1}, "num_cpus", "5000 replicas ask for 1 CPU"),
        ({"resources": {"CPU": 1}}, "resources", "num_cpus="),
        ({"num_cpus": -1}, r"num_cpus", "at least 0"),
        ({"replicas": 0}, "replicas", "at least 1"),
        ({"inner": "ray"}, "inner", "the actors open"),
        ({"python": "/nowhere/bin/python"}, "python", "no such file"),
        ({"address": ""}, "address", "expected a text"),
        ({"address": "127.0.0.1:1"}, "address", "uses the Ray cluster at"),
        ({"tabel": 3}, "tabel", "Its options"),
        ({"model": nn.Linear(1, 1)}, "model", "save_pretrained"),
    ],
)
def test_what_cannot_be_had_is_refused_at_once(
    open_toys: Open, options: dict[str, Any], field: str, match: str
) -> None:
    with pytest.raises(InvalidRequestError, match=match) as refusal:
        open_toys(**options)
    assert refusal.value.field == field


def test_resources_that_others_use(open_toys: Open) -> None:
    cpus = ray.cluster_resources()["CPU"]
    open_toys(num_cpus=cpus)
    with pytest.raises(
        EngineError, match=r"^replica 0: its process did not start within 3 s; it asks for .* CPU; free are 0 CPU"
    ):
        open_toys(num_cpus=cpus, placement_timeout=3)


def test_an_unknown_backend(open_toys: Open) -> None:
    with pytest.raises(BackendNotFoundError, match="no_such"):
        open_toys(inner="no_such")


def test_an_interpreter_without_ray(open_toys: Open, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    with pytest.raises(BackendImportError, match=r"pip install .*ray_backend.*ray==2"):
        open_toys(python=tmp_path / "bare")


def test_a_program_that_is_not_python(open_toys: Open, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho I am a shell >&2\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(InvalidRequestError, match=r"not a Python interpreter that works: .*I am a shell"):
        open_toys(python=program)


def test_an_interpreter_runs_the_actor(open_toys: Open) -> None:
    backend = open_toys(python=sys.executable)
    assert backend.generate([[72]], SAMPLING).ids.tolist()


@pytest.mark.nightly
def test_actors_of_one_name_are_shared_by_what_is_alike(open_toys: Open) -> None:
    first = open_toys(actor_name="shared")
    second = open_toys(actor_name="shared")
    assert pids(first) == pids(second)
    assert first.generate([[72]], SAMPLING).ids.tolist() == second.generate([[72]], SAMPLING).ids.tolist()

    with pytest.raises(InvalidRequestError, match=r"num_cpus: it has 0\.1, this call asks for 0\.2") as refusal:
        open_toys(actor_name="shared", num_cpus=0.2)
    assert refusal.value.field == "actor_name" and "inner" not in str(refusal.value)
    with pytest.raises(InvalidRequestError, match="inner: it has 'toy', this call asks for 'transformers'"):
        open_toys(actor_name="shared", inner="transformers")
    with pytest.raises(InvalidRequestError, match="replicas: it has 1"):
        open_toys(actor_name="shared", replicas=2)

    # Another driver would get new weights under the old label.
    state = {"table": corelm.get_backend("toy").engine.plugin.model.table.detach().roll(1, 1)}
    with pytest.raises((CapabilityError, InvalidRequestError), match="2 drivers use the actor"):
        first.update_weights(state)

    # Whoever joined leaves; whoever created ends.
    pid = pids(first)[0]
    second.close()
    assert first.generate([[72]], SAMPLING).ids.tolist()
    first.update_weights(state)
    with pytest.raises(EngineError, match="weights were changed"):
        open_toys(actor_name="shared")
    assert first.generate([[72]], SAMPLING).ids.tolist()
    first.close()
    assert wait_until(lambda: not runs(pid))


@pytest.mark.nightly
def test_a_driver_that_joined_goes_on_when_the_actor_was_started_again(open_toys: Open) -> None:
    first, second = open_toys(actor_name="mended"), open_toys(actor_name="mended")
    expected = second.generate([[72]], SAMPLING).ids.tolist()
    pid = pids(first)[0]
    os.kill(pid, signal.SIGKILL)
    assert second.generate([[72]], SAMPLING, timeout=120).ids.tolist() == expected
    await_healthy(first)
    assert pids(first) == pids(second) != [pid]


#: Joins the actors of another program, and asks them.
DRIVER = """
import sys
import corelm

backend = corelm.get_backend("ray", inner="toy", num_cpus=0.1, actor_name="programs", address=sys.argv[1])
print(backend.generate([[72]], {"max_new_tokens": 6, "seed": 3}).ids.tolist())
backend.close()
"""


@pytest.mark.nightly
def test_two_programs_share_an_actor(open_toys: Open) -> None:
    backend = open_toys(actor_name="programs")
    address = ray.get_runtime_context().gcs_address
    other = subprocess.run([sys.executable, "-c", DRIVER, address], capture_output=True, text=True, timeout=120)
    assert other.returncode == 0, other.stderr
    assert other.stdout.splitlines()[-1] == str(backend.generate([[72]], SAMPLING).ids.tolist())
    assert backend.health()


@pytest.mark.nightly
def test_ray_that_was_running_is_left_running(open_toys: Open) -> None:
    open_toys().close()
    assert ray.is_initialized() and CLUSTER.ours


@pytest.mark.nightly
def test_only_this_machine_can_reach_a_ray_that_was_started(open_toys: Open) -> None:
    open_toys()
    assert ray.get_runtime_context().gcs_address.startswith("127.0.0.1:")
    own = {os.getpid()}
    while found := {child for pid in own for child in children(pid)} - own:
        own |= found
    sockets = set()
    for pid in own:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(os.readlink(file).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    # 0A: it listens.
    listening = {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets}
    mapped = "0000000000000000FFFF0000"
    assert listening and listening <= {"0100007F", mapped + "0100007F", "0" * 24 + "01000000"}


#: Starts Ray, and opens and closes a backend on it; then another one without a Ray of its own.
PROGRAM = """
import ray

import corelm

ray.init(address="local", include_dashboard=False, num_cpus=1)
corelm.get_backend("ray", inner="toy", num_cpus=0.1).close()
assert ray.is_initialized()
ray.shutdown()
corelm.get_backend("ray", inner="toy", num_cpus=0.1).close()
assert not ray.is_initialized()
print("done")
"""


@pytest.mark.nightly
def test_ray_is_shut_down_by_whoever_started_it() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=180)
    assert found.stdout.splitlines()[-1:] == ["done"], found.stderr


@pytest.mark.nightly
def test_the_page_of_the_engines_says_what_transformers_in_an_actor_declares(model: Path) -> None:
    with corelm.get_backend("ray", model, inner="transformers", num_cpus=0.2, dtype="float32") as backend:
        assert_page_says("ray", backend)
