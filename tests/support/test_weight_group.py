"""Where a server joins the process that sends it weights."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from corelm.errors import InvalidRequestError
from corelm.support import WeightGroup


def test_the_port_is_the_given_one_or_a_free_one() -> None:
    assert WeightGroup("10.0.0.5", 29600).address() == ("10.0.0.5", 29600)
    host, port = WeightGroup("10.0.0.5").address()
    with socket.socket() as own:
        own.bind(("", port))
    assert host == "10.0.0.5"


def test_the_option_may_be_a_host_alone() -> None:
    assert WeightGroup.given("trainer") == WeightGroup("trainer") == WeightGroup.given(WeightGroup("trainer"))
    assert WeightGroup.given(None) is None


@pytest.mark.parametrize("wrong", ["", " trainer", "tcp://trainer:1", "trainer:29600", 29600, ("trainer", 1), True])
def test_anything_else_is_refused_before_a_server_waits_for_it(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"WeightGroup\('10\.0\.0\.5', port=29600\)") as caught:
        WeightGroup.given(wrong)
    assert caught.value.field == "weight_group"


@pytest.mark.parametrize("wrong", [0, 65536, "29600", True])
def test_a_port_is_a_number_of_one(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match="at most 65535") as caught:
        WeightGroup("trainer", wrong)
    assert caught.value.field == "weight_group.port"
