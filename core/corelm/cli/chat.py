"""``corelm chat``: a conversation on the terminal, or over a pipe, one line a question."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from tensordict import TensorDict

from corelm.cli.streams import Messages, Stream, is_terminal, opened_input, tell
from corelm.containers.history import History
from corelm.errors import BackendTimeoutError, CoreLMError, EngineError, printable
from corelm.policy.policy import LLMPolicy
from corelm.spec.message import Chat, Message

COMMANDS = {"/reset": "forget the conversation", "/exit": "end the chat, like Ctrl-D"}


@dataclass(kw_only=True)
class Conversation:
    """A conversation with an engine. Every turn that was sampled keeps its token ids.

    Attributes:
        policy: answers conversations.
        system: the system prompt, if there is one.
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

    def ask(self, question: str) -> tuple[str, str]:
        """Return the answer and its finish reason. If this raises, the conversation is as it was before."""
        history = History.from_chats([[*self.chat, Message("user", question)]])
        seed = None if self.seed is None else self.seed + self.asked
        result = self.policy(TensorDict(history=history), seed=seed)
        (self.chat,) = result["history"].full.chats
        self.asked += 1
        return result["text"].response[0], result["finish_reason"][0]


def run(conversation: Conversation, stdout: Stream) -> bool:
    """Answer every line of the standard input until it ends; return whether all were answered.

    Raises:
        KeyboardInterrupt: Ctrl-C, except on a terminal while the engine works: that drops the question only.
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
        try:
            answer, reason = conversation.ask(question)
        except KeyboardInterrupt:
            if not person:
                raise
            print(file=Messages())
            tell("interrupted; the question is dropped")
            continue
        except (CoreLMError, BackendTimeoutError) as error:
            if isinstance(error, EngineError) and not _serves(conversation):
                raise
            tell(f"error: {error}")
            complete = False
            continue
        shown = printable(answer, keep="\n\t") if is_terminal(sys.stdout) else answer
        stdout.write(f"{shown}\n".encode(errors="backslashreplace"))
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
        for line in stdin:
            yield line.decode(errors="surrogateescape")


def _serves(conversation: Conversation) -> bool:
    try:
        return conversation.policy.backend.health()
    except CoreLMError:
        return False
