"""``corelm chat`` over a pipe, and on a terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict

import corelm
from corelm import History, LLMPolicy
from corelm.errors import printable
from helpers.command_line import corelm_command
from helpers.processes import PATIENCE, heed_interrupts, sleeps, wait_until

#: An answer is one line.
ALWAYS = ("--max-new-tokens", 9, "--seed", 3, "--stop", "\n")

#: What the plugin says before it fails or waits: a control character, and in the end half of an é.
BEGUN = "Un\x1b caf"

#: A plugin that tells what it was asked and aborted. To "slow" it begins an answer and waits until it is aborted, to
#: "mute" it waits without a word, to "broken" it begins an answer and fails, and for "poison" and "plague" it fails. It
#: streams unless `WHOLE` is set.
TELLING = f"""
import dataclasses, os, threading
from corelm_testing.toy import ToyBackend
import corelm
from corelm.spec import TokenChunk
from corelm.spec import RowAnswer, generate_result

BEGUN = list({BEGUN!r}.encode()) + [0xC3]

class Telling(ToyBackend):
    dead = False

    def __init__(self, *arguments):
        super().__init__(*arguments)
        streaming = "WHOLE" not in os.environ
        self.capabilities = dataclasses.replace(self.capabilities, abort=True, streaming=streaming)
        self.aborted = threading.Event()

    @corelm.hookimpl
    def generate(self, request):
        (prompt,) = [bytes(min(i, 255) for i in row) for row in request.prompts.tolist()]
        self.tell(prompt.replace(b"\\n", b"/"))
        last = prompt.rpartition(b"user")[2]
        ids = [] if b"mute" in last else BEGUN
        if any(word in last for word in (b"slow", b"mute", b"broken")):
            if b"broken" not in last:
                print("ANSWERING", flush=True)
            for token in ids:
                if request.on_tokens is not None:
                    request.on_tokens(TokenChunk(row=0, ids=[token], logprobs=[-1.0]))
            if b"broken" in last:
                raise RuntimeError("internal error")
            assert self.aborted.wait(600)
            return generate_result(request, [RowAnswer(ids, [-1.0] * len(ids), "abort")])
        self.dead |= b"plague" in last
        if self.dead or b"poison" in last:
            raise RuntimeError("internal error")
        return super().generate(request)

    @corelm.hookimpl
    def abort(self, request):
        self.tell(b"aborted")
        self.aborted.set()
        return True

    @corelm.hookimpl
    def health(self, request):
        return not self.dead

    def tell(self, what):
        with open(os.environ["ASKED"], "ab") as file:
            file.write(what + b"\\n")
"""


@pytest.fixture
def telling(tmp_path: Path, fabricate: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that lists what the engine was asked."""
    module = f"telling_{tmp_path.name}"
    fabricate("telling", "1", {"telling": f"{module}:Telling"}, {module: TELLING}, site="telling")
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "telling"), os.environ.get("PYTHONPATH", "")]))
    return tmp_path / "asked"


def talk(questions: str, *more: object, backend: str = "toy") -> Any:
    return corelm_command("chat", "--backend", backend, *ALWAYS, *more, stdin=questions)


# ---------------------------------------------------------------- over a pipe


def test_every_line_is_answered_in_one_conversation():
    result = talk("Where is the cat?\n\nIs the tea hot?\n")
    assert result.exit_code == 0, result.output
    with corelm.get_backend("toy") as backend:
        policy = LLMPolicy(backend, sampling_params={"max_new_tokens": 9, "stop": ["\n"]})
        history = History.from_chats([[{"role": "user", "content": "Where is the cat?"}]])
        first = policy(TensorDict(history=history), seed=3)
        history = first["history"].full.append([{"role": "user", "content": "Is the tea hot?"}])
        second = policy(TensorDict(history=history), seed=4)
    assert result.stdout == "".join(f"{each['text'].response[0]}\n" for each in (first, second))


def test_a_byte_order_mark_is_no_part_of_the_question():
    assert talk("\ufeffWhere is the cat?\n").stdout == talk("Where is the cat?\n").stdout


