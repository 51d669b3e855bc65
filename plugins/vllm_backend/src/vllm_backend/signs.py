"""How a vLLM server shows that it works on answers that are not complete yet."""

from __future__ import annotations

from corelm_engine_kit import SignOfWork
from vllm_backend.protocol_http import COMPLETIONS

#: What vLLM counts while it works: ``vllm/v1/metrics/loggers.py``. While it reads a long prompt in parts, only the
#: share of the cache in use grows.
_COUNTERS = (
    "vllm:generation_tokens_total{",
    "vllm:prompt_tokens_total{",
    "vllm:iteration_tokens_total_count{",
    "vllm:kv_cache_usage_perc{",
)


def counters(metrics: str) -> tuple[str, ...] | None:
    """Return the lines of ``/metrics`` that change while the engine works; None if the server does not count."""
    return tuple(line for line in metrics.splitlines() if line.startswith(_COUNTERS)) or None


#: While the server loads weights, its counters stand still: it need only be alive.
SIGN = SignOfWork(rows=COMPLETIONS, page="/metrics", progress=counters, alive="/health")
