"""`examples/grpo_tiny.py`, shortened: the steps are checked against plain transformers, and the reward rises."""

import copy
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict

import corelm
from corelm_testing.tiny import build_tiny
from helpers.oracle import answer_logprobs

pytest.importorskip("matplotlib", reason="the example draws with matplotlib, which is not installed")

import grpo_tiny
from grpo_tiny import CLIP, GRPO, QUESTIONS, Options

SOME = list(QUESTIONS)[:4]
STEPS = 7


@pytest.fixture(scope="module")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the demo's tiny model, fully trained: the model of the other tests answers almost nothing correctly."""
    return build_tiny(tmp_path_factory.mktemp("grpo") / "tiny-model", progress=False)


@dataclass
class FinishedRun:
    folder: Path
    printed: str

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "steps.jsonl").read_text().splitlines()]


def run(demo_model: Path, folder: Path, steps: int) -> FinishedRun:
    """Run the command with fewer steps than 60."""
    threads = torch.get_num_threads()
    (folder / "tiny-model").symlink_to(demo_model)
    try:
        with redirect_stdout(StringIO()) as printed:
            grpo_tiny.main(["--output", str(folder), "--steps", str(steps)])
    finally:
        torch.set_num_threads(threads)
    return FinishedRun(folder, printed.getvalue())


@pytest.fixture(scope="module")
def finished(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return run(demo_model, tmp_path_factory.mktemp("run"), STEPS)


@pytest.fixture
def grpo(demo_model: Path) -> Iterator[GRPO]:
    with grpo_tiny.open_engines(demo_model, Options(group=6, lr=2e-4)) as opened:
        yield opened


@pytest.mark.nightly
def test_the_reward_rises(demo_model: Path, tmp_path: Path):
    rewards = [step["reward"] for step in run(demo_model, tmp_path, 20).steps]
    assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.1


def test_each_step_samples_with_the_weights_of_the_last_one(finished: FinishedRun):
    assert [step["sampled_with"] for step in finished.steps] == [str(step) for step in range(STEPS)]
    assert [step["weights"] for step in finished.steps] == [str(step + 1) for step in range(STEPS)]


def test_sampler_and_trainer_agree_at_every_step(finished: FinishedRun):
    for step in finished.steps:
        assert step["mismatch"]["max_abs"] < 1e-4
        assert step["mismatch"]["clipped_share"] == 0
        # Every answer has at least one token.
        assert step["mismatch"]["sequences"] == Options.prompts * Options.group


def test_the_kl_to_the_reference_begins_at_zero(finished: FinishedRun):
    first, *later = (step["kl"] for step in finished.steps)
    assert first == pytest.approx(0, abs=1e-9)
    assert all(kl > 1e-4 for kl in later)


def test_it_prints_a_report_and_draws_the_curves(finished: FinishedRun):
    lines = finished.printed.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["1–5", "5"], ["6–7", "7"]]
    assert all(any(line.startswith(question) for line in lines) for question in QUESTIONS)
    assert (finished.folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_model_it_saves_is_the_trained_one(finished: FinishedRun):
    before, after = (
        load_file(finished.folder / name / "model.safetensors") for name in ("tiny-model", "trained-model")
    )
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before)
    with grpo_tiny.open_engines(finished.folder / "trained-model", Options()) as trained:
        right = sum(ok for *_, ok in trained.examine())
    assert f"{right} after." in finished.printed


# One step --------------------------------------------------------------------------------------------------------


def answers(rollout: TensorDict) -> list[tuple[list[int], list[int]]]:
    """Return the ids of prompt and answer, row by row."""
    prompts, responses = (corelm.ragged(rollout, ("tokens", part)).tolist() for part in ("prompt", "response"))
    return list(zip(prompts, responses, strict=True))


def test_after_an_update_the_sampler_samples_from_the_trained_model(grpo: GRPO):
    before = copy.deepcopy(grpo.model)
    grpo.step(SOME, seed=0)
    rollout = grpo.sample(SOME, seed=1)
    assert rollout["log_probs"].provenance.weight_version == "1"
    sampled = corelm.ragged(rollout, ("log_probs", "response")).split()
    new, old = ([answer_logprobs(model, *row) for row in answers(rollout)] for model in (grpo.model, before))
    assert max(float((a - b).abs().max()) for a, b in zip(sampled, new, strict=True)) < 1e-4
    assert max(float((a - b).abs().max()) for a, b in zip(sampled, old, strict=True)) > 1e-2


