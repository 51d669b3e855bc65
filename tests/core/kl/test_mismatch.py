"""Importance weights, the mismatch report and the controllers against numbers computed in plain Python."""

import json
import math

import pytest
import torch
from tensordict import TensorDict

import corelm
from corelm import LLMPolicy, LogProbs, Masks
from corelm.errors import InvalidRequestError, MissingKeyError, ProvenanceMismatchError
from corelm.kl import (
    AdaptiveKLController,
    FixedKLController,
    ImportanceCorrection,
    MismatchReport,
    PerToken,
    RetrieveLogProb,
    mismatch_report,
)
from corelm_testing.toy import Bigram
from helpers.each import each
from helpers.kl_cases import rows_of
from helpers.refusals import refused

#: With seed 4 their answers are 6, 9 and 3 tokens long.
QUESTIONS = ["The cat", "Who", "It is so"]
#: train − sampled of the tokens that count, sequence by sequence; the last sequence has no such token.
AWAY = [[0.1, -0.2, 1.5], [-3.0, 0.0], []]


def dense():
    """Return `AWAY` in a dense batch: after one prompt token with a large difference, and before pads."""
    sampled, train = torch.full((3, 4), -1.0), torch.full((3, 4), -1.0)
    train[:, 0] = 5.0
    mask = torch.zeros(3, 4, dtype=torch.bool)
    for row, values in enumerate(AWAY):
        mask[row, 1 : 1 + len(values)] = True
        train[row, 1 : 1 + len(values)] += torch.tensor(values)
    attention = mask.clone()
    attention[:, 0] = True
    return TensorDict(
        log_probs=LogProbs(full=sampled, batch_size=3),
        train_log_probs=LogProbs(full=train, batch_size=3),
        masks=Masks(all_attention_mask=attention, all_assistant_mask=mask, batch_size=3),
        batch_size=3,
    )


def weight(ratio, how, low, high):
    low, high = low or 0.0, math.inf if high is None else high
    return min(max(ratio, low), high) if how == "truncate" else ratio * (low <= ratio <= high)


BOUNDS = [(None, 2.0), (0.5, 2.0), (None, None), (0.5, None), (0.0, 1.0)]


@each("how", ["truncate", "mask"])
@each("low, high", BOUNDS)
def test_token_weights_are_the_ratios_within_their_bounds(how, low, high):
    td = dense()
    out = ImportanceCorrection("token", how, low, high)(td)
    assert out is td and out["importance_weights"].dtype == torch.float32
    expected = torch.zeros(3, 4)
    for row, values in enumerate(AWAY):
        expected[row, 1 : 1 + len(values)] = torch.tensor([weight(math.exp(v), how, low, high) for v in values])
    torch.testing.assert_close(out["importance_weights"], expected)


@each("how", ["truncate", "mask"])
@each("low, high", BOUNDS)
def test_sequence_weights_are_the_ratios_of_the_sums(how, low, high):
    out = ImportanceCorrection("sequence", how, low, high, weights_key=("off", "w"))(dense())
    expected = [weight(math.exp(sum(values)), how, low, high) for values in AWAY]
    assert expected[-1] == 1.0, "a sequence without tokens that count"
    torch.testing.assert_close(out["off", "w"], torch.tensor(expected))


def test_weights_carry_no_gradient_and_extremes_stay_finite():
    td = dense()
    td["train_log_probs"].full = td["train_log_probs"].full.clone().requires_grad_()
    assert not ImportanceCorrection()(td)["importance_weights"].requires_grad
    td["log_probs"].full[0, 1] = -300.0
    for level in ("token", "sequence"):
        weights = ImportanceCorrection(level, high=None)(td)["importance_weights"]
        assert bool(torch.isfinite(weights).all()) and float(weights.max()) > 1e6


@each("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_log_probs_are_compared_in_float32(dtype):
    td = dense()
    for name in ("log_probs", "train_log_probs"):
        td[name] = LogProbs(full=td[name].full.to(dtype), batch_size=3)
    away = (td["train_log_probs"].full.double() - td["log_probs"].full.double()) * td["masks"].all_assistant_mask
    for level, expected in (
        ("token", torch.where(td["masks"].all_assistant_mask, away.exp(), 0.0)),
        ("sequence", away.sum(-1).exp()),
    ):
        found = ImportanceCorrection(level, high=None)(td)["importance_weights"]
        torch.testing.assert_close(found, expected.float())
    td["log_probs"].full[0, 1] = -300.0
    assert bool(torch.isfinite(ImportanceCorrection(high=None)(td)["importance_weights"]).all())


def test_the_effective_sample_size_survives_ratios_that_overflow():
    td = dense()
    for row, (one, other) in enumerate([(-1000.0, -999.0), (-998.0, -1000.0), (0.0, 0.0)]):
        td["train_log_probs"].full[row, 1:] = torch.tensor([one, other, 0.0])
    td["masks"].all_assistant_mask = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]]).bool()
    td["masks"].all_attention_mask = torch.ones(3, 4, dtype=torch.bool)
    # The two sums are 1 apart: -1997 and -1996.
    expected = (1 + math.e) ** 2 / (1 + math.e**2)
    assert mismatch_report(td, level="sequence").effective_sample_size == pytest.approx(expected, rel=1e-4)


