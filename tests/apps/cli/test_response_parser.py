"""`corelm generate --response-parser` writes answers as messages."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.command_line import CHAT, corelm_command, generate, rows, settings_of, write_rows

#: A plugin that answers with the last line of the question.
ECHOING = """
import corelm, torch
from corelm import Ragged
from corelm.spec.records import GenerateResult
from corelm_testing.toy import ToyBackend

class Echoing(ToyBackend):
    @corelm.hookimpl
    def generate(self, request):
        def answer(row):
            text = self.tokenizer.decode(row).rsplit("<|im_end|>", 1)[0].split("ECHO ")[-1]
            return [*text.encode(), self.tokenizer.eos_token_id]
        ids = Ragged.from_list([answer(row) for row in request.prompts.tolist()])
        return GenerateResult(ids=ids, logprobs=None, finish_reasons=("stop",) * len(ids))
"""
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture
def echoing(tmp_path: Any, fabricate: Any) -> str:
    module = f"echoing_{tmp_path.name}"
    fabricate("echoing", "1", {"echoing": f"{module}:Echoing"}, {module: ECHOING})
    return "echoing"


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"ECHO {text}"}]


def test_answers_to_conversations_are_written_as_messages(echoing, tmp_path):
    files = tmp_path / "lines.jsonl", tmp_path / "answers.jsonl"
    texts = [f"<think>Hm.</think>On it. {CALL}", "Just text.", CALL[:-20]]
    lines = [{"messages": asked(text), "tools": TOOLS} for text in texts]
    write_rows(files[0], [*lines, {"prompt": "ECHO no conversation"}, {"messages": asked(CALL)}])
    result = generate(files, "--backend", echoing, "--response-parser", "hermes", "--max-new-tokens", "200")
    assert result.exit_code == 0, result.output
    called, plain, cut, other, not_offered = rows(files[1])
    assert called["response"] == texts[0] and called["message"] == {
        "role": "assistant",
        "content": "On it. ",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        "reasoning_content": "Hm.",
    }
    assert plain["message"] == {"role": "assistant", "content": "Just text."} and "message_error" not in plain
    assert cut["response"] == texts[2] and cut["message"] is None and "malformed" in cut["message_error"]
    assert "message" not in other
    assert not_offered["message"] == {"role": "assistant", "content": CALL}
    assert settings_of(files[1])["settings"]["response_parser"] == "hermes"


def test_answers_with_messages_can_be_scored(echoing, tmp_path):
    files = tmp_path / "lines.jsonl", tmp_path / "answers.jsonl"
    write_rows(files[0], [{"messages": asked("Just text.")}, {"messages": asked(CALL[:-20]), "tools": TOOLS}])
    flags = ("--response-parser", "hermes", "--copy-input", "--max-new-tokens", 200)
    assert generate(files, *flags, backend=echoing).exit_code == 0
    result = corelm_command("score", "--backend", "toy", files[1])
    assert result.exit_code == 0 and "2 lines scored" in result.stderr, result.stderr


def test_a_parser_that_cannot_be_used_is_refused_before_any_line(echoing, tmp_path):
    files = tmp_path / "lines.jsonl", tmp_path / "answers.jsonl"
    write_rows(files[0], [{"messages": CHAT}])
    for flags, says in (
        (["--response-parser", "hermse"], "did you mean 'hermes'"),
        (["--response-parser", "auto"], "response_template"),
        (["--response-parser", "hermes", "--continue-final-message"], "leave out --continue-final-message"),
    ):
        result = generate(files, "--backend", echoing, *flags)
        assert result.exit_code == 2 and says in result.output and not files[1].exists(), flags
