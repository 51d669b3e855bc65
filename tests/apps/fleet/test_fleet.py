"""A fleet answers as one engine does, also when engines die."""

from __future__ import annotations

import threading
import time
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from apps.fleet.conftest import EXPECTED, ONE, PROMPTS, SAMPLING, assert_same
from corelm import Capabilities, DynamicBatcher, Ragged
from corelm.errors import (
    CapabilityError,
    EngineError,
    InvalidRequestError,
)
from corelm.spec import BackendSpec
from corelm_fleet.agreement import capabilities_of_all
from corelm_fleet.fleet import FleetEngine
from corelm_fleet.records import FleetLimits
from corelm_fleet.routing import Group, Loads
from corelm_fleet.tokenizer import FleetTokenizer
from helpers.insides import rows_wait
from helpers.mortal_toys import OTHER, TABLE, MortalToy, Toys, user_rows
from helpers.processes import PATIENCE, wait_until

# The same answers -----------------------------------------------------------------------------------------------------


def test_answers_and_scores_are_those_of_one_engine() -> None:
    with Toys("a", "b", "c") as toys:
        assert_same(toys.backend.generate(PROMPTS, SAMPLING))
        options: dict[str, Any] = {"return_logits": True, "return_argmax": True, "temperature": 0.5}
        rows, starts = [[1, 2, 3], [4], [5, 6], *PROMPTS], [2, 1, 1, *[1] * len(PROMPTS)]
        found = toys.backend.score_logprobs(rows, score_from=starts, **options)
        expected = ONE.score_logprobs(rows, score_from=starts, **options)
        for name in ("logprobs", "scored", "argmax", "logits"):
            assert torch.equal(getattr(found, name).values, getattr(expected, name).values), name
        served = [[request for hook, request in each.asked if user_rows(request)] for each in toys.made]
        assert all(served), "every replica works"
        assert all(replica.closed == 0 for replica in toys.made)
    assert [replica.closed for replica in toys.made] == [1, 1, 1]


def test_engines_that_take_one_call_at_a_time_get_one() -> None:
    inside: dict[str, int] = {}

    def before(engine: MortalToy, hook: str, request: Any) -> None:
        inside[engine.name] = inside.get(engine.name, 0) + 1
        assert inside[engine.name] == 1, "two calls at once"
        time.sleep(0.005)
        inside[engine.name] -= 1

    with Toys("a", "b", before=before, concurrent_calls=False) as toys:
        futures = [toys.backend.submit_generate(PROMPTS, SAMPLING) for _ in range(8)]
        for future in futures:
            assert_same(future.result(20))
        assert set(toys.states().values()) == {"healthy"}


def test_a_batcher_in_front_shares_calls() -> None:
    with Toys("a", "b") as toys, DynamicBatcher(toys.backend) as batcher:
        futures = [batcher.submit_generate([prompt], SAMPLING) for prompt in PROMPTS]
        for prompt, future in zip(PROMPTS, futures, strict=True):
            assert future.result(20).ids.tolist() == ONE.generate([prompt], SAMPLING).ids.tolist()


def test_the_tokenizer_is_that_of_an_engine() -> None:
    with Toys("a", "b") as toys:
        assert toys.backend.tokenize(["Hi"]).ids.tolist() == ONE.tokenize(["Hi"]).ids.tolist()
        assert toys.backend.tokenizer.decode([72, 105]) == "Hi" and len(toys.backend.tokenizer) == 260
        toys.backend.tokenizer.chat_template = "x"
        toys.fleet.join(toys.member("c"))
        toys.settle()
        assert [engine.tokenizer.chat_template for engine in toys.made] == ["x"] * 3
    # Answers can be read after the fleet was closed.
    assert toys.backend.tokenizer.decode([72, 105]) == "Hi"


def test_a_tokenizer_that_is_lost_with_its_engine_is_replaced() -> None:
    class Lost:
        def decode(self, ids: list[int]) -> str:
            raise EngineError("its process has ended", usable=False)

    class Kept:
        def decode(self, ids: list[int]) -> str:
            return chr(ids[0])

    tokenizer = FleetTokenizer(lambda: [], lambda: [Lost(), Kept()])
    assert tokenizer.decode([72]) == "H"
    with pytest.raises(AttributeError):
        tokenizer.nothing  # noqa: B018
    with pytest.raises(EngineError):
        FleetTokenizer(lambda: [], lambda: [Lost()]).decode([72])


