"""Find out by trying what a server does not say: which log-probs it returns, how many, and whether it honours seeds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from corelm.errors import BackendTimeoutError, CoreLMError, EngineError
from corelm.spec import Deadline
from corelm_engine_kit import RowError, TransientError, only_choice
from vllm_backend import sampling_masks
from vllm_backend.capabilities_http import ServerInfo
from vllm_backend.protocol_http import NEUTRAL
from vllm_backend.top_ids import MOST_CANDIDATES, MOST_IDS, by_label

if TYPE_CHECKING:
    from corelm_engine_kit import HttpEngine, Payload

#: Sends completion requests and returns the choice of each.
Send = Callable[[list[dict[str, Any]]], list[Any]]
LogprobsMode = Literal["raw", "processed"]
LOGPROBS_MODES: dict[str, LogprobsMode] = {"raw": "raw", "processed": "processed"}

#: How many candidates to compare at most.
CANDIDATES = 20
#: How vLLM says how many candidates it returns at most.
_MOST = re.compile(r"max allowed: (\d+)")
#: The two temperatures to compare. At the first one, raw and processed log-probs are equal.
NEUTRAL_TEMPERATURE, HIGH_TEMPERATURE = 1.0, 2.0
#: The least distance in nats between the likeliest and the least likely candidate. Below it, rounding could decide.
MIN_SPREAD = 0.1
#: How far the quotient of two spreads may be from its ideal value.
QUOTIENT_TOLERANCE = 0.1
#: How far, in nats, the log-prob of a sampled token may be from that of the same token as part of a prompt.
LOGPROB_TOLERANCE = 0.2

#: The tokens of an answer. Two seeds hardly ever agree on so many by chance.
ANSWER_TOKENS = 8
#: How often to compare two answers with the same seed.
ATTEMPTS = 3


def probe_server(server: HttpEngine, mode: LogprobsMode | None, deadline: Deadline) -> ServerInfo:
    """Return the server's `info` with the generation mode, the candidates and the seeds that its answers show.

    Args:
        server: what is known so far is what it says about itself.
        mode: the log-probs that it returns for sampled tokens, if the caller knows; None to find out.
        deadline: the end of opening.

    Raises:
        TimeoutError: the deadline has passed.
        EngineError: the server's completions lack a field that was asked for, or its log-probs cannot be told apart.
    """
    client, info = server.client, server.info
    prompt = info.tokenizer(["The"], add_special_tokens=False)["input_ids"][0]
    masks = sampling_masks.offered(client, info.routes, info.name, prompt, deadline.left())

    def send(requests: list[dict[str, Any]]) -> list[Any]:
        if masks:
            requests = [sampling_masks.accepted({**NEUTRAL, **each}, info.capabilities.vocab_size) for each in requests]
        payloads = [{**NEUTRAL, **request, "model": info.name} for request in requests]
        entries = server.post_rows(payloads, ["probe"] * len(payloads), deadline)
        for payload, entry in zip(payloads, entries, strict=True):
            if isinstance(entry, CoreLMError):
                raise _explained(server, payload, entry, deadline)
        return [only_choice(entry) for entry in entries]

    try:
        seeds = honours_seeds(send, prompt)
        candidates = most_candidates(send, prompt, min(MOST_CANDIDATES, info.capabilities.vocab_size))
        scored = candidates if info.capabilities.score else 0
        mode = mode or logprobs_mode(send, prompt, candidates)
        capabilities = replace(
            info.capabilities,
            # The server keeps one position for a sampled token.
            max_context=info.max_context - (mode != "raw"),
            argmax=scored > 0,
            score_top_k=min(scored, MOST_IDS),
            top_logprobs=min(candidates, MOST_IDS),
            generation_modes=frozenset({mode}),
            per_answer_seeds=seeds,
            # A server does not say where it runs. On a GPU its fused sampler takes no seeds.
            seeds_are_costly=seeds,
        )
        capabilities = sampling_masks.narrowed(capabilities) if masks else capabilities
    except (AttributeError, IndexError, KeyError, RowError, TypeError, ValueError) as error:
        raise EngineError(
            f"{client.base_url} is not a vLLM server, or too old: its completions lack what they were asked for "
            f"({type(error).__name__}: {error})",
            usable=True,
        ) from error
    return replace(info, capabilities=capabilities, candidates=candidates, whole_prompts=mode != "raw")


def _explained(server: HttpEngine, payload: Payload, error: CoreLMError, deadline: Deadline) -> CoreLMError:
    """Return the error for a request that the server does not answer. It says what to type if that can be found out."""
    if not isinstance(error, TransientError):
        return error
    if error.status == 500 and sampling_masks.ROUTE not in server.info.routes:
        # A server with this option answers 500, without a word, to requests that truncate nothing.
        truncating = sampling_masks.accepted(payload, server.capabilities.vocab_size)
        (entry,) = server.post_rows([truncating], ["probe"], deadline)
        if not isinstance(entry, CoreLMError):
            return EngineError(
                f"{server.client.base_url}: the server runs with --return-sampling-mask, which needs a route that it "
                "lacks: start it with --enable-scale-out as well, or without --return-sampling-mask",
                usable=True,
            )
    return error.final()


def logprobs_mode(send: Send, prompt: list[int], count: int) -> LogprobsMode:
    """Return whether sampled tokens come with log-probs from before (`raw`) or after (`processed`) the temperature.

    Compare the same candidates for one position at two temperatures. The difference between two candidates does not
    contain the normaliser; the temperature divides it in the processed mode only. Then compare one candidate's log-prob
    with that of the same token as part of a prompt, which is raw in every mode: this recognises logits.

    Args:
        send: sends requests.
        prompt: some ids.
        count: how many candidates the server returns for one position.

    Raises:
        EngineError: the values fit neither mode, or differ too little to decide.
    """
    cold, hot = _candidates(send, prompt, count)
    common = [token for token in cold if token in hot]
    first, last = common[0], common[-1]
    scored = send([_request([*prompt, first], prompt_logprobs=0)])[0]
    expected = scored["prompt_logprobs"][-1][str(first)]["logprob"]
    # Keep the `not`: NaN fails every comparison and must be rejected.
    if not abs(cold[first] - expected) < LOGPROB_TOLERANCE:
        raise _undecided(f"the log-prob of id {first} is {cold[first]:.3f} when sampled, {expected:.3f} in a prompt")
    spread = cold[first] - cold[last]
    quotient = (hot[first] - hot[last]) / spread if spread >= MIN_SPREAD else math.nan
    if abs(quotient - 1) < QUOTIENT_TOLERANCE:
        return "raw"
    if abs(quotient - NEUTRAL_TEMPERATURE / HIGH_TEMPERATURE) < QUOTIENT_TOLERANCE:
        return "processed"
    raise _undecided(
        f"its candidates are {spread:.3f} nats apart, and {quotient:.3f} times as far at temperature {HIGH_TEMPERATURE}"
    )


def most_candidates(send: Send, prompt: list[int], most: int) -> int:
    """Return how many candidates the server returns for one position, up to `most`."""
    good, bad, count = 0, most + 1, most
    while bad - good > 1:
        named = None
        try:
            (choice,) = send([_request(prompt, logprobs=count)])
            enough = len(choice["logprobs"]["top_logprobs"][0]) >= count
        except BackendTimeoutError:
            raise
        except CoreLMError as error:
            enough, named = False, _MOST.search(str(error))
        good, bad = (count, bad) if enough else (good, count)
        count = (good + bad) // 2
        if named and good <= int(named[1]) < bad:
            # What the server names as its limit is the limit, if it holds: nothing above it is tried.
            count, bad = int(named[1]), int(named[1]) + 1
    return good


def honours_seeds(send: Send, prompt: list[int]) -> bool:
    """Return whether equal seeds give equal answers and different seeds give different ones."""
    seeds = (1, 1, 2, 3, 4, 5)
    for _ in range(ATTEMPTS):
        requests = [
            _request(prompt, max_tokens=ANSWER_TOKENS, temperature=HIGH_TEMPERATURE, seed=seed) for seed in seeds
        ]
        first, again, *others = [choice["token_ids"] for choice in send(requests)]
        # In low precision an answer may depend on the rest of the batch, so one agreement is enough.
        if first == again:
            return any(other != first for other in others)
    return False


def _candidates(send: Send, prompt: list[int], count: int) -> tuple[dict[int, float], dict[int, float]]:
    """Return log-probs by id for the token after `prompt`, at each temperature; the first dict is likeliest first."""
    if not count:
        raise _undecided("it returns no candidates")
    temperatures = (NEUTRAL_TEMPERATURE, HIGH_TEMPERATURE)
    choices = send([_request(prompt, temperature=each, logprobs=min(count, CANDIDATES)) for each in temperatures])
    cold, hot = [dict(by_label(choice, 1)[0]) for choice in choices]
    return dict(sorted(cold.items(), key=lambda item: -item[1])), hot


def _request(prompt: list[int], **values: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 1, "temperature": 0.0, **values}


def _undecided(why: str) -> EngineError:
    return EngineError(
        f"cannot find out whether the server returns raw or processed log-probs: {why}. If it was started with "
        "--logprobs-mode raw_logprobs (the default) pass logprobs_mode='raw', if with processed_logprobs 'processed'",
        usable=True,
    )
