"""New weights for a fleet: all or none, also for engines that are started later."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any

import pytest
import torch

import corelm_fleet
from apps.fleet.conftest import NEW, OLD, PROMPTS, SAMPLING, answers
from corelm import Backend
from corelm.errors import EngineError, InvalidRequestError, StaleWeightsError
from corelm.spec import WeightUpdate
from corelm_fleet.fleet import FleetEngine
from corelm_fleet.replica import Member
from corelm_fleet.replica_runs import KeptWeights
from corelm_testing.toy import ToyBackend
from helpers.adapter_toys import ADD, CONFIG, AdapterToy, true_scores
from helpers.adapter_toys import TABLE as ADAPTER_TABLE
from helpers.mortal_toys import CANNOT_SCORE, LIMITS, OTHER, TABLE, MortalToy, Toys, one_engine
from helpers.processes import PATIENCE, wait_until


def test_all_engines_have_the_new_weights_when_the_update_returns() -> None:
    with Toys("a", "b", "c") as toys:
        assert answers(toys) == OLD
        assert toys.backend.update_weights({"table": OTHER}, "new") == "new"
        assert answers(toys) == NEW
        assert toys.backend.generate(PROMPTS, SAMPLING).weight_versions == ("new",) * len(PROMPTS)
        assert all(torch.equal(engine.model.table, OTHER) for engine in toys.made)
        assert [each.epoch for each in toys.fleet.status()] == [1, 1, 1]


def test_an_engine_that_is_started_later_loads_the_weights_as_they_were_handed_over(tmp_path: Any) -> None:
    trained = OTHER.clone()
    torch.save({"table": OTHER}, tmp_path / "weights.pt")
    with Toys("a", "b") as toys:
        for update in ({"table": trained}, tmp_path / "weights.pt"):
            toys.backend.update_weights(update)
            trained.zero_()
            for engine in toys.made[-2:]:
                engine.alive = False
            assert answers(toys) == NEW
            toys.settle()
            assert all(torch.equal(engine.model.table, OTHER) for engine in toys.made[-2:])
            assert answers(toys) == NEW
        assert len(toys.made) == 6


def test_a_death_during_an_update_leaves_no_old_weights() -> None:
    deaths: list[str] = []

    def before(engine: MortalToy, hook: str, request: Any) -> None:
        if hook == "update_weights" and not deaths:
            deaths.append(engine.name)
            engine.die()

    with Toys("a", "b", before=before) as toys:
        toys.backend.update_weights({"table": OTHER})
        assert answers(toys) == NEW
        toys.settle()
        assert answers(toys) == NEW and len(toys.made) == 3


def test_weights_that_no_engine_takes_are_refused_and_the_old_ones_serve() -> None:
    with Toys("a", "b") as toys:
        with pytest.raises(InvalidRequestError, match="the old ones are in force"):
            toys.backend.update_weights({"table": OTHER[:100]})
        assert toys.backend.weight_version == "0" and answers(toys) == OLD
        assert toys.backend.update_weights({"table": OTHER}) == "1"
        assert answers(toys) == NEW and len(toys.made) == 2


def test_an_update_that_fails_everywhere_is_an_error_and_the_old_weights_come_back() -> None:
    def before(engine: MortalToy, hook: str, request: Any) -> None:
        if hook == "update_weights":
            engine.model.table.data.zero_()
            raise RuntimeError("half loaded")

    with Toys("a", "b", before=before) as toys:
        with pytest.raises(EngineError):
            toys.backend.update_weights({"table": OTHER})
        toys.before = lambda *given: None
        assert answers(toys) == OLD
        assert toys.backend.weight_version not in ("0", "")


def test_an_engine_that_did_not_load_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    with Toys("a", "b") as toys:
        # It says that it has loaded them, and has not.
        monkeypatch.setattr(toys.made[1].model, "load_state_dict", lambda state: None)
        expect = corelm_fleet.probe_scores(one_engine(OTHER))
        update = WeightUpdate(version="x", when="drain", state_dict={"table": OTHER}, expect=expect)
        assert toys.fleet.update_weights(update)
        assert answers(toys) == NEW
        toys.settle()
        one, late = (engine.name for engine in toys.made[:2])
        assert [engine.name for engine in toys.made] == [one, late, late] and answers(toys) == NEW


def test_weights_that_no_canary_agrees_with_are_stale() -> None:
    with Toys("a", "b") as toys:
        update = WeightUpdate(
            version="x", when="drain", state_dict={"table": OTHER}, expect=corelm_fleet.probe_scores(one_engine(TABLE))
        )
        with pytest.raises(StaleWeightsError, match="the old ones are in force"):
            toys.fleet.update_weights(update)
        assert answers(toys) == OLD


def test_weights_that_are_changed_where_they_are_do_not_serve() -> None:
    with Toys("a", "b") as toys:
        with torch.no_grad():
            toys.made[0].model.table.copy_(OTHER)
        assert answers(toys) == OLD
    with Toys("a", "b") as toys:
        with torch.no_grad():
            for engine in toys.made:
                engine.model.table.copy_(OTHER)
        assert toys.backend.weights_changed() == "1"
        assert answers(toys) == NEW


def test_callers_during_updates_get_old_or_new_answers() -> None:
    with Toys("a", "b", "c") as toys:
        futures = []
        for number in range(20):
            futures.append(toys.backend.submit_generate(PROMPTS, SAMPLING))
            if number % 5 == 2:
                toys.backend.update_weights({"table": OTHER if number % 10 == 2 else TABLE}, f"v{number}")
            time.sleep(0.005)
        for future in futures:
            found = future.result(20)
            label = set(found.weight_versions or ())
            assert len(label) == 1
            assert found.ids.tolist() == (NEW if label & {"v2", "v12"} else OLD), label


# Some of the parameters -----------------------------------------------------------------------------------------------


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let toy engines take `upper` and `lower`, each half of the table."""

    def update(self: ToyBackend, request: WeightUpdate) -> bool:
        assert request.state_dict is not None
        for name, values in request.state_dict.items():
            self.model.table.data[slice(0, 130) if name == "upper" else slice(130, 260)].copy_(values)
        return True

    monkeypatch.setattr(ToyBackend, "update_weights", update)


