"""A replay gives what the engine gave, bit for bit, and refuses what it did not give."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from corelm import Backend, DynamicBatcher, hookimpl
from corelm.batching import Limits
from corelm.errors import CapabilityError, EngineError, InvalidRequestError
from corelm.rendering.encoding import Encoder
from corelm.spec import TokenizeRequest, TokenizeResult, TokenSets
from corelm.tensors.ragged import Ragged
from corelm_testing.cassette import CassetteRecorder, NotRecordedError
from corelm_testing.toy import Bigram, ToyBackend
from helpers.adapter_toys import ADD, CONFIG, AdapterToy
from helpers.cassettes import both, calls_of, recorded, replayed
from helpers.in_flight_toys import InFlight

SEEDED = {"max_new_tokens": 6, "seed": 7}
ROWS = [[65, 66], [67], [68, 69, 70]]


def same(one: Any, other: Any) -> bool:
    """Return whether two results are equal in every bit, dtype and type."""
    if isinstance(one, Ragged):
        bits = [each.values.detach().contiguous().view(torch.uint8) for each in (one, other)]
        return one.values.dtype == other.values.dtype and torch.equal(*bits) and torch.equal(one.lengths, other.lengths)
    if isinstance(one, TokenSets):
        return bool(one.tolist() == other.tolist())
    if hasattr(one, "__dataclass_fields__") and not isinstance(one, type):
        return all(same(getattr(one, each.name), getattr(other, each.name)) for each in fields(one))
    return type(one) is type(other) and bool(one == other)


CALLS = {
    "raw": lambda b: b.generate(ROWS, SEEDED),
    "processed": lambda b: b.generate(ROWS, {**SEEDED, "temperature": 0.7, "top_k": 5}, logprobs="processed"),
    "no-logprobs": lambda b: b.generate(ROWS, SEEDED, logprobs="none"),
    "greedy": lambda b: b.generate(ROWS, {"max_new_tokens": 4, "temperature": 0.0}),
    "kept-sets-and-top-ids": lambda b: b.generate(
        ROWS, {**SEEDED, "top_k": 3}, logprobs="processed", return_support=True, top_logprobs=2
    ),
    "scores": lambda b: b.score_logprobs(ROWS),
    "logits": lambda b: b.score_logprobs(ROWS, return_logits=True, return_argmax=True, temperature=0.5),
    "top-k-of-scores": lambda b: b.score_logprobs(ROWS, top_k=4),
    "given-ids": lambda b: b.score_logprobs(
        ROWS, top_ids=Ragged(torch.tensor([[1, -1], [2, 3], [4, 5], [6, 7], [8, 9], [1, 2]]), torch.tensor([2, 1, 3]))
    ),
    "given-sets": lambda b: b.score_logprobs(ROWS, support=[[[], [66, 67]], [[]], [[], [69], [1, 70]]]),
    "starts": lambda b: b.score_logprobs(ROWS, score_from=[1, 1, 2]),
    "empty": lambda b: b.generate([], SEEDED),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_result_comes_back_bit_for_bit(tmp_path: Path, call: str) -> None:
    one, other = both(tmp_path / "c", CALLS[call])
    assert same(one, other)


def test_infinite_and_odd_floats_come_back(tmp_path: Path) -> None:
    # A smallest denormal, an infinity, and a number whose shortest decimal has nine digits.
    odd = torch.tensor([2.0**-149, -torch.inf, -0.12345679, -0.0])

    class Odd:
        @hookimpl(wrapper=True)
        def score_logprobs(self, request: Any) -> Any:
            result = yield
            result.logits.values[0, :4] = odd
            return result

    with recorded(tmp_path / "c", wrappers=[Odd()]) as backend:
        backend.score_logprobs([[65, 66]], return_logits=True)
    with replayed(tmp_path / "c") as backend:
        found = backend.score_logprobs([[65, 66]], return_logits=True).logits
    assert found is not None
    assert torch.equal(found.values[0, :4].view(torch.int32), odd.view(torch.int32))


def test_a_replay_is_called_like_the_engine_and_needs_no_engine(tmp_path: Path) -> None:
    with recorded(tmp_path / "c") as backend:
        backend.generate(ROWS, SEEDED)
        facts = backend.name, backend.model_name, backend.eos_token_ids, backend.engine.pad_id
        declared = backend.capabilities
    with replayed(tmp_path / "c", tokenizer=None) as backend:
        # No tokenizer either: ids in, ids out.
        batch = backend.generate(ROWS, SEEDED)
        assert facts == (backend.name, backend.model_name, backend.eos_token_ids, backend.engine.pad_id)
        assert backend.provenance(batch).backend == "toy"
        assert "cassette" in backend.engine.software and "core-testing" in backend.engine.software
        assert backend.capabilities.sampling == declared.sampling and not backend.capabilities.gradients
        with pytest.raises(CapabilityError, match="gradients"):
            backend.score_logprobs(ROWS, grad=True)


def test_streamed_tokens_come_back_in_their_order(tmp_path: Path) -> None:
    def run(backend: Backend) -> list[Any]:
        with backend.stream(ROWS, SEEDED) as stream:
            return [(chunk.row, chunk.ids, chunk.logprobs, chunk.finish_reason) for chunk in stream]

    one, other = both(tmp_path / "c", run)
    assert one == other and len(one) > len(ROWS)
    with replayed(tmp_path / "c") as backend:
        # Rows in another order, and one of them twice: each still gets its own tokens.
        seeds = seeds_of(tmp_path / "c")
        with backend.stream([ROWS[2], ROWS[0]], {"max_new_tokens": 6}, seeds=[seeds[2], seeds[0]]) as stream:
            chunks = list(stream)
    for row, source in ((0, 2), (1, 0)):
        found = [token for chunk in chunks if chunk.row == row for token in chunk.ids]
        assert found == [token for at, ids, *_ in one if at == source for token in ids]


def seeds_of(path: Path) -> list[int]:
    return [seed for call in calls_of(path) if "seeds" in call["request"] for seed in call["request"]["seeds"]["data"]]


# What is refused -----------------------------------------------------------------------------------------------------


def test_by_content_neither_order_nor_batches_matter(tmp_path: Path) -> None:
    with recorded(tmp_path / "c") as backend:
        first = backend.generate(ROWS, SEEDED)
        second = backend.score_logprobs([[65, 66, 67], [70, 71]])
    seeds = seeds_of(tmp_path / "c")
    with replayed(tmp_path / "c") as backend:
        scores = backend.score_logprobs([[70, 71]])
        assert scores.logprobs.tolist() == second.logprobs.tolist()[1:]
        for _ in range(2):
            batch = backend.generate([ROWS[2], ROWS[0]], {"max_new_tokens": 6}, seeds=[seeds[2], seeds[0]])
            assert batch.ids.tolist() == [first.ids.tolist()[2], first.ids.tolist()[0]]
            assert batch.logprobs.tolist() == [first.logprobs.tolist()[2], first.logprobs.tolist()[0]]
        with pytest.raises(NotRecordedError, match=r"row 1: sequences \[70, 72\]: no row with these ids") as error:
            backend.score_logprobs([[70, 71], [70, 72]])
        assert error.value.rows == (1,)
        with pytest.raises(NotRecordedError, match=r"call 0 with other seeds: recorded .*match_seeds=False"):
            backend.generate(ROWS, {**SEEDED, "seed": 8})
        with pytest.raises(NotRecordedError, match=r"in call 0 with other sampling: max_new_tokens: recorded 6, got 7"):
            backend.generate(ROWS, {**SEEDED, "max_new_tokens": 7})


def test_without_seeds_answers_come_in_the_recorded_order(tmp_path: Path) -> None:
    with recorded(tmp_path / "c") as backend:
        found = [backend.generate([[65]], {"max_new_tokens": 8, "seed": seed}).ids.tolist() for seed in (1, 2)]
    with replayed(tmp_path / "c", match_seeds=False) as backend:
        assert [backend.generate([[65]], {"max_new_tokens": 8}).ids.tolist() for _ in range(2)] == found
        with pytest.raises(NotRecordedError):
            backend.generate([[65]], {"max_new_tokens": 8})


def test_a_batcher_whose_batches_differ_replays_by_content(tmp_path: Path) -> None:
    rows = [[65 + number % 20, 66 + number % 7] for number in range(24)]

    def run(backend: Backend, workers: int) -> list[Any]:
        limits = Limits(min_batch_size=min(workers, 6), batching_timeout=0.3)
        with DynamicBatcher(backend, limits) as shared, ThreadPoolExecutor(workers) as pool:
            ask = lambda number: shared.generate([rows[number]], {"max_new_tokens": 4, "seed": number})  # noqa: E731
            return [batch.ids.tolist() for batch in pool.map(ask, range(len(rows)))]

    found = run(recorded(tmp_path / "c"), 12)
    assert max(len(call["request"]["prompts"]["rows"]) for call in calls_of(tmp_path / "c")) > 1
    assert run(replayed(tmp_path / "c"), 1) == found
    assert run(replayed(tmp_path / "c"), 24) == found
    # A row that is not recorded fails alone.
    with (
        DynamicBatcher(replayed(tmp_path / "c"), Limits(min_batch_size=2)) as shared,
        ThreadPoolExecutor(2) as pool,
    ):
        good = pool.submit(shared.generate, [rows[0]], {"max_new_tokens": 4, "seed": 0})
        bad = pool.submit(shared.generate, [[99]], {"max_new_tokens": 4, "seed": 0})
        assert good.result(60).ids.tolist() == found[0]
        with pytest.raises(NotRecordedError):
            bad.result(60)


# Faults, weights, adapters -------------------------------------------------------------------------------------------


class OwnError(ValueError):
    """An exception that no replay knows."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


