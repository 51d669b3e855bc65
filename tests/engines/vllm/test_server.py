"""A selection of the conformance kit and more on a real vLLM server, which some tests kill.

The oracle is a float32 forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import corelm
from corelm import Backend, SamplingParams
from corelm.errors import CapabilityError, EngineError, InvalidRequestError
from engines.vllm.distributions import distributions
from engines.vllm.launch import TIMEOUT, VLLMServerProcess
from helpers import oracle
from helpers.oracle_kit import OracleKit
from helpers.processes import wait_until
from helpers.selected_kit import SelectedKit
from helpers.silences import outlasts_silence
from helpers.tiny_models import random_rows, tiny_model, tiny_tokenizer

Open = Callable[..., Backend]


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServerProcess]:
    with VLLMServerProcess(tiny_folder, tmp_path_factory.mktemp("log") / "raw.txt") as running:
        yield running


@pytest.fixture(scope="module")
def other_server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServerProcess]:
    """A server that returns processed log-probs, of at most 30 ids. Tests may change its weights."""
    log = tmp_path_factory.mktemp("log") / "processed.txt"
    arguments = ("--logprobs-mode", "processed_logprobs", "--max-logprobs", "30")
    with VLLMServerProcess(tiny_folder, log, *arguments) as running:
        yield running


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    tiny_model(hidden_size=128, seed=1).save_pretrained(folder)
    return folder


def connect(server: VLLMServerProcess, **options: Any) -> Backend:
    return corelm.get_backend("vllm", base_url=server.url, api_key=server.key, **options)


class TestServerConformance(OracleKit, SelectedKit):
    model: ClassVar[nn.Module] = tiny_model(hidden_size=128)

    @pytest.fixture(scope="class")
    @classmethod
    def open_backend(
        cls, server: VLLMServerProcess, other_server: VLLMServerProcess, tiny_folder: Path, other_folder: Path
    ) -> Iterator[Callable[[], Backend]]:
        """Return a function that opens backends.

        Backends on one server share its weights. So the first backend, which most tests use, has a server for itself,
        and the backends that tests open to change weights share the other server.
        """
        cls.other_folder = other_folder
        servers = iter([server])
        yield lambda: connect(next(servers, other_server))
        with connect(other_server) as last:
            last.update_weights(tiny_folder, version="default")

    def new_weights(self) -> tuple[Path, Callable[[list[int], float], Tensor]]:
        return self.other_folder, lambda ids, temperature: oracle.logprobs(OTHER, ids, temperature)

    def engine_sampling(self) -> dict[str, Any]:
        return {"engine_kwargs": {"logit_bias": {"7": 20.0}}}

    other_folder: Path


#: The oracle's own copies of the two models.
MODEL: nn.Module = tiny_model(hidden_size=128)
OTHER: nn.Module = tiny_model(hidden_size=128, seed=1)


def test_capabilities_are_read_from_the_server(server: VLLMServerProcess, tiny_folder: Path) -> None:
    with connect(server, model=str(tiny_folder)) as backend:
        capabilities = backend.capabilities
        assert (capabilities.vocab_size, capabilities.max_context) == (512, 512)
        assert backend.eos_token_ids == {2} and capabilities.generation_modes == {"raw"}
        assert capabilities.per_answer_seeds and capabilities.update_weights and capabilities.score


def test_a_wrong_model_or_key_is_refused(server: VLLMServerProcess) -> None:
    with pytest.raises(InvalidRequestError, match="pass model="):
        connect(server, model="another")
    with pytest.raises(EngineError, match="api_key"):
        corelm.get_backend("vllm", base_url=server.url, api_key="a-wrong-key-of-this-test")


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
def test_processed_log_probs_are_of_the_distribution_sampled_from(
    other_server: VLLMServerProcess, sampling: dict[str, float]
) -> None:
    prompts = random_rows(3, 20, 100)
    with connect(other_server) as backend:
        assert backend.capabilities.generation_modes == {"processed"}
        assert (backend.capabilities.top_logprobs, backend.capabilities.score_top_k) == (30, 30)
        asked: dict[str, Any] = {"logprobs": "processed", "top_logprobs": 30}
        result = backend.generate(prompts, {"max_new_tokens": 8, "seed": 4} | sampling, **asked)
        with pytest.raises(CapabilityError):
            backend.generate(prompts, {"max_new_tokens": 1} | sampling, logprobs="raw")
    assert result.logprobs is not None and result.mode == "processed"
    assert result.top_ids is not None and result.top_logprobs is not None
    tops = zip(result.top_ids.split(), result.top_logprobs.split(), strict=True)
    for prompt, answer, given, top in zip(prompts, result.ids.tolist(), result.logprobs.split(), tops, strict=True):
        row = [*prompt, *answer]
        expected = distributions(MODEL, row, SamplingParams(**sampling))[len(prompt) :]
        own = expected.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(given.double(), own, rtol=0, atol=1e-4)
        ids, values = top[0], top[1].double()
        torch.testing.assert_close(values, expected.topk(30).values, rtol=0, atol=1e-4)
        # Of ids that rounding could swap, either may be named, with its own log-prob.
        named = expected.gather(1, ids.clamp_min(0)).masked_fill(ids < 0, -torch.inf)
        torch.testing.assert_close(values, named, rtol=0, atol=1e-4)


def test_scores_are_raw_also_if_log_probs_are_processed(other_server: VLLMServerProcess) -> None:
    rows = random_rows(2, 3, 60, 511)
    with connect(other_server) as backend:
        scores = backend.score_logprobs(rows)
    assert scores.mode == "raw"
    for row, found in zip(rows, scores.logprobs.split(), strict=True):
        torch.testing.assert_close(found, oracle.logprobs(MODEL, row), rtol=0, atol=1e-4)


def test_an_ignored_eos_may_be_sampled_before_min_new_tokens_if_nothing_else_ends_an_answer(
    server: VLLMServerProcess,
) -> None:
    prompts = random_rows(*[3] * 24)
    sampling = {"max_new_tokens": 64, "ignore_eos": True, "seed": 5, "min_new_tokens": 64}
    with connect(server) as backend:
        result = backend.generate(prompts, sampling, logprobs="none")
        assert any(2 in answer for answer in result.ids.tolist()) and set(result.ids.lengths.tolist()) == {64}
        with pytest.raises(CapabilityError, match="ignore_eos"):
            backend.generate(prompts, {**sampling, "stop": ["a"]}, logprobs="none")


def test_an_invalid_row_does_not_affect_the_others_or_the_server(server: VLLMServerProcess) -> None:
    # The server's vocabulary has 512 ids; core is told 600, so that it lets the second row through.
    with connect(server, vocab_size=600) as backend:
        result = backend.generate([[5, 6], [5, 599], [7]], {"max_new_tokens": 2}, on_error="skip")
        assert result.errors is not None and [bool(text) for text in result.errors] == [False, True, False]
        assert "vocabulary" in result.errors[1] and backend.health()


def test_an_aborted_answer_keeps_its_tokens(server: VLLMServerProcess) -> None:
    sampling = {"max_new_tokens": 480, "ignore_eos": True}
    with connect(server) as backend, ThreadPoolExecutor(1) as pool:
        future = pool.submit(backend.generate, [[5, 6]] * 2, sampling, request_ids=["a", "b"])
        assert wait_until(lambda: server.running() >= 2, TIMEOUT)
        backend.abort(["a"])
        result = future.result(TIMEOUT)
    assert result.finish_reasons == ("abort", "length")
    assert result.ids.lengths[0] < 480 == result.ids.lengths[1] and result.logprobs is not None
    answer = result.ids.tolist()[0]
    torch.testing.assert_close(
        result.logprobs.split()[0], oracle.answer_logprobs(MODEL, [5, 6], answer), rtol=0, atol=1e-4
    )


@pytest.mark.nightly
def test_answers_may_take_more_than_twice_the_read_timeout(server: VLLMServerProcess) -> None:
    assert outlasts_silence(lambda seconds: connect(server, read_timeout=seconds), tokens=480, rows=16)


@pytest.mark.nightly
def test_every_row_is_served_if_the_server_is_killed_and_restarted_during_a_call(
    other_server: VLLMServerProcess,
) -> None:
    prompts = random_rows(*range(2, 18))
    sampling = {"max_new_tokens": 400, "ignore_eos": True, "seed": 7}
    with connect(other_server, max_retries=100) as backend, connect(other_server, max_retries=0) as without_retries:
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(backend.generate, prompts, sampling)
            assert wait_until(lambda: other_server.running() >= len(prompts), TIMEOUT)
            other_server.kill()
            # Without retries, a call to the dead server fails at once.
            with pytest.raises(EngineError) as caught:
                without_retries.generate(prompts, sampling)
            assert caught.value.usable is False and not without_retries.health()
            other_server.start()
            other_server.wait_until_ready()
            result = future.result(TIMEOUT)
        assert set(result.finish_reasons) == {"length"} and result.logprobs is not None
        for prompt, answer, found in zip(prompts, result.ids.tolist(), result.logprobs.split(), strict=True):
            expected = oracle.answer_logprobs(MODEL, prompt, answer)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        # The server honours seeds, so the answers are those of an undisturbed call.
        assert backend.generate(prompts[:2], sampling).ids.tolist() == result.ids.tolist()[:2]


@pytest.mark.nightly
def test_a_server_on_a_cpu_does_not_replace_experts(tmp_path: Path) -> None:
    """vLLM 0.32 answers with neither the old weights nor the new ones afterwards."""
    tiny_model("qwen3-moe", hidden_size=128).save_pretrained(tmp_path / "moe")
    tiny_tokenizer().save_pretrained(tmp_path / "moe")
    with VLLMServerProcess(tmp_path / "moe", tmp_path / "log.txt") as server, connect(server) as backend:
        with pytest.raises(CapabilityError):
            backend.update_weights(tmp_path / "moe")
        assert backend.weight_version == "0"
