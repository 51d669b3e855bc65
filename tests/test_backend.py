"""The façade: what is refused before the engine sees it, what is refused of what it returns, and what is never lost."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tenacity
import torch

import corelm
from corelm import Backend, Ragged, SamplingParams, hookimpl
from corelm.errors import (
    BackendClosedError,
    BackendIncompatibleError,
    BackendTimeoutError,
    CapabilityError,
    EngineError,
    InvalidRequestError,
)
from fakes import CONTEXT, EOS, VOCAB, Fake

SHORT = {"max_new_tokens": 2}


def fake(*args, **capabilities) -> Backend:
    return Backend(Fake(*args, **capabilities), "fake")


def sent(backend: Backend) -> list:
    return backend._engine.requests


# Before the engine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "rows", "says"),
    [
        ([[1], [VOCAB]], (1,), f"row 1: id {VOCAB} at position 0 is outside the vocabulary of {VOCAB}"),
        ([[1, -1], [1]], (0,), "row 0: id -1 at position 1"),
        ([[], [1], []], (0, 2), "row 0: has no tokens"),
        ([[1] * (CONTEXT - 1), [1]], (0,), "row 0: 11 tokens + 2 new do not fit the context of 12"),
        ([[1], ["x"]], (1,), "row 1: expected a list of token ids"),
        ([[1], [1.5]], (1,), "row 1: expected a list of token ids"),
        ([[1], [True]], (1,), "row 1: expected a list of token ids"),
        ([[1], 3], (1,), "row 1: expected a list of token ids"),
        ([[99], [], [1], [-5]], (0, 1, 3), "row 3"),
    ],
)
def test_bad_prompts_are_all_found_before_anything_runs(prompts, rows, says):
    backend = fake()
    with pytest.raises(InvalidRequestError, match="prompts") as error:
        backend.generate(prompts, SHORT)
    assert error.value.rows == rows and error.value.field == "prompts"
    assert says in str(error.value)
    assert sent(backend) == []


def test_ids_too_large_for_int64_are_refused_and_not_wrapped():
    with pytest.raises(InvalidRequestError, match="int64"):
        fake().generate([[2**70]], SHORT)


@pytest.mark.parametrize(
    "ids", [torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)]
)
def test_a_tensor_of_another_kind_is_refused(ids):
    with pytest.raises(InvalidRequestError, match="prompts"):
        fake().generate(ids, SHORT)


def test_a_message_spells_out_a_few_rows_and_the_error_holds_all():
    with pytest.raises(InvalidRequestError, match="and 95 more rows") as error:
        fake().generate([[]] * 100, SHORT)
    assert error.value.rows == tuple(range(100))


@pytest.mark.parametrize(
    "prompts", [[[1, 3], [4]], [torch.tensor([1, 3]), torch.tensor([4])], Ragged.from_list([[1, 3], [4]])]
)
def test_lists_tensors_and_ragged_are_the_same_prompts(prompts):
    out = fake().generate(prompts, SHORT)
    assert out.ids.tolist() == [[3, 3], [4, 4]]


def test_a_context_may_be_filled_to_the_last_token_but_not_over():
    backend = fake()
    assert len(backend.generate([[1] * (CONTEXT - 2)], SHORT).ids) == 1
    assert len(backend.generate([[1] * (CONTEXT - 1)], {"max_new_tokens": None}).ids) == 1
    with pytest.raises(InvalidRequestError, match="12 tokens"):
        backend.generate([[1] * CONTEXT], {"max_new_tokens": None})
    # A scored row may be exactly as long as the context.
    assert len(backend.score_logprobs([[1] * CONTEXT]).logprobs) == 1
    with pytest.raises(InvalidRequestError, match="13 tokens"):
        backend.score_logprobs([[1] * (CONTEXT + 1)])


def test_a_parameter_the_engine_does_not_honour_is_refused():
    with pytest.raises(CapabilityError, match=r"does not honour top_k=3; it honours: stop, temperature") as error:
        fake().generate([[1]], {"top_k": 3, **SHORT})
    assert error.value.capability == "top_k"
    with pytest.raises(InvalidRequestError, match=r"takes 0.0 to 2.0, got 2.5"):
        fake().generate([[1]], {"temperature": 2.5, **SHORT}, logprobs="none")
    with pytest.raises(InvalidRequestError, match="stop_token_ids: 99"):
        fake().generate([[1]], {"stop_token_ids": [99], **SHORT})
    with pytest.raises(CapabilityError, match="lacks per_answer_seeds"):
        fake(per_answer_seeds=False).generate([[1]], {"seed": 1, **SHORT})
    assert fake(per_answer_seeds=False).generate([[1]], SHORT).ids.tolist() == [[1, 1]]


def test_log_probs_are_converted_only_where_that_is_exact():
    backend = fake()
    assert backend.generate([[1]], SHORT, logprobs="processed").mode == "processed"
    for other in ({"temperature": 0.5}, {"temperature": 0}):
        with pytest.raises(CapabilityError, match="returns no processed log-probs"):
            backend.generate([[1]], {**SHORT, **other}, logprobs="processed")
    beams = fake(sampling={"num_beams": None}, generation_modes=frozenset({"raw"}))
    with pytest.raises(CapabilityError, match="beam"):
        beams.generate([[1]], {**SHORT, "num_beams": 2})


@pytest.mark.parametrize(
    ("options", "capability"),
    [
        ({"temperature": 0.5}, "score_temperature"),
        ({"return_logits": True}, "logits"),
        ({"grad": True}, "gradients"),
    ],
)
def test_scoring_asks_for_capabilities(options, capability):
    with pytest.raises(CapabilityError) as error:
        fake().score_logprobs([[1, 2]], **options)
    assert error.value.capability == capability


@pytest.mark.parametrize("temperature", [0, -1, float("nan"), "1"])
def test_scoring_needs_a_positive_temperature(temperature):
    with pytest.raises(InvalidRequestError, match="temperature"):
        fake(score_temperature=True).score_logprobs([[1, 2]], temperature=temperature)


def test_stop_ids_are_eos_and_the_callers_own():
    backend = fake()
    for sampling, expected in [({}, {EOS}), ({"stop_token_ids": [5]}, {EOS, 5}), ({"ignore_eos": True}, set())]:
        backend.generate([[1]], {**SHORT, **sampling})
        assert sent(backend)[-1].stop_ids == expected
    listed = fake(eos_token_ids=frozenset({7, 8}))
    listed.generate([[1]], SHORT)
    assert sent(listed)[-1].stop_ids == {7, 8}


def test_samples_are_expanded_by_core_unless_the_engine_has_its_own():
    for native in (False, True):
        backend = fake(native_samples=native)
        out = backend.generate([[1], [3]], {"num_samples": 2, "seed": 5, **SHORT})
        assert out.ids.tolist() == [[1, 1], [1, 1], [3, 3], [3, 3]]
        request = sent(backend)[-1]
        assert len(request.prompts) == (2 if native else 4)
        assert request.sampling.num_samples == (2 if native else None)
        assert len(set(request.seeds.tolist())) == 4


def test_seeds_belong_to_the_rows_whatever_else_is_skipped():
    backend = fake()
    backend.generate([[1], [3], [4]], {"seed": 5, **SHORT})
    whole = sent(backend)[-1].seeds.tolist()
    backend.generate([[99], [3], [4]], {"seed": 5, **SHORT}, on_error="skip")
    assert sent(backend)[-1].seeds.tolist() == whole[1:]


def test_torch_governs_the_answers_when_no_seed_is_given():
    backend = fake()
    for _ in range(2):
        torch.manual_seed(3)
        backend.generate([[1]], SHORT)
    backend.generate([[1]], SHORT)
    first, second, third = (request.seeds.tolist() for request in sent(backend))
    assert first == second != third


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda b: b.generate(None), "prompts"),
        (lambda b: b.generate(5), "prompts"),
        (lambda b: b.generate("text"), "prompts"),
        (lambda b: b.generate([[1]], SHORT, request_ids=["a", "b"]), "request_ids"),
        (lambda b: b.generate([[1]], SHORT, request_ids="a"), "request_ids"),
        (lambda b: b.generate([[1]], SHORT, seeds=[0.5]), "seeds"),
        (lambda b: b.generate([[1]], SHORT, seeds=[1, 2]), "seeds"),
        (lambda b: b.generate([[1]], SHORT, seeds=[-1]), "seeds"),
        (lambda b: b.generate([[1]], SHORT, timeout=-1), "timeout"),
        (lambda b: b.generate([[1]], SHORT, timeout=float("nan")), "timeout"),
        (lambda b: b.generate([[1]], 5), "sampling_params"),
        (lambda b: b.generate([[1]], logprobs="cooked"), "logprobs"),
        (lambda b: b.generate([[1]], on_error="ignore"), "on_error"),
        (lambda b: b.score_logprobs([[1, 2]], score_from="abc"), "score_from"),
        (lambda b: b.score_logprobs([[1, 2]], score_from=[1, 2]), "score_from"),
        (lambda b: b.score_logprobs([[1, 2]], score_from=1.5), "score_from"),
        (lambda b: b.score_logprobs([[1, 2]], device="nowhere"), "device"),
        (lambda b: b.score_logprobs([[1, 2]], temperature=10**400), "temperature"),
        (lambda b: b.score_logprobs([[1, 2]], temperature=True), "temperature"),
        (lambda b: b.tokenize(None), "texts"),
        (lambda b: b.tokenize(["1", 2]), "texts"),
        (lambda b: b.update_weights({}, version=7), "version"),
        (lambda b: Backend(Fake(), "fake", retry="3"), "retry"),
        (lambda b: Backend(Fake(), "fake", timeout=0), "timeout"),
        (lambda b: corelm.get_backend(None), "name"),
    ],
)
def test_an_argument_of_another_kind_is_refused_by_name(call, field):
    with pytest.raises(InvalidRequestError) as error:
        call(fake())
    assert error.value.field == field


def test_arrays_are_ids_too():
    assert fake().generate(np.array([[1, 3], [4, 5]]), SHORT).ids.tolist() == [[3, 3], [5, 5]]
    assert fake().generate([np.array([1, 3]), [np.int64(4)]], SHORT).ids.tolist() == [[3, 3], [4, 4]]


# Skipping bad rows ---------------------------------------------------------------------------------------------------


def test_skipping_serves_the_other_rows_in_place():
    out = fake().generate([[99], [3], [], [4]], SHORT, on_error="skip")
    assert out.ids.tolist() == [[], [3, 3], [], [4, 4]]
    assert out.logprobs.tolist() == [[], [-1.0, -1.0], [], [-1.0, -1.0]]
    assert out.finish_reasons == ("error", "length", "error", "length")
    assert "99" in out.errors[0] and "no tokens" in out.errors[2] and out.errors[1] == out.errors[3] == ""
    sampled = fake().generate([[99], [3]], {"num_samples": 2, **SHORT}, on_error="skip")
    assert sampled.ids.tolist() == [[], [], [3, 3], [3, 3]]
    assert sampled.finish_reasons == ("error", "error", "length", "length")


def test_skipped_rows_take_their_request_ids_along():
    backend = fake()
    backend.generate([[1], [99], [3]], SHORT, request_ids=["a", "b", "c"], on_error="skip")
    assert sent(backend)[-1].request_ids == ("a", "c")
    backend.score_logprobs([[1, 2], [99, 1]], request_ids=["a", "b"], on_error="skip")
    assert sent(backend)[-1].request_ids == ("a",)


def test_skipping_in_scoring_keeps_every_row_as_long_as_its_sequence():
    out = fake().score_logprobs([[1, 99], [1, 3, 4]], on_error="skip")
    assert out.logprobs.tolist() == [[0.0, 0.0], [0.0, -1.0, -1.0]]
    assert out.scored.tolist() == [[False, False], [False, True, True]]
    assert "99" in out.errors[0] and out.errors[1] == ""


def test_no_answers_are_truncated_ones_too_if_they_would_have_been():
    backend = fake(sampling={"top_k": None}, generation_modes=frozenset({"processed"}))
    assert backend.generate([], {"top_k": 2, **SHORT}, logprobs="processed").support == "truncated"


def test_the_engine_is_not_called_for_nothing():
    backend = fake()
    assert len(backend.generate([], SHORT).ids) == 0
    assert len(backend.generate([[99]], SHORT, on_error="skip").ids) == 1
    assert len(backend.score_logprobs([]).logprobs) == 0
    assert sent(backend) == []


# After the engine ----------------------------------------------------------------------------------------------------


def rows(*lists, dtype=torch.int64) -> Ragged:
    return Ragged.from_list(lists, dtype)


@pytest.mark.parametrize(
    ("bend", "says"),
    [
        (lambda b: None, "returned None"),
        (lambda b: replace(b, ids=rows([1, 1])), "1 rows for 2 answers"),
        (lambda b: replace(b, finish_reasons=("length",)), "1 finish reasons"),
        (lambda b: replace(b, finish_reasons=("length", "tired")), "row 1: finish reason 'tired'"),
        (lambda b: replace(b, ids=rows([1, 1], [3, VOCAB])), "outside the vocabulary"),
        (lambda b: replace(b, ids=rows([1], [3, 3, 3])), "row 1: 3 tokens, but max_new_tokens is 2"),
        (lambda b: replace(b, logprobs=None), "no log-probs"),
        (lambda b: replace(b, logprobs=rows([-1.0], [-1.0] * 3, dtype=torch.float32)), "differ in length"),
        (
            lambda b: replace(b, logprobs=rows([-1.0] * 2, [-1.0, float("nan")], dtype=torch.float32)),
            "row 1, position 1",
        ),
        (
            lambda b: replace(b, logprobs=rows([-1.0] * 2, [float("-inf"), -1.0], dtype=torch.float32)),
            "row 1, position 0",
        ),
        (lambda b: replace(b, logprobs=Ragged(b.logprobs.values.double(), b.logprobs.lengths)), "torch.float64"),
        (lambda b: replace(b, mode="processed"), "processed log-probs, but raw"),
        (lambda b: {}, "the result is a dict, expected a GenerationBatch"),
        (lambda b: replace(b, ids=[[1, 1], [3, 3]]), "ids is a list, expected a Ragged"),
        (lambda b: replace(b, finish_reasons=None), "finish_reasons is a NoneType"),
        (lambda b: replace(b, logprobs=rows([0.5, -1.0], [-1.0, -1.0], dtype=torch.float32)), "log-prob is 0.5"),
        (lambda b: replace(b, ids=rows([EOS, 1], [3, 3])), "row 0: goes on after a stop id"),
        (lambda b: replace(b, weight_versions=("0",)), "1 weight_versions for 2 rows"),
    ],
)
def test_a_result_that_breaks_the_specification_is_an_engine_error(bend, says):
    with pytest.raises(EngineError, match="backend 'fake', hook generate") as error:
        fake(bend).generate([[1], [3]], SHORT)
    assert says in str(error.value) and error.value.usable


@pytest.mark.parametrize(
    ("bend", "says"),
    [
        (lambda b: None, "returned None"),
        (lambda b: replace(b, logprobs=rows([0.0, -1.0], dtype=torch.float32)), "differ in length"),
        (lambda b: replace(b, scored=rows([True, True, True], dtype=torch.bool)), "position 0"),
        (lambda b: replace(b, scored=rows([False, True, False], dtype=torch.bool)), "not every position"),
        (lambda b: replace(b, logprobs=rows([-1.0] * 3, dtype=torch.float32)), "something other than 0.0"),
        (lambda b: replace(b, temperature=0.5), "temperature 0.5"),
        (lambda b: replace(b, mode="cooked"), "mode 'cooked'"),
        (lambda b: replace(b, support="truncated"), "support 'truncated'"),
        (lambda b: replace(b, scored=None), "scored is a NoneType"),
    ],
)
def test_a_score_that_breaks_the_specification_is_an_engine_error(bend, says):
    with pytest.raises(EngineError, match="backend 'fake', hook score_logprobs") as error:
        fake(bend).score_logprobs([[1, 3, 4]])
    assert says in str(error.value)


def test_scores_at_a_temperature_are_not_raw_and_truncated_ones_not_full():
    bend = lambda b: replace(b, temperature=0.5)  # noqa: E731
    with pytest.raises(EngineError, match="mode 'raw', expected 'processed'"):
        fake(bend, score_temperature=True).score_logprobs([[1, 3]], temperature=0.5)
    bend = lambda b: replace(b, mode="processed", temperature=1.0)  # noqa: E731
    honours = {"sampling": {"top_k": None}, "generation_modes": frozenset({"processed"})}
    with pytest.raises(EngineError, match="says full support, but sampled under truncation"):
        fake(bend, **honours).generate([[1]], {"top_k": 2, **SHORT}, logprobs="processed")


def test_an_inference_tensor_never_reaches_a_user():
    def bend(batch):
        with torch.inference_mode():
            return replace(batch, logprobs=Ragged(batch.logprobs.values.clone(), batch.logprobs.lengths))

    with pytest.raises(EngineError, match="inference tensor"):
        fake(bend).generate([[1]], SHORT)


def test_an_exception_inside_a_hook_is_typed_chained_and_survived():
    failures = iter([ValueError("out of luck")])

    def bend(batch):
        for error in failures:
            raise error
        return batch

    backend = fake(bend)
    with pytest.raises(EngineError, match="ValueError: out of luck") as error:
        backend.generate([[1]], SHORT)
    assert isinstance(error.value.__cause__, ValueError)
    assert backend.generate([[1]], SHORT).ids.tolist() == [[1, 1]]


# Retries, turns, life ------------------------------------------------------------------------------------------------


def failing(times: int, error: Exception):
    left = iter(range(times))

    def bend(batch):
        for _ in left:
            raise error
        return batch

    return bend


def test_a_failed_call_is_repeated_as_often_as_asked():
    patient = tenacity.Retrying(stop=tenacity.stop_after_attempt(3), reraise=True)
    assert len(Backend(Fake(failing(2, OSError("lost"))), "fake", retry=patient).generate([[1]], SHORT).ids) == 1
    with pytest.raises(EngineError, match="lost"):
        Backend(Fake(failing(3, OSError("lost"))), "fake", retry=patient).generate([[1]], SHORT)


def test_an_engine_that_is_gone_is_not_asked_again():
    engine = Fake(failing(1, EngineError("dead", usable=False)))
    with pytest.raises(EngineError, match="dead"):
        Backend(engine, "fake", retry=3).generate([[1]], SHORT)
    assert len(engine.requests) == 1


def test_one_thread_at_a_time_unless_the_engine_takes_several():
    inside, together = threading.Event(), threading.Barrier(2)

    def hold(batch):
        inside.set()
        together.wait(timeout=10)
        return batch

    backend = fake(hold)
    first = threading.Thread(target=backend.generate, args=([[1]], SHORT))
    first.start()
    assert inside.wait(timeout=10)
    with pytest.raises(BackendTimeoutError, match="busy"):
        backend.generate([[1]], SHORT, timeout=0.01)
    together.wait(timeout=10)
    first.join(timeout=10)
    shared = fake(hold, concurrent_calls=True)
    together.reset()
    threads = [threading.Thread(target=shared.generate, args=([[1]], SHORT)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        # Both must be inside at once to pass the barrier.
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in threads) and len(sent(shared)) == 2


def test_a_closed_backend_says_so_and_closes_twice():
    with fake() as backend:
        assert backend.health()
    backend.close()
    assert backend.closed and not backend.health()
    for call in (
        lambda: backend.generate([[1]], SHORT),
        lambda: backend.score_logprobs([[1, 2]]),
        lambda: backend.tokenize(["1"]),
        lambda: backend.update_weights({}),
    ):
        with pytest.raises(BackendClosedError, match="fake"):
            call()


def test_waiting_and_running_share_one_timeout():
    backend = fake()
    backend.generate([[1]], SHORT, timeout=5)
    assert 0 < sent(backend)[-1].timeout <= 5


def test_a_callers_retrying_ends_with_the_last_error_itself():
    twice = tenacity.Retrying(stop=tenacity.stop_after_attempt(2))
    with pytest.raises(EngineError, match="lost"):
        Backend(Fake(failing(2, OSError("lost"))), "fake", retry=twice).generate([[1]], SHORT)


def test_health_does_not_wait_for_a_call_under_way():
    class Healthy(Fake):
        @hookimpl
        def health(self, request):
            return True

    inside, go_on = threading.Event(), threading.Event()
    backend = Backend(Healthy(lambda batch: (inside.set(), go_on.wait(timeout=10), batch)[-1]), "fake")
    thread = threading.Thread(target=backend.generate, args=([[1]], SHORT))
    thread.start()
    assert inside.wait(timeout=10)
    assert backend.health()
    go_on.set()
    thread.join(timeout=10)


@pytest.mark.parametrize("lacks", ["capabilities", "tokenizer"])
def test_an_engine_without_what_the_specification_names_is_refused(lacks):
    engine = type("Bare", (), {"capabilities": Fake.capabilities, "tokenizer": Fake.tokenizer, lacks: None})()
    if lacks == "tokenizer":
        del type(engine).tokenizer
    with pytest.raises(BackendIncompatibleError, match="without `capabilities` or `tokenizer`"):
        Backend(engine, "fake")
    with pytest.raises(BackendIncompatibleError, match="has no hook"):
        Backend(Fake(), "fake", plugins=[object()])


def test_a_timeout_inside_the_engine_is_typed():
    with pytest.raises(BackendTimeoutError, match="too slow"):
        fake(failing(1, TimeoutError("too slow"))).generate([[1]], SHORT)


def test_wrappers_see_and_replace_results():
    class Shout:
        @hookimpl(wrapper=True)
        def generate(self, request):
            batch = yield
            return replace(batch, finish_reasons=("abort",) * len(batch.ids))

    out = Backend(Fake(), "fake", plugins=[Shout()]).generate([[1]], SHORT)
    assert out.finish_reasons == ("abort",)


@pytest.mark.parametrize("hook", ["genrate", "score"])
def test_a_misspelt_hook_is_an_error_and_not_silence(hook):
    def method(self, request):
        return None

    plugin = type("Typo", (), {hook: hookimpl(method)})()
    with pytest.raises(BackendIncompatibleError, match=hook):
        Backend(Fake(), "fake", plugins=[plugin])


def test_a_hook_with_another_signature_is_an_error():
    class Wrong:
        @hookimpl
        def generate(self, prompts): ...

    with pytest.raises(BackendIncompatibleError, match="generate"):
        Backend(Wrong.__new__(type("W", (Wrong, Fake), {})), "fake")


# Weights and provenance ----------------------------------------------------------------------------------------------


def test_a_weight_version_counts_up_or_is_the_callers():
    backend = fake()
    assert backend.generate([[1]], SHORT).weight_versions == ("0",)
    assert backend.update_weights({"w": torch.zeros(1)}) == "1"
    assert sent(backend)[-1].state_dict.keys() == {"w"} and sent(backend)[-1].path is None
    assert backend.update_weights("some/where", version="step-9") == "step-9"
    assert sent(backend)[-1].path == Path("some/where")
    out = backend.generate([[1], [3]], SHORT)
    assert backend.provenance(out).weight_version == "step-9"
    with pytest.raises(InvalidRequestError, match="weights: expected a state dict or a path"):
        backend.update_weights(3)
    with pytest.raises(CapabilityError, match="update_weights"):
        fake(update_weights=False).update_weights({})


def test_raw_log_probs_have_temperature_one_whatever_they_were_sampled_with():
    backend = Backend(Fake(), "fake", model_name="m")
    sampling = SamplingParams(temperature=0.5, max_new_tokens=2)
    made = backend.provenance(backend.generate([[1]], sampling), sampling)
    assert made.distribution == ("raw", 1.0, "full", ())
    assert (made.backend, made.model, made.weight_version) == ("fake", "m", "0")


def test_rows_of_different_weights_have_different_provenance():
    backend = fake(lambda b: replace(b, weight_versions=("7", "8")))
    made = backend.provenance(backend.generate([[1], [3]], SHORT))
    assert [p.weight_version for p in made] == ["7", "8"]


def test_a_call_that_waited_behind_an_update_has_the_new_version():
    inside, go_on = threading.Event(), threading.Event()

    def hold(batch):
        inside.set()
        assert go_on.wait(timeout=10)
        return batch

    backend = fake(hold)
    results = {}
    first = threading.Thread(target=lambda: results.update(a=backend.generate([[1]], SHORT)))
    first.start()
    assert inside.wait(timeout=10)
    # The update waits for the first call, and the second call behind the update or before it: its label must be true.
    engine = backend._engine
    engine.bend = lambda batch: batch
    update = threading.Thread(target=backend.update_weights, args=({},))
    second = threading.Thread(target=lambda: results.update(c=backend.generate([[1]], SHORT)))
    update.start()
    second.start()
    go_on.set()
    for thread in (first, update, second):
        thread.join(timeout=10)
    updated_before = [type(r).__name__ for r in engine.requests].index("WeightUpdate") < len(engine.requests) - 1
    assert results["a"].weight_versions == ("0",)
    assert results["c"].weight_versions == (("1",) if updated_before else ("0",))


def test_an_update_that_did_not_happen_is_an_error():
    engine = Fake()
    engine.updated = False
    with pytest.raises(EngineError, match="returned False: the new weights are not in force"):
        Backend(engine, "fake").update_weights({})


# Opening -------------------------------------------------------------------------------------------------------------


def test_an_option_the_plugin_does_not_know_is_named_with_the_nearest_it_does():
    with pytest.raises(InvalidRequestError, match=r"max_contxt.*did you mean 'max_context'") as error:
        corelm.get_backend("toy", max_contxt=64)
    assert error.value.field == "max_contxt"
    with corelm.get_backend("toy", max_context=64) as backend:
        assert backend.capabilities.max_context == 64


def test_an_engine_that_does_not_open_says_why(tmp_path):
    with pytest.raises(EngineError, match=r"'toy' \(corelm-toy-backend .*FileNotFoundError") as error:
        corelm.get_backend("toy", tmp_path / "nothing")
    assert isinstance(error.value.__cause__, FileNotFoundError) and error.value.usable is False
