"""`Provenance`: which distribution a log-probability came from. It describes the number, not the sampler."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, TypedDict

from corelm.spec.sampling import SamplingParams

Mode = Literal["raw", "processed"]
#: The adapter (LoRA, for example) of a call: its name, False for the base weights alone, None for the
#: engine's own default. That is no adapter, except in a PEFT model object, whose active adapters stay on.
Adapter = str | Literal[False] | None
Support = Literal["full", "truncated"]
#: The weights of the tokens of one row: (version, first token), from token 0 on, ascending.
VersionRuns = tuple[tuple[str, int], ...]


class LogProbLabel(TypedDict):
    """The fields of a `GenerateResult` or a `ScoreResult` that say which distribution its log-probs are of."""

    mode: Mode
    temperature: float
    support: Support


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a row of log-probabilities came from.

    `raw` is the model's own distribution: temperature 1, full support and no penalties, however the token was
    sampled. `processed` is the distribution sampled from, built in the order penalties → temperature → top-k
    → top-p → min-p. Greedy decoding is temperature 0: its processed log-probabilities are 0.

    Attributes:
        backend: the backend's name. A label: it may differ between two numbers that belong together.
        model: the model's name. A label, as above.
        weight_version: the version of the weights. A label, as above. With an adapter it also names that and
            its version, as in ``"3+policy@12"``; with ``adapter=False`` it is ``"3+none"``. ``"step-1+2"`` are weights
            two changes after those that a caller labelled ``"step-1"``.
        mode: `raw` or `processed`. This and the next three attributes are the distribution: they must agree
            before two numbers are compared.
        temperature: what the logits were divided by.
        support: `truncated` if some ids may have lost their probability, else `full`.
        penalties: (name, value) of each penalty in force.
        adapter: the adapter that the call asked for. A label, like the first three.
        version_runs: the weights of each token of a row that was sampled while weights were updated: ``((version,
            first token), ...)``, from token 0 of the answer on; empty if the row is of one version. A label, too.
    """

    backend: str
    model: str
    weight_version: str
    mode: Mode = "raw"
    temperature: float = 1.0
    support: Support = "full"
    penalties: tuple[tuple[str, float], ...] = ()
    adapter: Adapter = None
    version_runs: VersionRuns = ()

    @staticmethod
    def label(logprobs: Literal["none", "raw", "processed"], sampling: SamplingParams) -> LogProbLabel:
        """Return the label of sampled tokens' log-probs, given ``request.logprobs`` and ``request.sampling``.

        A plugin puts it into its results, and core compares them with it. "none" is labelled like "raw".

        >>> Provenance.label("processed", SamplingParams(temperature=0.5, top_k=3))
        {'mode': 'processed', 'temperature': 0.5, 'support': 'truncated'}
        """
        if logprobs != "processed":
            return {"mode": "raw", "temperature": 1.0, "support": "full"}
        support: Support = "truncated" if sampling.truncates_support else "full"
        return {"mode": "processed", "temperature": sampling.temperature, "support": support}

    @staticmethod
    def label_of_scores(temperature: float, truncated: bool = False) -> LogProbLabel:
        """Return the label of given tokens' log-probs at ``request.temperature``, `truncated` if a support is given.

        At a temperature other than 1 they are not the model's own.
        """
        own = temperature == 1.0 and not truncated
        support: Support = "truncated" if truncated else "full"
        return {"mode": "raw" if own else "processed", "temperature": temperature, "support": support}

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes by name."""
        names = self.__dataclass_fields__
        return dict(zip(names, attrgetter(*names)(self), strict=True))

    @property
    def distribution(self) -> tuple[Mode, float, Support, tuple[tuple[str, float], ...]]:
        """The attributes that must agree.

        At temperature 1 with full support and no penalties, raw and processed are the same numbers.
        """
        untouched = self.temperature == 1.0 and self.support == "full" and not self.penalties
        return ("raw" if untouched else self.mode, self.temperature, self.support, self.penalties)

    def matches(self, other: Provenance) -> bool:
        """Return whether log-probabilities of the two may be subtracted from one another.

        The label of truncated numbers does not say which ids were left. Whoever has these ids, as `corelm.kl`
        does, compares them as well.

        >>> policy, reference = Provenance("vllm", "mine", "12"), Provenance("transformers", "base", "0")
        >>> policy.matches(reference), policy.matches(Provenance("vllm", "mine", "12", "processed", 0.7))
        (True, False)
        """
        return self.distribution == other.distribution
