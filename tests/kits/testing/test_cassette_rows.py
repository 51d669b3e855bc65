"""Replays whose calls have other rows than the recorded ones, and recorded calls that were interrupted or saw new
weights.
"""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from corelm import Backend, DynamicBatcher, hookimpl
from corelm.batching import Limits
from corelm.errors import EngineError
from corelm_testing.cassette import CassetteRecorder, NotRecordedError
from corelm_testing.toy import Bigram
from helpers.cassettes import calls_of, recorded, replayed
from helpers.in_flight_toys import InFlight


def seeds_of(path: Path) -> list[int]:
    return [seed for call in calls_of(path) for seed in call["request"]["seeds"]["data"]]


def test_equal_rows_keep_their_own_answers(tmp_path: Path) -> None:
    sampling = {"max_new_tokens": 8, "num_samples": 3}
    with recorded(tmp_path / "c") as backend:
        found = backend.generate([[65], [65]], {**sampling, "seed": 1}).ids.tolist()
    assert found[:3] != found[3:]
    with replayed(tmp_path / "c") as backend:
        assert backend.generate([[65], [65]], {**sampling, "seed": 1}).ids.tolist() == found
    with replayed(tmp_path / "c", match_seeds=False) as backend:
        assert [backend.generate([[65]], sampling).ids.tolist() for _ in range(2)] == [found[:3], found[3:]]
    with replayed(tmp_path / "c", match_seeds=False) as backend:
        # A third sample was not drawn, and none of the others stands for it.
        with pytest.raises(NotRecordedError) as error:
            backend.generate([[65]] * 3, sampling)
        assert list(error.value.problems) == [2]


class NotTogether:
    """Fails every call of several rows."""

    @hookimpl(wrapper=True)
    def generate(self, request: Any) -> Any:
        result = yield
        if len(request.prompts) > 1:
            raise EngineError("not together", usable=True)
        return result


def test_a_shared_call_that_failed_does_not_hide_what_its_rows_got(tmp_path: Path) -> None:
    def ask(backend: Backend, number: int) -> Any:
        return backend.submit_generate([[65 + number]], {"max_new_tokens": 3, "seed": number})

    def together(backend: Backend) -> list[list[list[int]]]:
        limits = Limits(min_batch_size=2, batching_timeout=60.0)
        with DynamicBatcher(backend, limits) as shared:
            # One thread asks, so that the rows of the shared call have the same order in every run.
            futures = [ask(shared, number) for number in range(2)]
            return [future.result().ids.tolist() for future in futures]

    found = together(recorded(tmp_path / "c", wrappers=[NotTogether()]))
    assert sorted("error" in call for call in calls_of(tmp_path / "c")) == [False, False, True]
    # A run with other batches gets the answers, and one with the same batches the same failure first.
    with replayed(tmp_path / "c") as backend:
        assert [ask(backend, number).result().ids.tolist() for number in range(2)] == found
    assert together(replayed(tmp_path / "c")) == found
    with replayed(tmp_path / "c") as backend, pytest.raises(EngineError, match="not together"):
        backend.generate([[65], [66]], {"max_new_tokens": 3}, seeds=seeds_of(tmp_path / "c")[:2])


class UpdatedInTheMiddle(InFlight):
    """Samples its fourth token after an update, at the latest."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.updated = threading.Event()

    def _distributions(self, logits: Any, prompt: list[int], answer: list[int], request: Any) -> Any:
        if len(answer) == 3:
            assert self.updated.wait(60)
        return super()._distributions(logits, prompt, answer, request)

    @hookimpl
    def update_weights(self, request: Any) -> bool:
        done = super().update_weights(request)
        self.updated.set()
        return done


def test_an_answer_that_saw_new_weights_says_so_again(tmp_path: Path) -> None:
    new = Bigram(torch.randn(260, 260, generator=torch.Generator().manual_seed(1))).state_dict()

    def run(backend: Backend) -> list[Any]:
        with backend.stream([[65], [66]], {"max_new_tokens": 6, "seed": 1, "ignore_eos": True}) as stream:
            next(stream)
            backend.update_weights(new, when="now")
            list(stream)
            first = stream.result
        then = backend.generate([[65]], {"max_new_tokens": 3, "seed": 1})
        return [(each.ids.tolist(), each.weight_versions, each.version_runs) for each in (first, then)]

    with Backend.from_plugin(UpdatedInTheMiddle.open(), "toy", wrappers=[CassetteRecorder(tmp_path / "c")]) as backend:
        one = run(backend)
    changed, after = one[0][2]
    assert [version for version, _ in changed] == ["0", "1"] and after == (("1", 0),) and one[1][1] == ("1",)
    with replayed(tmp_path / "c") as backend:
        assert run(backend) == one


def test_an_interrupted_call_leaves_nothing_behind(tmp_path: Path) -> None:
    class Interrupted:
        on = False

        @hookimpl(wrapper=True)
        def generate(self, request: Any) -> Any:
            result = yield
            if self.on:
                raise KeyboardInterrupt
            return result

    def ask(backend: Backend, first: int) -> None:
        backend.generate([[first]], {"max_new_tokens": 2, "seed": 1})

    with recorded(tmp_path / "c") as backend:
        ask(backend, 65)
    inside = Interrupted()
    with recorded(tmp_path / "c", mode="new_episodes", wrappers=[inside]) as backend:
        inside.on = True
        # The first is answered from the cassette, the other by the engine.
        for first in (65, 66):
            with pytest.raises(KeyboardInterrupt):
                ask(backend, first)
        inside.on = False
        for first in (65, 66, 67):
            ask(backend, first)
    assert [call["request"]["prompts"]["rows"] for call in calls_of(tmp_path / "c")] == [[[65]], [[66]], [[67]]]
