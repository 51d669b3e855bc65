"""Habits of a server that it does not tell: found out by trying, with a few requests of a few tokens.

Which log-probs it returns is decided by the environment it was started with, whether it honours seeds by its options.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from corelm.errors import EngineError
from corelm.spec import GenerationMode, SamplingParams
from corelm.support import HttpClient
from sglang_backend import answers, sampling
from sglang_backend.answers import Expected, Row

_log = logging.getLogger(__name__)

#: Two temperatures at which different tokens are drawn, with raw and scaled log-probs that are far apart.
_TEMPERATURES = (2.0, 50.0)
_DRAWS = 8
#: How far off the better explanation may be, in nats, and how many times further the other one must be. Numbers of
#: 16-bit models, sampled and scored, agree to a few hundredths.
_NEAR, _CLEARLY = 0.5, 4.0
#: Long enough that two answers at the highest temperature are never the same by chance.
_LENGTH = 8
#: Seconds for all requests of one trial. The first that a server gets may make it compile.
_TIMEOUT = 300.0


class Trial:
    """Tries a server whose weights are called ``expected.label``."""

    def __init__(self, client: HttpClient, expected: Expected) -> None:
        self._client = client
        self._expected = expected
        self._prompt = [token % expected.vocab_size for token in range(1, 5)]

    def generation_modes(self) -> frozenset[GenerationMode]:
        """Whether a sampled token's log-prob is the model's own (``raw``) or that of the logits over the temperature
        (``scaled``); nothing if it is neither, or if the two cannot be told apart.
        """
        raw_errors, scaled_errors = [], []
        for temperature in _TEMPERATURES:
            drawn = self._answers(temperature, range(_DRAWS), length=1)
            found = [row.logprobs[0] for row in drawn]
            raw = self._raw([row.ids[0] for row in drawn])
            raw_errors.append(max(abs(a - b) for a, b in zip(found, raw, strict=True)))
            # Scaled ones are raw / temperature less the same number for every token.
            rest = [a - b / temperature for a, b in zip(found, raw, strict=True)]
            scaled_errors.append(max(rest) - min(rest))
        off: dict[GenerationMode, float] = {"raw": max(raw_errors), "scaled": max(scaled_errors)}
        best, other = sorted(off, key=lambda mode: off[mode])
        if off[best] < _NEAR and off[best] * _CLEARLY < off[other]:
            return frozenset({best})
        _log.warning(
            "the server's log-probs are not clearly raw or scaled ones (off by %s nats): none are offered", off
        )
        return frozenset()

    def honours_seeds(self) -> bool:
        """Whether equal seeds give equal answers, and others others, where chance gives no two that are equal."""
        one, same, other = (row.ids for row in self._answers(_TEMPERATURES[-1], (1, 1, 2), length=_LENGTH))
        return one == same != other

    # Requests --------------------------------------------------------------------------------------------------------

    def _answers(self, temperature: float, seeds: Sequence[int], length: int) -> list[Row]:
        wanted = SamplingParams(temperature=temperature, max_new_tokens=length)
        payloads = []
        for seed in seeds:
            parameters = sampling.parameters(
                wanted,
                max_new_tokens=length,
                seed=seed,
                stop_ids=frozenset(),
                eos_token_ids=frozenset(),
                vocab_size=self._expected.vocab_size,
            )
            payloads.append(answers.generate_payload(self._prompt, parameters, True))
        return [_served(answers.parse_answer(entry, self._expected, True)) for entry in self._post(payloads)]

    def _raw(self, tokens: Sequence[int]) -> list[float]:
        """The log-prob of each token after the prompt, as a given token is scored: at temperature 1."""
        start = len(self._prompt)
        rows = [[*self._prompt, token] for token in tokens]
        entries = self._post([answers.score_payload(ids, start) for ids in rows])
        scored = [
            answers.parse_scores(entry, ids, start, self._expected) for entry, ids in zip(entries, rows, strict=True)
        ]
        return [_served(row).logprobs[0] for row in scored]

    def _post(self, payloads: Sequence[dict[str, Any]]) -> list[Any]:
        entries = self._client.post_each("/generate", payloads, names=[""] * len(payloads), timeout=_TIMEOUT)
        answers.raise_if_none_was_served(entries)
        return entries


def _served(row: Row) -> Row:
    if row.error:
        raise EngineError(row.error)
    return row
