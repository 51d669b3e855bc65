"""Checks with many callers: threads and tasks share a real engine through a `DynamicBatcher`; some are cancelled."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict

from corelm import Backend, DynamicBatcher, LLMPolicy, Tokens
from corelm.batching import Limits
from corelm.errors import InvalidRequestError
from helpers.tiny_models import random_rows

CALLERS = 16
GREEDY = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}


def check_threads(backend: Backend) -> None:
    """Assert that every caller gets the same result as alone, and that a bad request fails only for its caller."""
    prompts = random_rows(*range(3, 3 + CALLERS))
    answers = backend.generate(prompts, GREEDY)
    scores = backend.score_logprobs(prompts)
    batcher = DynamicBatcher(backend, Limits(max_batch_size=4))

    def caller(row: int) -> None:
        prompt = [prompts[row]]
        answer = batcher.generate(prompt, GREEDY)
        assert answer.ids.tolist() == [answers.ids.tolist()[row]]
        torch.testing.assert_close(answer.logprobs.values, answers.logprobs.split()[row], rtol=0, atol=1e-4)
        with pytest.raises(InvalidRequestError, match="row 0"):
            batcher.generate([[backend.capabilities.vocab_size]], GREEDY)
        found = batcher.score_logprobs(prompt)
        torch.testing.assert_close(found.logprobs.values, scores.logprobs.split()[row], rtol=0, atol=1e-4)

    with ThreadPoolExecutor(CALLERS) as pool:
        for done in [pool.submit(caller, row) for row in range(CALLERS)]:
            done.result(timeout=120)
    state = batcher.state()
    assert state.settled == 2 * CALLERS and state.queued == state.in_flight == 0
    batcher.cleanup()
    assert batcher.state().threads == 0 and backend.health()


def check_tasks(backend: Backend, long: int) -> None:
    """Assert that cancelled tasks leave the queue and the engine, and that the others are answered.

    Args:
        backend: the engine, without a batcher.
        long: the number of tokens of an answer that takes long enough to be cancelled while it runs.
    """
    prompts = random_rows(*range(3, 3 + CALLERS))
    answers = backend.generate(prompts, GREEDY).ids.tolist()
    options = {"input_mode": "tokens", "batching": Limits(max_batch_size=4), "return_text": False, "inplace": False}
    short = LLMPolicy(backend, sampling_params=GREEDY, **options)
    slow = LLMPolicy(
        short.backend,
        **{"input_mode": "tokens", "return_text": False, "inplace": False},
        sampling_params={"max_new_tokens": long, "ignore_eos": True},
    )

    def asked(row: int) -> TensorDict:
        return TensorDict(tokens=Tokens.from_rows(prompt=[prompts[row]]), batch_size=[1])

    async def crowd() -> list[TensorDict]:
        leaving = [asyncio.create_task(slow.aforward(asked(row))) for row in range(CALLERS)]
        # By now some are in the engine and the others in the queue.
        while short.get_batching_state().in_flight < 4:
            await asyncio.sleep(0)
        staying = [asyncio.create_task(short.aforward(asked(row))) for row in range(CALLERS)]
        for task in leaving:
            task.cancel()
        assert all(
            isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*leaving, return_exceptions=True)
        )
        return await asyncio.gather(*staying)

    found = asyncio.run(asyncio.wait_for(crowd(), timeout=120))
    assert [td["tokens", "response"][0].tolist() for td in found] == answers
    short.cleanup_batching()
    state = short.get_batching_state()
    assert state.queued == state.in_flight == state.threads == 0 and backend.health()
