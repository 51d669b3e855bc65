"""``corelm generate`` with prompts that make the engine fail, and with an engine that is gone."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from helpers.command_line import FAULTY, LINES, corelm_command, generate, rows, write_prompts, write_rows

STRANGE = {"id": "strange", "messages": [{"role": "user", "content": "strange"}]}


@pytest.fixture
def files(tmp_path: Path, fabricate) -> tuple[Path, Path]:
    fabricate("faulty", "1", {"faulty": f"faulty_{tmp_path.name}:Faulty"}, {f"faulty_{tmp_path.name}": FAULTY})
    return write_prompts(tmp_path)


def texts(*prompts: str) -> list[dict[str, Any]]:
    return [{"id": prompt, "prompt": prompt} for prompt in prompts]


def faults(files: tuple[Path, Path]) -> list[dict[str, Any]]:
    path = files[1].with_name("answers.errors.jsonl")
    return rows(path) if path.exists() else []


@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_a_prompt_that_fails_every_call_fails_alone(files, tmp_path, size):
    prompts = texts("one", "poison", "three", "four", "poison again", "six")
    write_rows(files[0], [*prompts, STRANGE])
    result = generate(files, "--seed", 5, "--batch-size", size, backend="faulty")
    assert result.exit_code == 1, result.output
    assert [row["id"] for row in rows(files[1])] == ["one", "three", "four", "six"]
    assert [fault["id"] for fault in faults(files)] == ["poison", "poison again", "strange"]
    assert "internal error" in faults(files)[0]["error"] and "expected other texts" in faults(files)[2]["error"]
    healthy = tmp_path / "healthy.jsonl"
    write_rows(files[0], [line if "poison" not in line["prompt"] else {"prompt": "x"} for line in prompts])
    generate((files[0], healthy), "--seed", 5)
    answers = {row["id"]: row["response"] for row in rows(healthy)}
    assert all(row["response"] == answers[row["id"]] for row in rows(files[1]))


def test_only_prompts_that_fail_are_left_and_the_engine_is_not_blamed(files):
    write_rows(files[0], texts("poison 1", "poison 2", "poison 3"))
    for _ in range(2):
        assert generate(files, backend="faulty").exit_code == 1
        assert [fault["line"] for fault in faults(files)] == [1, 2, 3] and not files[1].exists()


def test_a_call_that_fails_once_costs_no_answer(files, monkeypatch):
    monkeypatch.setenv("FAIL_AT", "2")
    assert generate(files, "--batch-size", 2, backend="faulty").exit_code == 0
    assert len(rows(files[1])) == len(LINES) and not faults(files)


def test_an_engine_that_is_gone_is_not_asked_about_every_line(files, monkeypatch, tmp_path):
    monkeypatch.setenv("FAIL_FROM", "3")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    write_rows(files[0], texts(*(f"number {number}" for number in range(40))))
    result = generate(files, "--batch-size", 8, backend="faulty")
    assert result.exit_code == 3 and "out of memory" in result.stderr
    assert (tmp_path / "calls").read_text().split() == ["8", "8", "8", "1"]
    assert "tries them last: 17, 18, 19, 20, 21, 22, 23, 24" in result.stderr
    assert [fault["line"] for fault in faults(files)] == list(range(17, 25))
    monkeypatch.delenv("FAIL_FROM")
    assert generate(files, "--batch-size", 8, backend="faulty").exit_code == 0
    assert {row["line"] for row in rows(files[1])} == set(range(1, 41)) and not faults(files)


@pytest.mark.parametrize("command", ["generate", "score"])
def test_an_error_of_the_harmless_line_alone_does_not_say_that_the_engine_is_gone(tmp_path, fabricate, command):
    """The engine refuses short rows, as it refuses a call with a certain prompt."""
    picky = """
from dataclasses import replace
import corelm
import torch
from corelm import Ragged
from corelm_testing.toy import ToyBackend

