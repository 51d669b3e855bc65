"""Where a server joins the process that sends it weights."""

from __future__ import annotations

import socket

import pytest

from corelm.errors import InvalidRequestError
from corelm_engine_kit import WeightGroup


def test_the_port_is_the_given_one_or_a_free_one() -> None:
    assert WeightGroup("10.0.0.5", 29600).address() == ("10.0.0.5", 29600)
    host, port = WeightGroup("10.0.0.5").address()
    with socket.socket() as own:
        own.bind(("", port))
    assert host == "10.0.0.5"


def test_the_option_may_be_a_host_alone() -> None:
    assert WeightGroup.given("trainer") == WeightGroup("trainer") == WeightGroup.given(WeightGroup("trainer"))
    assert WeightGroup.given(None) is None


def test_anything_else_is_refused_before_a_server_waits_for_it() -> None:
    for wrong in ("", " trainer", "tcp://trainer:1", "trainer:29600", 29600, ("trainer", 1), True):
        with pytest.raises(InvalidRequestError, match=r"WeightGroup\('10\.0\.0\.5', port=29600\)") as caught:
            pytest.fail(f"{wrong!r} was read: {WeightGroup.given(wrong)}")
        assert caught.value.field == "weight_group"
    for port in (0, 65536, "29600", True):
        with pytest.raises(InvalidRequestError) as caught:
            pytest.fail(f"{port!r} was read: {WeightGroup('trainer', port)}")
        assert caught.value.field == "weight_group.port"
