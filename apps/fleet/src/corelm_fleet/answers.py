"""What a canary asks an engine, and how far apart the answers are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from corelm import Backend
from corelm.errors import CapabilityError
from corelm_fleet.probes import Probe, ProbeScores, dtype_of_engine, plain_modes, probes_for, scores

Row = tuple[float, ...]
#: Log-probs by the ids of their probe.
Scores = Mapping[Probe, Row]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was sampled after one prompt, greedily.

    Attributes:
        logprobs: the log-probs of the ids, as sampling returned them.
        scored: the same, as scoring returns them; None from an engine that cannot score.
    """

    ids: Probe
    logprobs: Row
    scored: Row | None = None


@dataclass(frozen=True, slots=True)
class Answers:
    """What an engine says in one look.

    Attributes:
        scores: the log-probs of each probe.
        sampled: what was sampled, by its prompt.
        tails: the log-probs of the long probes from the end of their shared prefix on, which an engine with a prefix
            cache computes with it.
        ends: the same tokens in `scores`.
    """

    scores: Scores
    sampled: Mapping[Probe, Sampled]
    tails: Scores
    ends: Scores

    def equals(self, other: Answers) -> bool:
        """Return whether nothing differs, to the last bit. Probes that only one of them has do not count."""
        return apart(self.scores, other.scores) == 0.0 and self.sampled == other.sampled


class Questions:
    """Asks one engine.

    Args:
        backend: the backend to ask. A batcher's queue is not used.

    Attributes:
        dtype: the dtype of the engine's logits; None if it returns none, and before it was asked.

    Raises:
        CapabilityError: the engine can neither score nor sample greedily with raw log-probs.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = Backend(backend.engine)
        can = backend.capabilities
        self._probes = probes_for(can.vocab_size, can.max_context, backend.eos_token_ids)
        coldest = can.sampling.get("temperature", (1.0, 1.0))
        self._samples = (
            self._probes.sampled > 0
            and bool(can.generation_modes & {"raw", "scaled"})
            and (coldest is None or coldest[0] == 0.0)
        )
        if not can.score and not self._samples:
            raise CapabilityError(
                f"canary: backend {backend.name!r} can neither score nor sample greedily with raw log-probs, so "
                "nothing shows its weights; leave out canary=True",
                capability="score",
            )
        self.dtype: str | None = None
        self._knows_dtype = False

    def ask(self, expected: ProbeScores | None) -> Answers:
        """Ask everything: two calls that can use a prefix cache, then one that scores all tokens from the first on.

        Args:
            expected: the engine also scores the probes of these.
        """
        sampled, tails = self.warm_up()
        if not self._backend.capabilities.score:
            return Answers({}, sampled, {}, {})
        probes = tuple(dict.fromkeys((*self._probes.rows, *(expected.probes if expected is not None else ()))))
        followed = [(*prompt, *answer.ids) for prompt, answer in sampled.items()]
        starts = [1] * len(probes) + [len(prompt) for prompt in sampled]
        with plain_modes():
            rows = scores(self._backend, [*probes, *followed], starts)
            if not self._knows_dtype:
                self.dtype, self._knows_dtype = dtype_of_engine(self._backend, self._probes.rows[0]), True
        whole = dict(zip(probes, rows, strict=False))
        again = zip(sampled.items(), rows[len(probes) :], strict=True)
        start = max(self._probes.shared, 1) - 1
        return Answers(
            scores=whole,
            sampled={prompt: Sampled(answer.ids, answer.logprobs, row) for (prompt, answer), row in again},
            tails=tails,
            ends={probe: whole[probe][start:] for probe in tails},
        )

    def warm_up(self) -> tuple[dict[Probe, Sampled], dict[Probe, Row]]:
        """Ask what fills the prefix cache. Return what was sampled, and the `tails` of `Answers`."""
        can_score = self._backend.capabilities.score
        sampled, tails = dict[Probe, Sampled](), dict[Probe, Row]()
        with plain_modes():
            if self._samples:
                prompts = self._probes.pair[:1] if can_score else tuple(dict.fromkeys(self._probes.rows))
                sampling = {"max_new_tokens": self._probes.sampled, "temperature": 0.0, "ignore_eos": True}
                made = self._backend.generate([list(prompt) for prompt in prompts], sampling)
                assert made.logprobs is not None
                each = zip(prompts, made.ids.tolist(), made.logprobs.tolist(), strict=True)
                sampled = {prompt: Sampled(tuple(ids), tuple(row)) for prompt, ids, row in each}
            if can_score:
                pair = tuple(dict.fromkeys(self._probes.pair))
                tails = dict(zip(pair, scores(self._backend, pair, max(self._probes.shared, 1)), strict=True))
        return sampled, tails


def apart(one: Scores, other: Scores) -> float:
    """Return how far apart two scorings are: the mean difference of a probe's tokens, of the probe where it is largest.

    Only probes that both have are compared. If a number is NaN, they are infinitely far apart.
    """
    return max((_mean_difference(one[probe], other[probe]) for probe in one.keys() & other.keys()), default=0.0)


def _mean_difference(one: Sequence[float], other: Sequence[float]) -> float:
    differences = [abs(a - b) for a, b in zip(one, other, strict=False)]
    mean = sum(differences) / len(differences) if differences else 0.0
    return math.inf if math.isnan(mean) else mean
