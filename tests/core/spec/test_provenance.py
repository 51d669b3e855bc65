"""`Provenance`: how log-probs are labelled, and which may be compared."""

from typing import Any

from corelm import Provenance, SamplingParams
from helpers.each import each


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


def test_numbers_match_if_they_are_of_one_distribution_and_only_then():
    def of(**distribution: Any) -> Provenance:
        return Provenance("toy", "m", "0", mode="processed", **distribution)

    plain, other_model = of(), Provenance("vllm", "n", "7", adapter="lora")
    different = [
        of(temperature=0.5),
        of(support="truncated"),
        of(penalties=(("presence_penalty", 0.5),)),
        of(penalties=(("presence_penalty", 1.0),)),
        of(temperature=0.5, support="truncated"),
        Provenance("toy", "m", "0", "raw", penalties=(("presence_penalty", 0.5),)),
    ]
    for one in (plain, *different):
        assert [other for other in (plain, *different) if one.matches(other)] == [one]
    assert plain.matches(other_model) and of(temperature=0.5).matches(of(temperature=0.5))
