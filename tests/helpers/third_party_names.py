"""What core and the plugins use of other libraries under names that may change without an error.

Those are private names, and public names that are looked up. If a library drops one, the code takes the model, version
or option for one without it, and goes a slower way or a wrong one. `tests/test_third_party_names.py` looks each of them
up in the libraries that are installed, so that a rename fails a test of `make test-newest`.
"""

import ast
import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import corelm

ROOT = Path(__file__).parents[2]
OWN = {
    *(
        "corelm",
        "corelm_engine_kit",
        "corelm_testing",
        "corelm_fleet",
        "corelm_interop",
        "corelm_serve",
        "corelm_compare",
    ),
    *("corelm_cli", "transformers_backend", "vllm_backend", "sglang_backend", "ray_backend", "openai_backend"),
}

# What is imported ----------------------------------------------------------------------------------------------------


@functools.cache
def imports() -> dict[str, set[tuple[str, str]]]:
    """Return the modules and names that core and the plugins import from other libraries, by library."""
    found: dict[str, set[tuple[str, str]]] = {}
    for source in (ROOT / "core", *ROOT.glob("[kpa]*/*/src")):
        for path in source.rglob("*.py"):
            for module, name in _imports(ast.parse(path.read_text(encoding="utf-8"))):
                library = module.partition(".")[0]
                if library not in OWN | sys.stdlib_module_names:
                    found.setdefault(library, set()).add((module, name))
    return found


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of everything that is imported, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def is_importable(module: str, name: str) -> bool:
    """Return whether ``from module import name`` works; without a name, ``import module``."""
    with suppress(ImportError):
        found = importlib.import_module(module)
        return not name or hasattr(found, name) or is_importable(f"{module}.{name}", "")
    return False


def installed(library: str) -> bool:
    return find_spec(library) is not None


# What is looked up ---------------------------------------------------------------------------------------------------


@functools.cache
def _model(family: str = "qwen2") -> Any:
    from helpers.tiny_models import tiny_model

    return tiny_model(family)


@functools.cache
def _peft_model() -> Any:
    import peft

    from helpers.tiny_models import tiny_model

    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    return peft.get_peft_model(tiny_model(), config)


def _tokenizer() -> Any:
    from helpers.tiny_models import tiny_tokenizer

    return tiny_tokenizer()


def _mask_arguments() -> Any:
    from transformers.masking_utils import AttentionMaskInterface

    return _arguments(AttentionMaskInterface()["sdpa"])


def _checkpointed_layer() -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(torch.nn.Linear(2, 2))


def _arguments(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def _arguments_of(dotted: str) -> Callable[[], set[str]]:
    return lambda: _arguments(pkgutil.resolve_name(dotted))


def _object(dotted: str) -> Callable[[], Any]:
    return lambda: pkgutil.resolve_name(dotted)


def _made(dotted: str) -> Callable[[], Any]:
    """Return a function that makes an object of a class without arguments."""
    return lambda: pkgutil.resolve_name(dotted)()


def _attributes_in(dotted: str) -> Callable[[], set[str]]:
    """Return a function that finds the names of attributes in the source of a class."""

    def found() -> set[str]:
        tree = ast.parse(inspect.getsource(pkgutil.resolve_name(dotted)))
        return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}

    return found


@dataclass(frozen=True)
class LookedUp:
    """Names that code looks up.

    Attributes:
        package: the library that may rename them.
        where: returns what has them: an object, or a set of names.
        names: the names, with spaces between them.
    """

    package: str
    where: Callable[[], Any]
    names: str

    def missing(self) -> list[str]:
        """Return the names that are not there."""
        owner = self.where()
        has = owner.__contains__ if isinstance(owner, set) else functools.partial(hasattr, owner)
        return [name for name in self.names.split() if not has(name)]


