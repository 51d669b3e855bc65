"""Let a server honour seeds on a CPU. For tests; not part of the plugin.

SGLang honours seeds only with ``--enable-deterministic-inference``, whose attention and matrix products are written for
GPUs. On a CPU in float32, torch's own give a row the same numbers in every batch, except for rounding, so this module
switches SGLang's off. It is a plugin of SGLang, which finds it on PYTHONPATH.
"""

from __future__ import annotations


def install() -> None:
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups.choices import add_deterministic_attention_backend_choices

    batch_invariant_ops.enable_batch_invariant_mode = lambda *args, **kwargs: None
    add_deterministic_attention_backend_choices(["torch_native"])
