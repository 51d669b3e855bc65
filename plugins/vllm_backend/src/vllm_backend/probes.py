"""What a server does not say about itself but shows: which log-probs it returns, and whether it honours seeds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from corelm.errors import CoreLMError, EngineError

#: Sends completion requests and gives the choice of each.
Ask = Callable[[list[dict[str, Any]]], list[Any]]

#: How many candidates are asked for, as many as servers allow by default; or, if that is refused, as many as OpenAI's.
CANDIDATES = (20, 5)
#: The temperatures compared. The first leaves log-probs alone in every mode.
NEUTRAL, HOT = 1.0, 2.0
#: Between the likeliest and the least likely candidate, in nats: with less, rounding could decide.
LEAST_SPREAD = 0.1
#: How far from its ideal the quotient of two spreads may be, and a log-prob from the same one computed otherwise.
TOLERANCE, CLOSE = 0.1, 0.2

#: Tokens of an answer that two seeds agree on by chance hardly ever.
LONG_ENOUGH = 8
ATTEMPTS = 3


def logprobs_mode(ask: Ask, prompt: list[int]) -> Literal["raw", "processed"]:
    """Whether log-probs of sampled tokens are those before (`raw`) or after (`processed`) the temperature.

    The same candidates for one position are asked for at two temperatures. What they have in common, the normaliser,
    falls out of the difference between two of them; what is left is divided by the temperature, or is not. That they
    are log-probs at all is seen by the prompt's, which are raw in every mode.

    Raises:
        EngineError: neither, or too little difference to tell.
    """
    cold, hot = _candidates(ask, prompt)
    both = [token for token in cold if token in hot]
    first, last = both[0], both[-1]
    again = ask([_request([*prompt, first], prompt_logprobs=0)])[0]
    expected = again["prompt_logprobs"][-1][str(first)]["logprob"]
    if not abs(cold[first] - expected) < CLOSE:
        raise _undecided(f"its log-prob of id {first} is {cold[first]:.3f}, but {expected:.3f} as one of a prompt")
    spread = cold[first] - cold[last]
    quotient = (hot[first] - hot[last]) / spread if spread >= LEAST_SPREAD else math.nan
    if abs(quotient - 1) < TOLERANCE:
        return "raw"
    if abs(quotient - NEUTRAL / HOT) < TOLERANCE:
        return "processed"
    raise _undecided(f"its candidates are {spread:.3f} nats apart, and {quotient:.3f} times that at temperature {HOT}")


def honours_seeds(ask: Ask, prompt: list[int]) -> bool:
    """Whether the same seed gives the same answer, and others give others."""
    seeds = (1, 1, 2, 3, 4, 5)
    for _ in range(ATTEMPTS):
        requests = [_request(prompt, max_tokens=LONG_ENOUGH, temperature=HOT, seed=seed) for seed in seeds]
        first, again, *others = [choice["token_ids"] for choice in ask(requests)]
        # In low precision an answer may depend on what else is computed, so once is enough.
        if first == again:
            return any(other != first for other in others)
    return False


def _candidates(ask: Ask, prompt: list[int]) -> tuple[dict[int, float], dict[int, float]]:
    """Log-probs by id for the token after `prompt`, likeliest first, at either temperature."""
    refused: CoreLMError | None = None
    for count in CANDIDATES:
        try:
            found = ask([_request(prompt, temperature=heat, logprobs=count) for heat in (NEUTRAL, HOT)])
        except CoreLMError as error:
            refused = error
            continue
        cold, hot = [
            {int(token.removeprefix("token_id:")): float(value) for token, value in top.items()}
            for top in (choice["logprobs"]["top_logprobs"][0] for choice in found)
        ]
        return dict(sorted(cold.items(), key=lambda item: -item[1])), hot
    raise _undecided(f"it refuses to say ({refused})") from refused


def _request(prompt: list[int], **values: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 1, "temperature": 0.0, **values}


def _undecided(why: str) -> EngineError:
    return EngineError(
        f"whether the server returns raw or processed log-probs cannot be told: {why}; if it was started with "
        "--logprobs-mode raw_logprobs (the default) pass logprobs_mode='raw', if with processed_logprobs 'processed'",
        usable=True,
    )
