"""Run vLLM's V2 model runner without a GPU: its Triton kernels run in Triton's interpreter, row by row in NumPy.

    python -m engines.vllm.interpreted FOLDER

scores the rows that standard input holds as JSON with the model in FOLDER, plainly and by id, and prints what it found.

vLLM switches Triton off unless it finds a driver for the CPU, which ordinary builds of Triton do not have. The
interpreter needs none, so an empty one is enough. All this must be set before vLLM is imported.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
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

    from corelm import Backend
    from vllm_backend import VLLMBackend, scoring_by_id
    from vllm_backend.engine_sync import SyncEngine

    asked: list[tuple[Any, ...]] = []

    class Recording(SyncEngine):
        """Remembers what vLLM was asked for, and can spoil what it returns by id."""

        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.spoil: Callable[[Any], Any] = lambda scores: scores

        def run(self, requests: Any, *rest: Any) -> Any:
            asked.extend((each.params.prompt_logprobs, each.params.prompt_logprob_start) for each in requests)
            outputs = super().run(requests, *rest)
            for output in outputs:
                if output.prompt_token_id_logprobs is not None:
                    output.prompt_token_id_logprobs = self.spoil(output.prompt_token_id_logprobs)
            return outputs

        def score_plainly(self) -> None:
            self._info = replace(self._info, scores_by_id=False)

        def believes(self) -> bool:
            """Return what comes of a trial."""
            return scoring_by_id.tried(replace(self._info, scores_by_id=False), self._score).scores_by_id

    given = json.load(sys.stdin)
    rows, starts = given["rows"], given["starts"]
    options = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 26}
    engine: Any = Recording.start({"model": sys.argv[1], "enable_chunked_prefill": False, **options}, None)
    with Backend.from_plugin(VLLMBackend(engine), "vllm") as backend:
        found: dict[str, Any] = {"at_open": list(asked)}
        asked.clear()
        found["by_id"] = backend.score_logprobs(rows, score_from=starts).logprobs.tolist()
        found["asked"] = list(asked)
        asked.clear()
        found["argmax"] = backend.score_logprobs(rows, score_from=starts, return_argmax=True).argmax.tolist()
        found["asked_argmax"] = list(asked)
        engine.score_plainly()
        found["plain"] = backend.score_logprobs(rows, score_from=starts).logprobs.tolist()
        # What `choose_ways` makes of an engine whose arrays are wrong.
        spoils = {
            "right": lambda scores: scores,
            "shifted": lambda scores: scores[[*range(1, len(scores)), 0]],
            "off": lambda scores: scores - 0.3,
            "nan": lambda scores: scores * float("nan"),
            "short": lambda scores: scores[1:],
            "missing": lambda scores: None,
        }
        for name, spoil in spoils.items():
            engine.spoil = spoil
            found[name] = engine.believes()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