def test_the_report_against_numbers_by_hand():
    flat = [value for values in AWAY for value in values]
    ratios = [math.exp(value) for value in flat]
    found = mismatch_report(dense(), low=0.5, high=2.0)
    assert (found.tokens, found.sequences) == (5, 2)
    assert found.mean_abs == pytest.approx(sum(map(abs, flat)) / 5, rel=1e-5)
    assert found.mean_exp_abs == pytest.approx(sum(math.exp(abs(value)) for value in flat) / 5, rel=1e-5)
    assert found.max_abs == pytest.approx(3.0)
    size = sum(ratios) ** 2 / sum(ratio**2 for ratio in ratios)
    assert found.effective_sample_size == pytest.approx(size, rel=1e-5)
    assert found.effective_share == pytest.approx(size / 5, rel=1e-5)
    assert found.clipped_share == pytest.approx(2 / 5), "exp(1.5) and exp(-3)"
    assert mismatch_report(dense()).clipped_share == pytest.approx(1 / 5), "there is no lower bound by default"
    of_sequences = mismatch_report(dense(), level="sequence", low=0.5)
    ratios = [math.exp(sum(values)) for values in AWAY if values]
    size = sum(ratios) ** 2 / sum(ratio**2 for ratio in ratios)
    assert of_sequences.effective_sample_size == pytest.approx(size, rel=1e-5)
    assert of_sequences.effective_share == pytest.approx(size / 2, rel=1e-5)
    assert of_sequences.clipped_share == pytest.approx(1.0)
    assert of_sequences.max_abs == found.max_abs


def test_without_mismatch_and_without_tokens():
    td = dense()
    td["train_log_probs"] = td["log_probs"].clone()
    same = mismatch_report(td)
    assert (same.mean_abs, same.mean_exp_abs, same.max_abs, same.clipped_share) == (0.0, 1.0, 0.0, 0.0)
    assert (same.effective_sample_size, same.effective_share) == (5.0, 1.0)
    td["masks"].all_assistant_mask = torch.zeros(3, 4, dtype=torch.bool)
    for level in ("token", "sequence"):
        nothing = mismatch_report(td, level=level)
        assert nothing == MismatchReport(
            tokens=0,
            sequences=0,
            mean_abs=0.0,
            mean_exp_abs=1.0,
            max_abs=0.0,
            effective_sample_size=0.0,
            effective_share=1.0,
            clipped_share=0.0,
        )


@each("pad", [False, True])
@each("shape", [(), (3,), (2, 2)])
@each("where", ["root", "next"])
def test_on_rollouts_of_every_shape_and_layout(shape, pad, where):
    sampler = Bigram.of_talk()
    trainer = Bigram(sampler.table.detach() + 0.2 * torch.randn(260, 260, generator=torch.Generator().manual_seed(0)))
    with corelm.get_backend("toy", sampler) as one, corelm.get_backend("toy", trainer) as other:
        policy = LLMPolicy(one, input_mode="text", sampling_params={"max_new_tokens": 6}, pad_output=pad, inplace=False)
        texts = QUESTIONS[: shape[0]] if shape else QUESTIONS[0]
        td = policy.replace(num_samples=shape[1] if len(shape) > 1 else None)(TensorDict(text=texts), seed=4)
        RetrieveLogProb(LLMPolicy(other, input_mode="text"), log_probs_key="train_log_probs")(td)
    answers = [ids.tolist() for ids in corelm.ragged(td, ("tokens", "response")).split()]
    befores = corelm.ragged(td, ("tokens", "prompt")).tolist()
    tables = [model.table.detach().double().log_softmax(-1) for model in (trainer, sampler)]
    ratios = [
        [float((tables[0] - tables[1])[b, a].exp()) for b, a in zip([before[-1], *answer[:-1]], answer, strict=True)]
        for before, answer in zip(befores, answers, strict=True)
    ]
    td = TensorDict(next=td, batch_size=shape) if where == "next" else td
    for level in ("token", "sequence"):
        ImportanceCorrection(level, "truncate", 0.9, 1.1, weights_key=f"{level}_weights")(td)
    place = td["next"] if where == "next" else td
    found = place["sequence_weights"]
    expected = torch.tensor([weight(math.prod(row), "truncate", 0.9, 1.1) for row in ratios]).reshape(shape)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert isinstance(place["token_weights"], torch.Tensor if pad else PerToken)
    for found, before, row in zip(rows_of(place, "token_weights"), befores, ratios, strict=True):
        expected = torch.tensor([0.0] * len(before) + [weight(ratio, "truncate", 0.9, 1.1) for ratio in row])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    report = mismatch_report(td, low=0.9, high=1.1)
    every = [ratio for row in ratios for ratio in row]
    assert report.tokens == len(every) and report.sequences == len(ratios)
    assert report.mean_abs == pytest.approx(sum(abs(math.log(ratio)) for ratio in every) / len(every), abs=1e-5)
    assert report.clipped_share == pytest.approx(sum(not 0.9 <= r <= 1.1 for r in every) / len(every))


