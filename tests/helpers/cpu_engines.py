"""What each engine needs to run on a CPU, in a process of its own environment, as make builds it."""

import os
from pathlib import Path
from typing import Any

from engines.sglang_on_cpu import CPU_ARGUMENTS, CPU_ENVIRONMENT

ROOT = Path(__file__).parents[2]

#: What each engine needs to run on a CPU: its interpreter, variables, and options. The engines' own tests use the same.
ENGINES: dict[str, dict[str, Any]] = {
    "transformers": {"python": str(ROOT / ".venv" / "bin" / "python"), "dtype": "float32"},
    "vllm": {
        "python": str(ROOT / ".venv-vllm" / "bin" / "python"),
        "env": {
            "HF_HUB_OFFLINE": "1",
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        },
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 26,
    },
    "sglang": {
        "python": str(ROOT / ".venv-sglang" / "bin" / "python"),
        "env": {
            # The launched server inherits these.
            **CPU_ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join(filter(None, [CPU_ENVIRONMENT["PYTHONPATH"], os.environ.get("PYTHONPATH")])),
        },
        "progress": False,
        **CPU_ARGUMENTS,
    },
}