def test_the_history_and_the_system_prompt_reach_the_engine(telling):
    result = talk("one\ntwo\n/reset\nthree\n/exit\nnever\n", "--system", "Be brief.", backend="telling")
    assert result.exit_code == 0, result.output
    asked = telling.read_text(errors="replace").splitlines()
    assert len(asked) == len(result.stdout.splitlines()) == 3
    assert all("Be brief." in each for each in asked)
    assert "one" in asked[1] and "two" in asked[1]
    assert "one" not in asked[2] and "two" not in asked[2] and "three" in asked[2]


def test_a_question_that_fails_is_dropped_and_the_rest_are_answered(telling):
    result = talk("one\npoison\ntwo\n", backend="telling")
    assert result.exit_code == 1 and len(result.stdout.splitlines()) == 2
    assert "error: " in result.stderr and "internal error" in result.stderr
    assert "poison" not in telling.read_text(errors="replace").splitlines()[-1]


def test_an_answer_that_fails_on_its_way_does_not_join_the_next_one(telling):
    result = talk("broken\ntwo\n", backend="telling")
    first, second = result.stdout.splitlines()
    assert result.exit_code == 1 and first == BEGUN and second and "internal error" in result.stderr
    assert b"broken" not in telling.read_bytes().splitlines()[-1]


def test_an_engine_that_does_not_stream_gives_the_same_conversation(telling, monkeypatch):
    streamed = talk("one\ntwo\n", backend="telling")
    monkeypatch.setenv("WHOLE", "1")
    whole = talk("one\ntwo\n", backend="telling")
    assert whole.exit_code == 0 and whole.stdout == streamed.stdout
    asked = telling.read_bytes().splitlines()
    assert asked[:2] == asked[2:]


def test_an_engine_that_is_gone_ends_the_chat(telling):
    result = talk("one\nplague\ntwo\n", backend="telling")
    assert result.exit_code == 3 and len(result.stdout.splitlines()) == 1
    assert len(telling.read_text(errors="replace").splitlines()) == 2


def test_a_prompt_that_is_too_long_does_not_end_the_chat():
    result = talk(f"{'x' * 600}\nIs the tea hot?\n")
    assert result.exit_code == 1 and len(result.stdout.splitlines()) == 1 and "error: " in result.stderr


def test_an_unknown_command_is_not_a_question(telling):
    result = talk("/rest\n /slash\n", backend="telling")
    assert result.exit_code == 1 and "/rest is not a command (/reset: forget the conversation; /exit:" in result.stderr
    (asked,) = telling.read_text(errors="replace").splitlines()
    assert "/slash" in asked


def test_an_answer_that_was_cut_says_so():
    assert (
        "(ended early: length; --max-new-tokens sets the longest answer)" in talk("Hi\n", "--max-new-tokens", 1).stderr
    )


def test_a_refused_chat_says_why():
    for more, message in (
        (["--num-samples", 2], "No such option"),
        (["--n", 2], "No such option"),
        (["--top-p", 1.5], "top_p"),
        (["--option", "max_contxt=5"], "max_context"),
    ):
        result = talk("Hi\n", *more)
        assert result.exit_code == 2 and message in result.stderr, more


@pytest.mark.process
def test_bytes_that_are_no_text_are_an_error_of_their_line_and_ctrl_c_ends_a_chat_over_a_pipe(telling):
    words = [sys.executable, "-m", "corelm_cli", "chat", "--backend", "telling"]
    run = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )
    assert run.stdin is not None and run.stderr is not None
    run.stdin.buffer.write(b"caf\xe9\nslow\n")
    run.stdin.flush()
    assert run.stdout is not None and run.stdout.read(len(BEGUN)) == BEGUN
    run.send_signal(signal.SIGINT)
    printed, said = run.communicate(timeout=PATIENCE)
    assert (run.returncode, printed) == (130, "\n") and "interrupted" in said and "Traceback" not in said
    assert "error: " in said
    # What the engine prints goes to the standard error.
    assert "ANSWERING" in said
    assert telling.read_bytes().splitlines()[-1] == b"aborted"


