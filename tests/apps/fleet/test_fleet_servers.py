"""A server may be started again, or be another one, without notice. Toy engines stand for servers here."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from apps.fleet.conftest import NEW, OLD, PROMPTS, SAMPLING, answers
from corelm import Ragged
from corelm.errors import InvalidRequestError
from corelm.spec import GenerateResult
from corelm_fleet.records import FleetLimits
from helpers.mortal_toys import CANNOT_SCORE, OTHER, TABLE, MortalToy, Toys, user_rows

#: A suspect is not given up.
PATIENT = FleetLimits(misses=2, take_back=0.0, trial=0.0, backoff=0.02, longest_backoff=0.05)


def probes(toys: Toys) -> list[Any]:
    """Return the requests of canaries."""
    asked = [each for engine in toys.made for each in engine.asked]
    return [each for hook, each in asked if hook in ("generate", "score_logprobs") and not user_rows(each)]


@pytest.fixture
def in_the_dark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let toy engines, as servers do, not say that their weights were changed."""
    monkeypatch.setattr(MortalToy, "weights_state", None)


def test_a_server_that_comes_back_with_its_first_weights_does_not_serve_them(in_the_dark: None) -> None:
    with Toys("a", "b", limits=PATIENT) as toys:
        toys.backend.update_weights({"table": OTHER})
        (server,) = [each for each in toys.made if each.name == "a"]
        server.alive = False
        toys.await_state("a", "suspect")
        server.model.table.data = TABLE.clone()
        server.alive = True
        toys.settle()
        assert [answers(toys) for _ in range(4)] == [NEW] * 4
        assert [each.starts for each in toys.fleet.status() if each.name == "a"] == [2]


def test_a_server_that_did_not_answer_for_a_while_goes_on(in_the_dark: None) -> None:
    with Toys("a", "b", limits=PATIENT) as toys:
        toys.made[0].alive = False
        toys.await_state(toys.made[0].name, "suspect")
        toys.made[0].alive = True
        toys.settle()
        assert len(toys.made) == 2 and answers(toys) == OLD


def refuse_rows(engine: MortalToy, result: GenerateResult) -> GenerateResult:
    """Return what the backend of a server makes of the status 404 for each row."""
    rows = len(result.ids)
    nothing = Ragged.from_list([[]] * rows)
    return replace(
        result,
        ids=nothing,
        logprobs=nothing.with_values(nothing.values.float()),
        finish_reasons=("error",) * rows,
        errors=("404: no such model",) * rows,
    )


@pytest.mark.parametrize("rowwise", [False, True])
def test_a_server_that_refuses_its_probes_is_at_fault_and_not_the_request(rowwise: bool) -> None:
    with Toys("a", "b") as toys:
        (wrong,) = [each for each in toys.made if each.name == "a"]

        def before(engine: MortalToy, hook: str, request: Any) -> None:
            if engine is wrong:
                raise InvalidRequestError("404: no such model", field="model")

        if rowwise:
            wrong.after = refuse_rows
        else:
            toys.before = before
        assert answers(toys) == OLD
        toys.settle()
        assert [each.starts for each in toys.fleet.status()] == [2, 1]


def test_a_server_that_refuses_a_request_is_asked_its_canary_and_goes_on() -> None:
    def before(engine: MortalToy, hook: str, request: Any) -> None:
        if hook == "generate" and user_rows(request):
            raise InvalidRequestError("odd", field="prompts")

    with Toys("a", "b", before=before) as toys:
        looks, started = len(probes(toys)), time.monotonic()
        for _ in range(20):
            with pytest.raises(InvalidRequestError):
                toys.backend.generate(PROMPTS, SAMPLING)
        assert len(toys.made) == 2 and set(toys.states().values()) == {"healthy"}
        # Once every five seconds, and not for every request that is refused.
        times = 1 + int((time.monotonic() - started) / 5.0)
        assert looks < len(probes(toys)) <= looks + 2 * 3 * times


def test_engines_that_cannot_score_are_compared_by_what_they_sample() -> None:
    with pytest.raises(InvalidRequestError):
        Toys("a", "b", tables={"b": OTHER}, **CANNOT_SCORE)
    with Toys("a", "b", **CANNOT_SCORE) as toys:
        assert answers(toys) == OLD
        toys.backend.update_weights({"table": OTHER})
        assert answers(toys) == NEW and len(toys.made) == 2


@pytest.mark.parametrize("other", ["b", "c"])
def test_one_engine_that_cannot_score_hides_no_other(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = MortalToy.make.__func__  # type: ignore[attr-defined]

    def of_name(cls: type[MortalToy], name: str, *given: Any, **can: Any) -> MortalToy:
        engine: MortalToy = make(cls, name, *given, **can | (CANNOT_SCORE if name == "a" else {}))
        return engine

    monkeypatch.setattr(MortalToy, "make", classmethod(of_name))
    with Toys("a", "b", "c") as toys:
        assert answers(toys) == OLD and not toys.backend.capabilities.score
    with pytest.raises(InvalidRequestError):
        Toys("a", "b", "c", tables={other: OTHER})
