"""A real vLLM server with ``--return-sampling-mask``, held against enumeration and against scores over its sets.

The V2 model runner, which this option needs, runs in Triton's interpreter here; see `interpreted` and `v2_on_cpu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import corelm
from corelm import Backend, Ragged, SamplingParams
from corelm.errors import CapabilityError
from engines.vllm.distributions import distributions
from engines.vllm.interpreted import SETTINGS
from engines.vllm.launch import VLLMServerProcess
from helpers import oracle
from helpers.processes import wait_until
from helpers.tiny_models import random_rows, tiny_model

PROMPTS = random_rows(9, 1, 4, 30, seed=5)
ATOL = 2e-5
PATIENCE = 200.0
ASKED: dict[str, Any] = {"logprobs": "processed", "return_support": True}

SAMPLINGS: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.6},
    "min-p": {"min_p": 0.2},
    "top-k-top-p": {"top_k": 50, "top_p": 0.8},
    "one-id": {"top_k": 1},
}


#: The server takes a minute to start. test_kept_sets.py shows the sets of an engine in this process.
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServerProcess]:
    arguments = ["--return-sampling-mask", "--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    # vLLM crashes on a CPU when it reads the prompt of a seeded request in two steps.
    arguments += ["--no-enable-chunked-prefill"]
    here = {**SETTINGS, "PYTHONPATH": str(Path(__file__).parent / "v2_on_cpu")}
    log = tmp_path_factory.mktemp("masks") / "server.log"
    with VLLMServerProcess(tiny_folder, log, *arguments, environment=here) as running:
        yield running


@pytest.fixture(scope="module")
def backend(server: VLLMServerProcess) -> Iterator[Backend]:
    with corelm.get_backend("vllm", base_url=server.url, api_key=server.key) as opened:
        yield opened


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_sets_are_those_that_truncation_leaves(backend: Backend, name: str) -> None:
    sampling = SamplingParams.make({**SAMPLINGS[name], "max_new_tokens": 6, "ignore_eos": True, "seed": 3})
    batch = backend.generate(PROMPTS, sampling, **ASKED)
    assert batch.kept_ids is not None and batch.kept_log_mass is not None and batch.logprobs is not None
    model = tiny_model(hidden_size=128)
    for row, (prompt, answer) in enumerate(zip(PROMPTS, batch.ids.tolist(), strict=True)):
        drawn_from = distributions(model, [*prompt, *answer], sampling)[len(prompt) :]
        own = oracle.next_logits(model, [*prompt, *answer])[len(prompt) - 1 : -1].double().log_softmax(-1)
        for step, ids in enumerate(batch.kept_ids.tolist()[row]):
            expected = (drawn_from[step] > -torch.inf).nonzero().flatten()
            assert ids == expected.tolist(), f"row {row}, token {step}"
            mass = float(own[step, expected].logsumexp(-1))
            assert batch.kept_log_mass.tolist()[row][step] == pytest.approx(mass, abs=ATOL)
            found = batch.logprobs.tolist()[row][step]
            assert found == pytest.approx(float(drawn_from[step, answer[step]]), abs=ATOL)


def test_scores_over_the_sets_are_the_samplers_numbers(backend: Backend, tiny_folder: Path) -> None:
    sampling = {"top_p": 0.8, "top_k": 40, "max_new_tokens": 8, "ignore_eos": True, "seed": 4}
    batch = backend.generate(PROMPTS, sampling, **ASKED)
    assert batch.logprobs is not None
    starts = [len(prompt) for prompt in PROMPTS]
    with corelm.get_backend("transformers", tiny_folder, dtype="float32") as trainer:
        scores = trainer.score_logprobs(
            Ragged.from_list(PROMPTS).join(batch.ids), score_from=starts, support=batch.kept_ids
        )
    torch.testing.assert_close(scores.logprobs.values[scores.scored.values], batch.logprobs.values, atol=ATOL, rtol=0)


def test_scores_and_answers_without_sets(backend: Backend) -> None:
    """The server refuses temperature 0 and requests without top_k, which scores would have."""
    model = tiny_model(hidden_size=128)
    scores = backend.score_logprobs(PROMPTS[2:])
    for row, found in zip(PROMPTS[2:], scores.logprobs.split(), strict=True):
        own = oracle.next_logits(model, row)[:-1].log_softmax(-1)
        expected = own[torch.arange(len(row) - 1), torch.tensor(row[1:])]
        torch.testing.assert_close(found[1:], expected, atol=1e-4, rtol=0)
    sampling = {"temperature": 0.7, "max_new_tokens": 4, "ignore_eos": True}
    assert backend.generate(PROMPTS, sampling, logprobs="processed").ids.lengths.tolist() == [4] * 4
    with pytest.raises(CapabilityError) as caught:
        backend.generate(PROMPTS, {**sampling, "top_k": 5}, **ASKED)
    assert caught.value.capability == "temperature"


def test_what_there_is_of_an_aborted_answer_comes_with_its_sets(backend: Backend, server: VLLMServerProcess) -> None:
    sampling = {"top_k": 5, "max_new_tokens": 150, "ignore_eos": True}
    names = ["stays", "goes"]
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(backend.generate, PROMPTS[:2], sampling, **ASKED, request_ids=names)
        assert wait_until(lambda: server.running() >= 2, PATIENCE)
        backend.abort(["goes"])
        batch = answers.result(PATIENCE)
    assert batch.finish_reasons == ("length", "abort") and batch.kept_ids is not None
    assert 0 < int(batch.ids.lengths[1]) < 150 and batch.kept_ids.lengths.tolist() == batch.ids.lengths.tolist()
    assert bool(batch.kept_ids.contains(batch.ids.values).all())


def test_stop_strings_cut_the_sets_with_the_answer(backend: Backend) -> None:
    plain = backend.generate(PROMPTS[:1], {"top_k": 5, "max_new_tokens": 6, "ignore_eos": True, "seed": 2}, **ASKED)
    text = backend.detokenize(plain.ids.tolist())[0]
    stop = text.strip()[1:3] or text
    asked = {"top_k": 5, "max_new_tokens": 6, "ignore_eos": True, "seed": 2, "stop": [stop]}
    batch = backend.generate(PROMPTS[:1], asked, **ASKED)
    assert batch.finish_reasons == ("stop",) and batch.kept_ids is not None and plain.kept_ids is not None
    count = int(batch.ids.lengths[0])
    assert batch.ids.tolist()[0] == plain.ids.tolist()[0][:count]
    assert batch.kept_ids.tolist()[0] == plain.kept_ids.tolist()[0][:count]
