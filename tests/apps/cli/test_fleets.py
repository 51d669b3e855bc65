"""`corelm fleet status` asks every plugin that knows replicas elsewhere."""

from __future__ import annotations

import json
import re

from helpers.command_line import corelm_command

PLUGIN = """
from corelm_fleet import ReplicaStatus
from corelm_testing.toy import ToyBackend

class Clustered(ToyBackend):
    @classmethod
    def replica_status(cls, *, address=None, namespace="corelm"):
        if address == "nowhere":
            from corelm.errors import EngineError
            raise EngineError("no cluster answers at nowhere")
        return [ReplicaStatus(name=f"{namespace}/0", state="healthy", epoch=2, rows=3, tokens_per_second=4.5, starts=1,
                              why="")]
"""


def test_the_replicas_of_every_plugin_are_listed(fabricate):
    fabricate("clustered", "1", {"clustered": "clustered:Clustered"}, {"clustered": PLUGIN})
    result = corelm_command("fleet", "status", "--namespace", "mine")
    assert result.exit_code == 0, result.stderr
    assert re.search(r"^clustered +mine/0 +healthy +2 +3 +4\.5 +1", result.stdout, re.MULTILINE)
    (row,) = json.loads(corelm_command("fleet", "status", "--backend", "clustered", "--json").stdout)
    assert (row["backend"], row["name"], row["epoch"]) == ("clustered", "corelm/0", 2)


def test_a_cluster_that_does_not_answer(fabricate):
    fabricate("clustered", "1", {"clustered": "clustered:Clustered"}, {"clustered": PLUGIN})
    result = corelm_command("fleet", "status", "--backend", "clustered", "--address", "nowhere")
    assert result.exit_code == 3 and "no cluster answers" in result.stderr


def test_a_backend_without_replicas_elsewhere():
    result = corelm_command("fleet", "status", "--backend", "toy")
    assert result.exit_code == 2 and "does not have replicas" in result.stderr