def test_texts_wait_for_an_engine_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    may_open, make = threading.Event(), MortalToy.make

    def make_late(*given: Any, **can: Any) -> MortalToy:
        assert may_open.wait(PATIENCE)
        return make(*given, **can)

    with Toys("a", "b") as toys:
        monkeypatch.setattr(MortalToy, "make", make_late)
        for engine in toys.made:
            engine.alive = False
        for engine in list(toys.made):
            toys.await_state(engine.name, "restarting")
        threading.Timer(0.1, may_open.set).start()
        assert toys.backend.tokenizer.decode([72, 105]) == "Hi"
        assert toys.backend.tokenize(["Hi"]).ids.tolist() == ONE.tokenize(["Hi"]).ids.tolist()


# Deaths ---------------------------------------------------------------------------------------------------------------


def test_a_death_changes_no_answer() -> None:
    deaths = []

    def before(engine: MortalToy, hook: str, request: Any) -> None:
        if hook == "generate" and user_rows(request) and not deaths:
            deaths.append(engine.name)
            engine.die()

    with Toys("a", "b", before=before) as toys:
        assert_same(toys.backend.generate(PROMPTS, SAMPLING))
        assert len(deaths) == 1
        toys.settle()
        assert [each.starts for each in toys.fleet.status() if each.name in deaths] == [2]
        assert len(toys.made) == 3 and toys.made[0].closed + toys.made[1].closed == 1
        assert_same(toys.backend.generate(PROMPTS, SAMPLING))


def test_a_call_that_fails_while_the_engine_lives_is_repeated() -> None:
    failures = []

    def before(engine: MortalToy, hook: str, request: Any) -> None:
        if hook == "score_logprobs" and user_rows(request) and not failures:
            failures.append(engine.name)
            raise ValueError("out of memory")

    with Toys("a", "b", before=before) as toys:
        found = toys.backend.score_logprobs(PROMPTS)
        assert torch.equal(found.logprobs.values, ONE.score_logprobs(PROMPTS).logprobs.values)
        assert len(failures) == 1 and set(toys.states().values()) == {"healthy"}


def test_a_poison_row_fails_alone() -> None:
    def before(engine: MortalToy, hook: str, request: Any) -> None:
        if hook == "generate" and PROMPTS[7] in request.prompts.tolist():
            engine.die("poisoned")

    with Toys("a", "b", "c", before=before) as toys:
        found = toys.backend.generate(PROMPTS, SAMPLING, on_error="skip")
        assert found.errors is not None
        assert [row for row, error in enumerate(found.errors) if error] == [7]
        assert found.finish_reasons[7] == "error" and "2 replicas were lost" in found.errors[7]
        for row, ids in enumerate(EXPECTED.ids.tolist()):
            assert found.ids.tolist()[row] == ([] if row == 7 else ids)
        assert len(toys.made) <= 3 + 2
        with pytest.raises(EngineError) as failure:
            toys.backend.generate(PROMPTS, SAMPLING)
        assert failure.value.rows == (7,) and "poisoned" in str(failure.value)


def test_all_dead_is_an_error_in_bounded_time() -> None:
    def before(engine: MortalToy, hook: str, request: Any) -> None:
        if hook == "generate" and user_rows(request):
            engine.alive = False

    limits = FleetLimits(deaths=50, backoff=0.01, longest_backoff=0.02, restarts=0)
    with Toys("a", "b", before=before, limits=limits) as toys:
        with pytest.raises(EngineError, match="no replica is left") as failure:
            toys.backend.generate(PROMPTS, SAMPLING, timeout=60)
        assert failure.value.usable is False
        assert not toys.backend.health() and set(toys.states().values()) == {"gone"}
        with pytest.raises(EngineError):
            toys.backend.score_logprobs(PROMPTS)


def test_rows_that_fail_with_their_replica_are_sent_again() -> None:
    """Some engines report each row of a call that a dying server did not answer."""
    deaths: list[str] = []

    def spoil(engine: MortalToy, result: Any) -> Any:
        if deaths or len(result.ids) < 4:
            return result
        deaths.append(engine.name)
        engine.alive = False
        good = len(result.ids) - 2
        keep = Ragged.from_list([*result.ids.tolist()[:good], [], []])
        return replace(
            result,
            ids=keep,
            logprobs=Ragged.from_list([*result.logprobs.tolist()[:good], [], []], torch.float32),
            finish_reasons=(*result.finish_reasons[:good], "error", "error"),
            errors=("",) * good + ("connection lost",) * 2,
        )

    with Toys("a", "b") as toys:
        for engine in toys.made:
            engine.after = spoil
        assert_same(toys.backend.generate(PROMPTS, SAMPLING))
        assert len(deaths) == 1


# Requests that are refused --------------------------------------------------------------------------------------------


