"""``corelm chat``: a conversation on the terminal, or over a pipe, one line a question."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

from tensordict import TensorDict

from corelm import AnswerChunk, History, LLMPolicy
from corelm.errors import BackendTimeoutError, CoreLMError, EngineError, printable
from corelm.spec import Chat, Message
from corelm_cli.streams import Messages, Stream, is_terminal, opened_input, tell, without_bom
from corelm_cli.wording import as_flags

COMMANDS = {"/reset": "forget the conversation", "/exit": "end the chat, like Ctrl-D"}


@dataclass(kw_only=True)
class Conversation:
    """A conversation with an engine. Every turn that was sampled keeps its token ids.

    Attributes:
        seed: the first answer has this seed, and each later one the next; None does not fix the answers.
    """

    policy: LLMPolicy
    system: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        self.asked = 0
        self.chat: Chat = ()
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.chat = () if self.system is None else (Message("system", self.system),)

    def ask(self, question: str, show: Callable[[str], object]) -> str:
        """Pass the text of the answer to `show` as it comes, and return the finish reason.

        An engine that does not stream gives the text in one piece. If Ctrl-C ends an answer that has begun, the
        conversation goes on from what was said so far. If this raises anything else, the conversation is as it was
        before.
        """
        asked = (*self.chat, Message("user", question))
        prompt = TensorDict(history=History.from_chats([asked]))
        seed = None if self.seed is None else self.seed + self.asked
        if self.policy.backend.capabilities.streaming:
            chunks: list[AnswerChunk] = []
            try:
                with self.policy.stream(prompt, seed=seed) as stream:
                    for chunk in stream:
                        chunks.append(chunk)
                        show(chunk.text)
                    result = stream.result
            except KeyboardInterrupt:
                self._keep(asked, chunks)
                raise
        else:
            # On this thread, so that Ctrl-C reaches the engine.
            result = self.policy(prompt, seed=seed)
            show(result["text"].response[0])
        (self.chat,) = result["history"].full.chats
        self.asked += 1
        reason: str = result["finish_reason"][0]
        return reason

    def _keep(self, asked: Chat, chunks: list[AnswerChunk]) -> None:
        """Let an answer that was interrupted be the next turn, without half a character at its end."""
        while chunks and not chunks[-1].text:
            chunks.pop()
        if chunks:
            ids = tuple(chain.from_iterable(chunk.ids for chunk in chunks))
            self.chat = (*asked, Message("assistant", "".join(chunk.text for chunk in chunks), token_ids=ids))
            self.asked += 1


class _Answer:
    """An answer on the standard output, as it comes."""

    def __init__(self, stdout: Stream) -> None:
        self._stdout, self._watched = stdout, is_terminal(sys.stdout)
        self.begun = False

    def show(self, text: str) -> None:
        self.begun |= bool(text)
        # A terminal obeys some characters.
        self._write(printable(text, keep="\n\t") if self._watched else text)

    def end(self) -> None:
        self._write("\n")

    def _write(self, text: str) -> None:
        self._stdout.write(text.encode(errors="backslashreplace"))


def run(conversation: Conversation, stdout: Stream) -> bool:
    """Answer every line of the standard input until it ends; return whether all were answered.

    Raises:
        KeyboardInterrupt: Ctrl-C, except on a terminal while the engine works: that ends the answer only.
        EngineError: the engine failed and cannot serve any more.
    """
    person = is_terminal(sys.stdin)
    complete = True
    for line in _typed() if person else _piped():
        question = line.strip()
        if question == "/exit" and line.startswith("/"):
            break
        if question == "/reset" and line.startswith("/"):
            conversation.reset()
            continue
        if line.startswith("/"):
            known = "; ".join(f"{name}: {what}" for name, what in COMMANDS.items())
            tell(f"{question} is not a command ({known}). Begin the line with a space to ask it.")
            complete = False
            continue
        if not question:
            continue
        answer, before = _Answer(stdout), conversation.asked
        try:
            reason = conversation.ask(question, answer.show)
        except KeyboardInterrupt:
            if answer.begun:
                answer.end()
            if not person:
                raise
            if not answer.begun:
                print(file=Messages())  # after the ^C that the terminal shows
            kept = conversation.asked > before
            tell(f"interrupted; {'the answer ends here' if kept else 'the question is dropped'}")
            continue
        except (CoreLMError, BackendTimeoutError) as error:
            if answer.begun:
                answer.end()
            if isinstance(error, EngineError) and not _serves(conversation):
                raise
            tell(f"error: {as_flags(str(error))}")
            complete = False
            continue
        answer.end()
        if reason != "stop":
            tell(f"(ended early: {reason}; --max-new-tokens sets the longest answer)")
    return complete or person


def _typed() -> Iterator[str]:
    """Yield what a person types, line by line, with the editing keys of readline where there is one."""
    with suppress(ImportError):
        import readline  # noqa: F401
    while True:
        try:
            yield input("> ")
        except EOFError:
            print(file=Messages())
            return


def _piped() -> Iterator[str]:
    """Yield the lines of a pipe. Bytes that are not UTF-8 become lone surrogates, which are refused later."""
    with opened_input(None) as (stdin, _):
        for line in without_bom(stdin):
            yield line.decode(errors="surrogateescape")


def _serves(conversation: Conversation) -> bool:
    try:
        return conversation.policy.backend.health()
    except CoreLMError:
        return False
