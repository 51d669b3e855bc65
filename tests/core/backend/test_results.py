"""Results that a backend refuses, and what it keeps when an engine fails."""

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from corelm import LLMPolicy, Ragged
from corelm.errors import CapabilityError, EngineError
from helpers.each import each
from helpers.fakes import EOS, SHORT, VOCAB, fake, sent
from helpers.refusals import refused

NAN, INF = float("nan"), float("inf")


def rows(*lists, dtype=torch.int64) -> Ragged:
    return Ragged.from_list(lists, dtype)


def floats(*lists) -> Ragged:
    return rows(*lists, dtype=torch.float32)


def of_graph(given: Ragged) -> Ragged:
    return Ragged(given.values.clone().requires_grad_() * 1, given.lengths)


def hand_made(values, lengths) -> Ragged:
    """Return a `Ragged` that was not validated when it was made."""
    made = object.__new__(Ragged)
    made.__dict__.update(values=values, lengths=lengths)
    return made


def changed_lengths(given: Ragged) -> Ragged:
    made = given.clone()
    assert made.offsets.tolist() == [0, 2, 4]
    made.lengths[:] = torch.tensor([1, 3])
    return made


@each(
    "bend, says",
    [
        (lambda b: None, "returned None"),
        (lambda b: replace(b, ids=rows([1, 1])), "1 rows for 2 answers"),
        (lambda b: replace(b, finish_reasons=("length",)), "1 finish_reasons"),
        (lambda b: replace(b, finish_reasons=("length", "tired")), "row 1: finish reason 'tired'"),
        (lambda b: replace(b, ids=rows([1, 1], [3, VOCAB])), "outside the vocabulary"),
        (lambda b: replace(b, ids=rows([1], [3, 3, 3])), "row 1: 3 tokens, but max_new_tokens is 2"),
        (lambda b: replace(b, logprobs=None), "returned no logprobs"),
        (lambda b: replace(b, logprobs=floats([-1.0], [-1.0] * 3)), "differ in length"),
        (lambda b: replace(b, logprobs=floats([-1.0] * 2, [-1.0, NAN])), "row 1, position 1"),
        (lambda b: replace(b, logprobs=floats([-1.0] * 2, [-INF, -1.0])), "row 1, position 0"),
        (lambda b: replace(b, logprobs=Ragged(b.logprobs.values.double(), b.logprobs.lengths)), "torch.float64"),
        (lambda b: replace(b, mode="processed"), "processed log-probs, but raw"),
        (lambda b: {}, "the result is a dict, expected a GenerateResult"),
        (lambda b: replace(b, ids=[[1, 1], [3, 3]]), "ids is a list, expected a Ragged"),
        (lambda b: replace(b, logprobs=floats([0.5, -1.0], [-1.0, -1.0])), "log-prob is 0.5"),
        (lambda b: replace(b, ids=rows([EOS, 1], [3, 3])), "row 0, position 0: a stop id must end the answer"),
        (lambda b: replace(b, weight_versions=("0",)), "1 weight_versions for 2 rows"),
        (lambda b: replace(b, weight_versions=([], "0")), "row 0: weight_versions: expected a str, got list"),
        (lambda b: replace(b, texts=(None, "a")), "row 0: texts: expected a str, got NoneType"),
        (lambda b: replace(b, errors=("", 3)), "row 1: errors: expected a str, got int"),
        (lambda b: replace(b, cached_tokens=(1,)), "1 cached_tokens for 2 rows"),
        (lambda b: replace(b, cached_tokens=(0, 2)), "row 1: cached_tokens 2, expected None or a number of at most 1"),
        (lambda b: replace(b, finish_reasons=("length", "stop")), "row 1: finish reason 'stop', but"),
        (
            lambda b: replace(b, ids=rows([1, 1], []), logprobs=None, finish_reasons=("length", "stop")),
            "row 1: finish reason 'stop', but the answer has no",
        ),
        (lambda b: replace(b, ids=rows([1, 1], [3])), "row 1: finish reason 'length' after 1 tokens"),
        (lambda b: replace(b, ids=rows([1, EOS], [3, 3])), "row 0: finish reason 'length', but"),
        (lambda b: replace(b, ids=hand_made(b.ids.values.to("meta"), b.ids.lengths)), "ids is a tensor on the meta"),
        (lambda b: replace(b, ids=hand_made(b.ids.values.to_sparse(), b.ids.lengths)), "ids is a sparse_coo tensor"),
        (lambda b: replace(b, ids=hand_made(b.ids.values, b.ids.lengths.float())), "ids: lengths are whole numbers"),
        (
            lambda b: replace(b, ids=hand_made(b.ids.values, torch.tensor([2, 1]))),
            "add up to 3, but there are 4 values",
        ),
        (
            lambda b: replace(b, ids=hand_made(b.ids.values, torch.tensor([5, -1]))),
            "add up to 4, but there are 4 values",
        ),
        (lambda b: replace(b, ids=changed_lengths(b.ids)), "row 1: 3 tokens, but max_new_tokens is 2"),
        (lambda b: replace(b, logprobs=of_graph(b.logprobs)), "logprobs carries a graph"),
    ],
)
def test_a_bad_generation_is_an_engine_error(bend, says):
    with pytest.raises(EngineError, match="backend 'fake', hook generate") as error:
        fake(bend).generate([[1], [3]], SHORT)
    assert says in str(error.value) and error.value.usable


