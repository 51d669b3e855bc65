"""Answers to chat requests: ``POST /v1/chat/completions``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from corelm.spec import GenerateResult, Message
from corelm_interop.openai_answers import Answer
from corelm_interop.openai_logprobs import chat_logprobs
from corelm_serve.exchange import Exchange, Reply, record, usage
from corelm_serve.generation import Generation
from corelm_serve.requests import ChatAsk
from corelm_serve.service import RenderedPrompt, UnrecordedTurn

_CHUNK = "chat.completion.chunk"


async def answer_chat(exchange: Exchange, ask: ChatAsk) -> None:
    """Answer a chat request.

    Raises:
        CoreLMError: the conversation cannot be rendered, or the engine cannot do what was asked, or fails.
        ClientLeft: the client has hung up, or the server ends.
    """
    store = exchange.store
    # A turn in two parts is no turn of a session.
    if store is None or ask.continue_final_message:
        await _ChatReply(exchange, ask, UnrecordedTurn(ask.messages)).send()
        return
    with store.begin(ask.messages, tools=ask.tools, session=exchange.session) as turn:
        await _ChatReply(exchange, ask, turn).send()


class _ChatReply(Reply):
    def __init__(self, exchange: Exchange, ask: ChatAsk, turn: Any) -> None:
        super().__init__(exchange, "chatcmpl", [turn], include_usage=ask.include_usage)
        self._ask, self._turn = replace(ask, sampling=self.service.chat_sampling(ask.sampling)), turn

    async def send(self) -> None:
        ask, service = self._ask, self.service
        prompt = await asyncio.to_thread(service.render, ask, self._turn.messages)
        options = service.generate_options(ask.sampling, wanted=ask.logprobs, top_logprobs=ask.top_logprobs)
        generation = self.exchange.add(
            Generation(service.backend, [prompt.ids], ask.sampling, new_turn=not prompt.continues, **options)
        )
        # The tokens of a stream come without the most probable ids, and a parser needs the whole answer.
        if ask.stream and not service.parses and not ask.top_logprobs:
            await self._stream(generation, prompt)
            return
        answers, messages = await self._recorded(await generation.result(), prompt)
        numbers = usage([prompt.ids], answers)
        if not ask.stream:
            choices = [self._choice(at, *each) for at, each in enumerate(zip(answers, messages, strict=True))]
            await self.whole("chat.completion", choices, numbers)
            return
        await self.begin_stream()
        for at, (answer, message) in enumerate(zip(answers, messages, strict=True)):
            await self._delta(at, _message(message, stream=True), logprobs=self._logprobs(answer))
            await self._delta(at, {}, _finish_reason(answer, message))
        await self.end_stream(_CHUNK, numbers)

    async def _stream(self, generation: Generation, prompt: RenderedPrompt) -> None:
        begun: set[int] = set()
        reasons: dict[int, str] = {}
        async with aclosing(generation.chunks()) as chunks:
            async for chunk in chunks:
                if self.connection.left:
                    continue
                if not begun:
                    await self.begin_stream()
                delta: dict[str, Any] = {} if chunk.row in begun else {"role": "assistant"}
                if chunk.text or chunk.row not in begun:
                    delta["content"] = chunk.text
                begun.add(chunk.row)
                logprobs = None
                if self._ask.logprobs and chunk.ids:
                    logprobs = chat_logprobs(self.service.texts, chunk.ids, chunk.logprobs, None)
                if delta or logprobs:
                    await self._delta(chunk.row, delta, logprobs=logprobs)
                if chunk.finish_reason is not None:
                    reasons[chunk.row] = chunk.finish_reason
        answers, _ = await self._recorded(generation.streamed, prompt)
        for row, reason in sorted(reasons.items()):
            await self._delta(row, {}, reason)
        await self.end_stream(_CHUNK, usage([prompt.ids], answers))

    async def _recorded(self, result: GenerateResult, prompt: RenderedPrompt) -> tuple[list[Answer], list[Message]]:
        answers, messages = await asyncio.to_thread(self._read, result, prompt)
        record(self._turn, prompt.ids, answers, messages)
        self.exchange.refuse_if_over()
        return answers, messages

    def _read(self, result: GenerateResult, prompt: RenderedPrompt) -> tuple[list[Answer], list[Message]]:
        answers = self.service.answers(result, self._ask.sampling, [prompt.ids] if prompt.continues else None)
        return answers, self.service.messages(result, answers, self._ask.sampling, prompt, self._ask.tools)

    def _choice(self, index: int, answer: Answer, message: Message) -> dict[str, Any]:
        return {
            "index": index,
            "message": _message(message),
            "logprobs": self._logprobs(answer),
            "finish_reason": _finish_reason(answer, message),
        }

    def _logprobs(self, answer: Answer) -> dict[str, Any] | None:
        if not self._ask.logprobs or answer.logprobs is None:
            return None
        return chat_logprobs(self.service.texts, answer.ids, answer.logprobs, answer.top)

    async def _delta(
        self, index: int, delta: Mapping[str, Any], reason: str | None = None, logprobs: Any = None
    ) -> None:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        await self.event(_CHUNK, [choice])


def _message(message: Message, *, stream: bool = False) -> dict[str, Any]:
    """Return a message in the protocol's shape; a delta of a stream numbers its tool calls."""
    calls = [
        {
            **({"index": at} if stream else {}),
            "id": call["id"],
            "type": "function",
            "function": {"name": call["function"]["name"], "arguments": _as_text(call["function"].get("arguments"))},
        }
        for at, call in enumerate(message.tool_calls or ())
    ]
    content = message.content if message.content or not calls else None
    thoughts = next((message.extra[name] for name in ("reasoning_content", "thinking") if name in message.extra), None)
    return {
        "role": "assistant",
        "content": content,
        **({} if stream else {"refusal": None}),
        **({"tool_calls": calls} if calls else {}),
        **({"reasoning_content": thoughts} if thoughts is not None else {}),
    }


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


def _finish_reason(answer: Answer, message: Message) -> str:
    return "tool_calls" if message.tool_calls and answer.finish_reason == "stop" else answer.finish_reason
