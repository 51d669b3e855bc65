"""All prompts, and all that the transformers plugin does with a trained model; make test-real runs it."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import corelm
from corelm import Backend
from corelm.compare import SideSpec, compare
from helpers import oracle, real_checks
from helpers.command_line import corelm_command
from helpers.peft_models import with_lora
from helpers.plain_forward import gradients, own_loss
from helpers.real_checks import Rows, check_greedy, check_scores

pytestmark = pytest.mark.nightly


def test_all_numbers_are_those_of_the_plain_forward(backend: Backend, model: Any, rows: Rows) -> None:
    check_scores(backend, model, rows)
    check_greedy(backend, model, rows, 12)
    real_checks.check_sampled(backend, model, rows, 8)
    real_checks.check_stream(backend, rows[:8], 8)
    real_checks.check_kept_ids(backend, model, rows[:12], 8)


def test_gradients_are_those_of_plain_autograd(copy: Any, tokenizer: Any, rows: Rows) -> None:
    with corelm.get_backend("transformers", copy, tokenizer=tokenizer) as backend:
        for row in (rows[0], rows[8], rows[-8]):
            found = gradients(copy, backend.score_logprobs([row], grad=True).logprobs.values.sum())
            expected = gradients(copy, own_loss(copy, [row]))
            assert found.keys() == expected.keys()
            for name, gradient in expected.items():
                assert float((found[name] - gradient).norm()) <= 1e-3 * float(gradient.norm()), name


def test_an_adapter_gives_the_numbers_of_merged_weights(copy: Any, model: Any, tokenizer: Any, rows: Rows) -> None:
    few = rows[:6]
    adapted = with_lora(copy, lora_alpha=1)
    merged = deepcopy(adapted).merge_and_unload()
    assert float((oracle.logprobs(merged, few[1]) - oracle.logprobs(model, few[1])).abs().max()) > 0.01
    with corelm.get_backend("transformers", adapted, tokenizer=tokenizer) as backend:
        check_scores(backend, merged, few)
        check_greedy(backend, merged, few, 6)
        check_scores(backend, model, few, adapter=False)


def test_changed_weights_are_those_of_the_next_call(copy: Any, tokenizer: Any, folder: Path, rows: Rows) -> None:
    few = rows[:6]
    before = oracle.logprobs(copy, few[1])
    with (
        corelm.get_backend("transformers", copy, tokenizer=tokenizer) as in_place,
        corelm.get_backend("transformers", folder, dtype="float32") as updated,
    ):
        check_scores(in_place, copy, few)
        with torch.no_grad():
            for layer in copy.model.layers:
                layer.mlp.down_proj.weight.mul_(1.03)
        assert float((oracle.logprobs(copy, few[1]) - before).abs().max()) > 0.01
        updated.update_weights(copy.state_dict())
        for backend in (in_place, updated):
            check_scores(backend, copy, few)
            check_greedy(backend, copy, few, 6)


def test_compare_finds_no_difference_but_that_of_other_weights(folder: Path, copy: Any, tokenizer: Any) -> None:
    texts = list(real_checks.TEXTS[:4])
    side = SideSpec("transformers", folder, {"dtype": "float32"}, name="one")
    plain = SideSpec("transformers", folder, {"dtype": "float32", "fast": False}, name="plain")
    assert compare([side, plain], texts).verdict in ("agree", "rounding")
    with torch.no_grad():
        copy.model.layers[3].mlp.down_proj.weight.mul_(1.2)
    other = SideSpec("transformers", copy, {"tokenizer": tokenizer}, name="other")
    assert compare([side, other], texts).verdict in ("differ", "unexplained")


def test_the_command_scores_a_file(folder: Path, model: Any, tokenizer: Any, tmp_path: Path) -> None:
    files = (tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    texts = [text for text in real_checks.TEXTS if len(tokenizer(text).input_ids) > 1][:6]
    files[0].write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = ("--backend", "transformers", "--model", folder, "--dtype", "float32")
    ran = corelm_command("score", *options, "--input", files[0], "--output", files[1])
    assert ran.exit_code == 0, ran.output
    lines = [json.loads(line) for line in files[1].read_text().splitlines()]
    for text, line in zip(texts, lines, strict=True):
        expected = oracle.logprobs(model, tokenizer(text).input_ids)[1:]
        real_checks.close(torch.tensor(line["log_probs"]), expected, text)
