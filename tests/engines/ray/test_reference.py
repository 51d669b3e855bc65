"""A reference model in an actor gives the same KL as one in this process; and the page that shows it runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import corelm
from corelm import LLMPolicy
from corelm.kl import RetrieveKL
from helpers.pages import Page
from helpers.tiny_models import tiny_model

PAGE = Page(Path(__file__).parents[3] / "docs" / "scaling.md")


@pytest.mark.nightly
def test_the_kl_is_that_of_a_reference_in_this_process(model: Path) -> None:
    with (
        corelm.get_backend("transformers", model, dtype="float32") as backend,
        corelm.get_backend("transformers", model, dtype="float32") as here,
        corelm.get_backend("ray", model, inner="transformers", num_cpus=0.2, dtype="float32") as there,
    ):
        # Another model than the policy's, or every KL would be 0.
        for reference in (here, there):
            reference.update_weights(tiny_model(seed=1).state_dict())
        policy = LLMPolicy(backend, input_mode="text", sampling_params={"max_new_tokens": 8}, pad_output=True)
        rollout = policy(TensorDict(text=["the cat", "a dog sat on"]), seed=0)
        found = [RetrieveKL(LLMPolicy(each), add_to_reward=False)(rollout.clone()) for each in (here, there)]
    kl = [each["kl_penalty"] for each in found]
    assert torch.equal(kl[0], kl[1]) and kl[0].abs().sum() > 0
    ours, theirs = (each["ref_log_probs"].provenance for each in found)
    assert (ours.mode, ours.temperature) == (theirs.mode, theirs.temperature)


@pytest.mark.nightly
def test_the_section_about_ray_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny-model").symlink_to(tiny_model)
    monkeypatch.chdir(tmp_path)
    blocks = PAGE.blocks("py")
    assert len(blocks) == 2
    names: dict[str, object] = {"__name__": "scaling"}
    for block in blocks:
        exec(compile(block, str(PAGE.path), "exec"), names)
    assert "tensor" in capsys.readouterr().out
