"""How long a comparison may take: what a budget leaves out is said, and what is said holds all the same."""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from corelm import Backend
from corelm_compare import SideSpec, compare
from corelm_compare.findings import Clock
from corelm_testing.toy import ByteTokenizer, ToyBackend
from helpers.planted_defects import DEFECTS, PROMPTS, loaded, opened, sound
from transformers_backend import TransformersBackend

TEXTS = ["Hello", "What is your name?", "The cat", "Where?", "Why?", "And then?"]


def toys(**options):
    with Backend.from_plugin(ToyBackend.open(), "toy") as one, Backend.from_plugin(ToyBackend.open(), "toy") as other:
        return compare([one, other], TEXTS, **options)


def test_a_budget_that_is_spent_leaves_out_what_it_names():
    found = toys(budget=1e-6)
    assert found.verdict == "agree"
    # All rows are scored, and the sides' distances to themselves are measured.
    assert found.gaps[0].count > 100 and {gap.kind for gap in found.own} == {"again", "company", "order", "late_start"}
    assert {"sampled-differs", "temperature", "stop-string"} <= set(found.not_tried)
    assert set(found.not_tried.values()) == {"the budget of 1e-06 s was spent"}
    examined = r"causes are looked for in \d prompts? and \d rows? made of their ids, of 6 prompts and 3 rows made of"
    assert any(re.match(examined, note) for note in found.notes)
    assert not [why for why in toys(budget=1e6).not_tried.values() if "budget" in why]


def test_a_cause_that_was_not_looked_for_is_not_agreement(folder_of):
    folder = folder_of("qwen2", 3)
    with sound(folder) as right, DEFECTS["shift forward"].open(folder) as wrong:
        found = compare([right, wrong], PROMPTS, oracle=folder, budget=1e-6)
    assert (found.verdict, found.causes, found.exit_code) == ("unexplained", (), 1)
    assert "shift" in found.not_tried and "shift" not in found.ruled_out
    untried = rf"differ, and the budget of 1e-06 s was spent with {len(found.not_tried)} causes untried; give a larger"
    assert re.search(untried, found.headline) and not any("none of the causes" in note for note in found.notes)


def test_a_cause_that_was_tried_in_part_is_not_ruled_out(folder_of, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(Clock, "spent", property(lambda clock: "trying quantized weights" in told))
    folder = folder_of("qwen2", 3)
    others = opened(TransformersBackend, loaded(folder_of("qwen2", 4)), AutoTokenizer.from_pretrained(folder))
    with sound(folder) as one, others as other:
        found = compare(
            [one, other], PROMPTS, oracle=folder, budget=60, on_progress=lambda doing, left: told.append(doing)
        )
    assert "quantized" in {each.id for each in found.experiments} and "quantized" in found.not_tried
    assert "shift" in found.ruled_out and not {*found.ruled_out} & {*found.not_tried}


def test_sides_that_were_opened_with_different_models_are_told_so_before_anything_is_guessed(folder_of):
    folders = [folder_of("qwen2", 3), folder_of("qwen2", 4)]
    sides = [
        SideSpec(backend="transformers", model=folder, options={"dtype": "float32"}, name=name)
        for folder, name in zip(folders, ("base", "later"), strict=True)
    ]
    told: list[str] = []
    found = compare(sides, PROMPTS, quick=True, budget=1e6, on_progress=lambda doing, left: told.append(doing))
    (cause,) = found.causes
    assert (cause.id, cause.side, cause.confidence) == ("other-weights", "later", "certain")
    assert "opened with different models" in cause.evidence and str(folders[1]) in cause.evidence
    assert [doing for doing in told if doing.startswith("explaining")] == ["explaining later: other-weights"]
    # The same weights in another folder are no other model.
    copy = folders[1].with_name("copy")
    shutil.copytree(folders[0], copy, dirs_exist_ok=True)
    found = compare([sides[0], replace(sides[1], model=copy)], PROMPTS, quick=True, budget=1e6)
    assert (found.verdict, found.causes) == ("agree", ())


def test_a_quick_comparison_takes_the_first_prompts():
    found = toys(quick=True)
    prompts = [row for row in found.rows if row.kind == "text"]
    assert [row.text for row in prompts] == TEXTS[:4] and found.verdict == "agree"
    assert all(len(row.ids) - row.prompt_length <= 8 for row in prompts)
    with Backend.from_plugin(ToyBackend.open(), "toy") as one, Backend.from_plugin(ToyBackend.open(), "toy") as other:
        built_in = compare([one, other], quick=True)
    assert [row.kind for row in built_in.rows if not row.made_of_others] == ["text", "text", "text", "conversation"]


def test_a_quick_comparison_without_a_chat_template_takes_four_texts(monkeypatch):
    with Backend.from_plugin(ToyBackend.open(), "toy") as one, Backend.from_plugin(ToyBackend.open(), "toy") as other:
        monkeypatch.delattr(ByteTokenizer, "apply_chat_template")
        found = compare([one, other], quick=True)
    assert [row.kind for row in found.rows if not row.made_of_others] == ["text"] * 4


def test_what_is_done_and_how_long_it_takes_is_told():
    told: list[tuple[str, float | None]] = []
    started = time.monotonic()
    toys(on_progress=lambda doing, left: told.append((doing, left)))
    took = time.monotonic() - started
    assert [doing for doing, _ in told][:2] == ["opening the sides", "sampling completions"]
    assert any("toy 2 scores" in doing for doing, _ in told) and any(
        "sampling from toy 1" in doing for doing, _ in told
    )
    # It is not known before the rows are scored, and known from then on.
    known = [left is not None for _, left in told]
    assert known == sorted(known) and known[-1]
    assert all(left is None or 0 <= left < 20 * took + 10 for _, left in told)


@pytest.mark.parametrize("left", ["tolerance", "budget"])
def test_seconds_and_nats_are_above_0(left):
    with pytest.raises(ValueError, match=left):
        toys(**{left: 0.0})
