"""Results that a backend refuses, and what it keeps when an engine fails."""

from dataclasses import replace

import pytest
import torch

from corelm import Backend, Ragged
from corelm.errors import CapabilityError, EngineError, InvalidRequestError
from helpers.fakes import EOS, SHORT, VOCAB, Fake, fake, sent


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
        (lambda b: {}, "the result is a dict, expected a GenerateResult"),
        (lambda b: replace(b, ids=[[1, 1], [3, 3]]), "ids is a list, expected a Ragged"),
        (lambda b: replace(b, finish_reasons=None), "finish_reasons is a NoneType"),
        (lambda b: replace(b, logprobs=rows([0.5, -1.0], [-1.0, -1.0], dtype=torch.float32)), "log-prob is 0.5"),
        (lambda b: replace(b, ids=rows([EOS, 1], [3, 3])), "row 0: has tokens after a stop id"),
        (lambda b: replace(b, weight_versions=("0",)), "1 weight_versions for 2 rows"),
    ],
)
def test_a_bad_generation_is_an_engine_error(bend, says):
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
        (lambda b: replace(b, logprobs=rows([-1.0] * 3, dtype=torch.float32)), "not scored must be 0.0"),
        (lambda b: replace(b, temperature=0.5), "temperature 0.5"),
        (lambda b: replace(b, mode="cooked"), "mode 'cooked'"),
        (lambda b: replace(b, support="truncated"), "support 'truncated'"),
        (lambda b: replace(b, scored=None), "scored is a NoneType"),
    ],
)
def test_a_bad_score_is_an_engine_error(bend, says):
    with pytest.raises(EngineError, match="backend 'fake', hook score_logprobs") as error:
        fake(bend).score_logprobs([[1, 3, 4]])
    assert says in str(error.value)


def test_a_log_prob_may_exceed_zero_only_by_rounding():
    def answering(value):
        return fake(lambda b: replace(b, logprobs=rows([value, -1.0], [-1.0, -1.0], dtype=torch.float32)))

    most = torch.tensor(2.0**-10)
    assert answering(float(most)).generate([[1], [3]], SHORT).logprobs.values[0] == most
    with pytest.raises(EngineError, match="row 0, position 0"):
        answering(float(most.nextafter(torch.tensor(1.0)))).generate([[1], [3]], SHORT)


def test_rows_with_modified_lengths_are_validated_again():
    lengths = torch.tensor([2, 3])
    prompts = Ragged(torch.tensor([3, 4, 5, 6, 7]), lengths)
    assert prompts.offsets.tolist() == [0, 2, 5]
    lengths[:] = torch.tensor([3, 2])
    engine = Fake()
    Backend.from_plugin(engine, "fake").generate(prompts, SHORT)
    assert engine.requests[0].prompts.tolist() == [[3, 4, 5], [6, 7]]
    assert engine.requests[0].prompts.offsets.tolist() == [0, 3, 5]
    lengths[0] = 9
    with pytest.raises(InvalidRequestError, match="prompts: lengths add up to 11"):
        Backend.from_plugin(engine, "fake").generate(prompts, SHORT)


def test_mode_and_support_must_agree_with_the_request():
    bend = lambda b: replace(b, temperature=0.5)  # noqa: E731
    with pytest.raises(EngineError, match="mode 'raw', expected 'processed'"):
        fake(bend, score_temperature=True).score_logprobs([[1, 3]], temperature=0.5)
    bend = lambda b: replace(b, mode="processed", temperature=1.0)  # noqa: E731
    honours = {"sampling": {"top_k": None}, "generation_modes": frozenset({"processed"})}
    with pytest.raises(EngineError, match="reports full support, but truncation"):
        fake(bend, **honours).generate([[1]], {"top_k": 2, **SHORT}, logprobs="processed")


def test_an_inference_tensor_is_refused():
    def bend(batch):
        with torch.inference_mode():
            return replace(batch, logprobs=Ragged(batch.logprobs.values.clone(), batch.logprobs.lengths))

    with pytest.raises(EngineError, match="inference tensor"):
        fake(bend).generate([[1]], SHORT)


def test_an_exception_in_a_hook_becomes_an_engine_error_and_leaves_the_backend_usable():
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


def test_an_answer_that_failed_is_reported_or_skipped():
    def bend(batch):
        failed = tuple("error" if row == 1 else reason for row, reason in enumerate(batch.finish_reasons))
        return replace(batch, finish_reasons=failed, errors=("", "the engine said no", ""))

    backend = fake(bend)
    with pytest.raises(EngineError, match="row 1: the engine said no") as error:
        backend.generate([[1], [3], [4]], SHORT)
    assert error.value.problems == {1: "the engine said no"} and error.value.rows == (1,)
    batch = backend.generate([[1], [3], [4]], SHORT, on_error="skip")
    assert batch.errors == ("", "the engine said no", "") and batch.finish_reasons == ("length", "error", "length")
    silent = fake(lambda b: replace(b, finish_reasons=("error",) * len(b.ids)))
    with pytest.raises(EngineError, match="row 0: failed, and the engine gave no reason"):
        silent.generate([[1]], {"num_samples": 2, **SHORT})


def test_a_sequence_that_failed_is_reported_or_skipped():
    def bend(batch):
        values = batch.logprobs.values.clone()
        scored = batch.scored.values & (batch.scored.row_index != 1)
        return replace(
            batch,
            logprobs=Ragged(values * scored, batch.logprobs.lengths),
            scored=Ragged(scored, batch.scored.lengths),
            errors=("", "the engine said no"),
        )

    with pytest.raises(EngineError, match="row 1: the engine said no"):
        fake(bend).score_logprobs([[1, 3], [3, 4]])
    assert fake(bend).score_logprobs([[1, 3], [3, 4]], on_error="skip").errors == ("", "the engine said no")


SCALED = {"generation_modes": frozenset({"scaled"}), "sampling": {"temperature": None, "top_k": None, "min_p": None}}


@pytest.mark.parametrize(
    ("mode", "sampling", "served"),
    [
        ("raw", {}, True),
        ("raw", {"temperature": 0.0}, True),
        ("raw", {"top_k": 2}, True),
        ("raw", {"temperature": 0.5}, False),
        ("processed", {"temperature": 0.5}, True),
        ("processed", {"temperature": 0.5, "top_k": 2}, False),
        ("processed", {"min_p": 0.1}, False),
        ("processed", {"temperature": 0.0}, False),
    ],
)
def test_scaled_log_probs_serve_the_mode_that_they_equal(mode, sampling, served):
    def bend(batch):
        return replace(batch, mode=mode, temperature=sampling.get("temperature", 1.0) if mode == "processed" else 1.0)

    backend = fake(bend, **SCALED)
    if served:
        assert backend.generate([[1]], {**SHORT, **sampling}, logprobs=mode).mode == mode
        assert sent(backend)[0].logprobs == mode
    else:
        with pytest.raises(CapabilityError) as error:
            backend.generate([[1]], {**SHORT, **sampling}, logprobs=mode)
        assert error.value.capability == "generation_modes"
