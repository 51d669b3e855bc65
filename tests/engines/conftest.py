"""Tests with a real engine, each in the environment that has it (make test-vllm, make test-sglang). Elsewhere they are
not collected, and pytest fails if that leaves it nothing to do.
"""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [engine for engine in ("vllm", "sglang") if find_spec(engine) is None]
