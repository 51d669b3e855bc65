"""Log-probs of sampled tokens are right under every sampling parameter that an engine honours.

The tests run once for each parameter under which tokens can have log-probs, declared or honoured by every engine.
"""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from corelm import Backend, Provenance, SamplingParams
from corelm.errors import CapabilityError
from corelm.spec import GenerateResult
from corelm_testing.base import ConformanceBase, needs, not_applicable
from corelm_testing.reference import OPENINGS, sampled_from, seeded
from corelm_testing.trials import TRIALS, WITH_LOGPROBS, in_range, legal

NEW = 6
#: The processed log-probs of truncated distributions are tested in `distribution`, at cuts that rounding cannot move.
PROCESSED = tuple(name for name in WITH_LOGPROBS if TRIALS[name].effect != "truncation")


class SampledLogProbPromises(ConformanceBase):
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
        if TRIALS[name].effect == "penalty":
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
            batch = backend.generate(prompts, seeded(backend, {"max_new_tokens": NEW, **sampling}), logprobs=logprobs)
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
