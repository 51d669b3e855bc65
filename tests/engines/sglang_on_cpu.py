"""What SGLang needs to run on a CPU. The plugin itself sets none of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

#: The folder with the stand-in for `sgl_kernel`, which a launched server imports.
_STAND_INS = Path(__file__).parent / "sglang" / "cpu"

#: A server's arguments.
CPU_ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "dtype": "float32",
    "skip_server_warmup": True,
    # Otherwise the idle scheduler keeps a core busy.
    "sleep_on_idle": True,
    "max_total_tokens": 65536,
    "mem_fraction_static": 0.3,
}
#: Variables of a server's environment.
CPU_ENVIRONMENT = {
    "PYTHONPATH": str(_STAND_INS),
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # For a tiny model, compiling takes longer than running.
    "TORCHDYNAMO_DISABLE": "1",
}

#: A server that is started with these as well honours seeds.
SEEDS_ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(_STAND_INS), str(_STAND_INS / "seeds")])}
SEEDS_ARGUMENTS = {"enable_deterministic_inference": True}

#: A server that is started with these as well takes adapters.
LORA_ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(_STAND_INS), str(_STAND_INS / "lora")])}
LORA_ARGUMENTS: dict[str, Any] = {
    "enable_lora": True,
    "max_lora_rank": 8,
    "lora_target_modules": ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"],
    "lora_backend": "torch_native",
}
