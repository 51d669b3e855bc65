"""The provenance of log-probs names the distribution they came from, correctly."""

from __future__ import annotations

from typing import Any

import pytest
from tensordict import TensorDict

from corelm import Backend, LLMPolicy, Provenance
from corelm.errors import CapabilityError
from corelm.testing.base import ConformanceBase, needs, not_applicable
from corelm.testing.reference import OPENINGS, legal

TEMPERATURE = 0.8
RAW = ("raw", 1.0, "full", ())


class ProvenancePromises(ConformanceBase):
    @needs("mode:raw")
    def test_raw_log_probs_are_labelled_raw_under_every_sampling(self, backend: Backend) -> None:
        for sampling in _samplings(backend):
            found = _of_answers(backend, "raw", **sampling)
            assert (found.mode, found.temperature, found.support, found.penalties) == RAW, sampling

    @needs("mode:processed")
    def test_processed_log_probs_are_labelled_with_their_sampling(self, backend: Backend) -> None:
        for sampling in _samplings(backend):
            found = _of_answers(backend, "processed", **sampling)
            cut = {"top_k", "top_p", "min_p", "min_new_tokens"}.intersection(sampling)
            penalties = tuple((name, value) for name, value in sampling.items() if name.endswith("_penalty"))
            expected = ("processed", sampling.get("temperature", 1.0), "truncated" if cut else "full", penalties)
            assert (found.mode, found.temperature, found.support, found.penalties) == expected, sampling

    @needs("generation_modes", "sampling:temperature")
    def test_a_mode_that_is_not_declared_is_refused(self, backend: Backend) -> None:
        modes = backend.capabilities.generation_modes
        # If only the temperature is set, scaled log-probs are processed ones.
        missing = {"raw", "processed"} - modes - ({"processed"} if "scaled" in modes else set())
        for mode in missing:
            with pytest.raises(CapabilityError) as error:
                _of_answers(backend, mode, temperature=TEMPERATURE)
            assert error.value.capability == "generation_modes"
        if not missing:
            not_applicable("a mode that is not declared")

    @needs("score")
    def test_a_score_says_its_temperature(self, backend: Backend) -> None:
        found = _of_scores(backend)
        assert (found.mode, found.temperature, found.support, found.penalties) == RAW
        if backend.capabilities.score_temperature and legal(backend, "temperature", TEMPERATURE):
            found = _of_scores(backend, log_probs_mode="processed", sampling_params={"temperature": TEMPERATURE})
            assert (found.mode, found.temperature, found.support) == ("processed", TEMPERATURE, "full")

    @needs("score", "generation_modes")
    def test_only_log_probs_of_one_distribution_match(self, backend: Backend) -> None:
        # At temperature 1 every mode gives the model's own log-probs, so they can be compared with the scores.
        scores, answers = _of_scores(backend), _of_answers(backend, "raw")
        assert answers.matches(scores)
        if "processed" in backend.capabilities.generation_modes and legal(backend, "temperature", TEMPERATURE):
            assert _of_answers(backend, "processed").matches(scores)
            assert not _of_answers(backend, "processed", temperature=TEMPERATURE).matches(scores)

    @needs("generation_modes")
    def test_provenance_names_backend_model_and_weight_version(self, backend: Backend) -> None:
        found = [_of_answers(backend, "raw")]
        if backend.capabilities.score:
            found.append(_of_scores(backend))
        labels = (backend.name, backend.model_name, backend.weight_version)
        assert all((each.backend, each.model, each.weight_version) == labels for each in found)


def _samplings(backend: Backend) -> list[dict[str, Any]]:
    """Return samplings: the default, each declared parameter alone, and a temperature with a truncation."""
    values = {
        "temperature": TEMPERATURE,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.05,
        "min_new_tokens": 1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    }
    declared = [{name: value} for name, value in values.items() if legal(backend, name, value)]
    cuts = [each for each in declared if {"top_k", "top_p", "min_p"}.intersection(each)]
    hot = [{"temperature": TEMPERATURE, **cut} for cut in cuts[:1] if legal(backend, "temperature", TEMPERATURE)]
    return [{}, *declared, *hot]


def _of_answers(backend: Backend, mode: Any, **sampling: Any) -> Provenance:
    policy = LLMPolicy(
        backend, input_mode="text", sampling_params={"max_new_tokens": 2, **sampling}, log_probs_mode=mode
    )
    found: Provenance = policy(TensorDict(text=list(OPENINGS[:2])))["log_probs"].provenance
    return found


def _of_scores(backend: Backend, **options: Any) -> Provenance:
    policy = LLMPolicy(backend, input_mode="text", generate=False, **options)
    found: Provenance = policy(TensorDict(text=list(OPENINGS[:2])))["log_probs"].provenance
    return found