FAULTS = {
    "ours": InvalidRequestError("row 1: odd", field="prompts", problems={1: "odd"}),
    "unusable": EngineError("the engine is gone", usable=False),
    "capability": CapabilityError("not that", capability="top_k"),
    "timeout": TimeoutError("too slow"),
    "builtin": ZeroDivisionError("division"),
    "own": OwnError("this", "that"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_raised_again(tmp_path: Path, fault: str) -> None:
    class Failing:
        @hookimpl(wrapper=True)
        def generate(self, request: Any) -> Any:
            yield
            raise FAULTS[fault]

    def failure(backend: Backend) -> Any:
        with pytest.raises(Exception) as error:  # which one is compared
            backend.generate(ROWS, SEEDED)
        return type(error.value), str(error.value), {**vars(error.value)}

    with recorded(tmp_path / "c", wrappers=[Failing()]) as backend:
        one = failure(backend)
    with replayed(tmp_path / "c") as backend:
        assert failure(backend) == one


def test_a_call_that_failed_after_its_first_tokens_hands_them_over_again(tmp_path: Path) -> None:
    class FailingLate:
        @hookimpl(wrapper=True)
        def generate(self, request: Any) -> Any:
            yield
            raise EngineError("too late")

    def run(backend: Backend) -> list[Any]:
        chunks = []
        with backend.stream(ROWS, SEEDED) as stream, pytest.raises(EngineError, match="too late"):
            chunks.extend((chunk.row, chunk.ids) for chunk in stream)
        return chunks

    with recorded(tmp_path / "c", wrappers=[FailingLate()]) as backend:
        one = run(backend)
    assert one
    with replayed(tmp_path / "c") as backend:
        assert run(backend) == one


def test_a_row_that_failed_alone_fails_alone_again(tmp_path: Path) -> None:
    class Spoilt:
        @hookimpl(wrapper=True)
        def generate(self, request: Any) -> Any:
            result = yield
            reasons = ("error", *result.finish_reasons[1:])
            return replace(result, finish_reasons=reasons, errors=("boom", *[""] * (len(reasons) - 1)))

    with recorded(tmp_path / "c", wrappers=[Spoilt()]) as backend:
        one = backend.generate(ROWS, SEEDED, on_error="skip")
    with replayed(tmp_path / "c") as backend:
        other = backend.generate(ROWS, SEEDED, on_error="skip")
    assert one.errors == other.errors and one.finish_reasons == other.finish_reasons


def test_a_text_is_tokenized_as_recorded_whatever_the_weights(tmp_path: Path) -> None:
    class Tokenizing(ToyBackend):
        @hookimpl
        def tokenize(self, request: TokenizeRequest) -> TokenizeResult:
            return Encoder(self.tokenizer)(request)

    with Backend.from_plugin(Tokenizing.open(), "toy", wrappers=[CassetteRecorder(tmp_path / "c")]) as backend:
        backend.update_weights(Bigram.of_talk().state_dict())
        ids = backend.tokenize("Hi").ids.tolist()
    # The tokenizer can be neither saved nor loaded, so all that is known of the text is in the cassette.
    with replayed(tmp_path / "c", tokenizer=None) as backend:
        assert backend.tokenize("Hi").ids.tolist() == ids


def test_weights_are_told_apart(tmp_path: Path) -> None:
    new = Bigram(torch.randn(260, 260, generator=torch.Generator().manual_seed(1))).state_dict()
    other = {name: value + 1e-7 for name, value in new.items()}

    def run(backend: Backend, state: Any) -> list[Any]:
        found = [backend.generate(ROWS, SEEDED)]
        assert backend.update_weights(state) == "1"
        found.append(backend.generate(ROWS, SEEDED))
        return [(b.ids.tolist(), b.logprobs.tolist(), b.weight_versions) for b in found]

    with recorded(tmp_path / "c") as backend:
        one = run(backend, new)
    assert one[0][0] != one[1][0] and [each[2][0] for each in one] == ["0", "1"]
    with replayed(tmp_path / "c") as backend:
        assert run(backend, new) == one
    with replayed(tmp_path / "c") as backend, pytest.raises(NotRecordedError, match="other weights than the recorded"):
        run(backend, other)
    with replayed(tmp_path / "c") as backend:
        # Without the update, the first answers are the only ones.
        assert [backend.generate(ROWS, SEEDED).ids.tolist() for _ in range(3)] == [one[0][0]] * 3


def test_adapters_are_told_apart_and_carry_their_names(tmp_path: Path) -> None:
    def run(backend: Backend) -> list[Any]:
        backend.load_adapter("policy", {"added": ADD}, config=CONFIG)
        calls = [backend.score_logprobs(ROWS, adapter=adapter) for adapter in (None, "policy", False)]
        return [(each.logprobs.tolist(), each.weight_versions, each.adapter) for each in calls]

    with Backend.from_plugin(AdapterToy.of_table(), "toy", wrappers=[CassetteRecorder(tmp_path / "c")]) as backend:
        one = run(backend)
    assert one[0][0] != one[1][0]
    with replayed(tmp_path / "c") as backend:
        assert run(backend) == one
    with replayed(tmp_path / "c") as backend, pytest.raises(NotRecordedError):
        backend.load_adapter("policy", {"added": ADD + 1}, config=CONFIG)


# New episodes --------------------------------------------------------------------------------------------------------


def test_new_episodes_ask_the_engine_for_what_is_missing_alone(tmp_path: Path) -> None:
    asked: list[int] = []

    class Counted(ToyBackend):
        @hookimpl
        def generate(self, request: Any) -> Any:
            asked.append(len(request.prompts))
            return ToyBackend.generate(self, request)

    def session(rows: list[list[int]]) -> list[Any]:
        engine = Counted.open()
        recorder = CassetteRecorder(tmp_path / "c", record_mode="new_episodes")
        with Backend.from_plugin(engine, "toy", wrappers=[recorder]) as backend:
            return [backend.generate([row], {"max_new_tokens": 5, "seed": 1}).ids.tolist() for row in rows]

    first = session(ROWS[:2])
    assert asked == [1, 1]
    assert session(ROWS)[:2] == first and asked == [1, 1, 1]
    with replayed(tmp_path / "c") as backend:
        for row in ROWS:
            backend.generate([row], {"max_new_tokens": 5, "seed": 1})


def test_two_threads_record_at_once(tmp_path: Path) -> None:
    with recorded(tmp_path / "c") as backend:
        ready = threading.Barrier(4)

        def ask(number: int) -> list[Any]:
            ready.wait(60)
            return [
                backend.generate([[number + 65]], {"max_new_tokens": 3, "seed": seed}).ids.tolist() for seed in range(8)
            ]

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(ask, range(4)))
    with replayed(tmp_path / "c") as backend:
        for number in reversed(range(4)):
            again = [
                backend.generate([[number + 65]], {"max_new_tokens": 3, "seed": seed}).ids.tolist() for seed in range(8)
            ]
            assert again == found[number]


# Other rows than the recorded ones, and calls that were interrupted or saw new weights --------------------------------


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
