"""Scoring and generating with the backend, compared with the oracle."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from corelm import Backend
from corelm.errors import CapabilityError

from .oracle import Oracle, Variant
from .small import EOS, PAD

Verdict = Literal["right", "refused", "WRONG", "crashed"]

#: What may lie between a log-probability and that of the plain forward, in nats.
TOLERANCE = 1e-5
#: Where float32 itself is worse: how much further from float64 than the plain forward a log-probability may be.
FURTHER = 4.0
#: How many models with weights that are rounded otherwise show what float32 may round by.
NUDGES = 4
#: More than float32 rounds by in any of these models: not worth a forward in float64.
NO_ROUNDING = 0.1

NEW_TOKENS = 24
GREEDY_TOKENS = 12


@dataclass(frozen=True)
class Outcome:
    """What came of one check.

    Attributes:
        verdict: "right" and "refused" hold.
        detail: why it does not hold; the first sentence of a refusal.
        off: largest difference from the plain forward, in nats.
        noise: how far float32 may round, in nats: how far the plain forward is from float64, or a float64 forward with
            weights that are rounded otherwise; 0 if `off` is within the tolerance.
    """

    verdict: Verdict
    detail: str = ""
    off: float = 0.0
    noise: float = 0.0


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of one row, float64[n] each: those found, and those of the plain forward."""

    what: str
    ids: Sequence[int]
    start: int
    found: Tensor
    plain: Tensor

    @property
    def off(self) -> float:
        return _largest(self.found - self.plain)