def test_an_engine_that_is_started_later_gets_the_parameters_of_all_updates(halves: None) -> None:
    with Toys("a", "b") as toys:
        toys.backend.update_weights({"upper": TABLE[:130] / 2, "lower": OTHER[130:]})
        toys.backend.update_weights({"upper": OTHER[:130]})
        toys.backend.update_weights({"upper": OTHER[:130]})
        for engine in toys.made[:2]:
            engine.alive = False
        assert answers(toys) == NEW
        toys.settle()
        assert all(torch.equal(engine.model.table, OTHER) for engine in toys.made[2:])
        # Those that had the weights before were sent what was handed over, and no more.
        sent = [list(request.state_dict) for hook, request in toys.made[0].asked if hook == "update_weights"]
        assert sent == [["upper", "lower"], ["upper"], ["upper"]]


def test_engines_that_cannot_score_get_the_parameters_of_all_updates(halves: None) -> None:
    with Toys("a", "b", **CANNOT_SCORE) as toys:
        toys.backend.update_weights({"upper": OTHER[:130], "lower": OTHER[130:]})
        toys.backend.update_weights({"lower": OTHER[130:]})
        for engine in toys.made[:2]:
            engine.alive = False
        assert answers(toys) == NEW
        toys.settle()
        assert all(torch.equal(engine.model.table, OTHER) for engine in toys.made[2:])


def test_adapters_are_kept_next_to_the_base_weights(tmp_path: Any) -> None:
    def adapter(name: str, **source: Any) -> WeightUpdate:
        return WeightUpdate(version="", when="drain", adapter=name, **source)

    one, two, again = (adapter(name, path=tmp_path / name) for name in ("one", "two", "one"))
    tensors = [WeightUpdate(version="", when="drain", state_dict={name: torch.zeros(1)}) for name in "ab"]
    folder = WeightUpdate(version="", when="drain", path=tmp_path)
    kept = KeptWeights()

    def after(*updates: WeightUpdate) -> list[Any]:
        for update in updates:
            epoch = next(epochs)
            kept.begin(epoch, epoch - 1, update)
            kept.end(epoch)
        return list(kept.to(epoch, 0))

    epochs = iter(range(1, 20))
    found = after(one, tensors[0], two, tensors[1])
    assert sorted(found[0].state_dict) == ["a", "b"] and found[1:] == [one, two]
    assert after(folder, again) == [folder, two, again]
    gone = adapter("two")
    # An engine that is started later loads it, and then unloads it.
    assert after(gone) == [folder, two, again, gone]


def test_every_field_of_an_update_reaches_the_engines() -> None:
    update = WeightUpdate(
        version="x", when="abort", state_dict={"table": OTHER}, expect=corelm_fleet.probe_scores(one_engine(OTHER))
    )
    # These weights are those that the engines have: the toys do not know adapters.
    adapter = WeightUpdate(
        version="y", when="abort", state_dict={"table": TABLE}, adapter="policy", adapter_config={"r": 4}
    )
    # An update has one source of weights, and a fleet is never given a stream.
    # Each engine counts its own updates.
    carried = {"path", "stream", "number"}
    for whole in (update, adapter):
        with Toys("a", "b", adapters=True) as toys:
            assert toys.fleet.update_weights(whole)
            for engine in toys.made:
                ((_, got),) = [each for each in engine.asked if each[0] == "update_weights"]
                for each in fields(WeightUpdate):
                    given, found = getattr(whole, each.name), getattr(got, each.name)
                    if each.name == "state_dict":
                        assert torch.equal(found["table"], given["table"])
                    elif each.name != "number":
                        assert found == given, each.name
                    if given != each.default:
                        carried.add(each.name)
    assert carried == {each.name for each in fields(WeightUpdate)}, "give the others another value"


def test_engines_of_a_fleet_have_the_same_adapters() -> None:
    made: list[AdapterToy] = []

    def open_it() -> AdapterToy:
        made.append(AdapterToy.of_table())
        return made[-1]

    fleet = FleetEngine([Member("a", open_it), Member("b", open_it)], limits=LIMITS)
    rows = [[one, one + 1, 7] for one in range(8)]
    with Backend.from_plugin(fleet, "toys") as backend:
        assert backend.load_adapter("policy", {"added": ADD}, config=CONFIG) == "1"
        fleet.join(Member("c", open_it))
        assert wait_until(lambda: len(made) == 3 and "policy" in made[2].added, PATIENCE)
        for adapter, added, label in (("policy", ADD, "0+policy@1"), (False, 0.0, "0+none"), (None, 0.0, "0")):
            found = backend.score_logprobs(rows, adapter=adapter)
            for row, scores in zip(rows, found.logprobs.tolist(), strict=True):
                assert scores[1:] == pytest.approx(true_scores(row, added, ADAPTER_TABLE), abs=1e-4)
            assert found.weight_versions == (label,) * 8
        backend.unload_adapter("policy")
        with pytest.raises(InvalidRequestError):
            backend.score_logprobs(rows, adapter="policy")
