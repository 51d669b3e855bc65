"""Every request gets an id that no other one has, and is found by its name while it runs."""

from __future__ import annotations

import pytest

from corelm_engine_kit import InFlight


def test_requests_of_the_same_name_have_different_ids() -> None:
    in_flight = InFlight()
    with in_flight.named(["a", "b", "a"]) as first, in_flight.named(["a"]) as second:
        assert len({*first, *second}) == 4 and {len(each) for each in first} == {32}
        assert set(in_flight.ids(["a", "a", "unknown"])) == {first[0], first[2], *second}
        assert in_flight.ids(["b"]) == [first[1]] and in_flight.ids([]) == []
    assert in_flight.ids(["a", "b"]) == []


def test_a_request_is_forgotten_when_it_fails() -> None:
    in_flight = InFlight()
    with in_flight.named(["a"]) as outer:
        with pytest.raises(ValueError, match="failed"), in_flight.named(["a"]):
            raise ValueError("failed")
        assert in_flight.ids(["a"]) == outer
