"""Find out by trying what a server does not say: which log-probs it returns, whether it honours seeds, and whether it
returns the ids that truncation has left.

The first depends on the environment that the server was started with, the others on its options and version.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from corelm.errors import CapabilityError, EngineError, InvalidRequestError
from corelm.spec import Deadline, GenerateRequest, GenerateResult, GenerationMode, Ragged, SamplingParams
from corelm_engine_kit import probe_generation, probe_scoring
from sglang_backend import protocol
from sglang_backend.capabilities import ServerInfo

_log = logging.getLogger(__name__)

#: Two temperatures at which different tokens are drawn, and at which raw and scaled log-probs are far apart.
_TEMPERATURES = (2.0, 50.0)
#: Answers of one token that are drawn at each temperature.
_DRAWS = 8
#: The mode that explains the log-probs better must fit to within `_TOLERANCE` nats, and `_MARGIN` times better than the
#: other. The log-probs of a 16-bit model, sampled and then scored, agree to a few hundredths.
_TOLERANCE, _MARGIN = 0.5, 4.0
#: The top_k with which the kept ids are tried, at a temperature at which it cuts off much.
_KEPT = 4
#: How far their mass may be from what the most probable ids have, in nats.
_SAME_MASS = 0.02
#: Long enough that two answers at the highest temperature are never equal by chance.
_SEEDED_LENGTH = 8
#: Parameters that change the distribution before SGLang takes "original" log-probs from it. A server that returns those
#: would report the changed log-probs as the model's own.
_RESHAPING = frozenset({"presence_penalty", "frequency_penalty", "min_new_tokens", "engine_kwargs"})


def probe_server(engine: Any, deadline: Deadline, modes: frozenset[GenerationMode] | None = None) -> ServerInfo:
    """Return the `info` of an engine with the generation modes, seeds and kept ids that the server's replies show.

    Args:
        modes: the generation modes, if the server has no weights with which they could be tried.
    """
    probe, info = ServerProbe(engine, deadline), engine.info
    assumed = modes is not None
    modes = probe.generation_modes() if modes is None else modes
    if "scaled" not in modes or (not assumed and not probe.returns_support()):
        # The mass of the kept ids follows only from log-probs at the temperature at which they were cut off.
        info = replace(info, support_limit=0)
    seeds = probe.honours_seeds()
    excluded = _RESHAPING if "raw" in modes else frozenset()
    if seeds:
        # The sampler asserts that min_p is not used with a seed; a request with both would end the server.
        excluded |= {"min_p"}
    capabilities = replace(
        info.capabilities,
        generation_modes=modes,
        per_answer_seeds=seeds,
        top_logprobs=info.capabilities.score_top_k if modes else 0,
        return_support=info.support_limit > 0,
        # Otherwise it would not be known which tokens are of which weights.
        updates_in_flight=info.pauses and probe.says_versions(),
        sampling={name: span for name, span in info.capabilities.sampling.items() if name not in excluded},
    )
    return replace(info, capabilities=capabilities)


class ServerProbe:
    """Sends short requests to a server and draws conclusions from the replies."""

    def __init__(self, engine: Any, deadline: Deadline) -> None:
        self._engine, self._deadline = engine, deadline
        self._info: ServerInfo = engine.info
        self._prompt = [token % self._info.capabilities.vocab_size for token in range(1, 5)]

    def generation_modes(self) -> frozenset[GenerationMode]:
        """Return whether log-probs of sampled tokens are the model's own (``raw``) or those of the logits divided by
        the temperature (``scaled``). The set is empty if they are neither, or if the two cannot be told apart.
        """
        raw_errors, scaled_errors = [], []
        for temperature in _TEMPERATURES:
            answers = self._generate(temperature, range(_DRAWS), length=1)
            assert answers.logprobs is not None
            sampled, raw = answers.logprobs.values.tolist(), self._raw_logprobs(answers.ids.values.tolist())
            raw_errors.append(max(abs(a - b) for a, b in zip(sampled, raw, strict=True)))
            # A scaled log-prob is raw / temperature minus a normaliser that is the same for every token.
            normalisers = [a - b / temperature for a, b in zip(sampled, raw, strict=True)]
            scaled_errors.append(max(normalisers) - min(normalisers))
        errors: dict[GenerationMode, float] = {"raw": max(raw_errors), "scaled": max(scaled_errors)}
        best, other = sorted(errors, key=lambda mode: errors[mode])
        if errors[best] < _TOLERANCE and errors[best] * _MARGIN < errors[other]:
            return frozenset({best})
        _log.warning(
            "the server's log-probs are not clearly raw or scaled (errors in nats: %s), so it offers none of generated "
            "tokens",
            errors,
        )
        return frozenset()

    def returns_support(self) -> bool:
        """Return whether the server returns the ids that truncation has left, and whether their mass is what it should
        be: the most probable ids of the same replies, at the same temperature, say what they had.
        """
        top_k = min(_KEPT, self._info.capabilities.vocab_size)
        if not 1 < top_k <= self._info.support_limit:
            return False
        details = {"return_support": True, "top_logprobs": top_k}
        try:
            answers = self._generate(_TEMPERATURES[0], range(_DRAWS), length=1, top_k=top_k, **details)
        except (CapabilityError, InvalidRequestError, EngineError) as error:
            # Servers that do not know the field ignore it; others may refuse it.
            _log.info("the server does not return the ids that truncation has left: %s", error)
            return False
        assert answers.kept_ids is not None and answers.kept_log_mass is not None and answers.top_logprobs is not None
        masses = answers.top_logprobs.values.logsumexp(-1)
        exact = bool(((masses - answers.kept_log_mass.values).abs() < _SAME_MASS).all())
        if not exact:
            _log.warning("the ids that the server says truncation has left are not the most probable ones")
        return exact and bool((answers.kept_ids.counts.values >= top_k).all())

    def honours_seeds(self) -> bool:
        """Return whether equal seeds give equal answers and another seed gives another answer."""
        first, repeated, other = self._generate(_TEMPERATURES[-1], (1, 1, 2), length=_SEEDED_LENGTH).ids.tolist()
        return bool(first == repeated != other)

    def says_versions(self) -> bool:
        """Return whether replies say which of their tokens are of which weights."""
        payloads = protocol.generation_requests(self._request(1.0, (1,), length=1), self._info)
        (reply,) = self._engine.try_rows(payloads, self._deadline)
        return bool(reply["meta_info"].get("weight_versions"))

    # Requests --------------------------------------------------------------------------------------------------------

    def _generate(
        self, temperature: float, seeds: Sequence[int], length: int, top_k: int | None = None, **details: Any
    ) -> GenerateResult:
        """Sample `length` tokens per seed, always after the same prompt. `details` are other fields of the request."""
        request = self._request(temperature, seeds, length, top_k, **details)
        result: GenerateResult = _without_errors(self._engine.generate(request))
        return result

    def _request(
        self, temperature: float, seeds: Sequence[int], length: int, top_k: int | None = None, **details: Any
    ) -> GenerateRequest:
        prompts = Ragged.from_list([self._prompt] * len(seeds))
        sampling = SamplingParams(temperature=temperature, max_new_tokens=length, ignore_eos=True, top_k=top_k)
        seeded = torch.tensor(list(seeds))
        return probe_generation(prompts, sampling, seeds=seeded, timeout=self._deadline.left(), **details)

    def _raw_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-prob of each of `tokens` after the prompt, as the server scores it: at temperature 1."""
        rows, starts = [[*self._prompt, token] for token in tokens], torch.full((len(tokens),), len(self._prompt))
        request = probe_scoring(Ragged.from_list(rows), starts, timeout=self._deadline.left())
        return [row[-1] for row in _without_errors(self._engine.score_logprobs(request)).logprobs.tolist()]


def _without_errors(result: Any) -> Any:
    if error := next(filter(None, result.errors or ()), ""):
        raise EngineError(error)
    return result
