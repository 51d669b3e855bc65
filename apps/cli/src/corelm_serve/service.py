"""`Service`: the engine, the sessions and the limits that all requests of a server share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from corelm import Backend, Ragged
from corelm.application import AnswerReader, InputRows, final_turns, generation_mode, render_chats, special_tokens
from corelm.batching import DynamicBatcher, Limits
from corelm.errors import CapabilityError, CoreLMError, spelled_out
from corelm.spec import Chat, GenerateResult, Message, SamplingParams
from corelm.spec.message import new_call_id
from corelm.validate import invalid, shown
from corelm_interop.openai_answers import Answer, answers_of
from corelm_interop.token_texts import TokenTexts
from corelm_serve.options import ServerOptions
from corelm_serve.refusals import Refusal
from corelm_serve.requests import ChatAsk
from corelm_serve.sessions import SessionStore

_log = logging.getLogger(__name__)

#: Seconds that requests under way have to end when the server ends.
SHUTDOWN_TIMEOUT = 10
_ENDED = (
    "the conversation ends with an assistant turn; give continue_final_message=true and add_generation_prompt=false to "
    "continue that turn, or add_generation_prompt=true to sample a new one after it"
)
#: Seconds over which the tokens a second are counted.
RATE_OVER = 60


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A conversation as the engine reads it.

    Attributes:
        continues: whether the answer continues its last turn.
    """

    ids: list[int]
    text: str
    continues: bool = False


@dataclass(frozen=True, slots=True)
class UnrecordedTurn:
    """Takes the place of a turn of a session where nothing is recorded.

    Attributes:
        messages: the conversation as it came.
        session_id: None: there is no session.
    """

    messages: Chat = ()
    session_id: None = None

    def record(self, **answer: Any) -> None:
        """Forget an answer."""