@each(
    "bend, says",
    [
        (lambda b: None, "returned None"),
        (lambda b: replace(b, logprobs=floats([0.0, -1.0])), "differ in length"),
        (
            lambda b: replace(b, scored=rows([True, True, True], dtype=torch.bool)),
            "row 0, position 0: is marked as scored",
        ),
        (lambda b: replace(b, scored=rows([False, True, False], dtype=torch.bool)), "not every position"),
        (lambda b: replace(b, logprobs=floats([-1.0] * 3)), "was not scored must be 0.0"),
        (lambda b: replace(b, temperature=0.5), "temperature 0.5"),
        (lambda b: replace(b, mode="cooked"), "mode 'cooked'"),
        (lambda b: replace(b, support="truncated"), "support 'truncated'"),
        (lambda b: replace(b, scored=None), "returned no scored"),
        (lambda b: replace(b, weight_versions=(0,)), "row 0: weight_versions: expected a str, got int"),
        (lambda b: replace(b, scored=hand_made(b.scored.values.to("meta"), b.scored.lengths)), "scored is a tensor on"),
        (lambda b: replace(b, logprobs=of_graph(b.logprobs)), "logprobs carries a graph"),
    ],
)
def test_a_bad_score_is_an_engine_error(bend, says):
    with pytest.raises(EngineError, match="backend 'fake', hook score_logprobs") as error:
        fake(bend).score_logprobs([[1, 3, 4]])
    assert says in str(error.value)


@each(
    "logits, says",
    [
        (lambda: torch.full((5, VOCAB), NAN), "row 0, position 0: the logits hold nan or inf"),
        (lambda: torch.zeros(5, VOCAB).index_fill_(0, torch.tensor([3]), INF), "row 1, position 1: the logits"),
        (lambda: torch.zeros(5, VOCAB, dtype=torch.int64), "expected a floating-point"),
        (lambda: torch.zeros(5, VOCAB, requires_grad=True) * 1, "logits carries a graph"),
        (lambda: torch.zeros(5, VOCAB, device="meta"), "logits is a tensor on the meta device"),
        (lambda: torch.zeros(4, VOCAB), "logits: lengths add up to 5, but there are 4 values"),
    ],
)
def test_bad_logits_are_an_engine_error(logits, says):
    def bend(batch):
        return replace(batch, logits=hand_made(logits(), torch.tensor([2, 3])))

    with pytest.raises(EngineError) as error:
        fake(bend, logits=True).score_logprobs([[1, 3], [3, 4, 5]], return_logits=True)
    assert says in str(error.value)


