"""Run vLLM's V2 model runner without a GPU: its Triton kernels run in Triton's interpreter, row by row in NumPy.

    python -m engines.vllm.interpreted FOLDER

scores the rows that standard input holds as JSON with the model in FOLDER, and prints what it found.

vLLM switches Triton off unless it finds a driver for the CPU, which ordinary builds of Triton do not have. The
interpreter needs none, so an empty one is enough. All this must be set before vLLM is imported.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

SETTINGS = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "TRITON_INTERPRET": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}


def main() -> None:
    os.environ.update(SETTINGS)
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)

    import corelm

    given = json.load(sys.stdin)
    options = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 26}
    found: dict[str, Any] = {}
    for mode in ("raw_logprobs", "processed_logprobs"):
        with corelm.get_backend("vllm", sys.argv[1], engine="sync", logprobs_mode=mode, **options) as backend:
            scores = backend.score_logprobs(given["rows"], score_from=given["starts"], return_argmax=True)
            assert scores.argmax is not None
            found[mode] = [scores.logprobs.tolist(), scores.argmax.tolist()]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