@dataclass(eq=False)
class Service:
    """What all requests share. Its attributes change on the event loop's thread only.

    Attributes:
        backend: the engine, whose calls the requests share.
        options: what is answered, whom, and how much at a time.
        store: the recorded sessions; None if nothing is recorded.
        ending: whether the server ends, and answers no more.
        admitted_now: number of requests that are read, wait or are answered.
        created: when the server was made, in seconds since 1970.
    """

    backend: DynamicBatcher
    options: ServerOptions
    store: SessionStore | None
    ending: bool = False
    admitted_now: int = field(default=0, init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.name = self.options.model_name or self.backend.model_name or self.backend.name
        self.texts = TokenTexts(self.backend.tokenizer)
        self._specials = special_tokens(self.backend.tokenizer)
        self._reader = AnswerReader.of(
            self.options.response_parser, self.options.template_kwargs.get("tools"), self.backend
        )
        #: What ends each request under way.
        self._open: set[Callable[..., Awaitable[None]]] = set()
        self._health: asyncio.Task[bool] | None = None
        #: When answers were complete, and how many tokens they had.
        self._finished: deque[tuple[float, int]] = deque(maxlen=10_000)
        self._sampled = 0

    def metrics(self) -> str:
        """Return what the server does now, as Prometheus reads it."""
        state, since = self.backend.state(), time.monotonic() - RATE_OVER
        lately = sum(tokens for at, tokens in [*self._finished] if at > since)
        told = (
            ("requests", "gauge", "Requests that are read, wait or are answered.", self.admitted_now),
            ("calls_waiting", "gauge", "Calls that wait for the engine.", state.queued),
            ("calls_running", "gauge", "Calls in the engine.", state.in_flight),
            ("queued_tokens", "gauge", "Tokens of the calls that wait, given and to be sampled.", state.queued_tokens),
            ("sampled_tokens_total", "counter", "Tokens of complete answers.", self._sampled),
            ("tokens_per_second", "gauge", f"The same a second, over {RATE_OVER} seconds.", lately / RATE_OVER),
        )
        lines = (
            f"# HELP corelm_{n} {said}\n# TYPE corelm_{n} {kind}\ncorelm_{n} {value}\n" for n, kind, said, value in told
        )
        return "".join(lines)

    @property
    def parses(self) -> bool:
        """Whether answers are parsed, so that a client is told nothing before they are complete."""
        return self._reader.parser is not None

    # Admission -------------------------------------------------------------------------------------------------------

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request in the block.

        Raises:
            Refusal: there are too many, or the server ends.
        """
        if self.ending:
            raise Refusal(503, "the server is shutting down", type="server_error", code="closed")
        if self.admitted_now >= self.options.max_requests:
            full = f"the server works on {self.admitted_now} requests and takes no more; retry later"
            raise Refusal(429, full, type="rate_limit_error", code="queue_full", headers={"retry-after": "1"})
        self.admitted_now += 1
        try:
            yield
        finally:
            self.admitted_now -= 1

    @contextmanager
    def open(self, leave: Callable[..., Awaitable[None]]) -> Iterator[None]:
        """Let `end` call `leave`, which ends a request, in the block."""
        self._open.add(leave)
        try:
            yield
        finally:
            self._open.discard(leave)

    async def end(self) -> None:
        """Answer no more, and end the requests under way. Wait up to `SHUTDOWN_TIMEOUT` seconds for the engine."""
        self.ending = True
        leaving = [asyncio.ensure_future(leave(at_once=True)) for leave in [*self._open]]
        if leaving:
            _, late = await asyncio.wait(leaving, timeout=SHUTDOWN_TIMEOUT)
            for each in late:
                each.cancel()

    async def is_healthy(self) -> bool:
        """Return whether the engine can serve.

        Those who ask at the same time share an answer. They need no key, and each would take a thread from requests
        that have one, for as long as an engine that hangs does not answer.
        """
        if self._health is None or self._health.done():
            self._health = asyncio.create_task(asyncio.to_thread(_health_of, self.backend))
        return await asyncio.shield(self._health)

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model.

        Raises:
            Refusal: the server has no model of this name.
        """
        if name is not None and name != self.name:
            message = f"the model {shown(name)} does not exist; give {self.name!r}"
            raise Refusal(404, message, code="model_not_found", param="model")

    # Calls to the engine ---------------------------------------------------------------------------------------------

    def render(self, ask: ChatAsk, messages: Chat) -> RenderedPrompt:
        """Return the prompt of a conversation. Answers that the engine sampled keep their ids.

        Raises:
            InvalidRequestError, TemplateError: the conversation cannot be rendered, or continued.
        """
        begun = None
        if ask.continue_final_message and self.parses:
            raise invalid("continue_final_message", "this server parses answers, which are whole turns; leave it out")
        if ask.continue_final_message is not None:
            eos_ids = self.backend.eos_token_ids
            begun, problems = final_turns([messages], ask.continue_final_message, eos_ids, _ENDED)
            if problems:
                raise invalid("messages", problems[0])
        rendered = render_chats(
            self.backend,
            [messages],
            None if ask.tools is None else [ask.tools],
            begun,
            prompt=True,
            template_kwargs={**self.options.template_kwargs, **ask.template_kwargs},
            chat_template=self.options.chat_template,
            want_assistant=False,
        )
        continues = begun is not None and begun[0] is not None
        return RenderedPrompt(rendered.ids.tolist()[0], rendered.texts[0], continues)

    def with_stop_ids(self, sampling: SamplingParams) -> SamplingParams:
        """Return how to sample with the ids of stop strings that are special tokens.

        Special tokens are not in the text, so they could not be found there. Harnesses name the EOS so.
        """
        ids = [each for each, text in self._specials.items() if text in sampling.stop]
        if not ids:
            return sampling
        texts = {self._specials[each] for each in ids}
        return replace(
            sampling,
            stop=tuple(stop for stop in sampling.stop if stop not in texts),
            stop_token_ids=(*sampling.stop_token_ids, *ids),
        )

    def chat_sampling(self, sampling: SamplingParams) -> SamplingParams:
        """Return how to sample answers that are read as messages."""
        return self._reader.sampling(sampling)

    def generate_options(
        self, sampling: SamplingParams, *, wanted: bool, top_logprobs: int, mode: str | None = None
    ) -> dict[str, Any]:
        """Return the arguments of a call that samples.

        Args:
            wanted: whether the client asks for log-probs. Otherwise they are recorded, if the engine has them.
            top_logprobs: how many of the most probable ids the client asks for.
            mode: the log-probs that the client asks for; None for those of the server.
        """
        logprobs = mode or self.options.log_probs
        if not wanted:
            logprobs = self._recorded_mode(sampling)
        return {"logprobs": logprobs, "top_logprobs": top_logprobs, **self.call_options}

    @property
    def call_options(self) -> dict[str, Any]:
        """The arguments of every call."""
        return {"timeout": self.options.timeout, "adapter": self.options.adapter}

    def _recorded_mode(self, sampling: SamplingParams) -> Literal["none", "raw", "processed"]:
        if self.store is None:
            return "none"
        try:
            generation_mode(self.options.log_probs, sampling, self.backend.capabilities, self.backend.name)
        except CapabilityError:
            return "none"
        return self.options.log_probs

    # Its answers -----------------------------------------------------------------------------------------------------

    def answers(
        self, result: GenerateResult, sampling: SamplingParams, prompts: Sequence[Sequence[int]] | None = None
    ) -> list[Answer]:
        """Return the answers of a result: messages, or what continues the texts of `prompts`. Count their tokens."""
        tokens = int(result.ids.lengths.sum())
        self._finished.append((time.monotonic(), tokens))
        self._sampled += tokens
        return answers_of(result, sampling, self.backend, prompts)

    def messages(
        self,
        result: GenerateResult,
        answers: Sequence[Answer],
        sampling: SamplingParams,
        prompt: RenderedPrompt,
        tools: list[dict[str, Any]] | None,
    ) -> list[Message]:
        """Return the answers to one prompt as messages, as a policy with this parser makes them.

        Every tool call has an id.
        """
        rows = InputRows(
            batch_size=(1,),
            ids=Ragged.from_list([prompt.ids]),
            texts=(prompt.text,),
            tools=None if tools is None else (tools,),
        ).repeat(len(answers))
        said = tuple(each.text for each in answers)
        messages, problems = self._reader.read(rows, rows.texts or (), said, result, sampling, self.backend)
        if problems:
            _log.debug("answers that are not in the format %s: %s", self.options.response_parser, spelled_out(problems))
        return [_with_call_ids(each) for each in messages]


def _with_call_ids(message: Message) -> Message:
    if not message.tool_calls:
        return message
    calls = tuple({"id": new_call_id(), "type": "function", **call} for call in message.tool_calls)
    return replace(message, tool_calls=calls)


def _health_of(backend: Backend) -> bool:
    try:
        return backend.health()
    except CoreLMError:
        return False


def batched(backend: Backend, options: ServerOptions) -> DynamicBatcher:
    """Return a backend whose calls many requests share: the given one, if it does that."""
    if isinstance(backend, DynamicBatcher):
        return backend
    return DynamicBatcher(backend, Limits(max_queue=options.max_requests, on_full="raise"), merge=False)
