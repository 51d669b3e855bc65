"""What an opened vLLM engine says about its model, read from its configuration."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corelm.errors import CapabilityError, InvalidRequestError
from corelm.spec import Capabilities, GenerationMode
from vllm_backend.sampling import HONOURED

#: vLLM's names for its modes, and ours. Its other modes return logits under the name of log-probs.
MODES: dict[str, GenerationMode] = {"raw_logprobs": "raw", "processed_logprobs": "processed"}

#: The ways of loading after which vLLM can load again from a folder.
RELOADABLE = frozenset({"auto", "hf", "safetensors", "fastsafetensors"})


@dataclass(frozen=True)
class Model:
    """What is known of the model before the first request.

    Attributes:
        folder: where its checkpoint lies; None if vLLM could not load other weights in its place.
    """

    capabilities: Capabilities
    tokenizer: Any
    folder: Path | None

    @property
    def max_context(self) -> int:
        context = self.capabilities.max_context
        assert context is not None
        return context


def check_arguments(given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises:
    InvalidRequestError: a name that is not `known`. CapabilityError: a mode that returns something else than log-probs.
    """
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidRequestError(f"backend 'vllm': {name!r} is no engine argument of vLLM{hint}", field=name)
    mode = given.get("logprobs_mode", "raw_logprobs")
    if mode not in MODES:
        raise CapabilityError(
            f"logprobs_mode={mode!r} would return no log-probs; give one of {', '.join(MODES)}",
            capability="generation_modes",
        )


def describe(config: Any, tokenizer: Any, *, abort: bool, concurrent_calls: bool) -> Model:
    """Read a `VllmConfig`, as it is once the engine is up. `tokenizer` None takes the one that vLLM itself took."""
    model = config.model_config
    if tokenizer is None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            model.tokenizer, revision=model.tokenizer_revision, trust_remote_code=model.trust_remote_code
        )
    vocab_size: int = model.get_vocab_size()
    folder = _checkpoint_folder(config) if _reloads(config) else None
    # Without a tokenizer of its own vLLM has no text to find a stop string in.
    honoured = {name: span for name, span in HONOURED.items() if name != "stop" or not model.skip_tokenizer_init}
    capabilities = Capabilities(
        vocab_size=vocab_size,
        max_context=model.max_model_len,
        eos_token_ids=_eos_token_ids(model.try_get_generation_config(), tokenizer, vocab_size),
        sampling=honoured,
        generation_modes=frozenset({MODES[model.logprobs_mode]}),
        score=True,
        per_answer_seeds=True,
        concurrent_calls=concurrent_calls,
        update_weights=folder is not None,
        abort=abort,
    )
    return Model(capabilities, tokenizer, folder)


def _eos_token_ids(generation_config: Mapping[str, Any], tokenizer: Any, vocab_size: int) -> frozenset[int]:
    """The model's own list and the tokenizer's; a configuration class may default to the EOS of a larger vocabulary."""
    listed = generation_config.get("eos_token_id")
    found = {tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])}
    return frozenset(token for token in found if token is not None and token < vocab_size)


def _reloads(config: Any) -> bool:
    """Whether vLLM, told to load other weights, uses all of them."""
    from vllm.platforms import current_platform

    # On a CPU it packs the head when it loads it. A head that is tied to the embeddings is not loaded again, so the
    # packed one stays, and the model goes on with a new body and its old head.
    tied = getattr(config.model_config.hf_text_config, "tie_word_embeddings", False)
    keeps_its_head = current_platform.is_cpu() and tied
    return config.load_config.load_format in RELOADABLE and not keeps_its_head


def _checkpoint_folder(config: Any) -> Path | None:
    """Where the safetensors lie that vLLM has just loaded; None if it was something else."""
    model = config.model_config
    folder = Path(model.model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        cache = config.load_config.download_dir
        try:
            found = snapshot_download(model.model, revision=model.revision, cache_dir=cache, local_files_only=True)
        except (OSError, ValueError):
            # It came from somewhere else, a bucket for example.
            return None
        folder = Path(found)
    return folder if any(folder.glob("*.safetensors")) else None
