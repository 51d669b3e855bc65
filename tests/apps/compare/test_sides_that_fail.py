"""Sides that fail, or have nothing to say: an error that names the side, or a verdict that is not "agree"."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

from corelm import Backend, Ragged, hookimpl
from corelm.errors import EngineError, InvalidRequestError
from corelm_compare import SideSpec, compare
from helpers.planted_defects import PROMPTS, loaded, opened, sound
from helpers.planted_engines import Rescoring, ShiftedForward, Silent
from helpers.tiny_models import random_rows
from transformers_backend import TransformersBackend


class FailsLate(TransformersBackend):
    """Answers three calls, then fails."""

    calls = 0

    @hookimpl
    def score_logprobs(self, request):
        self.calls += 1
        if self.calls > 3:
            raise RuntimeError("out of luck")
        return TransformersBackend.score_logprobs(self, request)


class Nans(Rescoring):
    """Scores NaN in the middle of a row."""

    def rescored(self, rows, score):
        found = score(rows)
        for row in found:
            row[len(row) // 2] = torch.nan
        return found


@pytest.mark.parametrize("plugin", [FailsLate, Nans])
def test_an_error_names_the_side_and_the_others_are_closed(plugin, folder_of):
    folder, closed = folder_of("qwen2", 3), []

    class Watch:
        @hookimpl(wrapper=True)
        def close(self):
            closed.append("sound")
            return (yield)

    threads = set(threading.enumerate())
    right = SideSpec(backend="transformers", model=folder, options={"dtype": "float32", "wrappers": [Watch()]})
    wrong = Backend.from_plugin(plugin.open(loaded(folder), tokenizer=AutoTokenizer.from_pretrained(folder)), "twin")
    with wrong, pytest.raises(EngineError, match="side twin: "):
        compare([right, wrong], PROMPTS)
    assert closed == ["sound"] and wrong.closed
    assert {each for each in threading.enumerate() if each.is_alive()} <= threads


class RefusesTwenties(TransformersBackend):
    """Fails on rows whose first id is 20, as a server does on rows that it does not like."""

    @hookimpl
    def score_logprobs(self, request):
        made = TransformersBackend.score_logprobs(self, request)
        if request.return_logits:
            return made
        bad = [row[0] == 20 for row in request.sequences.tolist()]
        errors = tuple("no twenties" if each else "" for each in bad)
        kept = torch.tensor([not each for each in bad])[request.sequences.row_index]
        scored = made.scored.values & kept
        return replace(
            made,
            errors=errors if any(bad) else None,
            scored=Ragged(scored, made.scored.lengths),
            logprobs=Ragged(torch.where(scored, made.logprobs.values, 0.0), made.logprobs.lengths),
        )


def test_rows_that_one_side_fails_on_are_not_agreement(folder_of):
    folder = folder_of("qwen2", 3)
    with sound(folder) as one, opened(RefusesTwenties, loaded(folder), AutoTokenizer.from_pretrained(folder)) as other:
        found = compare([one, other], [*random_rows(12, 15), [20, 21, 22, 23]], oracle=folder)
    assert (found.verdict, found.causes, found.exit_code) == ("unexplained", (), 1)
    assert any("planted did not score row 2" in note for note in found.notes)
    assert sum("no twenties" in note for note in found.notes) >= 1


def test_nothing_that_was_compared_is_not_agreement(folder_of):
    folder = folder_of("qwen2", 3)
    with sound(folder) as one, sound(folder) as other:
        found = compare([one, other], [[5]], [[]], oracle=folder)
    assert found.gaps[0].count == 0 and found.verdict == "unexplained"
    assert any("no token of transformers 1 and transformers 2 could be compared" in note for note in found.notes)


def test_one_prompt_of_one_id_is_enough(folder_of):
    folder = folder_of("qwen2", 3)
    with sound(folder) as one, sound(folder) as other:
        found = compare([one, other], [[5]], oracle=folder)
    assert found.verdict == "agree" and found.gaps[0].count > 0


def test_answers_that_end_at_once_are_no_fault(folder_of):
    folder, eos = folder_of("qwen2", 3), list(range(512))

    def quick(name: str) -> Backend:
        model = loaded(folder)
        model.generation_config.eos_token_id = eos[: model.config.vocab_size]
        return opened(TransformersBackend, model, AutoTokenizer.from_pretrained(folder), name)

    with quick("one") as one, quick("other") as other:
        found = compare([one, other], PROMPTS, oracle=None)
    assert found.verdict == "agree" and found.gaps[0].count > 0


def test_completions_that_do_not_fit_a_side_are_refused(folder_of):
    folder = folder_of("qwen2", 3)
    with sound(folder) as one, sound(folder) as other, pytest.raises(InvalidRequestError) as caught:
        compare([one, other], random_rows(10, 10), [[5], [5] * 5000], oracle=folder)
    assert caught.value.field == "completions" and caught.value.rows == (1,)


@pytest.mark.parametrize("with_oracle", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_side_that_cannot_score_is_not_accused_of_the_other_sides_scores(with_oracle, folder_of):
    folder, tokenizer = folder_of("qwen2", 3), AutoTokenizer.from_pretrained(folder_of("qwen2", 3))
    with (
        opened(ShiftedForward, loaded(folder), tokenizer, "wrong") as one,
        opened(Silent, loaded(folder), tokenizer, "silent") as other,
    ):
        found = compare([one, other], PROMPTS, oracle=folder if with_oracle else None)
    assert found.exit_code == 1 and {each.id for each in found.causes} == {"shift"}
    assert "silent" not in {each.side for each in found.causes}


def test_a_checkpoint_that_is_none_is_refused_before_anything_is_asked(folder_of, tmp_path):
    folder = folder_of("qwen2", 3)
    with sound(folder) as one, sound(folder) as other, pytest.raises(InvalidRequestError) as caught:
        compare([one, other], PROMPTS, checkpoints=[tmp_path])
    assert caught.value.field == "checkpoints"


def test_a_side_that_names_no_eos_is_not_accused_of_ending_nowhere(folder_of):
    folder, tokenizer = folder_of("qwen2", 3), AutoTokenizer.from_pretrained(folder_of("qwen2", 3))
    plugin = TransformersBackend.open(loaded(folder), tokenizer=tokenizer)
    plugin.capabilities = replace(plugin.capabilities, eos_token_ids=frozenset())
    with sound(folder) as one, Backend.from_plugin(plugin, "silent about EOS") as other:
        found = compare([one, other], PROMPTS, oracle=folder)
    assert "ends" not in {each.id for each in found.causes}
