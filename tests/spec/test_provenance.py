"""`Provenance`: how log-probs are labelled, and which may be compared."""

from __future__ import annotations

from typing import Any

from corelm import Provenance, SamplingParams
from helpers.cases import each


@each(
    "sampling",
    [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"min_new_tokens": 2}, {"engine_kwargs": {"logit_bias": {}}}],
)
def test_processed_log_probs_of_a_restricted_distribution_have_truncated_support(sampling: dict[str, Any]):
    label = Provenance.label("processed", SamplingParams(**sampling))
    assert label == {"mode": "processed", "temperature": 1.0, "support": "truncated"}


@each("sampling", [{}, {"temperature": 0.0}, {"temperature": 0.5, "presence_penalty": 1.0}])
def test_processed_log_probs_of_the_whole_vocabulary_have_full_support(sampling: dict[str, Any]):
    label = Provenance.label("processed", SamplingParams(**sampling))
    assert label == {"mode": "processed", "temperature": sampling.get("temperature", 1.0), "support": "full"}


@each("logprobs", ["none", "raw"])
def test_raw_log_probs_are_the_models_own_however_the_token_was_sampled(logprobs: Any):
    sampling = SamplingParams(temperature=0.5, top_k=3, min_new_tokens=2, presence_penalty=1.0)
    assert Provenance.label(logprobs, sampling) == {"mode": "raw", "temperature": 1.0, "support": "full"}


@each("temperature, mode", [(1.0, "raw"), (0.7, "processed")])
def test_scores_are_raw_at_temperature_one_alone(temperature: float, mode: str):
    assert Provenance.label_of_scores(temperature) == {"mode": mode, "temperature": temperature, "support": "full"}