_HOOKS = "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks"
LOOKED_UP = (
    # The forward of a model. Its cache has had several names: test_families.py of the plugin demands that one is found.
    LookedUp(
        "transformers",
        lambda: _arguments(_model().forward),
        "input_ids attention_mask position_ids use_cache logits_to_keep",
    ),
    LookedUp("transformers", lambda: _arguments(_model("mixtral").forward), "output_router_logits"),
    # A model and its parts.
    LookedUp("transformers", _model, "all_tied_weights_keys name_or_path"),
    LookedUp("transformers", lambda: _model().model.layers[0], "gradient_checkpointing"),
    LookedUp("transformers", lambda: _model().model.layers[0].self_attn, "is_causal config"),
    LookedUp("torch", lambda: _model().get_input_embeddings(), "num_embeddings"),
    # Configurations.
    LookedUp(
        "transformers",
        lambda: _model().config,
        "_attn_implementation _attn_implementation_internal max_position_embeddings rope_parameters num_hidden_layers "
        "num_attention_heads intermediate_size tie_word_embeddings",
    ),
    LookedUp(
        "transformers", _made("transformers.Qwen3MoeConfig"), "num_experts num_experts_per_tok moe_intermediate_size"
    ),
    LookedUp("transformers", _made("transformers.DeepseekV3Config"), "n_routed_experts"),
    LookedUp("transformers", _made("transformers.MixtralConfig"), "num_local_experts"),
    LookedUp("transformers", _made("transformers.Ernie4_5_MoeConfig"), "moe_num_experts"),
    LookedUp("transformers", _made("transformers.OPTConfig"), "ffn_dim"),
    LookedUp("transformers", _made("transformers.GPT2Config"), "n_inner"),
    LookedUp("transformers", _made("transformers.Gemma2Config"), "final_logit_softcapping"),
    LookedUp("transformers", _made("transformers.Llama4TextConfig"), "attention_chunk_size"),
    LookedUp("transformers", _made("transformers.GenerationConfig"), "to_diff_dict"),
    # Caches, attention and masks that are replaced: an override that nobody calls does nothing.
    LookedUp("transformers", _made("transformers.DynamicCache"), "layers reorder_cache"),
    LookedUp(
        "transformers",
        _made("transformers.cache_utils.DynamicLayer"),
        "keys values lazy_initialization update reorder_cache",
    ),
    LookedUp("transformers", _mask_arguments, "local_size use_vmap"),
    # Tokenizers.
    LookedUp(
        "transformers",
        _tokenizer,
        "response_template added_tokens_decoder all_special_tokens convert_ids_to_tokens get_added_vocab",
    ),
    # Adapters.
    LookedUp("peft", _peft_model, "active_adapter active_adapters peft_config get_base_model merge_and_unload"),
    LookedUp("peft", lambda: _peft_model().base_model, "active_adapter prefix"),
    LookedUp(
        "peft",
        lambda: _peft_model().base_model.model.model.layers[0].self_attn.q_proj,
        "_active_adapter _disable_adapters merged_adapters scaling disable_adapters get_base_layer",
    ),
    LookedUp(
        "peft", lambda: _peft_model().base_model.model.lm_head, "_active_adapter _disable_adapters disable_adapters"
    ),
    LookedUp("peft", _made("peft.LoraConfig"), "init_lora_weights alora_invocation_tokens"),
    # torch.
    LookedUp("torch", lambda: torch.nn.Linear(2, 2), f"{_HOOKS} _parameters _modules _compiled_call_impl"),
    LookedUp("torch", lambda: torch.nn.modules.module, "_global_forward_hooks _global_forward_pre_hooks"),
    LookedUp("torch", lambda: torch.zeros(1), "_version"),
    LookedUp("torch", lambda: torch.zeros(1).untyped_storage(), "_share_filename_cpu_ _shared_incref"),
    LookedUp("torch", lambda: torch.ops.mkldnn, "_linear_pointwise _reorder_linear_weight"),
    LookedUp("torch", lambda: torch.compile(torch.nn.Linear(2, 2)), "_orig_mod"),
    LookedUp("torch", _checkpointed_layer, "_checkpoint_wrapped_module"),
    LookedUp("torch", _arguments_of("torch.nn.attention.varlen.varlen_attn"), "scale window_size enable_gqa"),
    LookedUp("torch", _object("torch.nn"), "DataParallel"),
    LookedUp("torch", _object("torch.nn.parallel"), "DistributedDataParallel"),
    LookedUp("torch", _object("torch.distributed.fsdp"), "FullyShardedDataParallel FSDPModule"),
    # tensordict.
    LookedUp("tensordict", lambda: corelm.Tokens.from_rows(full=[[1]]), "_tensordict _select"),
    LookedUp("tensordict", _made("tensordict.TensorDict"), "_has_names"),
    # TRL takes these from a trainer, where a rollout sets them.
    LookedUp("trl", _attributes_in("trl.GRPOTrainer"), "_last_loaded_step use_vllm vllm_mode vllm_generation"),
    # vLLM.
    LookedUp("vllm", _arguments_of("vllm.outputs.CompletionOutput"), "weight_versions"),
    LookedUp("vllm", _object("vllm.v1.engine.async_llm.AsyncLLM"), "update_weight_version"),
    LookedUp("vllm", _arguments_of("vllm.lora.peft_helper.PEFTHelper"), "use_rslora rank_pattern alpha_pattern"),
    LookedUp("vllm", _object("vllm.sampling_params"), "StructuredOutputsParams RepetitionDetectionParams"),
    LookedUp("vllm", _object("vllm.exceptions"), "VLLMClientError GracefulHTTPError"),
    # Ray.
    LookedUp("ray", _object("ray._private.ray_constants"), "ENABLE_RAY_CLUSTER"),
)
