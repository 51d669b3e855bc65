"""What an engine in this process can do, and which weights it can load later, read from vLLM's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corelm.errors import CapabilityError
from corelm.spec import SLEEP_LEVELS, Capabilities, GenerationMode
from corelm_engine_kit import configured_shapes, eos_token_ids, local_checkpoint
from vllm_backend.sampling import HONOURED
from vllm_backend.top_ids import MOST_IDS, limit

if TYPE_CHECKING:
    from corelm_engine_kit import Expected

#: vLLM's modes that return log-probs, with corelm's names for them. vLLM's other modes return logits.
LOGPROBS_MODES: dict[str, GenerationMode] = {"raw_logprobs": "raw", "processed_logprobs": "processed"}
#: The load format with which vLLM fills a model with random numbers, for weights that come later.
DUMMY = "dummy"

#: The load formats after which vLLM can load other weights from a folder.
RELOADABLE_FORMATS = frozenset({"auto", "hf", "safetensors", "fastsafetensors", DUMMY})

#: The fields of a model's configuration that give its number of experts, as vLLM looks for them.
_NUMBERS_OF_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What is known about a vLLM, in this process or behind a URL, before its first request.

    Attributes:
        capabilities: what the backend declares.
        tokenizer: the tokenizer of the backend.
        candidates: the most candidates that vLLM returns at a position (its ``max_logprobs``).
        whole_prompts: the prompt of a scored row is the whole row, since vLLM drafts tokens, or returns processed
            log-probs of what it samples.
        scores_alone: no other row may run while one is scored; see `mixes_rows`.
        reasons: why the engine lacks capabilities, by their names.
    """

    capabilities: Capabilities
    tokenizer: Any
    candidates: int = 0
    whole_prompts: bool = False
    scores_alone: bool = False
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def max_context(self) -> int:
        context = self.capabilities.max_context
        assert context is not None
        return context


@dataclass(frozen=True, kw_only=True)
class ModelInfo(EngineInfo):
    """The model of an engine in this process.

    Attributes:
        checkpoint: the folder of the model's safetensors, or their names and shapes if it holds none; None if vLLM
            could not load other weights.
        in_this_process: the worker of a synchronous engine runs in this process.
        takes_gpu_memory: vLLM was opened to take weights in the memory of its GPU.
        files: the folder of the model's safetensors, even if vLLM could not load others; None if there is none.
        largest_rank: the largest rank of an adapter; None if vLLM was not started with ``enable_lora=True``.
        runs: what `Backend.info` says: dtype and device, quantization and revision.
    """

    checkpoint: Expected | None
    in_this_process: bool = False
    takes_gpu_memory: bool = False
    files: Path | None = None
    largest_rank: int | None = None
    runs: Mapping[str, str] = field(default_factory=dict)


def read_model(config: Any, tokenizer: Any, *, abort: bool, concurrent_calls: bool) -> ModelInfo:
    """Return what the `VllmConfig` of a started engine says.

    Args:
        tokenizer: the caller's tokenizer; None to load the one that vLLM uses.

    Raises:
        CapabilityError: vLLM was opened without weights, and cannot be given any.
    """
    from vllm import envs
    from vllm.platforms import current_platform

    model, device = config.model_config, "cpu" if current_platform.is_cpu() else None
    if tokenizer is None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            model.tokenizer, revision=model.tokenizer_revision, trust_remote_code=model.trust_remote_code
        )
    vocab_size: int = model.get_vocab_size()
    files = local_checkpoint(model.model, revision=model.revision, cache_dir=config.load_config.download_dir)
    why_not_again = _why_not_again(config, device)
    checkpoint = _checkpoint(config, files, why_not_again)
    mode = LOGPROBS_MODES[model.logprobs_mode]
    whole_prompts = config.speculative_config is not None or mode != "raw"
    mixes = mixes_rows(config.lora_config is not None, device)
    candidates = limit(model.max_logprobs, vocab_size)
    # With skip_tokenizer_init vLLM decodes no text, so it cannot find stop strings.
    honoured = {name: span for name, span in HONOURED.items() if name != "stop" or not model.skip_tokenizer_init}
    capabilities = Capabilities(
        vocab_size=vocab_size,
        # vLLM keeps one position for a sampled token.
        max_context=model.max_model_len - whole_prompts,
        eos_token_ids=eos_token_ids(model.try_get_generation_config(), tokenizer, vocab_size=vocab_size),
        sampling=honoured,
        generation_modes=frozenset({mode}),
        score=True,
        argmax=candidates > 0,
        score_top_k=min(candidates, MOST_IDS),
        top_logprobs=min(candidates, MOST_IDS),
        per_answer_seeds=True,
        # On a GPU, vLLM's fused sampler of top-k and top-p takes no seeds.
        seeds_are_costly=device != "cpu",
        concurrent_calls=concurrent_calls and not mixes,
        stops_at_timeout=True,
        streaming=True,
        update_weights=checkpoint is not None,
        weight_stream=checkpoint is not None,
        # A synchronous engine runs one call at a time, so none is in flight.
        updates_in_flight=checkpoint is not None and abort,
        without_weights=config.load_config.load_format == DUMMY,
        sleep_levels=sleep_levels(model.enable_sleep_mode, checkpoint is not None),
        adapters=config.lora_config is not None,
        abort=abort,
    )
    transfer = config.weight_transfer_config
    runs = {"quantization": model.quantization, "revision": model.revision}
    on = f"{str(model.dtype).removeprefix('torch.')} on {current_platform.device_type}"
    return ModelInfo(
        capabilities=capabilities,
        tokenizer=tokenizer,
        checkpoint=checkpoint,
        whole_prompts=whole_prompts,
        in_this_process=not envs.VLLM_ENABLE_V1_MULTIPROCESSING
        and config.parallel_config.distributed_executor_backend == "uni",
        takes_gpu_memory=transfer is not None and transfer.backend == "ipc",
        files=files,
        largest_rank=None if config.lora_config is None else config.lora_config.max_lora_rank,
        candidates=candidates,
        scores_alone=mixes,
        reasons={"update_weights": why_not_again} if why_not_again else {},
        runs={"model": on, **{name: how for name, how in runs.items() if how}},
    )