def refused(rows):
    if any(b"poison" in bytes(min(i, 255) for i in row) for row in rows):
        raise RuntimeError("internal error")
    return tuple("too short" if len(row) < 14 else "" for row in rows)

class Picky(ToyBackend):
    @corelm.hookimpl
    def generate(self, request):
        errors = refused(request.prompts.tolist())
        made = super().generate(request)
        ids = [[] if error else row for error, row in zip(errors, made.ids.tolist())]
        reasons = tuple("error" if error else reason for error, reason in zip(errors, made.finish_reasons))
        return replace(made, ids=Ragged.from_list(ids), finish_reasons=reasons, errors=errors)

    @corelm.hookimpl
    def score_logprobs(self, request):
        errors = refused(request.sequences.tolist())
        made = super().score_logprobs(request)
        kept = torch.tensor([not error for error in errors]).repeat_interleave(made.scored.lengths)
        logprobs, scored = (field.with_values(field.values * kept) for field in (made.logprobs, made.scored))
        return replace(made, logprobs=logprobs, scored=scored, errors=errors)
"""
    fabricate("picky", "1", {"picky": "picky:Picky"}, {"picky": picky})
    field = "prompt" if command == "generate" else "text"
    source, target = tmp_path / "lines.jsonl", tmp_path / "answers.jsonl"
    asked = ["one that is long", "poison, not little", "another long one"]
    write_rows(source, [{"id": text, field: text} for text in asked])
    result = corelm_command(command, "--backend", "picky", "--input", source, "--output", target)
    assert result.exit_code == 1, result.output
    assert [row["id"] for row in rows(target)] == [asked[0], asked[2]]
    assert [fault["id"] for fault in faults((source, target))] == [asked[1]]


def test_a_prompt_that_kills_the_engine_holds_up_no_other(files):
    """Every run ends with a dead engine, and yet the next one gets further."""
    names = ["one", "plague", "three", "four", "plague too", *"abcdefgh"]
    write_rows(files[0], texts(*names))
    codes, tried_last = [], []
    for _ in range(5):
        codes.append(generate(files, "--batch-size", 4, backend="faulty").exit_code)
        tried_last.append([fault["id"] for fault in faults(files)])
    assert codes == [3] * 5
    # The first run stops at its first batch, the second one in the next; then only these lines are left.
    assert tried_last[:2] == [
        ["one", "plague", "three", "four"],
        ["one", "plague", "three", "four", "plague too", *"abc"],
    ]
    assert {row["id"] for row in rows(files[1])} == {*names} - {"plague", "plague too"}
    assert sorted(tried_last[-1]) == ["plague", "plague too"]
    assert all(fault["engine_failed"] for fault in faults(files))


GONE = """
from corelm_testing.toy import ByteTokenizer, ToyBackend
import corelm

class Strict(ByteTokenizer):
    def apply_chat_template(self, conversation, **options):
        if len(conversation) == 1:
            raise ValueError("conversations have to start with the system prompt")
        return super().apply_chat_template(conversation, **options)

class Gone(ToyBackend):
    @classmethod
    def open(cls, model=None, max_context=512):
        return super().open(tokenizer=Strict(), max_context=max_context)

    @corelm.hookimpl
    def generate(self, request):
        raise RuntimeError("out of memory")
