"""Every log-probability equals the oracle's, which is computed without the backend, and names its distribution."""

from __future__ import annotations

from collections import ChainMap
from typing import Any, Literal

import pytest
import torch
from tensordict import TensorDict

from corelm import Backend, LLMPolicy, Provenance, SamplingParams
from corelm.errors import CapabilityError
from corelm.spec import GenerateResult
from corelm.tensors.categorical import log_probs
from corelm_testing.base import ConformanceBase, needs, not_applicable
from corelm_testing.reference import LONGEST, OPENINGS, sampled_from, seeded, temperatures
from corelm_testing.usage import DECLARABLE, USAGE, WITH_LOGPROBS, in_range, legal, use

#: Unsorted, so that a backend that sorts rows has to put them back.
LENGTHS = (9, 300, 1, 131, 2, 40, 3)
#: The most tokens of an answer.
NEW = 8
#: The parameters that change the distribution that tokens are drawn from.
RESHAPING = tuple(name for name in DECLARABLE if USAGE[name].effect in ("temperature", "truncation", "penalty", "ban"))


class LogProbPromises(ConformanceBase, theme="logprobs"):
    """Every log-probability equals the oracle's, which is computed without the backend."""

    # Log-probs of sampled tokens -------------------------------------------------------------------------------------

    @needs("generation_modes")
    def test_the_first_response_token_has_its_log_prob(self, backend: Backend) -> None:
        prompts = self._rows_of_all_lengths(backend)
        self.assert_true_answers(prompts, backend.generate(prompts, seeded(backend, {"max_new_tokens": 1})))

    @needs("generation_modes")
    def test_every_sampled_token_has_its_log_prob(self, backend: Backend) -> None:
        prompts = self._rows_of_all_lengths(backend)
        self.assert_true_answers(prompts, backend.generate(prompts, seeded(backend, {"max_new_tokens": NEW})))

    @needs("mode:raw", "sampling:temperature")
    def test_raw_log_probs_are_the_models_own_at_every_temperature(self, backend: Backend) -> None:
        for temperature in temperatures(backend, 0.6, 1.7):
            self._assert_true_under(backend, "raw", temperature=temperature)

    @needs("mode:raw")
    def test_raw_log_probs_are_the_models_own_under_all_parameters_together(self, backend: Backend) -> None:
        reshaping = {name: found for name in RESHAPING if (found := use(backend, name))}
        if not reshaping:
            not_applicable("no parameter is declared that changes the distribution")
        while reshaping:
            try:
                return self._assert_true_under(backend, "raw", **ChainMap(*reshaping.values()))
            except CapabilityError as error:
                # The parameter is declared, but the engine refuses it in this combination.
                reshaping.pop(str(error.capability))
        raise AssertionError("the engine refuses every declared parameter")

    @needs("mode:processed", "sampling:temperature")
    def test_processed_log_probs_are_those_of_the_temperature(self, backend: Backend) -> None:
        for temperature in temperatures(backend, 0.6, 1.7):
            self._assert_true_under(backend, "processed", temperature=temperature)

    @needs("mode:processed", "sampling:temperature")
    def test_processed_log_probs_of_greedy_answers_are_zero(self, backend: Backend) -> None:
        if not legal(backend, "temperature", 0.0):
            not_applicable("sampling:temperature is not declared with 0")
        sampling = {"max_new_tokens": NEW, "temperature": 0.0}
        batch = backend.generate(self._rows_of_all_lengths(backend), sampling, logprobs="processed")
        assert batch.logprobs is not None and not bool(batch.logprobs.values.any())

    @needs("mode:scaled", "sampling:temperature")
    def test_scaled_log_probs_are_the_processed_ones_if_only_the_temperature_is_set(self, backend: Backend) -> None:
        for temperature in temperatures(backend, 0.6, 1.7):
            self._assert_true_under(backend, "processed", temperature=temperature)

    @needs("mode:scaled")
    def test_scaled_log_probs_are_the_raw_ones_at_temperature_1_under_every_truncation(self, backend: Backend) -> None:
        for sampling in _plain(backend):
            self._assert_true_under(backend, "raw", **sampling)

    # Log-probs of given tokens ---------------------------------------------------------------------------------------

    @needs("score")
    def test_every_token_but_the_first_is_scored(self, backend: Backend) -> None:
        rows = self._rows_of_all_lengths(backend)
        self.assert_true_scores(rows, backend.score_logprobs(rows))

    @needs("score_temperature")
    def test_scores_are_those_of_the_temperature(self, backend: Backend) -> None:
        rows = self._rows_of_all_lengths(backend)
        for temperature in (0.5, 1.7):
            batch = backend.score_logprobs(rows, temperature=temperature)
            assert batch.temperature == temperature
            self.assert_true_scores(rows, batch)

    @needs("score")
    def test_score_from_leaves_later_scores_unchanged(self, backend: Backend) -> None:
        rows = self.rows(backend, 12, 5, 9, 1)
        starts = [4, 1, 8, 1]
        batch = backend.score_logprobs(rows, score_from=starts)
        for row, start, found, scored in zip(rows, starts, batch.logprobs.split(), batch.scored.split(), strict=True):
            # Positions before `start` may or may not be scored.
            assert bool(scored[start:].all())
            self.assert_close(found[start:], self.oracle(row, 1.0)[start:], f"from position {start} on")

    @needs("argmax")
    def test_the_argmax_is_the_most_probable_id(self, backend: Backend) -> None:
        rows = self._rows_of_all_lengths(backend)
        starts = [max(1, len(row) // 2) for row in rows]
        asked = backend.score_logprobs(rows, score_from=starts, return_argmax=True)
        assert asked.argmax is not None
        for row, found, scored in zip(rows, asked.argmax.split(), asked.scored.split(), strict=True):
            assert bool((found[~scored] == -1).all())
            for position in scored.nonzero().flatten().tolist()[:4]:
                best = int(found[position])
                # No other id may be more probable. The given one and a few others are tried.
                others = {row[position], 0, 1, (best + 1) % self.vocab_size, self.vocab_size - 1}
                scores = {each: float(self.oracle([*row[:position], each], 1.0)[position]) for each in (best, *others)}
                assert scores[best] >= max(scores.values()) - 1e-3, (row, position, scores)
        assert backend.score_logprobs(rows).argmax is None

    @needs("score", "max_context")
    def test_a_row_may_be_as_long_as_the_context(self, backend: Backend) -> None:
        limit = backend.capabilities.max_context
        assert limit is not None
        if limit > LONGEST:
            self.declared_and_not_shown("max_context", f"open the backend with a context of at most {LONGEST} tokens")
        rows = self.rows(backend, limit, 2)
        self.assert_true_scores(rows, backend.score_logprobs(rows))

    @needs("score")
    def test_every_id_of_the_vocabulary_can_be_scored(self, backend: Backend) -> None:
        last = self.vocab_size - 1
        rows = [[0, last], *self.rows(backend, 3), [last, 0, last]]
        self.assert_true_scores(rows, backend.score_logprobs(rows))

    @needs("score", "logits")
    def test_logits_are_the_models_own_before_any_temperature(self, backend: Backend) -> None:
        rows = self.rows(backend, 7, 1, 20)
        temperature = 2.0 if backend.capabilities.score_temperature else 1.0
        batch = backend.score_logprobs(rows, return_logits=True, temperature=temperature)
        assert batch.logits is not None
        for row, logits in zip(rows, batch.logits.split(), strict=True):
            chosen = log_probs(logits.detach().cpu().float()).gather(-1, torch.tensor(row)[:, None])[:, 0]
            self.assert_close(chosen[1:], self.oracle(row, 1.0)[1:], "logits, normalised")

    @needs("score", "gradients")
    def test_scores_carry_gradients_only_if_asked(self, backend: Backend) -> None:
        rows = self.rows(backend, 6, 3)
        assert not backend.score_logprobs(rows).logprobs.values.requires_grad
        batch = backend.score_logprobs(rows, grad=True)
        self.assert_true_scores(rows, batch)
        parameters = list(_leaves(batch.logprobs.values.grad_fn))
        gradients = torch.autograd.grad(batch.logprobs.values.sum(), parameters)
        assert any(bool(gradient.any()) for gradient in gradients)

    # Helpers ---------------------------------------------------------------------------------------------------------

    def _assert_true_under(self, backend: Backend, mode: Literal["raw", "processed"], **sampling: Any) -> None:
        """Assert that the log-probs of answers are the oracle's, and say so."""
        prompts = self._rows_of_all_lengths(backend)
        batch = backend.generate(prompts, seeded(backend, {"max_new_tokens": NEW, **sampling}), logprobs=mode)
        temperature = 1.0 if mode == "raw" else sampling["temperature"]
        assert (batch.mode, batch.temperature, batch.support) == (mode, temperature, "full")
        self.assert_true_answers(prompts, batch)

    def _rows_of_all_lengths(self, backend: Backend) -> list[list[int]]:
        """Return rows of 1 to 300 tokens, shorter if needed to leave room for an answer in the context."""
        limit = backend.capabilities.max_context or max(LENGTHS) + NEW
        random = self.rows(backend, *(min(length, limit - NEW) for length in LENGTHS))
        return [*random, *backend.tokenize(OPENINGS).ids.tolist()]


def _leaves(node: Any) -> dict[torch.Tensor, None]:
    """Return the parameters that a result depends on, in the order of the walk through its graph."""
    found: dict[torch.Tensor, None] = {}
    seen, todo = set(), [node]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found[node.variable] = None
        todo += [parent for parent, _ in node.next_functions]
    return found


def _plain(backend: Backend) -> list[dict[str, Any]]:
    """Return samplings: temperature 1, greedy, and temperature 1 with each truncation, if declared."""
    greedy = [{"temperature": 0.0}] if legal(backend, "temperature", 0.0) else []
    cuts = [use(backend, name) for name in RESHAPING if USAGE[name].effect == "truncation"]
    return [{}, *greedy, *(cut for cut in cuts if cut)]


#: The most tokens of an answer to each parameter.
_SAMPLED = 6
#: The processed log-probs of truncated distributions are tested in `distribution`, at cuts that rounding cannot move.
PROCESSED = tuple(name for name in WITH_LOGPROBS if USAGE[name].effect != "truncation")


class SampledLogProbPromises(ConformanceBase, theme="sampled_logprobs"):
    """Log-probs of sampled tokens are right under every sampling parameter that an engine honours.

    The tests run once for each parameter under which tokens can have log-probs, declared or honoured by every engine.
    """

    @needs("generation_modes")
    @pytest.mark.parametrize("name", WITH_LOGPROBS)
    def test_raw_log_probs_are_the_models_own_under(self, backend: Backend, name: str) -> None:
        sampling = self.sampling_of(backend, name)
        prompts, batch = self._sample(backend, sampling, "raw")
        assert (batch.mode, batch.temperature, batch.support) == ("raw", 1.0, "full")
        self.assert_true_answers(prompts, batch)

    @needs("generation_modes")
    @pytest.mark.parametrize("name", PROCESSED)
    def test_processed_log_probs_are_those_of_the_distribution_sampled_from_under(
        self, backend: Backend, name: str
    ) -> None:
        sampling = self.sampling_of(backend, name)
        if USAGE[name].effect == "penalty":
            # Penalties come before the temperature, so the two together show the order.
            sampling |= {"temperature": 0.6} if legal(backend, "temperature", 0.6) else {}
        params = SamplingParams.make(sampling)
        prompts, batch = self._sample(backend, sampling, "processed")
        label = Provenance.label("processed", params)
        assert {key: getattr(batch, key) for key in label} == label
        if name == "engine_kwargs":
            # Only the engine knows the distribution. Core has checked that the numbers are log-probs.
            return
        if name == "repetition_penalty":
            return self._assert_penalised_for_repetition(backend)
        assert batch.logprobs is not None
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else backend.eos_token_ids)}
        for row, (prompt, answer, found) in enumerate(
            zip(prompts, batch.ids.tolist(), batch.logprobs.split(), strict=True)
        ):
            expected = torch.zeros(len(answer))
            for step, token in enumerate(answer):
                own = self.next_logprobs([*prompt, *answer[:step]], 1.0)
                expected[step] = sampled_from(own, params, answer[:step], stop_ids)[token]
            self.assert_close(found, expected, f"row {row}, {sampling}")

    # Helpers ---------------------------------------------------------------------------------------------------------

    def _sample(
        self, backend: Backend, sampling: dict[str, Any], logprobs: Literal["raw", "processed"]
    ) -> tuple[list[list[int]], GenerateResult]:
        """Return the prompt of each answer, and the answers; not applicable if the engine lacks these log-probs."""
        if SamplingParams.make(sampling).num_beams > 1:
            not_applicable("beams have no log-probs")
        # vLLM looks for stop strings in the prompt too if it ends in the middle of a character, as random ids may.
        random = [] if "stop" in sampling else self.rows(backend, 7, 24)
        prompts = [*random, *backend.tokenize(OPENINGS[:1] if random else OPENINGS).ids.tolist()]
        try:
            batch = backend.generate(
                prompts, seeded(backend, {"max_new_tokens": _SAMPLED, **sampling}), logprobs=logprobs
            )
        except CapabilityError as error:
            if error.capability != "generation_modes" or logprobs in backend.capabilities.generation_modes:
                raise
            not_applicable(f"mode:{logprobs} is not declared")
        return [prompt for prompt in prompts for _ in range(sampling.get("num_samples", 1))], batch

    def _assert_penalised_for_repetition(self, backend: Backend) -> None:
        """Assert that new ids keep their ratios, and that repeated ids lose on them, or gain if the penalty is below 1.

        By how much depends on the sign of the logit, which log-probs do not show.
        """
        (prompt,) = self.rows(backend, 24)
        own = self.next_logprobs(prompt, 1.0)
        shown = False
        for penalty in in_range(backend, "repetition_penalty", 1.5, 0.7):
            sampling = {"repetition_penalty": penalty, "num_samples": 64, "max_new_tokens": 1, "ignore_eos": True}
            batch = backend.generate([prompt], seeded(backend, sampling), logprobs="processed")
            assert batch.logprobs is not None
            ids, found = batch.ids.values.cpu(), batch.logprobs.values.cpu()
            gain = found - own[ids]
            seen = torch.isin(ids, torch.tensor(prompt))
            if not seen.any() or seen.all():
                continue
            new, repeated = gain[~seen], gain[seen]
            assert float(new.max() - new.min()) <= 2 * self.tolerance, "the ratios of new ids changed"
            # Positive where a repeated id gained or lost as it should.
            right = (repeated - new.mean()) * (1 if penalty < 1 else -1)
            assert float(right.min()) >= -2 * self.tolerance, f"a repeated id went the wrong way under {penalty}"
            assert float(right.max()) > 4 * self.tolerance, f"no repeated id changed under {penalty}"
            shown = True
        if not shown:
            not_applicable("needs a model that repeats some ids and not others")


TEMPERATURE = 0.8
RAW = ("raw", 1.0, "full", ())
#: Parameters with tests of their own: the first two change the shape of the output, the engine defines the last.
SHAPES = ("num_samples", "max_new_tokens", "engine_kwargs")


class ProvenancePromises(ConformanceBase, theme="provenance"):
    """The provenance of log-probs names the distribution they came from, correctly."""

    @needs("mode:raw")
    def test_raw_log_probs_are_labelled_raw_under_every_sampling(self, backend: Backend) -> None:
        for sampling in _samplings(backend):
            found = _of_answers(backend, "raw", **sampling)
            assert (found.mode, found.temperature, found.support, found.penalties) == RAW, sampling

    @needs("mode:processed")
    def test_processed_log_probs_are_labelled_with_their_sampling(self, backend: Backend) -> None:
        for sampling in _samplings(backend):
            found = _of_answers(backend, "processed", **sampling)
            effects = {USAGE[name].effect for name in sampling}
            cut = effects & {"truncation", "ban", "engine"}
            penalties = tuple((name, value) for name, value in sampling.items() if USAGE[name].effect == "penalty")
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
    cuts = [found for name, found in declared.items() if USAGE[name].effect == "truncation"]
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
