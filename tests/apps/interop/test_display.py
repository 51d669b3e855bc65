"""What `summary` and notebooks show: short, for people, and never an exception."""

from __future__ import annotations

import html.parser
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import corelm
import corelm_interop
from core.containers.test_support import rollout
from corelm import History, LLMPolicy
from corelm.containers import LogProbs, Masks
from corelm.containers.assemble import assemble
from corelm.errors import InvalidRequestError
from corelm.spec.message import Message
from corelm.spec.records import ContainerRequest, Parts
from corelm.tensors.ragged import Ragged
from corelm_interop.display import container_html, result_or_none
from helpers.broken_containers import BROKEN
from helpers.each import each
from helpers.four_rows import RAW, batch, both_layouts
from helpers.refusals import refused
from helpers.toy_prompts import QUESTIONS, SAMPLING, TOKENIZER, chat

CONTAINERS = ("text", "tokens", "masks", "log_probs", "history")


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of the usual size."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")


@pytest.fixture(scope="module")
def result() -> TensorDict:
    with corelm.get_backend("toy") as backend:
        policy = LLMPolicy(backend, sampling_params=SAMPLING)
        return policy(TensorDict(history=History.from_chats([chat(q) for q in QUESTIONS])), seed=3)


def many(count: int, words: int = 5) -> TensorDict:
    """Many rows that have not been made."""
    tokens = Ragged.from_list([[1] * words] * count)
    return assemble(
        ContainerRequest(
            batch_size=(count,),
            fields=frozenset({"text", "tokens", "masks", "log_probs", "history"}),
            tokens=Parts(
                tokens.slice(tokens.lengths * 0, tokens.lengths - 2),
                tokens.slice(tokens.lengths - 2, tokens.lengths),
                tokens,
            ),
            texts=Parts(("Q",) * count, ("A",) * count, ("QA",) * count),
            chats=Parts(None, None, ((Message("user", "Q"),),) * count),
            logprobs=Ragged(-tokens.values.float(), tokens.lengths),
            scored=Ragged.full(tokens.lengths, True, torch.bool),
            provenance=RAW,
            finish_reasons=("stop",) * count,
            errors=("",) * count,
        )
    )


# summary -------------------------------------------------------------------------------------------------------


@both_layouts
@each("shape", [(), (4,), (2, 2)])
def test_the_summary_fits_a_screen(shape: tuple[int, ...], pad_output: bool) -> None:
    td = batch((4,), pad_output)[1] if shape == () else batch(shape, pad_output)
    td["reward"] = torch.zeros(shape)
    lines = str(corelm_interop.summary(td)).splitlines()
    assert len(lines) <= 22 and max(map(len, lines)) <= 80
    shown = "\n".join(lines)
    assert "raw, toy, model 'tiny', weights '0'" in shown and "-10.000" in shown and "length" in shown
    assert "1 + 3" in shown and f"reward float32{list(shape)}" in shown
    assert ("padded" in shown) and ("not padded" in shown) is not pad_output
    assert ("1, 0" in shown) is (shape == (2, 2))


def test_the_summary_says_how_many_rows_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    td = many(500)
    lines = str(corelm_interop.summary(td)).splitlines()
    assert len(lines) <= 22 and lines[0] == "500 rows; below, the first 200"
    assert any("finish_reason: stop 200" in line for line in lines) and "more rows" in lines[-1]
    monkeypatch.setenv("LINES", "10")
    assert len(str(corelm_interop.summary(td)).splitlines()) <= 12


def test_the_summary_shows_errors_and_every_kind_of_log_probs() -> None:
    td = batch()
    td["errors"] = ["", "the prompt has 9 tokens", "", ""]
    td["ref_log_probs"] = td["log_probs"].clone()
    shown = str(corelm_interop.summary(td))
    assert "errors: 1, the first: the prompt has 9 tokens" in shown and "(the prompt" in shown
    assert "ref_log_probs: mean -10.500 over 6 scored tokens" in shown and "mean ref_log_probs" in shown


