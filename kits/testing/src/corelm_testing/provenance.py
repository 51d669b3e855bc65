"""The provenance of log-probs names the distribution they came from, correctly."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict

from corelm import Backend, LLMPolicy, Provenance
from corelm_testing.base import ConformanceBase, needs
from corelm_testing.reference import OPENINGS
from corelm_testing.trials import TRIALS, WITH_LOGPROBS, legal, use

TEMPERATURE = 0.8
RAW = ("raw", 1.0, "full", ())
#: Parameters with tests of their own: the first two change the shape of the output, the engine defines the last.
SHAPES = ("num_samples", "max_new_tokens", "engine_kwargs")


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
            effects = {TRIALS[name].effect for name in sampling}
            cut = effects & {"truncation", "ban", "engine"}
            penalties = tuple((name, value) for name, value in sampling.items() if TRIALS[name].effect == "penalty")
            expected = ("processed", sampling.get("temperature", 1.0), "truncated" if cut else "full", penalties)
            assert (found.mode, found.temperature, found.support, found.penalties) == expected, sampling

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
    """Return samplings: the default, each parameter alone that tokens with log-probs can have, and two together."""
    declared = {name: found for name in WITH_LOGPROBS if name not in SHAPES and (found := use(backend, name))}
    cuts = [found for name, found in declared.items() if TRIALS[name].effect == "truncation"]
    hot = [{"temperature": TEMPERATURE, **cut} for cut in cuts[:1] if legal(backend, "temperature", TEMPERATURE)]
    return [{}, *declared.values(), *hot]


def _of_answers(backend: Backend, mode: Any, **sampling: Any) -> Provenance:
    policy = LLMPolicy(
        backend, input_mode="text", sampling_params={"max_new_tokens": 4, **sampling}, log_probs_mode=mode
    )
    found: Provenance = policy(TensorDict(text=list(OPENINGS[:2])))["log_probs"].provenance
    return found


def _of_scores(backend: Backend, **options: Any) -> Provenance:
    policy = LLMPolicy(backend, input_mode="text", generate=False, **options)
    found: Provenance = policy(TensorDict(text=list(OPENINGS[:2])))["log_probs"].provenance
    return found
