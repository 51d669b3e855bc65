"""Whether a server answers, what it is, and whether its log-probs mean what core takes them for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from corelm.application import Scan, install_line
from corelm.errors import CoreLMError, InvalidRequestError
from corelm_cli.diagnosis import Finding

if TYPE_CHECKING:
    from corelm import Backend

#: Seconds for a page of a server.
_PAGE_TIMEOUT = 10.0
#: Engines by what servers say in their list of models; `openai` takes every other one.
_OWNERS = {"vllm": "vllm", "sglang": "sglang"}
#: A temperature at which raw and processed log-probs are far apart, and how many tokens are sampled at it.
_TEMPERATURE, _TOKENS = 0.5, 16
#: Nats by which a token's log-prob may differ when it is sampled and when it is scored: bfloat16 makes that much.
_TOLERANCE = 0.25


def server_findings(
    url: str,
    found: Scan,
    options: Mapping[str, Any],
    backend: str | None = None,
    model: str | None = None,
) -> Iterator[Finding]:
    """Send a server a few short prompts, and yield the findings.

    Args:
        url: of the server.
        found: the installed backends.
        options: of the backend, such as `api_key` and `tokenizer`.
        backend: the backend to use; None for the one that fits.
        model: the model's name there; None for its only one.
    """
    from corelm_engine_kit.http_errors import AccessError

    about = f"server {url}"
    try:
        owner, models = _models(url, options)
    except CoreLMError as error:
        remedy = "start it, or correct the URL"
        if isinstance(error, AccessError):
            remedy = "give the server's key: --option api_key=KEY"
        # The backend, if it is named, may know the key from a variable, or need no list of models.
        if backend is None or isinstance(error, InvalidRequestError):
            yield Finding(about, "problem", str(error), remedy)
            return
        yield Finding(about, "warning", f"it does not list its models: {error}")
    else:
        who = f", from {owner}" if owner else ""
        yield Finding(about, "ok", f"it answers{who}; its models: {', '.join(models) or 'none'}")
        if model is not None and model not in models:
            yield Finding(about, "warning", f"it does not list {model!r}", "give --model one of its models")
        backend = backend or _OWNERS.get(owner, "openai")
    if backend not in found.names:
        line = install_line(backend)
        yield Finding(
            about, "problem", f"the backend {backend!r} is not installed", line or "corelm backends lists those"
        )
        return
    from corelm import get_backend

    try:
        opened = get_backend(backend, model, base_url=url, **options)
    except CoreLMError as error:
        yield Finding(
            about, "problem", f"the backend {backend!r} refuses it: {error}", "give what the message asks for"
        )
        return
    with closing(opened):
        yield from _meaning(about, opened)


def _models(url: str, options: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return who made the server, as it says, and the models that it lists."""
    from corelm_engine_kit.http import HttpClient

    access = {name: options[name] for name in ("api_key", "headers") if name in options}
    client = HttpClient(url.rstrip("/").removesuffix("/v1"), connect_timeout=_PAGE_TIMEOUT, max_retries=0, **access)
    with closing(client):
        page = client.get("/v1/models", timeout=_PAGE_TIMEOUT)
    data = page.get("data") if isinstance(page, dict) else None
    cards = [card for card in (data if isinstance(data, list) else ()) if isinstance(card, dict) and "id" in card]
    owners = {str(card.get("owned_by") or "") for card in cards}
    return (owners.pop() if len(owners) == 1 else ""), [str(card["id"]) for card in cards]


def _meaning(about: str, backend: Backend) -> Iterator[Finding]:
    """Sample at a temperature that shows what a log-prob means, and score the same tokens."""
    can = backend.capabilities
    modes = sorted(can.generation_modes)
    text = f"the backend {backend.name!r} uses it: log-probs of answers: {', '.join(modes) or 'none'}; "
    text += f"scores given tokens: {'yes' if can.score else 'no'}"
    if not modes and not can.score:
        why = "the server returns none, or they are not those of the model's distribution"
        yield Finding(about, "warning", text, f"{why}: docs/backends says what a server needs")
    else:
        yield Finding(about, "ok", text)
    if not (can.score and "raw" in modes):
        return
    try:
        apart = _difference(backend)
    except CoreLMError as error:
        yield Finding(about, "problem", f"a short prompt failed: {error}")
        return
    if not apart <= _TOLERANCE:
        yield Finding(
            about,
            "problem",
            f"log-probs of {_TOKENS} tokens that it sampled at temperature {_TEMPERATURE} and then scored differ by "
            f"{apart:.2g} nats: the two are not of the same distribution",
            "corelm compare finds out why",
        )
    else:
        yield Finding(
            about, "ok", f"what it samples and what it scores have the same log-probs, within {apart:.1g} nats"
        )


def _difference(backend: Backend) -> float:
    """Return the largest difference, in nats, of the log-probs of sampled tokens and of the same tokens scored."""
    prompts = backend.tokenize(["The quick brown fox"]).ids
    sampling = {"max_new_tokens": _TOKENS, "temperature": _TEMPERATURE, "seed": 7}
    answer = backend.generate(prompts, sampling, logprobs="raw")
    scores = backend.score_logprobs(prompts.join(answer.ids), score_from=prompts.lengths)
    again = scores.logprobs.slice(prompts.lengths, scores.logprobs.lengths).values
    assert answer.logprobs is not None
    return float((answer.logprobs.values - again).abs().max()) if len(again) else 0.0