def test_a_refusal_is_the_callers_and_names_his_rows() -> None:
    kind: list[type[Exception]] = [InvalidRequestError]

    def before(engine: MortalToy, hook: str, request: Any) -> None:
        if hook == "generate" and PROMPTS[11] in request.prompts.tolist():
            at = request.prompts.tolist().index(PROMPTS[11])
            if kind[0] is InvalidRequestError:
                raise InvalidRequestError(f"row {at}: odd", field="prompts", problems={at: "odd"})
            raise CapabilityError("not so", capability="prompts")

    with Toys("a", "b", before=before) as toys:
        with pytest.raises(InvalidRequestError) as refusal:
            toys.backend.generate(PROMPTS, SAMPLING)
        assert refusal.value.problems == {11: "odd"} and "row 11: odd" in str(refusal.value)
        kind[0] = CapabilityError
        with pytest.raises(CapabilityError) as lack:
            toys.backend.generate(PROMPTS, SAMPLING)
        assert lack.value.capability == "prompts"
        assert len(toys.made) == 2 and set(toys.states().values()) == {"healthy"}
        assert_same(toys.backend.generate(PROMPTS[:11], SAMPLING), ONE.generate(PROMPTS[:11], SAMPLING))


class Stubborn:
    """A policy of a user that sends short prompts to one engine, whether it takes rows or not."""

    def choose(self, group: Group, loads: Loads) -> str | None:
        assert loads.takers == {*loads} and loads["another"] == 0.0
        return "third" if group.prompt == 1 else loads.least()


def test_a_policy_that_chooses_an_engine_that_takes_no_rows_fails_the_call_that_it_was_asked_for() -> None:
    go_on, inside = threading.Event(), threading.Event()

    def before(engine: MortalToy, hook: str, request: Any) -> None:
        if hook == "generate" and user_rows(request):
            inside.set()
            assert go_on.wait(PATIENCE)

    why = r"policy: it chose 'third', which takes no rows now; .*a.* do"
    with Toys("a", before=before, policy=Stubborn(), concurrent_calls=False) as toys:
        first = toys.backend.submit_generate(PROMPTS, SAMPLING)
        assert inside.wait(PATIENCE)
        second = toys.backend.submit_generate([[72]], SAMPLING)
        assert wait_until(lambda: rows_wait(toys.backend))
        go_on.set()
        assert_same(first.result(20))
        with pytest.raises(InvalidRequestError, match=why):
            second.result(20)
        toys.fleet.join(toys.member("third"))
        toys.settle()
        assert len(toys.backend.generate([[72]], SAMPLING).ids) == 1
        toys.fleet.drain("third")
        with pytest.raises(InvalidRequestError, match=why):
            toys.backend.generate([[72]], SAMPLING)


# What is carried ------------------------------------------------------------------------------------------------------


def test_every_hook_is_carried_or_has_a_reason_not_to_be() -> None:
    # Why a fleet does not carry these is said at FleetEngine.
    elsewhere = {"to_containers", "weights_state"}
    hooks = {name for name, value in vars(BackendSpec).items() if hasattr(value, "corelm_spec")}
    carried = {name for name, value in vars(FleetEngine).items() if hasattr(value, "corelm_impl")}
    assert carried | elsewhere == hooks and not carried & elsewhere


def test_capabilities_are_the_intersection() -> None:
    flags = [each.name for each in fields(Capabilities) if isinstance(each.default, bool)]
    everything = Capabilities(vocab_size=9, max_context=8, **dict.fromkeys(flags, True))
    for name in flags:
        without = dict.fromkeys(flags, True) | {name: False}
        if name == "score":
            of_scores = ("score_temperature", "logits", "argmax", "gradients", "score_support", "score_top_ids")
            without |= dict.fromkeys(of_scores, False)
        if name == "update_weights":
            without |= dict.fromkeys(("without_weights", "weight_stream", "updates_in_flight"), False)
        if name == "per_answer_seeds":
            without["seeds_are_costly"] = False
        less = Capabilities(vocab_size=9, max_context=4, **without)
        common = capabilities_of_all([everything, less])
        if name == "concurrent_calls":
            assert common.concurrent_calls
        elif name in ("seeds_are_costly", "without_weights"):
            # It holds for all if it holds for one.
            assert getattr(common, name)
        else:
            assert not getattr(common, name), name
        assert common.max_context == 4
    alone = capabilities_of_all([everything])
    lost = {name for name in flags if not getattr(alone, name)}
    # Threads of the fleet record no gradients, and an engine that is opened later has to load the same weights again.
    assert lost == {"gradients", "weight_stream", "updates_in_flight"}


def test_engines_that_differ_are_refused_with_both_names() -> None:
    with pytest.raises(InvalidRequestError, match=r"hold the same weights.*(one|two).*(one|two)"):
        Toys("one", "two", tables={"two": OTHER})
    with pytest.raises(InvalidRequestError, match=r"differ in the size of the vocabulary: one has 260, two has 200"):
        Toys("one", "two", tables={"two": TABLE[:200, :200]})
