"""Which weights sampled which tokens: how updates are labelled in vLLM, and the runs of versions from its labels.

vLLM pauses between two steps, and says with every step which label was in force. A label holds the number of the
update, because core's own label of the weights of the beginning is not known to vLLM.
"""

from __future__ import annotations

from typing import Any

from corelm.spec import GenerateRequest, WeightUpdate
from corelm_engine_kit import RowError

#: One run of tokens: the label of the weights, and the first token.
Run = tuple[str, int]


def label_of(update: WeightUpdate) -> str:
    """Return the label that vLLM is given for the weights of an update."""
    return f"{update.number}:{update.version}"


def runs_of(spans: Any, request: GenerateRequest, count: int) -> tuple[Run, ...]:
    """Return the runs of the first `count` tokens of an answer.

    Args:
        spans: vLLM's ``CompletionOutput.weight_versions``.

    Raises:
        RowError: vLLM does not say which weights sampled one of these tokens.
    """
    start, runs = 0, list[Run]()
    for span in spans or ():
        if span.start != start:
            break
        start = span.end
        version = _version(span.version, request)
        if span.start < max(count, 1) and (not runs or runs[-1][0] != version):
            runs.append((version, span.start))
    if start < count:
        raise RowError(f"vLLM does not say which weights sampled token {start} of the answer")
    return tuple(runs) or of_no_tokens(request)


def of_no_tokens(request: GenerateRequest) -> tuple[Run, ...]:
    """Return the runs of a row without tokens."""
    return ((request.weight_version or "", 0),)


def _version(label: str, request: GenerateRequest) -> str:
    number, _, version = label.partition(":")
    # vLLM's first label is "default".
    return version if number.isdecimal() and int(number) > request.weight_update else request.weight_version or ""
