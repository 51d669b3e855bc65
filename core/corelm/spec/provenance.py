"""`Provenance`: which distribution a log-probability came from. It describes the number, not the sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Mode = Literal["raw", "processed"]
Support = Literal["full", "truncated"]


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a row of log-probabilities came from.

    `raw` is the model's own distribution: temperature 1, full support and no penalties, whatever the token was sampled
    with. `processed` is the distribution sampled from, built in the order penalties → temperature → top-k → top-p →
    min-p; `support` is `truncated` when any of the last three cut it. Greedy decoding is temperature 0: its processed
    log-probabilities are 0.

    Attributes:
        backend, model, weight_version: labels. They may differ between two numbers that belong together.
        mode, temperature, support, penalties: the distribution. These must agree before two numbers are compared.
            `penalties` holds (name, value) for each penalty that was in force.
    """

    backend: str
    model: str
    weight_version: str
    mode: Mode = "raw"
    temperature: float = 1.0
    support: Support = "full"
    penalties: tuple[tuple[str, float], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Its attributes by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def distribution(self) -> tuple[Mode, float, Support, tuple[tuple[str, float], ...]]:
        """What must agree. At temperature 1 with full support and no penalties raw and processed are the same
        numbers.
        """
        untouched = self.temperature == 1.0 and self.support == "full" and not self.penalties
        return ("raw" if untouched else self.mode, self.temperature, self.support, self.penalties)

    def matches(self, other: Provenance) -> bool:
        """Whether log-probabilities of the two may be subtracted from one another.

        >>> policy, reference = Provenance("vllm", "mine", "12"), Provenance("transformers", "base", "0")
        >>> policy.matches(reference), policy.matches(Provenance("vllm", "mine", "12", "processed", 0.7))
        (True, False)
        """
        return self.distribution == other.distribution