def test_an_id_that_cannot_follow_may_have_logit_minus_infinity():
    def bend(batch):
        return replace(batch, logits=Ragged(torch.full((2, VOCAB), -INF), batch.logprobs.lengths))

    assert fake(bend, logits=True).score_logprobs([[1, 3]], return_logits=True).logits is not None


def ending(ids, reason="stop", **changes):
    """Return a fake that answers `ids` for this reason."""
    logprobs = rows([-1.0] * len(ids), dtype=torch.float32)
    return fake(lambda b: replace(b, ids=rows(ids), logprobs=logprobs, finish_reasons=(reason,), **changes), abort=True)


def test_an_answer_may_stop_at_a_stop_id_or_a_stop_string():
    stops = {"max_new_tokens": 4, "stop": ["45"], "stop_token_ids": [7]}
    # In the last answer the engine found the string a token late.
    for ids in ([3, EOS], [3, 7], [3, 4, 5], [4, 5, 3]):
        assert ending(ids).generate([[1]], stops).ids.tolist() == [ids]
    with pytest.raises(EngineError):
        ending([3, 4]).generate([[1]], {"max_new_tokens": 4, "stop_token_ids": [7]})


def test_an_answer_whose_text_is_the_engines_own_may_stop_at_a_string_that_its_ids_do_not_show():
    stops = {"max_new_tokens": 4, "stop": ["end"]}
    assert ending([3, 4], texts=("3 the end",)).generate([[1]], stops).finish_reasons == ("stop",)
    with pytest.raises(EngineError):
        ending([3, 4], texts=("3 the end",)).generate([[1]], {"max_new_tokens": 4})


def test_an_aborted_answer_may_end_anywhere():
    assert ending([3], "abort").generate([[1]], {"max_new_tokens": 4}).finish_reasons == ("abort",)


def test_an_answer_without_a_limit_that_ends_for_its_length_fills_the_context():
    assert ending([3] * 11, "length").generate([[1]], {"max_new_tokens": None}).ids.lengths.tolist() == [11]
    with pytest.raises(EngineError):
        ending([3] * 3, "length").generate([[1]], {"max_new_tokens": None})


def test_an_engine_may_reuse_its_buffers_for_the_next_call():
    ids, values, scored = torch.zeros(2, dtype=torch.int64), torch.zeros(2), torch.zeros(2, dtype=torch.bool)

    def bend(batch):
        if hasattr(batch, "ids"):
            lengths = batch.ids.lengths
            return replace(
                batch, ids=Ragged(ids.copy_(batch.ids.values), lengths), logprobs=Ragged(values - 1, lengths)
            )
        values.copy_(batch.logprobs.values)
        scored.copy_(batch.scored.values)
        lengths = batch.scored.lengths
        return replace(batch, logprobs=Ragged(values, lengths), scored=Ragged(scored, lengths))

    backend = fake(bend)
    policy = LLMPolicy(backend, input_mode="tokens", sampling_params=SHORT)
    first = policy(TensorDict(tokens=torch.tensor([[1, 3]]), batch_size=[1]))
    scores = backend.score_logprobs([[1, 3]])
    policy(TensorDict(tokens=torch.tensor([[1, 9]]), batch_size=[1]))
    backend.score_logprobs([[9], [8]])
    assert first["tokens"].response[0].tolist() == [3, 3] and first["tokens"].full[0].tolist() == [1, 3, 3, 3]
    assert scores.logprobs.tolist() == [[0.0, -1.0]] and scores.scored.tolist() == [[False, True]]


def test_what_is_checked_is_the_copy_that_is_kept(monkeypatch):
    """An engine that writes to its buffer meanwhile changes neither."""
    buffer, clone = torch.tensor([1, 1, 3, VOCAB]), torch.Tensor.clone

    def then_written(tensor, **options):
        made = clone(tensor, **options)
        if tensor is buffer:
            buffer.fill_(3)
        return made

    monkeypatch.setattr(torch.Tensor, "clone", then_written)
    with pytest.raises(EngineError, match="outside the vocabulary"):
        fake(lambda b: replace(b, ids=hand_made(buffer, b.ids.lengths))).generate([[1], [3]], SHORT)


