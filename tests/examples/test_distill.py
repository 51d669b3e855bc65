"""`examples/distill_tiny.py`, shortened: the loss is that of plain forward passes, and it falls."""

import copy
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import mean

import pytest
import torch
from transformers import AutoModelForCausalLM

import corelm
from corelm_testing.tiny import build_tiny

pytest.importorskip("matplotlib", reason="the example draws with matplotlib, which is not installed")

import distill_tiny
from distill_tiny import Distillation, Options

ASKED = distill_tiny.questions()[:6]
STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a student and a teacher, both trained for less time than those of the example."""
    folder = tmp_path_factory.mktemp("distill")
    build_tiny(folder / "student", steps=20, progress=False)
    build_tiny(folder / "teacher", steps=60, progress=False, heads=6, layers=3)
    return folder


@pytest.fixture(scope="module")
def printed(folder: Path) -> str:
    """Run the command and return what it prints."""
    threads = torch.get_num_threads()
    try:
        with redirect_stdout(StringIO()) as output:
            distill_tiny.main(["--output", str(folder), "--steps", str(STEPS), "--questions", "12"])
    finally:
        torch.set_num_threads(threads)
    return output.getvalue()


@pytest.fixture
def distillation(folder: Path) -> Iterator[Distillation]:
    with distill_tiny.open_engines(Options(output=folder)) as opened:
        yield opened


@pytest.mark.nightly
def test_the_loss_falls_and_everything_is_written(folder: Path, printed: str):
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    losses = [step["loss"] for step in steps]
    assert len(losses) == STEPS and mean(losses[-3:]) < 0.8 * mean(losses[:3])
    # Each step samples with the weights that the one before has made.
    assert len({step["sampled_with"] for step in steps}) == STEPS
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    lines = printed.splitlines()
    assert all(any(line.startswith(question) for line in lines) for question in distill_tiny.questions())
    assert "Likeliest answers that are the teacher's" in printed and "trained-student" in lines[-1]


@pytest.mark.parametrize(
    "kind", ["forward_kl", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("reverse_kl", "js"))]
)
def test_the_loss_is_that_of_plain_forward_passes(folder: Path, distillation: Distillation, kind: str):
    teacher = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32)
    student = copy.deepcopy(distillation.model)
    rollout = distillation.student(distill_tiny.conversations(ASKED), seed=1)
    distillation.ask(rollout)
    distillation.loss.terms = type(distillation.loss.terms)(kind)
    loss = distillation.loss.mean(rollout)
    loss.backward()
    values = []
    parts = (corelm.ragged(rollout, ("tokens", part)).split() for part in ("prompt", "full"))
    for prompt, full in zip(*parts, strict=True):
        with torch.no_grad():
            log_p = teacher(full[None]).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        log_q = student(full[None]).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        best = log_p.topk(Options.top_k).indices
        p, q = (
            torch.cat([one.exp().gather(1, best), 1 - one.exp().gather(1, best).sum(1, keepdim=True)], 1)
            for one in (log_p, log_q)
        )
        m = (p + q) / 2
        values.append(
            {
                "forward_kl": p * (p / q).log(),
                "reverse_kl": q * (q / p).log(),
                "js": (p * (p / m).log() + q * (q / m).log()) / 2,
            }[kind].sum(1)
        )
    wanted = torch.cat(values).mean()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-3)
    wanted.backward()
    for ours, theirs in zip(distillation.model.parameters(), student.parameters(), strict=True):
        scale = float(theirs.grad.abs().max())
        assert scale > 0 and float((ours.grad - theirs.grad).abs().max()) < 2e-3 * scale
