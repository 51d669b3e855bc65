"""What the vLLM plugin imports from vLLM. `docs/verified.md` says in which versions these names were found."""

from __future__ import annotations

#: The names by the module that they are imported from.
NEEDED: dict[str, frozenset[str]] = {
    "vllm": frozenset({"SamplingParams", "envs", "exceptions", "sampling_params"}),
    "vllm.distributed.weight_transfer.base": frozenset({"ParamMeta"}),
    "vllm.distributed.weight_transfer.nccl_engine": frozenset(
        {"NCCLTrainerInitInfo", "NCCLTrainerWeightTransferEngine"}
    ),
    "vllm.distributed.weight_transfer.packed_tensor": frozenset({"packed_ipc_producer"}),
    "vllm.engine.arg_utils": frozenset({"AsyncEngineArgs", "EngineArgs"}),
    "vllm.inputs": frozenset({"tokens_input"}),
    "vllm.lora.peft_helper": frozenset({"PEFTHelper"}),
    "vllm.lora.request": frozenset({"LoRARequest"}),
    "vllm.outputs": frozenset({"CompletionOutput"}),
    "vllm.platforms": frozenset({"current_platform"}),
    "vllm.sampling_params": frozenset({"RequestOutputKind"}),
    "vllm.usage.usage_lib": frozenset({"UsageContext"}),
    "vllm.v1.engine.async_llm": frozenset({"AsyncLLM"}),
    "vllm.v1.engine.exceptions": frozenset({"EngineDeadError"}),
    "vllm.v1.engine.llm_engine": frozenset({"LLMEngine"}),
    "vllm.v1.sample.logits_processor": frozenset({"BatchUpdate", "LogitsProcessor"}),
    "vllm.v1.sample.logits_processor.builtin": frozenset({"process_dict_updates"}),
}
