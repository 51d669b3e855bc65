"""Answers to requests in ids: ``POST /v1/tokens``."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

from corelm_interop.openai_answers import Answer
from corelm_serve.completion_request import TokenAsk
from corelm_serve.completions import begin_turns, record_all
from corelm_serve.exchange import Exchange
from corelm_serve.generation import Generation
from corelm_serve.replies import Reply, usage


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
