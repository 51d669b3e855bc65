"""More of what the transformers plugin does with a trained model; make test-real runs it."""

import json
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import corelm
from corelm.errors import CapabilityError
from helpers import oracle, planted_faults, real_checks
from helpers.command_line import corelm_command, write_rows
from helpers.command_line import rows as read_rows
from helpers.peft_models import with_lora
from helpers.plain_forward import gradients, own_loss
from helpers.real_checks import Rows, check_greedy, check_numbers, check_scores

pytestmark = pytest.mark.nightly


def test_gradients_are_those_of_float64(copy: Any, tokenizer: Any, rows: Rows) -> None:
    """Autograd of the plain float32 forward is 1e-3 off where tokens are nearly sure: its `log_softmax` is."""
    exact = deepcopy(copy).double()
    with corelm.get_backend("transformers", copy, tokenizer=tokenizer) as backend:
        for some in ([rows[0]], [rows[8]], [rows[0], rows[3], rows[11], rows[-8]]):
            found = gradients(copy, backend.score_logprobs(some, grad=True).logprobs.values.sum())
            expected = gradients(exact, own_loss(exact, some))
            assert found.keys() == expected.keys()
            for name, gradient in expected.items():
                assert float((found[name] - gradient).norm()) < 1e-4 * float(gradient.norm()), name


def test_an_adapter_gives_the_numbers_of_merged_weights(copy: Any, model: Any, tokenizer: Any, rows: Rows) -> None:
    few = rows[:6]
    adapted = with_lora(copy, lora_alpha=1)
    merged = deepcopy(adapted).merge_and_unload()
    assert float((oracle.logprobs(merged, few[1]) - oracle.logprobs(model, few[1])).abs().max()) > 0.01
    with corelm.get_backend("transformers", adapted, tokenizer=tokenizer) as backend:
        check_numbers(backend, merged, few, 6)
        check_scores(backend, model, few, adapter=False)


def test_changed_weights_are_those_of_the_next_call(copy: Any, tokenizer: Any, folder: Path, rows: Rows) -> None:
    few = rows[:6]
    before = oracle.logprobs(copy, few[1])
    with (
        corelm.get_backend("transformers", copy, tokenizer=tokenizer) as in_place,
        corelm.get_backend("transformers", folder, dtype="float32") as updated,
    ):
        for backend in (in_place, updated):
            check_scores(backend, copy, few)
        with torch.no_grad():
            for layer in copy.model.layers:
                layer.mlp.down_proj.weight.mul_(1.03)
        assert float((oracle.logprobs(copy, few[1]) - before).abs().max()) > 0.01
        updated.update_weights(copy.state_dict())
        for backend in (in_place, updated):
            check_scores(backend, copy, few)
            check_greedy(backend, copy, few, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plant", planted_faults.PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_changes_no_number(
    copy: Any, tokenizer: Any, rows: Rows, plant: Callable[[Any], None], dtype: torch.dtype
) -> None:
    model = deepcopy(copy).to(dtype)
    exact = copy.double() if dtype == torch.float32 else copy
    for each in (model, exact):
        plant(each)
    # The second has nothing before its last token that could be read wrongly.
    texts, prompts = [rows[28][:27], rows[0][:2], rows[0], rows[3][:14]], [rows[28][:21], rows[0]]
    with corelm.get_backend("transformers", model, tokenizer=tokenizer) as backend:
        planted_faults.check(backend, model, exact, texts, prompts, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_noise_is_refused(copy: Any, tokenizer: Any, rows: Rows, dtype: torch.dtype) -> None:
    model = copy.to(dtype)
    planted_faults.noise(model)
    with corelm.get_backend("transformers", model, tokenizer=tokenizer) as backend:
        for call in (backend.score_logprobs, partial(backend.generate, sampling={"max_new_tokens": 2})):
            with pytest.raises(CapabilityError, match="each time it reads the same ids"):
                call(rows[:3])


def test_compare_tells_rounding_and_has_no_bias_of_its_own(folder: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": text} for text in real_checks.TEXTS[:4]])
    ran = corelm_command(
        *("compare", "--model", folder, "--input", tmp_path / "prompts.jsonl", "--max-new-tokens", 6, "--json"),
        *("--backend", "transformers", "--option", "dtype=float32"),
        *("--backend", "transformers", "--option", "dtype=bfloat16"),
    )
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert found["verdict"] == "rounding"
    (exact,) = (gap for gap in found["gaps"] if (gap["kind"], gap["other"]) == ("oracle", "transformers 1"))
    # With a float32 log_softmax in the plain forward, the mean would be 8e-6.
    assert abs(exact["mean"]) < 5e-6 and exact["max_abs"] < real_checks.MOST


def test_compare_tells_that_one_layer_has_other_weights(
    folder: Path, copy: Any, tokenizer: Any, tmp_path: Path
) -> None:
    with torch.no_grad():
        copy.model.layers[12].mlp.down_proj.weight.mul_(1.02)
    for each in (copy, tokenizer):
        each.save_pretrained(tmp_path / "changed")
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": text} for text in real_checks.TEXTS[:4]])
    ran = corelm_command(
        *("compare", "--input", tmp_path / "prompts.jsonl", "--max-new-tokens", 6, "--json"),
        *("--checkpoint", tmp_path / "changed", "--option", "dtype=float32"),
        *("--backend", "transformers", "--model", folder, "--backend", "transformers", "--model", tmp_path / "changed"),
    )
    assert ran.exit_code == 1, ran.output
    found = json.loads(ran.stdout)
    assert found["verdict"] == "differ" and [cause["id"] for cause in found["causes"]] == ["stale-weights"]


def test_the_command_scores_a_file(folder: Path, model: Any, tokenizer: Any, tmp_path: Path) -> None:
    files = (tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    chat = [*real_checks.CHATS[1], {"role": "assistant", "content": "It is 56."}]
    lines = [{"text": text} for text in real_checks.TEXTS[:4]]
    write_rows(files[0], [*lines, {"prompt": "Paris is", "completion": " a city"}, {"messages": chat}])
    options = ("--backend", "transformers", "--model", folder, "--option", "dtype=float32")
    ran = corelm_command("score", *options, "--per-token", "--input", files[0], "--output", files[1])
    assert ran.exit_code == 0, ran.output
    texts = [tokenizer(line["text"]).input_ids for line in lines]
    prompt, whole = (tokenizer(text).input_ids for text in ("Paris is", "Paris is a city"))
    opened = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True).input_ids
    # The answer's turn ends with the id that ends an answer.
    said = [*opened, *tokenizer("It is 56.").input_ids, tokenizer.eos_token_id]
    pairs = [*((row, 1) for row in texts), (whole, len(prompt)), (said, len(opened))]
    for (row, start), line in zip(pairs, read_rows(files[1]), strict=True):
        real_checks.close(torch.tensor(line["log_probs"]), oracle.logprobs(model, row)[start:], str(row))
