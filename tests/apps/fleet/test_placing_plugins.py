"""A plugin whose `open` lists `python` or `replicas` gets these options; core opens no process and no fleet for it."""

from __future__ import annotations

import pytest

import corelm
from corelm.errors import BackendNotFoundError, InvalidRequestError
from helpers.refusals import refused

PLUGIN = """
from corelm_testing.toy import ToyBackend

class Placing(ToyBackend):
    given = None

    @classmethod
    def open(cls, model=None, *, replicas=1, python=None, **options):
        cls.given = replicas, python, options
        return super().open()

class ReplicasAlone(Placing):
    @classmethod
    def open(cls, model=None, *, replicas=1, **options):
        return super().open(replicas=replicas, **options)
"""


@pytest.fixture
def placing(fabricate) -> None:
    backends = {"placing": "placing:Placing", "replicas_alone": "placing:ReplicasAlone"}
    fabricate("placing", "1", backends, {"placing": PLUGIN})


def test_a_plugin_gets_the_options_that_it_lists(placing: None) -> None:
    with corelm.get_backend("placing", replicas=3, python="/envs/other", extra=1) as backend:
        assert backend.engine.plugin.given == (3, "/envs/other", {"extra": 1})
        assert type(backend.engine.plugin).__name__ == "Placing"
    with corelm.get_backend("placing") as backend:
        assert backend.engine.plugin.given == (1, None, {})


def test_an_option_that_it_does_not_list_is_that_of_core(placing: None) -> None:
    with corelm.get_backend("replicas_alone", replicas=2) as backend:
        assert backend.engine.plugin.given == (2, None, {})
    with refused(InvalidRequestError, field="python"):
        corelm.get_backend("replicas_alone", replicas=2, python="/nowhere/bin/python")
    # It lists neither.
    with pytest.raises(InvalidRequestError, match="python="):
        corelm.get_backend("toy", replicas=2)


def test_a_plugin_that_is_not_here_may_be_there() -> None:
    with refused(InvalidRequestError, field="python"):
        corelm.get_backend("no_such", python="/nowhere/bin/python")
    with pytest.raises(BackendNotFoundError):
        corelm.get_backend("no_such")
