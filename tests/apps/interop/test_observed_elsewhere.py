"""Observers of an engine in another process, of a fleet, and of a canary's questions."""

from __future__ import annotations

import sys
from typing import Any

import corelm
from corelm import Backend
from corelm_fleet.fleet import FleetEngine
from corelm_fleet.replica import Member
from corelm_interop import ObservedCall, Observer, Timing
from corelm_testing.toy import ToyBackend

PROMPTS = [[72, 105], [65], [66], [67, 68, 69]]
SAMPLING: dict[str, Any] = {"max_new_tokens": 6, "seed": 3, "ignore_eos": True}


class Names(Observer):
    """Remembers which backend each call was of, and how many users it served."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, int]] = []

    def ended(self, call: ObservedCall) -> None:
        assert call.engine is not None
        self.seen.append((call.hook, call.engine.backend, len(call.origins)))


def test_an_engine_in_another_process_is_measured_here() -> None:
    timing = Timing()
    with corelm.get_backend("toy", python=sys.executable, wrappers=[timing]) as backend:
        with corelm.get_backend("toy") as plain:
            expected = plain.generate(PROMPTS, SAMPLING).ids.tolist()
        assert backend.generate(PROMPTS, SAMPLING).ids.tolist() == expected
        with backend.stream(PROMPTS, SAMPLING) as stream:
            list(stream)
    made = timing.summary().hooks["generate"]
    assert (made.calls, made.rows, made.sampled_tokens) == (2, 8, 48)
    assert made.first_token is not None and made.first_token.count == 4


def test_a_fleet_is_one_engine_with_all_rows_in_one_call() -> None:
    timing, names = Timing(), Names()
    members = [Member(name, ToyBackend.open) for name in ("a", "b")]
    with Backend.from_plugin(FleetEngine(members), "toy", wrappers=[timing, names]) as fleet:
        # The canaries of the replicas have asked them, and are not the user's calls.
        assert timing.summary().hooks == {}
        fleet.generate(PROMPTS, SAMPLING)
        fleet.update_weights({"table": ToyBackend.open().model.table + 1})
        list(fleet.stream(PROMPTS, SAMPLING))
    made = timing.summary().hooks["generate"]
    assert (made.calls, made.rows, made.given_tokens, made.retries) == (2, 8, 14, 0)
    assert made.first_token is not None and made.first_token.count == 4
    assert timing.summary().hooks["update_weights"].calls == 1
    assert [each for each in names.seen if each[0] != "to_containers"] == [
        ("generate", "toy", 1),
        ("update_weights", "toy", 0),
        ("generate", "toy", 1),
    ]


def test_what_a_canary_asks_is_seen_with_the_calls_of_users() -> None:
    timing = Timing()
    with corelm.get_backend("toy", canary=True, wrappers=[timing]):
        hooks = timing.summary().hooks
    assert hooks["score_logprobs"].calls > 0 and hooks["generate"].calls > 0
