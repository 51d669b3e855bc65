"""The parts of a comparison: figures, rows, what is refused, what is found without an oracle, and what it costs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

import corelm
from corelm import Backend, Ragged, hookimpl
from corelm.errors import CapabilityError, InvalidRequestError
from corelm_compare import SideSpec, as_html, as_text, compare
from corelm_compare.cases import measure
from corelm_compare.oracles import Oracle
from corelm_testing.toy import ToyBackend
from helpers import oracle as plain
from helpers.lora import lora, merged, save
from helpers.planted_defects import (
    DEFECTS,
    PROMPTS,
    loaded,
    older,
    opened,
    sound,
)
from helpers.planted_engines import AddsBos, IgnoresAdapters, ShiftedForward, Silent, TopOnly
from helpers.tiny_models import random_rows
from transformers_backend import TransformersBackend


def test_the_figures_of_a_gap_are_those_of_a_formula():
    first = [torch.tensor([torch.nan, -1.0, -2.0]), torch.tensor([torch.nan, -3.0, -4.0, torch.nan])]
    second = [torch.tensor([torch.nan, -1.5, -2.0]), torch.tensor([torch.nan, -2.0, -4.05, -1.0])]
    gap = measure("sides", "a", "b", first, second, [[5, 6, 7], [8, 9, 10, 11]], str)
    delta = torch.tensor([-0.5, 0.0, 1.0, -0.05], dtype=torch.float64)
    torch.testing.assert_close(gap.delta.double(), delta, atol=1e-6, rtol=0)
    assert (gap.count, gap.skipped) == (4, 1)
    assert gap.mean == pytest.approx(0.1125) and gap.mean_abs == pytest.approx(0.3875)
    assert gap.median_abs == pytest.approx(0.275) and gap.max_abs == pytest.approx(1.0)
    assert gap.outside == pytest.approx(0.5)
    assert gap.k3 == pytest.approx(float((delta.exp() - 1 - delta).mean()), abs=1e-6)
    worst = gap.worst[0]
    assert (worst.row, worst.position, worst.token_id, worst.token) == (1, 1, 9, "9")
    assert gap.rows.tolist() == [0, 0, 1, 1] and gap.positions.tolist() == [1, 2, 1, 2]


def test_no_tokens_have_no_gap():
    gap = measure("sides", "a", "b", [torch.full((1,), torch.nan)], [torch.full((1,), torch.nan)], [[1]], str)
    assert (gap.count, gap.mean_abs, gap.max_abs, gap.k3, gap.worst) == (0, 0.0, 0.0, 0.0, ())


def test_the_oracle_is_the_plain_forward(folder_of):
    folder = folder_of("gemma2", 4)
    rows = [[5, 6, 7, 8], [9, 10]]
    for row, found in zip(rows, Oracle.load(folder).numbers(rows), strict=True):
        torch.testing.assert_close(found[1:], plain.logprobs(loaded(folder), row)[1:], rtol=0, atol=1e-5)


def test_a_comparison_is_json_and_holds_all_numbers(folder_of):
    folder = folder_of("qwen2", 3)
    with sound(folder) as one, opened(ShiftedForward, loaded(folder), AutoTokenizer.from_pretrained(folder)) as other:
        found = compare([one, other], PROMPTS, oracle=folder)
        row = found.rows[4]
        expected = one.score_logprobs([list(row.ids)]).logprobs.tolist()[0]
    assert row.numbers["transformers"][1:] == pytest.approx(expected[1:], abs=1e-5)
    assert len(row.tokens) == len(row.ids) == len(row.numbers["planted"])
    assert {row.kind for row in found.rows} == {"text", "conversation", "ids"}
    plainly = json.loads(json.dumps(found.to_json(arrays=True), allow_nan=False))
    assert plainly["exit_code"] == 1 and plainly["causes"][0]["id"] == "shift"
    assert len(plainly["gaps"][0]["delta"]) == plainly["gaps"][0]["count"]
    assert "delta" not in found.to_json()["gaps"][0]
    assert found.headline in str(found) and "shift" in found.headline
    assert any(each.what == "numbers" and each.position == 1 for each in found.divergences)


def test_a_defect_is_named_on_the_other_side_too(folder_of):
    folder = folder_of("qwen2", 3)
    with opened(AddsBos, loaded(folder), AutoTokenizer.from_pretrained(folder)) as wrong, sound(folder) as right:
        found = compare([wrong, right], PROMPTS, oracle=folder)
    assert {(cause.id, cause.side) for cause in found.causes} == {("bos-added", "planted")}


def test_two_defects_on_two_sides_are_both_named(folder_of):
    folder, tokenizer = folder_of("qwen2", 3), AutoTokenizer.from_pretrained(folder_of("qwen2", 3))
    with (
        opened(AddsBos, loaded(folder), tokenizer, "one") as one,
        opened(TopOnly, loaded(folder), tokenizer, "other") as other,
    ):
        found = compare([one, other], PROMPTS, oracle=folder)
    assert {(cause.id, cause.side) for cause in found.causes} == {("bos-added", "one"), ("top-only", "other")}


@pytest.mark.parametrize(
    "name",
    [
        "shift forward",
        pytest.param("adds BOS to ids", marks=pytest.mark.nightly),
        pytest.param("cuts long rows on the left", marks=pytest.mark.nightly),
        pytest.param("normalises over the top 200", marks=pytest.mark.nightly),
        pytest.param("logarithms to base 2", marks=pytest.mark.nightly),
    ],
)
def test_without_an_oracle_a_cause_is_named_too(name, folder_of):
    defect, folder = DEFECTS[name], folder_of("qwen2", 3)
    with sound(folder) as right, defect.open(folder) as wrong:
        found = compare([right, wrong], PROMPTS, oracle=None)
    print(found)
    assert {cause.id for cause in found.causes} == {defect.cause}
    # What the side says when it samples contradicts what it says when it scores.
    assert {cause.side for cause in found.causes} == {"planted"}


def test_without_an_oracle_other_weights_are_a_difference_and_no_cause(folder_of):
    folder = folder_of("qwen2", 3)
    with sound(folder) as one, DEFECTS["weights before an update"].open(folder) as other:
        found = compare([one, other], PROMPTS, oracle=None)
    assert (found.verdict, found.causes, found.exit_code) == ("unexplained", (), 1)
    assert "shift" in found.ruled_out and "missing-scale" in found.ruled_out
    assert "cause not found" in str(found)


def test_weights_that_are_known_are_named(folder_of, tmp_path):
    folder = folder_of("qwen2", 3)
    earlier = loaded(folder)
    with torch.no_grad():
        for name, parameter in earlier.named_parameters():
            parameter.copy_(older(name, parameter))
    earlier.save_pretrained(tmp_path / "step-1")
    with sound(folder) as one, opened(TransformersBackend, earlier, AutoTokenizer.from_pretrained(folder)) as other:
        found = compare([one, other], PROMPTS, oracle=folder, checkpoints=[folder_of("qwen2", 4), tmp_path / "step-1"])
    (cause,) = found.causes
    assert (cause.id, cause.side, cause.confidence) == ("stale-weights", "planted", "certain")
    assert "step-1" in cause.evidence


@pytest.mark.parametrize("plugin", [IgnoresAdapters, TransformersBackend])
def test_an_adapter_that_is_ignored_or_another_one(plugin, folder_of, tmp_path):
    folder = folder_of("qwen2", 3)
    state, config = lora(loaded(folder))
    right = save(state, config, tmp_path / "right")
    wrong = right if plugin is IgnoresAdapters else save(lora(loaded(folder), seed=1)[0], config, tmp_path / "wrong")
    merged(loaded(folder), state).save_pretrained(tmp_path / "merged")
    planted = Backend.from_plugin(plugin.open(folder, dtype="float32"), "planted")
    with sound(folder) as one, planted as other:
        one.load_adapter("mine", right)
        other.load_adapter("mine", wrong)
        found = compare([one, other], PROMPTS, oracle=tmp_path / "merged", adapter="mine")
    print(found)
    expected = "adapter-not-applied" if plugin is IgnoresAdapters else "wrong-adapter"
    assert {(cause.id, cause.side) for cause in found.causes} == {(expected, "planted")}


def test_a_side_that_cannot_score_is_compared_by_what_it_samples(folder_of):
    folder = folder_of("qwen2", 3)
    with sound(folder) as one, opened(Silent, loaded(folder), AutoTokenizer.from_pretrained(folder)) as other:
        found = compare([one, other], PROMPTS, oracle=folder)
    assert found.verdict == "agree"
    assert {row.sampled_by for row in found.rows} == {"planted"}
    assert found.gaps[0].count > 20 and found.gaps[0].mean_abs < 1e-4
    # What it sampled is listed against the scores of the other side.
    assert "planted, sampled / scored" in as_text(found, 120) and "planted, sampled (plain)" in as_html(found)


def test_calls_are_counted_and_bounded(folder_of):
    folder = folder_of("qwen2", 3)
    calls = {"transformers": 0}

    class Counting:
        @hookimpl(wrapper=True)
        def score_logprobs(self, request):
            calls["transformers"] += 1
            return (yield)

        @hookimpl(wrapper=True)
        def generate(self, request):
            calls["transformers"] += 1
            return (yield)

    one = SideSpec(backend="transformers", model=folder, options={"dtype": "float32", "wrappers": [Counting()]})
    with DEFECTS["weights before an update"].open(folder) as other:
        found = compare([one, other], PROMPTS)
    assert found.sides[0].calls == calls["transformers"] <= 12 + len(found.rows) + 12
    assert found.calls == sum(side.calls for side in found.sides)


class WrongOnce:
    """A wrapper that puts one wrong number into the scores of one row: that which ends with `last`."""

    def __init__(self, last: int) -> None:
        self.last = last

    @hookimpl(wrapper=True)
    def score_logprobs(self, request):
        made = yield
        rows = [row.clone() for row in made.logprobs.split()]
        for ids, row in zip(request.sequences.tolist(), rows, strict=True):
            if ids[-1] == self.last and len(row) > 9 and row[9] != 0.0:
                row[9] -= 3.0
        return replace(made, logprobs=Ragged(torch.cat(rows), made.logprobs.lengths))


def test_one_wrong_number_in_thousands_is_a_difference(folder_of):
    folder = folder_of("qwen2", 3)
    rows = random_rows(*[80] * 30)
    completions = [[*row, n] for n, row in enumerate(random_rows(*[20] * 30, seed=1), start=100)]
    wrong = corelm.get_backend("transformers", folder, dtype="float32", wrappers=[WrongOnce(125)])
    with sound(folder) as one, wrong as other:
        found = compare([one, other], rows, completions, oracle=folder)
    assert found.gaps[0].count > 2900 and found.gaps[0].mean_abs < 2e-3
    assert found.verdict == "unexplained" and found.exit_code == 1
    assert found.gaps[0].worst[0].row == 25 and found.gaps[0].worst[0].position == 9
    assert [(each.row, each.position) for each in found.divergences if each.what == "numbers"] == [(25, 9)]


def test_secrets_are_not_in_a_record(folder_of):
    from corelm_compare.sides import shown_options

    options = shown_options({"base_url": "http://host/sk-0123456789", "api_key": "sk-0123456789", "dtype": "float32"})
    assert options == {"base_url": "http://host/***", "api_key": "***", "dtype": "float32"}
    # The names of these contain "token", and they are no secrets.
    options = {"tokenizer": "PATH", "max_batch_tokens": 4096, "headers": {"X-Tenant": "mine"}}
    assert shown_options(options) == {"tokenizer": "PATH", "max_batch_tokens": "4096", "headers": "{X-Tenant}"}


def test_what_cannot_be_compared_is_refused():
    with Backend.from_plugin(ToyBackend.open(), "toy") as one, Backend.from_plugin(ToyBackend.open(), "toy") as other:
        for change in (
            {"sides": [one]},
            {"prompts": []},
            {"prompts": "text"},
            {"prompts": [[]]},
            {"prompts": [[1, "a"]]},
            {"completions": ["a"]},
            {"tolerance": -1.0},
            {"oracle": "/nothing/here"},
        ):
            (field,) = change
            with pytest.raises(InvalidRequestError) as caught:
                compare(**{"sides": [one, other], "prompts": ["Hello", "you"], "oracle": None, **change})
            assert caught.value.field == field, change


def test_the_toy_agrees_with_itself():
    with Backend.from_plugin(ToyBackend.open(), "toy") as one, Backend.from_plugin(ToyBackend.open(), "toy") as other:
        found = compare([one, other], ["Hello", "What is your name?"])
    assert found.verdict == "agree" and found.oracle is None
    assert any("plain forward" in note for note in found.notes)


def test_two_sides_that_cannot_score_cannot_be_compared(folder_of):
    folder, tokenizer = folder_of("qwen2", 3), AutoTokenizer.from_pretrained(folder_of("qwen2", 3))
    with (
        opened(Silent, loaded(folder), tokenizer) as one,
        opened(Silent, loaded(folder), tokenizer) as other,
        pytest.raises(CapabilityError),
    ):
        compare([one, other], PROMPTS, oracle=None)
