"""`Trials`: sends short requests to a server and returns what it answers, for `probing` to draw conclusions from."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from corelm.errors import CoreLMError, EngineError, InvalidRequestError
from corelm_engine_kit import RowError, TransientError, only_choice
from openai_backend.protocol import COMPLETIONS, LOGPROBS, answer_ids, prompt_of
from openai_backend.replies import Reported, reported
from openai_backend.server_info import ServerInfo

if TYPE_CHECKING:
    from corelm.spec import Deadline
    from corelm_engine_kit import HttpClient

#: Statuses by which servers, rightly or not, refuse a request that they do not understand.
_NOT_UNDERSTOOD = frozenset({500, 501})
#: Texts to begin with. After the second one, answers repeat themselves, so that penalties change them.
TEXTS = ("Where is the", "One, two, three, four, one, two, three, four, one, two,")


@dataclass(frozen=True)
class Answer:
    """What a server answered.

    Attributes:
        reply: the reply.
        info: how to read it.
    """

    reply: Any
    info: ServerInfo

    @cached_property
    def choice(self) -> Mapping[str, Any]:
        return only_choice(self.reply)

    @cached_property
    def text(self) -> str:
        return str(self.choice.get("text"))

    @property
    def reason(self) -> Any:
        return self.choice.get("finish_reason")

    @cached_property
    def ids(self) -> list[int] | None:
        """The ids that were sampled; None if they are not known."""
        if not self.info.knows_ids:
            return None
        try:
            ids = answer_ids(self.reply, self.info, need_logprobs=False)[0]
        except (RowError, KeyError, TypeError):
            return None
        return ids if isinstance(ids, list) and {*map(type, ids)} <= {int} else None

    @cached_property
    def told(self) -> Reported | None:
        """What the reply says of its tokens; None if it says nothing."""
        try:
            return reported(self.choice)
        except (RowError, KeyError, TypeError):
            return None

    @property
    def key(self) -> Hashable:
        """What is equal in equal answers."""
        return (None if self.ids is None else tuple(self.ids), self.text, self.reason)


class Trials:
    """Sends requests to a server that is being opened.

    Args:
        client: the connection.
        deadline: the end of opening.
    """

    def __init__(self, client: HttpClient, deadline: Deadline) -> None:
        self.client = client
        self._deadline = deadline

    def post(self, payloads: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return the reply to each payload, or the error with which the server refuses it.

        Raises:
            CoreLMError: the server does not serve.
        """
        entries = self.client.post_each(
            COMPLETIONS,
            payloads,
            names=["probe"] * len(payloads),
            is_reply_to=lambda payload, reply: True,
            timeout=self._deadline.left(),
        )
        for entry in entries:
            if isinstance(entry, CoreLMError) and not refused(entry):
                raise entry.final() if isinstance(entry, TransientError) else entry
        return entries

    def ask(self, info: ServerInfo, *requests: Mapping[str, Any], text: str = TEXTS[0]) -> list[Answer | None]:
        """Return the answer to each request; None where the server refuses it.

        Args:
            info: how the server takes prompts.
            requests: fields in addition to those of every request; ``ids`` replaces the prompt.
            text: the prompt.
        """
        ids = info.vocabulary.encode(text, add_special_tokens=info.adds_special_tokens)
        payloads = []
        for given in requests:
            fields = {name: value for name, value in given.items() if name != "ids"}
            prompt = prompt_of(given.get("ids", ids), info)
            plain = {"temperature": 0.0, "top_p": 1.0, "logprobs": LOGPROBS} if info.naming else {"temperature": 0.0}
            payloads.append({**info.fields, **plain, **fields, "prompt": text if prompt is None else prompt})
        found = []
        for entry in self.post(payloads):
            answer = None if isinstance(entry, CoreLMError) else Answer(entry, info)
            found.append(answer if answer is not None and is_completion(answer.reply) else None)
        return found


def is_completion(reply: Any) -> bool:
    """Return whether a reply is a completion with one choice."""
    try:
        only_choice(reply)
    except RowError:
        return False
    return True


def refused(error: CoreLMError) -> bool:
    """Return whether the server does not understand the request, as an error of it says."""
    if isinstance(error, TransientError):
        return error.status in _NOT_UNDERSTOOD
    return isinstance(error, InvalidRequestError) or (isinstance(error, EngineError) and "status 405" in str(error))