def test_the_summary_prefers_texts_to_repeated_means() -> None:
    td = batch()
    del td["history"]
    td["text"].prompt, td["text"].response = ["What is it?"] * 4, ["An answer"] * 4
    label = replace(RAW, mode="processed", temperature=0.7, support="truncated", model="/root/.cache/models/my-model")
    for name in ("ref_log_probs", "train_log_probs"):
        td[name] = td["log_probs"].clone()
        td[name].provenance = label
    shown = str(corelm_interop.summary(td))
    assert "What is it" in shown.splitlines()[-4] and "An answer" in shown.splitlines()[-1]
    assert "mean log-prob" in shown and "train_log_probs: mean -10.500" in shown and "model 'my-model'" in shown
    assert "mean train_log_probs" in corelm_interop.summary(td)._repr_html_()


def test_the_summary_is_a_text_in_a_kernel_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert "4 rows" in str(corelm_interop.summary(batch()))


def test_entries_of_others_and_results_without_texts_are_shown(backend: corelm.Backend) -> None:
    bare = LLMPolicy(backend, sampling_params=SAMPLING, return_text=False, return_history=False)
    chats = History.from_chats([chat(q) for q in QUESTIONS])
    for td in (bare(TensorDict(history=chats)), batch()):
        messages = [[{"role": "user", "content": "Hi"}]] * len(td)
        td.set("prompt", NonTensorStack.from_list(messages), inplace=False)
        shown = str(corelm_interop.summary(td))
        assert "finish_reason" in shown and corelm_interop.summary(td)._repr_html_()


def test_control_characters_and_wide_ones_do_not_break_the_table() -> None:
    td = batch()
    td["text"].response = ["\x1b[31mred\n\ttab", "漢字" * 40, "e\u0301" * 90, "<b>"]
    shown = str(corelm_interop.summary(td))
    assert "\x1b" not in shown and "\\x1b[31mred\\n\\ttab" in shown and "漢字" in shown


def test_the_summary_refuses_what_is_not_a_tensordict(result: TensorDict) -> None:
    with refused(InvalidRequestError, field="td"):
        corelm_interop.summary(result["tokens"])


# Whatever it is ----------------------------------------------------------------------------------------------------


@each("make", BROKEN.values())
def test_nothing_that_is_printed_raises(make: Any) -> None:
    td = make()
    assert str(corelm_interop.summary(td)) and corelm_interop.summary(td)._repr_html_()
    for value in td.values():
        if type(value).__module__.startswith("corelm"):
            assert container_html(value).startswith("<div>")


# Notebooks -----------------------------------------------------------------------------------------------------------


