"""The flags that say how conversations and texts become tokens: those of `PolicyOptions` that files and chats need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict

import corelm
from corelm import History, LLMPolicy
from corelm_testing.toy import Bigram, ByteTokenizer
from helpers.command_line import CHAT, corelm_command, generate, rows, score, settings_of, write_rows

#: A plugin that writes every prompt to a file, special tokens as 255, and whose tokenizer renders other templates.
NOTING = """
import os
import corelm, jinja2
from corelm_testing.toy import ByteTokenizer, ToyBackend

class Rendering(ByteTokenizer):
    chat_template = None

    def apply_chat_template(self, conversation, chat_template=None, add_generation_prompt=False, **variables):
        if chat_template is None:
            return super().apply_chat_template(conversation, add_generation_prompt)
        return jinja2.Template(chat_template).render(messages=conversation, **variables)

class Noting(ToyBackend):
    @classmethod
    def open(cls, model=None, max_context=512):
        return super().open(tokenizer=Rendering(), max_context=max_context)

    @corelm.hookimpl
    def generate(self, request):
        with open(os.environ["NOTED"], "ab") as file:
            for row in request.prompts.tolist():
                file.write(bytes(min(i, 255) for i in row).replace(b"\\n", b"/") + b"\\n")
        return super().generate(request)
"""
TEMPLATE = "{% for message in messages %}[{{ message.content }}{{ mark }}]{% endfor %}"
BEGUN = [*CHAT, {"role": "assistant", "content": "The cat"}]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "lines.jsonl", tmp_path / "answers.jsonl"


@pytest.fixture
def noting(tmp_path: Path, fabricate: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that lists the prompts that reached the engine."""
    module = f"noting_{tmp_path.name}"
    fabricate("noting", "1", {"noting": f"{module}:Noting"}, {module: NOTING})
    monkeypatch.setenv("NOTED", str(tmp_path / "noted"))
    return tmp_path / "noted"


# ---------------------------------------------------------------- turns that are continued


def test_an_assistant_turn_at_the_end_is_continued_as_in_python(files):
    write_rows(files[0], [{"messages": BEGUN}, {"messages": CHAT}, {"messages": BEGUN, "tools": [{"name": "look"}]}])
    result = generate(files, "--continue-final-message", "--temperature", 0, "--return-tokens", "--copy-input")
    assert result.exit_code == 0, result.output
    with corelm.get_backend("toy") as backend:
        sampling = {"max_new_tokens": 9, "temperature": 0}
        policy = LLMPolicy(backend, sampling_params=sampling, continue_final_message=True)
        expected = policy(TensorDict(history=History.from_chats([BEGUN, CHAT, BEGUN])))
    made = rows(files[1])
    assert [row["token_ids"] for row in made] == [ids.tolist() for ids in expected["tokens"].response]
    assert [row["response"] for row in made] == list(expected["text"].response)
    assert settings_of(files[1])["settings"]["continue_final_message"] is True


def test_an_assistant_turn_at_the_end_is_refused_with_the_flag_to_type(files):
    write_rows(files[0], [{"messages": BEGUN}, {"messages": CHAT}])
    result = generate(files)
    assert result.exit_code == 1 and len(rows(files[1])) == 1
    (failed,) = rows(files[1].with_name("answers.errors.jsonl"))
    assert failed["line"] == 1 and "give --continue-final-message to continue that turn" in failed["error"]


def test_answers_that_continue_a_turn_are_not_scored_as_the_next_turn(files, tmp_path):
    write_rows(files[0], [{"messages": BEGUN}])
    generate(files, "--continue-final-message", "--copy-input")
    result = score((files[1], tmp_path / "scores.jsonl"))
    assert result.exit_code == 1 and "is scored as the assistant's next turn" in result.stderr


# ---------------------------------------------------------------- prompts that are too long


def test_a_long_prompt_is_cut_on_the_left_if_asked(files, noting):
    write_rows(files[0], [{"prompt": "Where is the cat, and is the tea hot?"}, {"prompt": "The sea"}])
    refused = generate(files, "--option", "max_context=20", backend="noting")
    assert refused.exit_code == 1 and "give --truncation left, which drops its first tokens" in refused.stderr
    noting.unlink()
    # Answers that were not cut are other answers.
    mixed = generate(files, "--option", "max_context=20", "--truncation", "left", backend="noting")
    assert mixed.exit_code == 2 and "truncation" in mixed.stderr
    files = (files[0], files[1].with_name("cut.jsonl"))
    assert generate(files, "--option", "max_context=20", "--truncation", "left", backend="noting").exit_code == 0
    assert noting.read_bytes().splitlines() == [b"he tea hot?", b"\xffThe sea"]


