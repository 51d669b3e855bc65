"""One bad request fails alone: the rest of its batch is served, and later ones are untouched."""

from __future__ import annotations

import pytest

from corelm.backend.seeds import answer_seeds
from corelm.errors import BackendTimeoutError, CapabilityError, EngineError, InvalidRequestError
from helpers.batching_fakes import LONG, POISON, SEEDED, Held, answer, batcher, hold_one, ids, rows_of
from helpers.fakes import SHORT


def test_bad_input_is_refused_before_it_is_queued():
    engine = Held(permits=0)
    with batcher(engine) as made:
        for sampling, prompts in ((SHORT, [[99]]), (SHORT, [[]]), (SHORT, [[1] * 12]), ({"top_p": 7}, [[1]])):
            with pytest.raises(InvalidRequestError):
                made.submit_generate(prompts, sampling)
        with pytest.raises(CapabilityError):
            made.submit_generate([[1]], {"top_k": 3})
        assert made.state().queued == 0 and not engine.calls


def test_what_fails_in_the_engine_fails_alone_and_the_rest_is_served():
    engine = Held(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        futures = [made.submit_generate([[POISON if n == 5 else n + 3]], SEEDED) for n in range(9)]
        engine.free()
        for n, future in enumerate(futures):
            if n == 5:
                error = future.exception(LONG)
                assert isinstance(error, EngineError) and "poisoned" in str(error) and error.__cause__ is engine.error
            else:
                assert ids(future) == [answer([n + 3], int(answer_seeds(7, [0])), 2, 1.0)]
        assert ids(made.generate([[5]], SEEDED)), "later calls are untouched"
    # One call for all, then halves: 9 -> 4 + 5 -> 2 + 3 -> 1 + 2.
    assert [len(call.prompts) for call in engine.calls[1:-1]] == [9, 4, 5, 2, 1, 1, 3] or len(engine.calls) < 10


def test_skipped_rows_are_put_back_and_failures_of_single_rows_are_their_requests_own():
    class Rowwise(Held):
        def generate(self, request):  # type: ignore[override]
            batch = super().generate(request)
            bad = [row[0] == 14 for row in request.prompts.tolist()]
            return type(batch)(
                ids=batch.ids,
                logprobs=batch.logprobs,
                finish_reasons=tuple("error" if b else r for b, r in zip(bad, batch.finish_reasons, strict=True)),
                errors=tuple("no fourteen" if b else "" for b in bad),
            )

    Rowwise.generate.corelm_impl = Held.generate.corelm_impl  # type: ignore[attr-defined]
    engine = Rowwise(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        fine = made.submit_generate([[5]], SEEDED)
        strict = made.submit_generate([[4], [14]], SEEDED)
        lenient = made.submit_generate([[99], [14], [4]], SEEDED, on_error="skip")
        engine.free()
        assert ids(fine) and fine.result().finish_reasons == ("length",)
        error = strict.exception(LONG)
        assert isinstance(error, EngineError) and error.problems == {1: "no fourteen"}
        batch = lenient.result(LONG)
        assert batch.finish_reasons == ("error", "error", "length") and batch.ids.lengths.tolist() == [0, 2, 2]
        assert "outside the vocabulary" in batch.errors[0] and batch.errors[1:] == ("no fourteen", "")
    assert len(engine.calls) == 2


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (EngineError("gone", usable=False), 1),
        (BackendTimeoutError("slow"), 1),
        (CapabilityError("cannot"), 1),
        (EngineError("who knows"), 2 * 8 - 1),
    ],
)
def test_an_error_that_is_everybodys_is_not_asked_for_again(error, calls):
    engine = Held(permits=0, error=error)
    with batcher(engine) as made:
        hold_one(engine, made)
        futures = [made.submit_generate([[POISON]], SEEDED) for _ in range(8)]
        engine.free()
        raised = [future.exception(LONG) for future in futures]
        assert all(type(each) is type(error) and str(error) in str(each) for each in raised)
        assert len({id(each) for each in raised}) == 8, "each caller has one of its own to raise"
    assert len(engine.calls) == 1 + calls


def test_an_engine_that_is_not_healthy_any_more_is_not_asked_again():
    engine = Held(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        futures = [made.submit_generate([[POISON]], SEEDED) for _ in range(8)]
        engine.alive = False
        engine.free()
        assert all(isinstance(future.exception(LONG), EngineError) for future in futures)
    assert len(engine.calls) == 2


def test_who_left_meanwhile_is_not_asked_for_again():
    engine = Held(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        poisoned, gone, kept = (made.submit_generate([[n]], SEEDED) for n in (POISON, 4, 5))
        engine.release()
        engine.wait_for_calls(2)
        assert gone.cancel()
        engine.free()
        assert isinstance(poisoned.exception(LONG), EngineError) and ids(kept)
    assert [rows_of(call) for call in engine.calls[2:]] == [[[POISON]], [[5]]]


def test_an_engine_that_dies_in_the_middle_fails_the_rest():
    class Dying(Held):
        def _pass(self, request):
            try:
                return super()._pass(request)
            except RuntimeError:
                if len(rows_of(request)) == 1:
                    raise EngineError("the process is gone", usable=False) from None
                raise

    engine = Dying(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        futures = [made.submit_generate([[n]], SEEDED) for n in (POISON, 4, 5, 6)]
        engine.free()
        assert all("gone" in str(future.exception(LONG)) for future in futures)
    assert [len(call.prompts) for call in engine.calls] == [1, 4, 2, 1]


def test_an_answer_for_fewer_rows_than_asked_is_refused_whoever_asked():
    class Short(Held):
        def generate(self, request):  # type: ignore[override]
            batch = super().generate(request)
            return type(batch)(ids=batch.ids.select([0]), logprobs=batch.logprobs.select([0]), finish_reasons=("stop",))

    Short.generate.corelm_impl = Held.generate.corelm_impl  # type: ignore[attr-defined]
    engine = Short(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        one, two = (made.submit_generate([[n]], SEEDED) for n in (4, 5))
        pair = made.submit_generate([[6], [7]], SEEDED)
        engine.free()
        assert ids(one) == [answer([4], int(answer_seeds(7, [0])), 2, 1.0)]
        assert ids(two) == [answer([5], int(answer_seeds(7, [0])), 2, 1.0)]
        assert "1 rows for 2 answers" in str(pair.exception(LONG))


def test_requests_that_name_their_rows_alike_do_not_share():
    engine = Held(permits=0)
    with batcher(engine) as made:
        hold_one(engine, made)
        futures = [made.submit_generate([[n]], SEEDED, request_ids=["mine"]) for n in (4, 5)]
        engine.free()
        assert [ids(future)[0] for future in futures] == [
            answer([n], int(answer_seeds(7, [0])), 2, 1.0) for n in (4, 5)
        ]
