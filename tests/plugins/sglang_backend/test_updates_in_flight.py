"""New weights while the server answers: it is paused, and every row says which weights sampled which of its tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from corelm.errors import CapabilityError, EngineError
from corelm.spec import GenerateRequest, WeightUpdate
from corelm_engine_kit import RowError
from helpers.http_server import json_reply
from helpers.requests import generation
from sglang_backend.weight_history import WeightHistory

#: Seconds after which a test that hangs fails.
TIMEOUT = 60.0
SAMPLING = {"max_new_tokens": 4, "ignore_eos": True}


class Held:
    """Holds the answers of a fake server until `release`, which says how many of their tokens came before it."""

    def __init__(self, fake: Any) -> None:
        self._fake, self._begun, self._released = fake, threading.Event(), threading.Event()
        self._label, self._spans = fake.weight_label, []
        fake.fault = self._wait
        fake.spoil = self._spoil

    def _wait(self, request: Any) -> None:
        if request.path == "/generate" and not self._released.is_set():
            self._begun.set()
            assert self._released.wait(TIMEOUT)

    def _spoil(self, reply: Any) -> None:
        reply["meta_info"]["weight_versions"] = self._spans

    def answer(self, backend: Any) -> Future[Any]:
        pool = ThreadPoolExecutor(1)
        answer = pool.submit(backend.generate, [[5]], SAMPLING)
        pool.shutdown(wait=False)
        assert self._begun.wait(TIMEOUT)
        return answer

    def release(self, *ends: tuple[str, int]) -> None:
        starts = [0, *(end for _, end in ends)]
        self._spans = [
            {"version": label, "start": start, "end": end} for (label, end), start in zip(ends, starts, strict=False)
        ]
        self._released.set()


def test_a_server_that_says_which_tokens_are_of_which_weights_takes_updates_in_flight(fake, connect):
    assert connect().capabilities.updates_in_flight
    fake.spoil = lambda reply: reply["meta_info"].pop("weight_versions")
    silent = connect()
    assert not silent.capabilities.updates_in_flight
    with pytest.raises(CapabilityError):
        silent.update_weights("anywhere", when="now")


@pytest.mark.parametrize(
    "settings", [{"dp_size": 2}, {"pp_size": 2}, {"disaggregation_mode": "decode"}, {"speculative_algorithm": "EAGLE"}]
)
def test_servers_of_which_it_is_not_known_take_none(fake, connect, settings):
    fake.server_info |= settings
    assert not connect().capabilities.updates_in_flight


def test_the_server_is_paused_and_the_runs_are_those_that_it_reports(backend, fake, other_folder):
    held = Held(fake)
    answer = held.answer(backend)
    assert backend.update_weights(other_folder, version="new", when="now") == "new"
    assert [path for path, _ in fake.pauses] == ["/pause_generation", "/continue_generation"]
    assert fake.pauses[0][1]["mode"] == "retract" and fake.weight_updates[0]["flush_cache"] is True
    held.release(("default", 3), ("new", 4))
    found = answer.result(TIMEOUT)
    assert found.version_runs == ((("0", 0), ("new", 3)),) and found.weight_versions == ("0",)
    assert backend.generate([[5]], {"max_new_tokens": 1}, on_error="skip").errors is not None


def test_rows_of_one_version_have_no_runs(backend, fake, other_folder):
    held = Held(fake)
    answer = held.answer(backend)
    backend.update_weights(other_folder, version="new", when="now")
    # It had no token before the update.
    held.release(("new", 4))
    found = answer.result(TIMEOUT)
    assert found.version_runs is None and found.weight_versions == ("new",)


def test_updates_that_wait_do_not_pause_the_server(backend, fake, other_folder):
    backend.update_weights(other_folder, version="new")
    assert fake.pauses == [] and backend.generate([[5]], SAMPLING).weight_versions == ("new",)


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([], "do not say where"),
        ([("default", 3)], "do not say where"),
        ([("new", 2), ("default", 4)], "are in force"),
        ([("default", 2), ("a stranger", 4)], "'a stranger'"),
    ],
)
def test_a_row_that_does_not_say_which_tokens_are_new_is_an_error(backend, fake, other_folder, ends, message):
    held = Held(fake)
    answer = held.answer(backend)
    backend.update_weights(other_folder, version="new", when="now")
    held.release(*ends)
    with pytest.raises(EngineError, match=message):
        answer.result(TIMEOUT)


def failing(path: str, held: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def fault(request: Any) -> Any:
        return json_reply({"error": {"message": "broken"}}, status=500) if request.path == path else held(request)

    return fault


def test_weights_of_which_loading_failed_have_a_label_too(connect, fake, other_folder):
    backend = connect(max_retries=0)
    fake.pauses.clear()
    held = Held(fake)
    answer = held.answer(backend)
    fake.fault = failing("/update_weights_from_disk", fake.fault)
    with pytest.raises(EngineError):
        backend.update_weights(other_folder, version="new", when="now")
    # The server goes on, and calls the weights by the new label: they may be partly new.
    assert [path for path, _ in fake.pauses] == ["/pause_generation", "/continue_generation"]
    assert fake.weight_label == "new"
    held.release(("default", 1), ("new", 4))
    ((first, second),) = answer.result(TIMEOUT).version_runs
    assert first == ("0", 0) and second == (backend.weight_version, 1) and second[0] not in ("0", "new")


def test_rows_of_weights_that_could_not_be_labelled_are_errors(connect, fake, other_folder):
    backend = connect(max_retries=0)
    held = Held(fake)
    answer = held.answer(backend)
    inner = failing("/update_weights_from_disk", fake.fault)
    fake.fault = failing("/update_weight_version", inner)
    with pytest.raises(EngineError):
        backend.update_weights(other_folder, version="new", when="now")
    held.release(("default", 4))
    with pytest.raises(EngineError):
        answer.result(TIMEOUT)


def test_a_server_that_does_not_go_on_is_not_usable(connect, fake, other_folder):
    backend = connect(max_retries=0)
    fake.fault = lambda request: json_reply({}, status=500) if request.path == "/continue_generation" else None
    with pytest.raises(EngineError) as caught:
        backend.update_weights(other_folder, version="new", when="now")
    assert caught.value.usable is False


def test_a_server_that_goes_on_at_the_third_request_stays_usable(connect, fake, other_folder):
    asked = []

    def fault(request):
        if request.path == "/continue_generation":
            asked.append(request)
            return json_reply({}, status=500) if len(asked) < 3 else None
        return None

    backend = connect(max_retries=0)
    fake.fault = fault
    backend.update_weights(other_folder, version="new", when="now")
    assert len(asked) == 3


# The history itself ---------------------------------------------------------------------------------------------------


def request(version: str = "core's", number: int = 0) -> GenerateRequest:
    return generation(weight_version=version, weight_update=number)


def meta(*ends: tuple[str, int]) -> dict[str, Any]:
    starts = [0, *(end for _, end in ends)]
    spans = [{"version": each, "start": start, "end": end} for (each, end), start in zip(ends, starts, strict=False)]
    return {"weight_version": ends[-1][0], "weight_versions": spans}


def test_runs_are_cut_off_with_the_answer_and_joined_if_core_has_one_name_for_them():
    history = WeightHistory("a")
    weights = history.of_call(request())
    for number, (label, version) in enumerate((("b", "new"), ("c", "new"), ("d", "newer")), start=1):
        history.note(label, WeightUpdate(version=version, number=number))
    reply = meta(("a", 2), ("b", 3), ("c", 5), ("d", 9))
    assert weights.runs(reply, 9) == (("core's", 0), ("new", 2), ("newer", 5))
    assert weights.runs(reply, 5) == (("core's", 0), ("new", 2))
    assert weights.runs(reply, 2) == weights.before == (("core's", 0),)
    # A call that core has made after the first two updates.
    later = history.of_call(request("also core's", 3))
    assert later.runs(meta(("d", 4)), 4) == (("also core's", 0),)
    with pytest.raises(RowError):
        later.runs(meta(("c", 4)), 4)


def test_a_call_over_an_unlabelled_update_knows_the_weights_after_it():
    history = WeightHistory("a")
    history.note("b", WeightUpdate(version="new", number=1))
    weights = history.of_call(request("new", 1))
    history.lose_track()
    with pytest.raises(RowError):
        weights.runs(meta(("b", 4)), 4)
    history.note("c", WeightUpdate(version="newer", number=3))
    assert weights.runs(meta(("c", 4)), 4) == (("newer", 0),)


def test_an_update_between_core_and_the_plugin_names_the_first_tokens():
    history = WeightHistory("a")
    history.note("b", WeightUpdate(version="new", number=1))
    weights = history.of_call(request("old", 0))
    assert weights.runs(meta(("b", 4)), 4) == weights.before == (("new", 0),)