def test_a_log_prob_may_exceed_zero_only_by_rounding():
    def answering(value):
        return fake(lambda b: replace(b, logprobs=floats([value, -1.0], [-1.0, -1.0])))

    most = torch.tensor(2.0**-10)
    assert answering(float(most)).generate([[1], [3]], SHORT).logprobs.values[0] == most
    with pytest.raises(EngineError):
        answering(float(most.nextafter(torch.tensor(1.0)))).generate([[1], [3]], SHORT)


def test_mode_and_support_must_agree_with_the_request():
    bend = lambda b: replace(b, temperature=0.5)  # noqa: E731
    with pytest.raises(EngineError):
        fake(bend, score_temperature=True).score_logprobs([[1, 3]], temperature=0.5)
    bend = lambda b: replace(b, mode="processed", temperature=1.0)  # noqa: E731
    honours = {"sampling": {"top_k": None}, "generation_modes": frozenset({"processed"})}
    with pytest.raises(EngineError):
        fake(bend, **honours).generate([[1]], {"top_k": 2, **SHORT}, logprobs="processed")


def test_an_inference_tensor_is_refused():
    def bend(batch):
        with torch.inference_mode():
            return replace(batch, logprobs=Ragged(batch.logprobs.values.clone(), batch.logprobs.lengths))

    with pytest.raises(EngineError):
        fake(bend).generate([[1]], SHORT)


def test_an_answer_that_failed_is_reported_or_skipped():
    def bend(batch):
        failed = tuple("error" if row == 1 else reason for row, reason in enumerate(batch.finish_reasons))
        return replace(batch, finish_reasons=failed, errors=("", "the engine said no", ""))

    backend = fake(bend)
    with refused(EngineError, rows=(1,)) as error:
        backend.generate([[1], [3], [4]], SHORT)
    assert error.value.problems == {1: "the engine said no"}
    batch = backend.generate([[1], [3], [4]], SHORT, on_error="skip")
    assert batch.errors == ("", "the engine said no", "") and batch.finish_reasons == ("length", "error", "length")
    batch = backend.generate([[1], [99], [3], [4]], SHORT, on_error="skip")
    assert "99" in batch.errors[1] and batch.errors[2:] == ("the engine said no", ""), "a skipped row hides no other"
    silent = fake(lambda b: replace(b, finish_reasons=("error",) * len(b.ids)))
    with refused(EngineError, rows=(0,)):
        silent.generate([[1]], {"num_samples": 2, **SHORT})


def test_the_first_position_that_was_asked_for_has_to_be_scored():
    def bend(batch):
        scored = batch.scored.with_values(batch.scored.values & (batch.scored.positions != 2))
        return replace(batch, scored=scored, logprobs=scored.with_values(batch.logprobs.values * scored.values))

    with pytest.raises(EngineError, match="row 0, position 2: not every position asked for was scored"):
        fake(bend).score_logprobs([[1, 3, 4, 5]], score_from=[2])


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

    with refused(EngineError, rows=(1,)):
        fake(bend).score_logprobs([[1, 3], [3, 4]])
    assert fake(bend).score_logprobs([[1, 3], [3, 4]], on_error="skip").errors == ("", "the engine said no")


SCALED = {
    "generation_modes": frozenset({"scaled"}),
    "sampling": dict.fromkeys(("temperature", "top_k", "min_p", "min_new_tokens", "repetition_penalty")),
}


@each(
    "mode, sampling, served",
    [
        ("raw", {}, True),
        ("raw", {"temperature": 0.0}, True),
        ("raw", {"top_k": 2}, True),
        ("raw", {"temperature": 0.5}, False),
        ("processed", {"temperature": 0.5}, True),
        ("processed", {"temperature": 0.5, "top_k": 2}, False),
        ("processed", {"min_p": 0.1}, False),
        ("processed", {"temperature": 0.0}, False),
        ("raw", {"min_new_tokens": 2}, False),
        ("raw", {"repetition_penalty": 1.2}, False),
        ("processed", {"min_new_tokens": 2}, False),
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
