"""Have vLLM truncate with its own PyTorch code: Triton's interpreter cannot run its kernel for top-k and top-p (0.32).

A plugin of vLLM, which finds it on PYTHONPATH. For tests; not part of ours.
"""


def install() -> None:
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False
