"""Tests with a real engine, each in the environment that has it (make test-vllm, make test-sglang, make test-ray).
Elsewhere they are not collected, and pytest fails if that leaves it nothing to do. `make test-hosts` collects those in
`hosted/`, which need the environments of all engines.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

collect_ignore = [engine for engine in ("vllm", "sglang", "ray") if find_spec(engine) is None]
collect_ignore += [] if os.environ.get("CORELM_TEST_HOSTS") else ["hosted"]
