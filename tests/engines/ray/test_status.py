"""`corelm fleet status` shows the actors that have names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from engines.ray.conftest import Open


@pytest.mark.nightly
def test_the_command_shows_actors_with_names(open_toys: Open) -> None:
    backend = open_toys(replicas=2, actor_name="seen", namespace="watched")
    backend.generate([[72]] * 8, {"max_new_tokens": 8, "seed": 1})
    command = [str(Path(sys.executable).parent / "corelm"), "fleet", "status", "--backend", "ray", "--json"]
    command += ["--address", ray.get_runtime_context().gcs_address, "--namespace", "watched"]
    # As in another shell: Ray has set this variable in the program that has started the cluster.
    env = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert found.returncode == 0, found.stderr
    rows = json.loads(found.stdout)
    assert [(row["name"], row["state"], row["epoch"], row["starts"]) for row in rows] == [
        ("seen/0", "healthy", 0, 1),
        ("seen/1", "healthy", 0, 1),
    ]
    assert sum(row["tokens_per_second"] for row in rows) > 0

    # Ray itself would try for minutes.
    closed = subprocess.run([*command[:6], "--address", "127.0.0.1:1"], capture_output=True, text=True, timeout=60)
    assert closed.returncode == 3 and "no Ray cluster could be joined at 127.0.0.1:1" in closed.stderr
    assert "Connection refused" in closed.stderr

    hostless = subprocess.run([*command[:6], "--address", ":1"], capture_output=True, text=True, timeout=60)
    assert hostless.returncode == 2 and "expected HOST:PORT, such as 127.0.0.1:6379, got ':1'" in hostless.stderr

    nowhere = subprocess.run(command[:5], capture_output=True, text=True, timeout=60)
    assert nowhere.returncode == 2 and "name the cluster" in nowhere.stderr