def test_invalid_arguments_and_inputs_are_refused():
    for options, message in (
        ({"level": "word"}, "'token', 'sequence'"),
        ({"how": "drop"}, "'truncate', 'mask'"),
        ({"high": 0.5}, "high: expected a finite number of at least 1"),
        ({"low": 1.5}, "low: expected a number from 0 to 1"),
        ({"low": -0.1}, "low: expected a number from 0 to 1"),
        ({"high": float("nan")}, "high: expected a finite number of at least 1"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            ImportanceCorrection(**options)
        if "how" not in options:
            with pytest.raises(InvalidRequestError, match=message):
                mismatch_report(dense(), **options)
    td = dense()
    td["log_probs"].full[1, 2] = float("-inf")
    for call in (ImportanceCorrection(), mismatch_report):
        with refused(InvalidRequestError, field="log-probs", rows=(1,)):
            call(td)
    assert "importance_weights" not in td.keys()
    with refused(MissingKeyError, field="('train_log_probs', 'full')"):
        mismatch_report(dense().exclude("train_log_probs"))


def test_the_trainers_temperature_must_be_the_samplers():
    with corelm.get_backend("toy") as backend:
        hot = {"max_new_tokens": 6, "temperature": 0.7}
        policy = LLMPolicy(
            backend, input_mode="text", sampling_params=hot, log_probs_mode="processed", inplace=False, pad_output=True
        )
        td = policy(TensorDict(text=QUESTIONS), seed=4)
        RetrieveLogProb(policy.replace(log_probs_mode="raw"), log_probs_key="train_log_probs")(td)
        for call in (ImportanceCorrection(), mismatch_report):
            with pytest.raises(ProvenanceMismatchError, match="row 0"):
                call(td)
        assert mismatch_report(td, allow_mismatch=True).max_abs > 0.01
        RetrieveLogProb(policy, log_probs_key="train_log_probs")(td)
        assert mismatch_report(td).max_abs < 1e-4


def test_the_adaptive_coefficient_follows_the_paper():
    controller = AdaptiveKLController(0.2, target=6.0, horizon=10_000)
    # (measured KL, sequences, expected factor)
    steps = [
        (6.0, 512, 1.0),
        (6.6, 512, 1 + 0.1 * 512 / 10_000),
        (60.0, 256, 1 + 0.2 * 256 / 10_000),
        (0.0, 64, 1 - 0.2 * 64 / 10_000),
    ]
    value = 0.2
    for kl, n_steps, factor in steps:
        value *= factor
        assert controller.update(torch.tensor(kl), n_steps) == pytest.approx(value, rel=1e-6)
        assert controller.value == pytest.approx(value, rel=1e-6)


def test_a_resumed_run_goes_on_with_the_same_coefficient():
    first = AdaptiveKLController(0.2, target=6.0, horizon=100)
    first.update(60.0, 10)
    state = json.loads(json.dumps(first.state_dict()))
    again = AdaptiveKLController(0.5, target=6.0, horizon=100)
    again.load_state_dict(state)
    assert again.value == first.value == pytest.approx(0.2 * 1.02)
    assert again.update(1.0, 5) == first.update(1.0, 5)
    fixed = FixedKLController(0.3)
    assert fixed.update(60.0, 10) == fixed.value == 0.3
    other = FixedKLController(0.1)
    other.load_state_dict(fixed.state_dict())
    assert other.value == 0.3 and repr(other) == "FixedKLController(value=0.3)"