# ---------------------------------------------------------------- on a terminal


class Terminal:
    """A person's terminal with a chat in it."""

    def __init__(self, *more: object) -> None:
        self._ours, theirs = pty.openpty()
        words = [
            sys.executable,
            "-m",
            "corelm_cli",
            "chat",
            "--backend",
            "telling",
            "--max-new-tokens",
            "9",
            "--seed",
            "3",
        ]
        environment = {**os.environ, "TERM": "dumb", "COLUMNS": "200"}
        self.run = subprocess.Popen(
            [*words, *map(str, more)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            # Ctrl-C reaches the processes of the terminal's own session.
            preexec_fn=_own_terminal,
        )
        os.close(theirs)
        self.shown = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.run.poll() is None:
            self.run.kill()
            self.run.wait()
        os.close(self._ours)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def prompted(self) -> None:
        """Read until the chat waits for input. Python misses a Ctrl-C that comes between its prompt and that wait."""
        self.until("> ")
        assert wait_until(lambda: sleeps(self.run.pid))

    def until(self, text: str) -> str:
        """Read until the text is shown; return what was shown before it, from the last call on."""
        end = time.monotonic() + PATIENCE
        while text not in self.shown:
            ready, _, _ = select.select([self._ours], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{text!r} was not shown: {self.shown!r}"
            try:
                self.shown += os.read(self._ours, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"the chat ended: {self.shown!r}") from None
        before, _, self.shown = self.shown.partition(text)
        return before


def _own_terminal() -> None:
    import fcntl
    import termios

    heed_interrupts()
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.process
def test_an_answer_is_shown_as_it_comes_and_ctrl_c_ends_it_alone(telling):
    with Terminal() as terminal:
        terminal.until("> ")
        terminal.type("slow\n")
        # The engine has not finished. Half a character, and characters that a terminal obeys, are not shown.
        terminal.until(f"ANSWERING\r\n{printable(BEGUN)}")
        terminal.type("\x03")
        assert terminal.until("interrupted; the answer ends here") == "^C\r\n"
        terminal.until("> ")
        terminal.type("two\n")
        terminal.prompted()
        terminal.type("\x03")
        terminal.until("interrupted")
        assert terminal.run.wait(PATIENCE) == 130
    first, aborted, second = telling.read_bytes().splitlines()
    # The conversation goes on from what was shown; 255 stands for the special tokens.
    assert aborted == b"aborted" and second.startswith(first + BEGUN.encode() + b"\xff") and b"two" in second


@pytest.mark.process
@pytest.mark.parametrize("engine", ["streams", pytest.param("does not stream", marks=pytest.mark.nightly)])
def test_ctrl_c_drops_a_question_that_has_no_answer_yet_and_ctrl_d_ends_the_chat(telling, monkeypatch, engine):
    if engine == "does not stream":
        monkeypatch.setenv("WHOLE", "1")
    with Terminal() as terminal:
        terminal.until("> ")
        terminal.type("one\n")
        terminal.until("> ")
        terminal.type("mute\n")
        terminal.until("ANSWERING")
        terminal.type("\x03")
        terminal.until("interrupted; the question is dropped")
        terminal.until("> ")
        terminal.type("two\n")
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.run.wait(PATIENCE) == 0
    last = telling.read_text(errors="replace").splitlines()[-1]
    assert "one" in last and "two" in last and "mute" not in last


def test_a_model_given_as_the_backend_is_told_its_flag():
    result = corelm_command("chat", "--backend", "some/model")
    assert result.exit_code == 2 and "give --backend transformers --model 'some/model'" in result.stderr


def test_the_model_is_the_argument_or_a_flag():
    result = corelm_command("chat", "one", "--model", "two")
    assert result.exit_code == 2 and "given twice, as one" in result.stderr
    result = corelm_command("chat", "/nowhere/model", stdin="hello\n")
    assert result.exit_code == 2 and "/nowhere/model" in result.stderr