"""


@pytest.mark.parametrize(
    ("lines", "options"),
    [
        ([{"messages": [{"role": role, "content": "Hi"} for role in ("system", "user")]}] * 2, ()),
        ([{"prompt": "a"}, {"prompt": "b"}], ("--option", "max_context=5", "--max-new-tokens", 2)),
    ],
    ids=["the template refuses the check", "the check does not fit"],
)
def test_lines_are_not_blamed_by_a_check_that_never_reached_the_engine(files, fabricate, lines, options):
    fabricate("gone", "1", {"gone": "gone_backend:Gone"}, {"gone_backend": GONE}, site="gone")
    write_rows(files[0], lines)
    result = generate(files, *options, backend="gone")
    assert result.exit_code == 3 and "out of memory" in result.stderr and "tries them last: 1, 2" in result.stderr
    assert [fault["engine_failed"] for fault in faults(files)] == [True, True]


@pytest.fixture
def heed_interrupts() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt: a process that was started in the background may ignore it.

    The event `raised` of the handler is set then.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupt.raised.set()  # type: ignore[attr-defined]
        signal.default_int_handler(number, frame)

    interrupt.raised = threading.Event()  # type: ignore[attr-defined]
    before = signal.signal(signal.SIGINT, interrupt)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_does_not_forget_which_lines_the_engine_failed_at(files, fabricate, monkeypatch, heed_interrupts):
    interrupted = """
import os, signal
from corelm_testing.toy import ToyBackend
import corelm

class Interrupted(ToyBackend):
    @corelm.hookimpl
    def generate(self, request):
        if os.environ["FAULT"] == "dead":
            raise RuntimeError("out of memory")
        if os.environ["FAULT"] == "slow" and request.prompts.tolist()[0][-3:] == [*b"sea"]:
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT).raised.wait(60)
        return super().generate(request)
"""
    fabricate("interrupted", "1", {"stops": "stops_backend:Interrupted"}, {"stops_backend": interrupted}, site="stops")
    write_rows(files[0], texts("The cat", "The sea", "A bird"))
    codes, suspects = [], []
    for fault in ("dead", "slow", "none"):
        monkeypatch.setenv("FAULT", fault)
        codes.append(generate(files, backend="stops").exit_code)
        suspects.append([fault["id"] for fault in faults(files) if fault["engine_failed"]])
    assert codes == [3, 130, 0]
    assert suspects == [["The cat", "The sea", "A bird"], ["The sea", "A bird"], []]


def test_a_refused_setting_is_not_a_fault_of_lines(files):
    result = generate(
        files, "--log-probs", "processed", "--top-p", 0.5, "--option", "model_kwargs={}", backend="faulty"
    )
    assert result.exit_code == 2 and not faults(files) and not files[1].exists()


def test_what_the_engine_aborted_is_not_an_answer(files, fabricate):
    aborting = """
import dataclasses
import corelm
from corelm_testing.toy import ToyBackend

class Aborting(ToyBackend):
    @corelm.hookimpl
    def generate(self, request):
        made = super().generate(request)
        return dataclasses.replace(made, finish_reasons=("abort", *made.finish_reasons[1:]))
"""
    fabricate("aborting", "1", {"aborting": "aborting:Aborting"}, {"aborting": aborting}, site="aborting")
    assert generate(files, backend="aborting").exit_code == 1
    assert [fault["line"] for fault in faults(files)] == [1] and next(iter(rows(files[1])))["line"] == 2


def test_a_wrong_log_prob_fails_its_own_line(files, fabricate):
    """Core refuses the whole result of a call that has one."""
    wrong = """
import corelm
from corelm_testing.toy import ToyBackend

class Wrong(ToyBackend):
    @corelm.hookimpl
    def generate(self, request):
        made = super().generate(request)
        for row, prompt in enumerate(request.prompts.tolist()):
            if prompt[-3:] == [*b"sea"]:
                made.logprobs.values[made.logprobs.offsets[row]] = float("nan")
        return made
"""
    fabricate("wrong", "1", {"wrong": "wrong:Wrong"}, {"wrong": wrong}, site="wrong")
    write_rows(files[0], texts("The cat", "The sea", "A bird"))
    assert generate(files, "--log-probs", "raw", backend="wrong").exit_code == 1
    (fault,) = faults(files)
    assert fault["line"] == 2 and "log-prob is nan" in fault["error"]
    assert [row["line"] for row in rows(files[1])] == [1, 3]
