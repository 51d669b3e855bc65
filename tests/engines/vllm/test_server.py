"""A real vLLM server keeps every promise, also when it is killed; the oracle is a plain float32 forward pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor, nn

import corelm
from corelm import Backend
from corelm.errors import CapabilityError, EngineError, InvalidRequestError
from corelm.testing import BackendConformance
from engines.vllm.launch import PATIENCE, VLLMServer
from helpers import oracle as plain
from helpers.tiny_models import random_rows, tiny_model, tiny_tokenizer

Open = Callable[..., Backend]


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    with VLLMServer(tiny_folder, tmp_path_factory.mktemp("log") / "raw.txt") as running:
        yield running


@pytest.fixture(scope="module")
def other_server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """One whose weights tests may change, and which gives processed log-probs."""
    log = tmp_path_factory.mktemp("log") / "processed.txt"
    with VLLMServer(tiny_folder, log, "--logprobs-mode", "processed_logprobs") as running:
        yield running


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    tiny_model(hidden_size=128, seed=1).save_pretrained(folder)
    return folder


def connect(server: VLLMServer, **options: Any) -> Backend:
    return corelm.get_backend("vllm", base_url=server.url, api_key=server.key, **options)


class TestVLLMServer(BackendConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(
        cls, server: VLLMServer, other_server: VLLMServer, tiny_folder: Path, other_folder: Path
    ) -> Iterator[Callable[[], Backend]]:
        """Two backends of one server have one set of weights. So the first, which every test is given, has a server of
        its own, and those that tests open for themselves share the other.
        """
        cls.other_folder = other_folder
        servers = iter([server])
        yield lambda: connect(next(servers, other_server))
        with connect(other_server) as last:
            last.update_weights(tiny_folder, version="default")

    def oracle(self, ids: list[int], temperature: float) -> Tensor:
        return plain.logprobs(MODEL, ids, temperature)

    def next_logprobs(self, ids: list[int], temperature: float) -> Tensor:
        return (plain.next_logits(MODEL, ids)[-1] / temperature).log_softmax(-1)

    def new_weights(self) -> tuple[Path, Callable[[list[int], float], Tensor]]:
        return self.other_folder, lambda ids, temperature: plain.logprobs(OTHER, ids, temperature)

    other_folder: Path


#: The oracle's own copies of the two models.
MODEL: nn.Module = tiny_model(hidden_size=128)
OTHER: nn.Module = tiny_model(hidden_size=128, seed=1)


def test_what_the_server_says_of_itself_is_read(server: VLLMServer, tiny_folder: Path) -> None:
    with connect(server, model=str(tiny_folder)) as backend:
        capabilities = backend.capabilities
        assert (capabilities.vocab_size, capabilities.max_context) == (512, 512)
        assert backend.eos_token_ids == {2} and capabilities.generation_modes == {"raw"}
        assert capabilities.per_answer_seeds and capabilities.update_weights and capabilities.score


def test_another_model_or_key_is_refused(server: VLLMServer) -> None:
    with pytest.raises(InvalidRequestError, match="pass model="):
        connect(server, model="another")
    with pytest.raises(EngineError, match="api_key"):
        corelm.get_backend("vllm", base_url=server.url, api_key="a-wrong-key-of-this-test")


def test_greedy_answers_are_those_of_transformers(server: VLLMServer) -> None:
    prompts = random_rows(*range(1, 33), *range(33, 449, 13))
    assert len(prompts) == 64
    sampling = {"max_new_tokens": 16, "temperature": 0.0}
    with connect(server) as backend:
        found = backend.generate(prompts, sampling)
    with corelm.get_backend("transformers", MODEL, tokenizer=tiny_tokenizer()) as reference:
        expected = reference.generate(prompts, sampling)
    assert found.ids.tolist() == expected.ids.tolist() and found.finish_reasons == expected.finish_reasons
    assert found.logprobs is not None and expected.logprobs is not None
    torch.testing.assert_close(found.logprobs.values, expected.logprobs.values, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 1.2, "top_p": 0.7},
    ],
    ids=str,
)
def test_processed_log_probs_are_those_of_what_was_sampled_from(
    other_server: VLLMServer, sampling: dict[str, float]
) -> None:
    prompts = random_rows(3, 20, 100)
    with connect(other_server) as backend:
        assert backend.capabilities.generation_modes == {"processed"}
        batch = backend.generate(prompts, {"max_new_tokens": 8, "seed": 4} | sampling, logprobs="processed")
        with pytest.raises(CapabilityError):
            backend.generate(prompts, {"max_new_tokens": 1} | sampling, logprobs="raw")
    assert batch.logprobs is not None and batch.mode == "processed"
    for prompt, answer, given in zip(prompts, batch.ids.tolist(), batch.logprobs.split(), strict=True):
        expected = [
            processed(plain.next_logits(MODEL, [*prompt, *answer[:t]])[-1], **sampling)[token]
            for t, token in enumerate(answer)
        ]
        torch.testing.assert_close(given, torch.stack(expected), rtol=0, atol=1e-4)


def processed(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """float32[V]: log-probs after temperature, and after one kind of truncation."""
    if temperature == 0:
        return torch.full_like(logits, -torch.inf).index_fill_(0, logits.argmax(), 0.0)
    logits = logits / temperature
    order = logits.argsort(descending=True)
    before = logits[order].softmax(-1).cumsum(-1) - logits[order].softmax(-1)
    kept = order[(before < top_p) & (torch.arange(len(order)) < (top_k or len(order)))]
    cut = torch.full_like(logits, -torch.inf)
    cut[kept] = logits[kept]
    return cut.log_softmax(-1)


def test_scores_are_raw_where_log_probs_are_processed(other_server: VLLMServer) -> None:
    rows = random_rows(2, 3, 60, 512)
    with connect(other_server) as backend:
        scores = backend.score_logprobs(rows)
    assert scores.mode == "raw"
    for row, found in zip(rows, scores.logprobs.split(), strict=True):
        torch.testing.assert_close(found, plain.logprobs(MODEL, row), rtol=0, atol=1e-4)


def test_eos_is_free_before_the_least_length_only_where_nothing_else_ends_an_answer(server: VLLMServer) -> None:
    prompts = random_rows(*[3] * 24)
    sampling = {"max_new_tokens": 64, "ignore_eos": True, "seed": 5, "min_new_tokens": 64}
    with connect(server) as backend:
        batch = backend.generate(prompts, sampling, logprobs="none")
        assert any(2 in answer for answer in batch.ids.tolist()) and set(batch.ids.lengths.tolist()) == {64}
        with pytest.raises(CapabilityError, match="ignore_eos"):
            backend.generate(prompts, {**sampling, "stop": ["a"]}, logprobs="none")


def test_an_invalid_row_fails_alone_and_the_server_lives_on(server: VLLMServer) -> None:
    # The server knows 512 ids, and is said to know more.
    with connect(server, vocab_size=600) as backend:
        batch = backend.generate([[5, 6], [5, 599], [7]], {"max_new_tokens": 2}, on_error="skip")
        assert batch.errors is not None and [bool(text) for text in batch.errors] == [False, True, False]
        assert "vocabulary" in batch.errors[1] and backend.health()


def test_what_is_aborted_returns_what_it_has(server: VLLMServer) -> None:
    sampling = {"max_new_tokens": 480, "ignore_eos": True}
    with connect(server) as backend, ThreadPoolExecutor(1) as pool:
        future = pool.submit(backend.generate, [[5, 6]] * 2, sampling, request_ids=["a", "b"])
        wait_until_running(server, 2)
        backend.abort(["a"])
        batch = future.result(PATIENCE)
    assert batch.finish_reasons == ("abort", "length")
    assert batch.ids.lengths[0] < 480 == batch.ids.lengths[1] and batch.logprobs is not None
    answer = batch.ids.tolist()[0]
    torch.testing.assert_close(
        batch.logprobs.split()[0], plain.answer_logprobs(MODEL, [5, 6], answer), rtol=0, atol=1e-4
    )


def test_opening_and_closing_ten_times_leaves_nothing(server: VLLMServer) -> None:
    before = set(threading.enumerate())
    for _ in range(10):
        with connect(server) as backend:
            backend.generate([[5, 6]], {"max_new_tokens": 1})
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("corelm-http")]


def test_a_server_killed_and_restarted_mid_batch_serves_every_row(other_server: VLLMServer) -> None:
    prompts = random_rows(*range(2, 18))
    sampling = {"max_new_tokens": 400, "ignore_eos": True, "seed": 7}
    with connect(other_server, max_retries=100) as backend, connect(other_server, max_retries=0) as impatient:
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(backend.generate, prompts, sampling)
            wait_until_running(other_server, len(prompts))
            other_server.kill()
            # While there is none, a client that does not wait says so, and closes.
            with pytest.raises(EngineError) as caught:
                impatient.generate(prompts, sampling)
            assert caught.value.usable is False and not impatient.health()
            other_server.start()
            other_server.wait_until_ready()
            batch = future.result(PATIENCE)
        assert set(batch.finish_reasons) == {"length"} and batch.logprobs is not None
        for prompt, answer, found in zip(prompts, batch.ids.tolist(), batch.logprobs.split(), strict=True):
            expected = plain.answer_logprobs(MODEL, prompt, answer)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        # The seeds are honoured, so it is what it would have been.
        assert backend.generate(prompts[:2], sampling).ids.tolist() == batch.ids.tolist()[:2]


def test_a_restarted_server_is_not_taken_for_one_with_the_new_weights(
    other_server: VLLMServer, other_folder: Path
) -> None:
    rows = random_rows(4, 30)
    with connect(other_server) as backend:
        backend.update_weights(other_folder, version="tuned")
        scores = backend.score_logprobs(rows)
        assert scores.weight_versions == ("tuned", "tuned")
        for row, found in zip(rows, scores.logprobs.split(), strict=True):
            torch.testing.assert_close(found, plain.logprobs(OTHER, row), rtol=0, atol=1e-4)
        other_server.kill()
        other_server.start()
        other_server.wait_until_ready()
        with pytest.raises(EngineError, match="update_weights again"):
            backend.score_logprobs(rows)
        backend.update_weights(other_folder, version="again")
        scores = backend.score_logprobs(rows)
        assert scores.weight_versions == ("again", "again")
        for row, found in zip(rows, scores.logprobs.split(), strict=True):
            torch.testing.assert_close(found, plain.logprobs(OTHER, row), rtol=0, atol=1e-4)


def wait_until_running(server: VLLMServer, requests: int) -> None:
    """Until the engine works on as many requests, by its own count."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        page = httpx.get(f"{server.url}/metrics", trust_env=False).text
        lines = (line for line in page.splitlines() if line.startswith("vllm:num_requests_running"))
        if sum(float(line.rpartition(" ")[2]) for line in lines) >= requests:
            return
    raise AssertionError(f"the server never worked on {requests} requests at once")