# ---------------------------------------------------------------- templates and tokenizing


@pytest.mark.parametrize("given", ["text", "file"])
def test_a_template_and_its_variables_reach_the_engine(files, noting, tmp_path, given):
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    write_rows(files[0], [{"messages": CHAT}])
    more = ("--chat-template", path if given == "file" else TEMPLATE, "--template-kwargs", "mark=!")
    assert generate(files, *more, backend="noting").exit_code == 0
    assert noting.read_bytes() == b"[Where is the cat?!]\n"


def test_another_template_is_another_setting(files, noting, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    write_rows(files[0], [{"messages": CHAT}])
    for text, code in ((TEMPLATE, 0), (TEMPLATE, 0), (f"{TEMPLATE}!", 2)):
        path.write_text(text)
        result = generate(files, "--chat-template", path, backend="noting")
        assert result.exit_code == code
    assert "was made with chat_template" in result.stderr and TEMPLATE not in result.stderr


def test_special_tokens_are_left_out_if_asked(files, noting):
    write_rows(files[0], [{"prompt": "The cat<|im_end|>"}])
    more = ("--tokenizer-kwargs", "add_special_tokens=false", "--tokenizer-kwargs", "parse_special=false")
    assert generate(files, *more, backend="noting").exit_code == 0
    assert noting.read_bytes() == b"The cat<|im_end|>\n"


def test_a_chat_has_the_same_flags(noting):
    words = ("--backend", "noting", "--max-new-tokens", 9, "--option", "max_context=30", "--truncation", "left")
    more = ("--chat-template", TEMPLATE, "--template-kwargs", "mark=!")
    assert corelm_command("chat", *words, *more, stdin="Where is the cat, or the tea?\n").exit_code == 0
    assert noting.read_bytes() == b"is the cat, or the tea?!]\n"[-22:]


# ---------------------------------------------------------------- scoring


def test_prompt_and_completion_are_tokenized_as_asked(files):
    write_rows(files[0], [{"prompt": "The cat ", "completions": ["is on", "was"]}])
    assert score(files).exit_code == 0
    assert rows(files[1])[0]["tokens"] == [6, 4]
    refused = score(files, "--completion-boundary", "separate")
    assert refused.exit_code == 2 and "completion_boundary" in refused.stderr
    files = (files[0], files[1].with_name("separate.jsonl"))
    assert score(files, "--completion-boundary", "separate").exit_code == 0
    assert rows(files[1])[0]["tokens"] == [5, 3]


def test_greedy_completions_are_marked(files):
    best = Bigram.of_talk().table.argmax(-1).tolist()
    greedy, last = "", ord("t")
    while len(greedy) < 4:
        last = best[last]
        greedy += chr(last)
    write_rows(
        files[0],
        [{"prompt": "The cat", "completions": [greedy, "zzz"]}, {"text": "zz"}, {"messages": [*CHAT, BEGUN[-1]]}],
    )
    assert score(files, "--is-greedy").exit_code == 0
    said = [row["is_greedy"] for row in rows(files[1])]
    prompt = ByteTokenizer().apply_chat_template(CHAT, add_generation_prompt=True)
    ids = [*prompt.encode(), *b"The cat", ByteTokenizer.eos_token_id]
    turn = all(best[a] == b for a, b in zip(ids[len(prompt) - 1 :], ids[len(prompt) :], strict=False))
    assert said == [[True, False], best[ByteTokenizer.bos_token_id] == ord("z") and best[ord("z")] == ord("z"), turn]


# ---------------------------------------------------------------- mistakes


def test_a_wrong_value_is_refused_with_what_to_type(files):
    write_rows(files[0], [{"messages": CHAT}])
    for words, message in (
        (["--template-kwargs", "tokenize=true"], "tokenize is not a variable of the template"),
        (["--template-kwargs", "thinking"], "expected KEY=VALUE"),
        (["--tokenizer-kwargs", "add_special=false"], "add_special_tokens"),
        (["--truncation", "right"], "'right' is not one of 'error', 'left'"),
        (["--chat-template", "nowhere.jinja"], "error: No such file or directory: 'nowhere.jinja'"),
        (["--chat-template", "chatlm"], "did you mean 'chatml'"),
    ):
        result = generate(files, *words)
        assert result.exit_code == 2 and message in " ".join(result.stderr.split()), (words, result.stderr)
        assert not files[1].exists()
