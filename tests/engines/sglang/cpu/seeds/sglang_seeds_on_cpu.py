"""Lets a server honour seeds on a CPU. For tests; no part of the plugin.

SGLang honours them with ``--enable-deterministic-inference`` alone, which comes with attention and matrix products that
are written for GPUs. Torch's own, on a CPU in float32, give a row the same numbers in every company, but for rounding.
This is a plugin of SGLang's kind, which finds it on PYTHONPATH.
"""

from __future__ import annotations


def install() -> None:
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups.choices import add_deterministic_attention_backend_choices

    batch_invariant_ops.enable_batch_invariant_mode = lambda *args, **kwargs: None
    add_deterministic_attention_backend_choices(["torch_native"])