@dataclass
class Comparison:
    """Collects what the calls of one check returned, and compares it with the oracle."""

    oracle: Oracle
    rows: list[Scored] = field(default_factory=list)
    greedy: list[tuple[float, str]] = field(default_factory=list)
    other_ids: list[str] = field(default_factory=list)

    def add(self, what: str, ids: Sequence[int], start: int, found: Tensor) -> None:
        """Add the log-probabilities found for ``ids[start:]``."""
        if len(found):
            self.rows.append(Scored(what, ids, start, found.double(), self._oracle(ids, start)))

    def add_greedy(self, what: str, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Add ids sampled at temperature 0, which have to be the likeliest ones."""
        if answer:
            table = self.oracle.after([*prompt, *answer[:-1]], len(prompt) - 1)
            lost = table.max(-1).values - table.gather(-1, torch.tensor(list(answer)).unsqueeze(-1))[:, 0]
            self.greedy.append((_largest(lost), what))

    def outcome(self) -> Outcome:
        off = max((row.off for row in self.rows), default=0.0)
        noise, problems = 0.0, []
        if off > NO_ROUNDING:
            problems = [(row.off, f"{row.what}: off by {row.off:.2g} nats") for row in self.rows]
        elif off > TOLERANCE:
            try:
                noise, problems = self._further_from_float64()
            except Exception as error:
                reason = f"{type(error).__name__}: {first_sentence(str(error))}"
                problems = [(off, f"off by {off:.2g} nats, and there is no forward in float64: {reason}")]
        # Ids that are as likely but for rounding are as good.
        allowed = 2 * max(TOLERANCE, FURTHER * noise)
        problems += [
            (lost, f"{what}: an id {lost:.2g} nats below the likeliest")
            for lost, what in self.greedy
            if not lost <= allowed
        ]
        if off <= TOLERANCE:
            # Where float32 rounds by more, a seed may pick another id now and then.
            problems += [(0.0, f"{what}: other ids than in company, with the same seed") for what in self.other_ids]
        if problems:
            return Outcome("WRONG", max(problems)[1], off=off, noise=noise)
        return Outcome("right", off=off, noise=noise)

    def _further_from_float64(self) -> tuple[float, list[tuple[float, str]]]:
        precise = [self._oracle(row.ids, row.start, "precise") for row in self.rows]
        both = list(zip(self.rows, precise, strict=True))
        noise = max(_largest(row.plain - exact) for row, exact in both)
        away = [_largest(row.found - exact) for row, exact in both]
        if not max(away) <= max(TOLERANCE, FURTHER * noise):
            # One forward may round luckily. Weights that are rounded otherwise show what rounding does to this model.
            noise = max(
                noise,
                *(
                    _largest(self._oracle(row.ids, row.start, number) - exact)
                    for number in range(NUDGES)
                    for row, exact in both
                ),
            )
        problems = [
            (far, f"{row.what}: {far:.2g} nats from float64, where float32 may round by {noise:.1g}")
            for row, far in zip(self.rows, away, strict=True)
            if not far <= max(TOLERANCE, FURTHER * noise)
        ]
        return noise, problems

    def _oracle(self, ids: Sequence[int], start: int, variant: Variant = "plain") -> Tensor:
        table = self.oracle.after(ids[:-1], start - 1, variant)
        return table.gather(-1, torch.tensor(list(ids[start:])).unsqueeze(-1))[:, 0]


def guarded(check: Any, *args: Any) -> Outcome:
    """Return the outcome of a check, or what its exception amounts to."""
    try:
        outcome: Outcome = check(*args)
        return outcome
    except Exception as error:
        return failure(error)


def failure(error: Exception) -> Outcome:
    """Return the outcome that an exception of the backend amounts to: a refusal if it is a `CapabilityError`."""
    if isinstance(error, CapabilityError):
        return Outcome("refused", first_sentence(str(error)))
    return Outcome("crashed", f"{type(error).__name__}: {first_sentence(str(error))}")


def first_sentence(text: str) -> str:
    """Return the text up to its first full stop or line break."""
    return text.split("\n")[0].split(". ")[0].rstrip(".")


def scoring(backend: Backend, oracle: Oracle, rows: Sequence[Sequence[int]]) -> Outcome:
    """Score all rows in one call."""
    comparison = Comparison(oracle)
    result = backend.score_logprobs(rows)
    for ids, found in zip(rows, _split(result.logprobs), strict=True):
        comparison.add(f"a row of {len(ids)} ids", ids, 1, found[1:])
    return comparison.outcome()


def generating(backend: Backend, oracle: Oracle, prompts: Sequence[Sequence[int]], vocab: int) -> Outcome:
    """Sample in company and alone with the same seeds, and greedily."""
    comparison = Comparison(oracle)
    seeds = list(range(100, 100 + len(prompts)))
    # An eighth of the ids, so that the rows of a batch leave it one after another.
    sampling = {"max_new_tokens": NEW_TOKENS, "stop_token_ids": list(range(5, vocab, 8))}
    together = backend.generate(prompts, sampling, seeds=seeds)
    answers = together.ids.tolist()
    for prompt, answer, found in zip(prompts, answers, _split(together.logprobs), strict=True):
        comparison.add(f"the answer to a prompt of {len(prompt)} in company", [*prompt, *answer], len(prompt), found)
    for prompt, answer, seed in zip(prompts, answers, seeds, strict=True):
        alone = backend.generate([prompt], sampling, seeds=[seed])
        lone_answer = alone.ids.tolist()[0]
        what = f"the answer to a prompt of {len(prompt)} alone"
        comparison.add(what, [*prompt, *lone_answer], len(prompt), _split(alone.logprobs)[0])
        if lone_answer != answer:
            comparison.other_ids.append(what)
    greedy = backend.generate(prompts, {"max_new_tokens": GREEDY_TOKENS, "temperature": 0.0})
    for prompt, answer, found in zip(prompts, greedy.ids.tolist(), _split(greedy.logprobs), strict=True):
        what = f"the greedy answer to a prompt of {len(prompt)}"
        comparison.add(what, [*prompt, *answer], len(prompt), found)
        comparison.add_greedy(what, prompt, answer)
    return comparison.outcome()


def some_rows(vocab: int) -> list[list[int]]:
    """Return rows to score: of many lengths, three that share 64 ids, and one with padding and EOS ids inside."""
    generator = torch.Generator().manual_seed(1)
    rows = [_random(length, vocab, generator) for length in (1, 2, 17, 60, 100, 140)]
    shared = _random(64, vocab, generator)
    rows += [shared + _random(length, vocab, generator) for length in (6, 26, 37)]
    odd = _random(40, vocab, generator)
    odd[5] = odd[6] = odd[-1] = PAD
    odd[9] = EOS
    return [*rows, odd]


def some_prompts(vocab: int) -> list[list[int]]:
    """Return prompts of several lengths, two of them equal."""
    generator = torch.Generator().manual_seed(2)
    prompts = [_random(length, vocab, generator) for length in (1, 3, 17, 40, 90)]
    return [*prompts[:4], prompts[3], prompts[4]]


def _random(length: int, vocab: int, generator: torch.Generator) -> list[int]:
    return torch.randint(3, vocab, (length,), generator=generator).tolist()


def _split(logprobs: Any) -> Sequence[Tensor]:
    return logprobs.values.cpu().split(logprobs.lengths.tolist())


def _largest(differences: Tensor) -> float:
    # NaN has to count as a difference.
    return float(differences.abs().nan_to_num(float("inf"), posinf=float("inf")).max())
