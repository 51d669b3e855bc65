"""Tests with a real engine, each in the environment that has it (make test-vllm, for example).
Elsewhere they are not collected, and pytest fails if that leaves it nothing to do. `make test-hosts` collects those in
`hosted/`, which need the environments of all engines.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

#: The folders whose names are not the engine's module.
_MODULES = {"llamacpp": "llama_cpp"}

collect_ignore = [
    engine for engine in ("vllm", "sglang", "ray", "llamacpp") if find_spec(_MODULES.get(engine, engine)) is None
]
collect_ignore += [] if os.environ.get("CORELM_TEST_HOSTS") else ["hosted"]
