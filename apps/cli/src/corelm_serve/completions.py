"""Answers to requests for completions, ``POST /v1/completions``, and to requests in ids, ``POST /v1/tokens``.

With `echo` and `logprobs`, prompts are scored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack, aclosing
from functools import partial
from typing import Any

from corelm.spec import GenerateResult
from corelm.spec.answer_text import HALF_CHARACTER
from corelm_interop.openai_answers import Answer, ScoredPrompt, scored_prompts
from corelm_interop.openai_logprobs import CompletionLogprobs
from corelm_serve.exchange import Exchange, Reply, record, usage
from corelm_serve.generation import Call, Generation
from corelm_serve.requests import CompletionAsk, TokenAsk
from corelm_serve.service import UnrecordedTurn

_KIND = "text_completion"


async def answer_completions(exchange: Exchange, ask: CompletionAsk) -> None:
    """Answer a request for completions. One that only scores its prompts is not recorded.

    Raises:
        CoreLMError: the engine cannot do what was asked, or fails.
        ClientLeft: the client has hung up, or the server ends.
    """
    prompts = await asyncio.to_thread(_ids, exchange, ask)
    with ExitStack() as stack:
        turns = begin_turns(exchange, prompts if ask.samples else [], stack)
        await _CompletionReply(exchange, ask, prompts, turns).send()


def begin_turns(exchange: Exchange, prompts: Sequence[Sequence[int]], stack: ExitStack) -> list[Any]:
    """Return a turn of a session for each prompt. They end with the stack."""
    store, session = exchange.store, exchange.session
    # An empty prompt is the beginning of nothing.
    return [
        UnrecordedTurn() if store is None or not ids else stack.enter_context(store.begin_tokens(ids, session=session))
        for ids in prompts
    ]


def _ids(exchange: Exchange, ask: CompletionAsk) -> list[list[int]]:
    if ask.ids is not None:
        return [list(row) for row in ask.ids]
    rows: list[list[int]] = exchange.service.backend.tokenize(ask.texts or ()).ids.tolist()
    return rows


class _CompletionReply(Reply):
    def __init__(self, exchange: Exchange, ask: CompletionAsk, prompts: list[list[int]], turns: Sequence[Any]) -> None:
        super().__init__(exchange, "cmpl", turns, include_usage=ask.include_usage)
        self._ask, self._prompts, self._turns = ask, prompts, turns
        self._samples = ask.sampling.num_samples or 1 if ask.samples else 1
        self._echoed: list[str] = []
        self._scored: list[ScoredPrompt] = []
        # One for each choice.
        self._shapes = [
            CompletionLogprobs(
                exchange.service.texts,
                exchange.service.backend.tokenizer,
                ids,
                skip_special_tokens=ask.sampling.skip_special_tokens,
                by_id=ask.by_id,
            )
            for ids in prompts
            for _ in range(self._samples)
        ]

    async def send(self) -> None:
        ask, service = self._ask, self.service
        if ask.echo:
            await self._read_prompts()
        if not ask.samples:
            await self._whole([])
            return
        top = ask.logprobs or 0
        # One list holds the log-probs of prompt and answer. Those of a prompt that was not drawn can only be raw.
        mode = "raw" if self._scored else None
        options = service.generate_options(ask.sampling, wanted=ask.logprobs is not None, top_logprobs=top, mode=mode)
        generation = self.exchange.add(Generation(service.backend, self._prompts, ask.sampling, **options))
        # The tokens of a stream come without the most probable ids.
        if ask.stream and not top:
            await self._stream(generation)
        else:
            await self._whole(await self._recorded(await generation.result()))

    async def _read_prompts(self) -> None:
        """Make the text, and the log-probs, that echo puts before the answers."""
        ask, backend = self._ask, self.service.backend
        if ask.texts is not None:
            self._echoed = list(ask.texts)
        else:
            self._echoed = await asyncio.to_thread(backend.detokenize, self._prompts, skip_special_tokens=False)
        if ask.samples:
            # The answer may complete the last character of its prompt.
            self._echoed = [text.rstrip(HALF_CHARACTER) for text in self._echoed]
        if ask.logprobs is not None:
            options = {"top_k": ask.logprobs, **self.service.call_options}
            scoring = Call(partial(backend.submit_score_logprobs, self._prompts, **options))
            self._scored = scored_prompts(self._prompts, await self.exchange.add(scoring).result())

    async def _whole(self, answers: Sequence[Answer]) -> None:
        self.exchange.refuse_if_over()
        numbers = usage(self._prompts, answers)
        choices = [
            self._choice(at, answers[at] if answers else None) for at in range(len(self._prompts) * self._samples)
        ]
        if not self._ask.stream:
            await self.whole(_KIND, choices, numbers)
            return
        await self.begin_stream()
        for choice in choices:
            await self.event(_KIND, [choice])
        await self.end_stream(_KIND, numbers)

    def _choice(self, index: int, answer: Answer | None) -> dict[str, Any]:
        text, logprobs = self._before(index)
        reason = "length"
        if answer is not None:
            text, reason = text + answer.text, answer.finish_reason
            if answer.logprobs is not None and self._ask.logprobs is not None:
                added = self._shapes[index].add(answer.ids, answer.logprobs, answer.top)
                logprobs = _joined(logprobs, added)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _before(self, index: int) -> tuple[str, dict[str, Any] | None]:
        """Return the text and the log-probs of the prompt of a choice, if it is echoed."""
        at = index // self._samples
        if not self._scored:
            return (self._echoed[at] if self._echoed else ""), None
        return self._echoed[at], self._shapes[index].echo(self._scored[at], self._echoed[at])

    async def _stream(self, generation: Generation) -> None:
        begun = False
        async with aclosing(generation.chunks()) as chunks:
            async for chunk in chunks:
                if self.connection.left:
                    continue
                if not begun:
                    begun = True
                    await self.begin_stream()
                    if self._ask.echo:
                        for index in range(len(self._shapes)):
                            text, logprobs = self._before(index)
                            await self._part(index, text, logprobs)
                logprobs = None
                if self._ask.logprobs is not None and chunk.ids:
                    logprobs = self._shapes[chunk.row].add(chunk.ids, chunk.logprobs, None)
                if chunk.text or logprobs or chunk.finish_reason:
                    await self._part(chunk.row, chunk.text, logprobs, chunk.finish_reason)
        answers = await self._recorded(generation.streamed)
        self.exchange.refuse_if_over()
        await self.end_stream(_KIND, usage(self._prompts, answers))

    async def _recorded(self, result: GenerateResult) -> list[Answer]:
        answers = await asyncio.to_thread(self.service.answers, result, self._ask.sampling, self._prompts)
        record_all(self._turns, self._prompts, answers, self._samples)
        return answers

    async def _part(self, index: int, text: str, logprobs: Any, reason: str | None = None) -> None:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        await self.event(_KIND, [choice])


def record_all(turns: Sequence[Any], prompts: Sequence[Sequence[int]], answers: Sequence[Answer], samples: int) -> None:
    """Record the answers to several prompts, which are next to each other."""
    for at, (turn, ids) in enumerate(zip(turns, prompts, strict=True)):
        record(turn, ids, answers[at * samples : (at + 1) * samples])


def _joined(before: dict[str, Any] | None, then: dict[str, Any]) -> dict[str, Any]:
    if before is None:
        return then
    return {name: None if before[name] is None or then[name] is None else [*before[name], *then[name]] for name in then}


# Requests in ids ------------------------------------------------------------------------------------------------------


async def answer_tokens(exchange: Exchange, ask: TokenAsk) -> None:
    """Answer a request in ids.

    Raises:
        CoreLMError: the engine cannot do what was asked, or fails.
        ClientLeft: the client has hung up, or the server ends.
    """
    service, prompts = exchange.service, [list(row) for row in ask.prompts]
    samples = ask.sampling.num_samples or 1
    with ExitStack() as stack:
        turns = begin_turns(exchange, prompts, stack)
        options = service.generate_options(
            ask.sampling, wanted=ask.logprobs != "none", top_logprobs=ask.top_logprobs, mode=ask.logprobs
        )
        generation = exchange.add(Generation(service.backend, prompts, ask.sampling, **options))
        answers = await asyncio.to_thread(service.answers, await generation.result(), ask.sampling, prompts)
        record_all(turns, prompts, answers, samples)
        exchange.refuse_if_over()
        choices = [_choice(at, answer, at // samples, ask) for at, answer in enumerate(answers)]
        await Reply(exchange, "tokens", turns).whole("tokens", choices, usage(prompts, answers))


def _choice(index: int, answer: Answer, prompt: int, ask: TokenAsk) -> dict[str, Any]:
    wanted = ask.logprobs != "none"
    top = answer.top if wanted else None
    return {
        "index": index,
        "prompt_index": prompt,
        "token_ids": answer.ids,
        "logprobs": answer.logprobs if wanted else None,
        "top_ids": None if top is None else [[each for each, _ in pairs] for pairs in top],
        "top_logprobs": None if top is None else [[value for _, value in pairs] for pairs in top],
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "provenance": answer.provenance.to_dict(),
    }