def sleep_levels(enabled: bool, takes_weights: bool) -> frozenset[int]:
    """Return the levels at which vLLM can sleep; level 2 needs weights afterwards."""
    return frozenset(level for level in SLEEP_LEVELS if enabled and (level == 1 or takes_weights))


def at_a_time(count: int, *, alone: bool) -> list[slice]:
    """Return which of so many rows to run at a time: all of them, or each one alone."""
    step = 1 if alone else max(1, count)
    return [slice(start, start + step) for start in range(0, count, step)]


def mixes_rows(lora: bool, device: str | None) -> bool:
    """Return whether a vLLM that was opened with LoRA, or not, cannot run every two rows in one step.

    On a CPU (seen with vLLM 0.32), a row without an adapter has the index -1, which is the last one: it gets that of
    other rows in the step. A call has one adapter, so calls that are made one after another are right. Where the head
    takes adapters, as that of Llama does, the engine dies of a row that is scored in a step with another row.
    """
    return lora and device == "cpu"


def _checkpoint(config: Any, files: Path | None, why_not: str) -> Expected | None:
    model = config.model_config
    if config.load_config.load_format != DUMMY:
        return None if why_not else files
    option, capability = f"load_format={DUMMY!r}", "load_format"
    if why_not:
        raise CapabilityError(f"{option} needs weights later, but {why_not}", capability=capability)
    return files or configured_shapes(model.hf_config, model.trust_remote_code, option=option, capability=capability)


def _why_not_again(config: Any, device: str | None) -> str:
    """Return why vLLM would not use every tensor of weights that it is told to load later; "" if it would."""
    load_format = config.load_config.load_format
    if load_format not in RELOADABLE_FORMATS:
        return f"vLLM was opened with load_format={load_format!r}; open a folder of safetensors"
    return obstacle(config.model_config.hf_text_config, device, config.model_config.is_moe)


def obstacle(text: Any, device: str | None, has_experts: bool = False) -> str:
    """Return why vLLM would answer wrongly after it has loaded weights again, and what to do; "" if it would not.

    On a CPU, as seen with vLLM 0.32.

    Args:
        text: the configuration of the language model; None if it is not known.
        device: what vLLM runs on; None if it is not known.
        has_experts: whether vLLM finds experts in the model.
    """
    if text is None or device != "cpu":
        return ""
    if has_experts or any(getattr(text, name, 0) for name in _NUMBERS_OF_EXPERTS):
        return "on a CPU, vLLM answers wrongly after it has loaded a mixture of experts again; use another engine"
    if getattr(text, "tie_word_embeddings", False):
        # vLLM packs the weights of the head when it first loads them. If it is tied to the embeddings, it is not loaded
        # again: the model would go on with a new body and the old, packed head.
        return (
            "on a CPU, vLLM would keep the old head of a model whose head is tied to its embeddings; open a copy that "
            "is saved with tie_word_embeddings=False and a head (lm_head.weight) of its own, or use another engine"
        )
    return ""