def test_the_gradient_reaches_every_parameter_and_only_the_trained_model(grpo: GRPO, demo_model: Path):
    grpo.step(SOME, seed=0)
    stored = load_file(demo_model / "model.safetensors")
    for name, parameter in grpo.model.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), name
        assert float(parameter.grad.norm()) > 0, name
        assert not torch.equal(parameter, stored[name]), name
    rollout = grpo.sample(SOME, seed=1)
    grpo.score_reference(rollout)
    scores = corelm.ragged(rollout, ("ref_log_probs", "full")).split()
    reference = grpo_tiny.AutoModelForCausalLM.from_pretrained(demo_model)
    for score, (prompt, answer) in zip(scores, answers(rollout), strict=True):
        torch.testing.assert_close(score[len(prompt) :], answer_logprobs(reference, prompt, answer), atol=1e-4, rtol=0)


def test_the_loss_matches_the_paper(grpo: GRPO):
    """Compute equation 3 answer by answer and token by token, from plain forward passes."""
    old = copy.deepcopy(grpo.model)
    rollout = grpo.sample(SOME, seed=0)
    rollout["advantage"] = grpo_tiny.advantages(rollout["reward"])
    assert rollout["advantage"].abs().max() > 0
    for score in (grpo.score_before, grpo.score_reference, grpo.correct):
        score(rollout)
    grpo.learn(rollout)  # the second pass has ratios to clip
    loss, numbers = grpo.loss(rollout)

    totals, clipped, kls = [], [], []
    sampled = corelm.ragged(rollout, ("log_probs", "response")).split()
    for (prompt, answer), advantage, at_sampling in zip(
        answers(rollout), rollout["advantage"].flatten().tolist(), sampled, strict=True
    ):
        now, then = answer_logprobs(grpo.model, prompt, answer), answer_logprobs(old, prompt, answer)
        ratio = (now - then).exp()
        cut = ratio.clamp(1 - CLIP, 1 + CLIP)
        # The reference is the sampling model.
        kl = (then - now).exp() - (then - now) - 1
        weight = (then - at_sampling).exp().clamp(max=2.0)
        totals.append((weight * torch.minimum(ratio * advantage, cut * advantage) - Options.kl_coef * kl).mean())
        clipped.append((cut * advantage < ratio * advantage).float())
        kls.append(now - then)
    assert loss.item() == pytest.approx(-torch.stack(totals).mean().item(), abs=1e-4)
    assert numbers["kl"] == pytest.approx(torch.cat(kls).mean().item(), abs=1e-4)
    assert 0 < numbers["clipped"] == pytest.approx(torch.cat(clipped).mean().item(), abs=0.01)


def test_advantages_are_normalised_within_a_group():
    found = grpo_tiny.advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]]))
    half, quarter = 0.5 / (1 / 3) ** 0.5, 0.25 / 0.25**0.5
    expected = [[half, -half, -half, half], [0.0] * 4, [-quarter, -quarter, -quarter, 3 * quarter]]
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-3, rtol=0)


def test_an_answer_is_right_if_it_ends_with_the_right_word():
    for answer, finish_reason, right in (
        ("A duck says quack.", "stop", True),
        ("quack", "stop", True),
        ("A duck says quack.", "length", False),
        ("A duck says quack and moo.", "stop", False),
        ("quacks", "stop", False),
        (".", "stop", False),
        ("", "stop", False),
    ):
        assert grpo_tiny.is_right("What does a duck say?", answer, finish_reason) is right, (answer, finish_reason)


# The command line ------------------------------------------------------------------------------------------------


def test_engine_arguments_are_parsed_as_python_values():
    given = ["enforce_eager=True", "kv_cache_memory_bytes=67108864", "engine=async", "path=a=b"]
    options = grpo_tiny.parse(["--rollouts", "vllm", *(part for one in given for part in ("--engine-arg", one))])
    assert options.engine_args == {
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 26,
        "engine": "async",
        "path": "a=b",
    }
    assert grpo_tiny.parse([]) == Options()