class Checker(html.parser.HTMLParser):
    """Checks that every tag is closed in order, and collects the text and the titles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text, self.titles = "", []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "br":
            self.open.append(tag)
        self.titles += [value for name, value in attrs if name == "title"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@both_layouts
def test_a_notebook_shows_tokens_with_role_mask_and_log_prob(pad_output: bool) -> None:
    td = batch((4,), pad_output)
    td["masks"].all_assistant_mask = td["masks"].all_response_mask
    page = Checker(corelm_interop.summary(td, tokenizer=TOKENIZER)._repr_html_())
    assert "position 1, id 9, response, assistant, log-prob -9, probability 0.0001234" in page.titles
    assert "position 0, id 4, prompt, not the assistant" in page.titles
    assert len(page.titles) == 13 and "raw, toy, model 'tiny', weights '0'" in page.text
    ids = Checker(corelm_interop.summary(td)._repr_html_())
    assert "4 9 10 11" in ids.text


@both_layouts
@each("name", CONTAINERS)
def test_every_container_is_shown_in_a_notebook(name: str, pad_output: bool) -> None:
    td = batch((2, 2), pad_output)
    td["text"].response = [["<script>alert(1)</script>", "&amp;"], ["\x1b[2J", "d"]]
    page = Checker(container_html(td[name]))
    assert type(td[name]).__name__ in page.text and "4 rows as (2, 2)" in page.text
    assert "\x1b" not in page.text
    if name == "text":
        assert "<script>alert(1)</script>" in page.text and "<script" not in container_html(td[name])
    if name == "log_probs":
        assert "-9 -10 -11" in page.text


def test_a_page_stays_small(result: TensorDict) -> None:
    assert len(corelm_interop.summary(many(100, words=5000))._repr_html_()) < 400_000
    assert "… 92 more rows" in Checker(corelm_interop.summary(many(100))._repr_html_()).text
    assert Checker(corelm_interop.summary(result)._repr_html_()).text


def test_a_tensordict_without_containers_is_shown_as_tensordict_shows_it() -> None:
    other = TensorDict(a=torch.zeros(2), batch_size=[2])
    # tensordict 0.15.3 has HTML for it.
    assert result_or_none(other) == (other._repr_html_() if hasattr(other, "_repr_html_") else None)
    found = result_or_none(batch())
    assert found is not None and found.startswith("<div>")


#: What a notebook does with the last value of a cell.
NOTEBOOK = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell("import torch, corelm_interop; from tensordict import TensorDict; from corelm import LLMPolicy")
shell.run_cell("corelm_interop.show_results()")
shell.run_cell("policy = LLMPolicy('toy', input_mode='text', sampling_params={'max_new_tokens': 3})")
for cell in ("policy(TensorDict(text=['Who?', 'Hi']))", "TensorDict(a=torch.zeros(2), batch_size=[2])"):
    shell.run_cell("value = " + cell)
    shown, _ = shell.display_formatter.format(shell.user_ns["value"])
    print(sorted(shown), shown.get("text/html", "")[:18])
shell.run_cell("corelm_interop.show_results(policy.backend.tokenizer)")
shell.run_cell("value = policy(TensorDict(text=['Who?']))")
print(shell.display_formatter.format(shell.user_ns["value"])[0]["text/html"].count(">W</span>"))
shell.run_cell("policy.close()")
"""


@pytest.mark.process
def test_ipython_shows_a_result_and_leaves_other_tensordicts_alone(tmp_path: Path) -> None:
    pytest.importorskip("IPython", reason="IPython is not installed")
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", NOTEBOOK], capture_output=True, text=True, env=environment)
    other = "['text/html', 'text/plain'] <div style=" if hasattr(TensorDict, "_repr_html_") else "['text/plain']"
    assert f"['text/html', 'text/plain'] <div><b>2 rows</b>\n{other}" in ran.stdout, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == "1", ran.stdout + ran.stderr


@each("padded", [False, True])
def test_log_probs_without_a_mask_of_scores_count_all_tokens_and_no_pads(padded):
    values = [[-1.0, -2.0, -3.0], [-4.0, -5.0]]
    log_probs, masks = LogProbs.from_rows(full=values), None
    if padded:
        dense = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, 0.0]])
        log_probs = LogProbs(full=dense, batch_size=[2])
        masks = Masks(all_attention_mask=dense != 0, batch_size=[2])
    td = TensorDict({"log_probs": log_probs, **({} if masks is None else {"masks": masks})}, batch_size=[2])
    shown = str(corelm_interop.summary(td))
    assert "mean -3.000 over 5 scored tokens" in shown and "-2.000" in shown and "-4.500" in shown
    assert "-4.500" in corelm_interop.summary(td)._repr_html_()
    if padded:
        alone = str(corelm_interop.summary(td.exclude("masks")))
        assert "cannot be told from pads" in alone and "-3.000" not in alone


@each("pad", [False, True])
def test_sets_of_ids_and_the_most_probable_ids_are_named(pad: bool) -> None:
    td = rollout(pad)
    for text in (str(corelm_interop.summary(td)), corelm_interop.summary(td)._repr_html_()):
        assert "with kept_ids, top_ids, tail_log_mass" in text
    assert "position 3" in corelm_interop.summary(td)._repr_html_() and "0 0" in container_html(td["log_probs"])
