"""The distribution that a token is drawn from, one id at a time in float64, from the definitions of the parameters."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

#: Two probabilities whose ratio is this close to 1 may be in any order once they are rounded to float32.
TIE = 1e-5


@dataclass(frozen=True)
class Enumerated:
    """What is left of a vocabulary.

    Attributes:
        full: the probability of each id before truncation.
        kept: the ids that truncation leaves, ascending.
        ties: whether rounding may change which ids are left.
    """

    full: list[float]
    kept: list[int]
    ties: bool

    @property
    def log_mass(self) -> float:
        return math.log(math.fsum(self.full[token] for token in self.kept))

    def logprob(self, token: int) -> float:
        """Return the log-prob of an id among those that are left."""
        return math.log(self.full[token]) - self.log_mass


def enumerated(
    logits: Sequence[float],
    *,
    prompt: Sequence[int] = (),
    answer: Sequence[int] = (),
    banned: Collection[int] = (),
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    min_new_tokens: int = 0,
    **_: Any,
) -> Enumerated:
    """Return the distribution of the token that follows.

    Args:
        logits: of the model.
        prompt, answer: the ids before it.
        banned: ids that are not drawn while the answer has less than `min_new_tokens`.
    """
    scores = []
    for token, given in enumerate(logits):
        score = given
        if token in prompt or token in answer:
            score = score / repetition_penalty if score > 0 else score * repetition_penalty
        score -= frequency_penalty * answer.count(token) + presence_penalty * (token in answer)
        out = token in banned and len(answer) < min_new_tokens
        scores.append(-math.inf if out else score / temperature)
    total = math.fsum(math.exp(score) for score in scores)
    full = [math.exp(score) / total for score in scores]

    kept = sorted((token for token, mass in enumerate(full) if mass > 0), key=lambda token: -full[token])
    ties = False
    if top_k is not None:
        ties |= top_k < len(kept) and _equal(full[kept[top_k - 1]], full[kept[top_k]])
        kept = kept[:top_k]
    if top_p < 1.0:
        mass, nucleus, before = math.fsum(full[token] for token in kept), [], 0.0
        for token in kept:
            ties |= _equal(before, top_p)
            if before >= top_p:
                break
            nucleus.append(token)
            before += full[token] / mass
        # The id before which the mass is reached may be any of equal ones.
        ties |= len(nucleus) < len(kept) and _equal(full[kept[len(nucleus) - 1]], full[kept[len(nucleus)]])
        kept = nucleus
    ties |= any(_equal(full[token], min_p * full[kept[0]]) for token in kept[1:])
    kept = [token for token in kept if full[token] >= min_p * full[kept[0]]]
    return Enumerated(full, sorted(kept), ties)


def _equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=TIE)
