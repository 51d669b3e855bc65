"""Every kind of adapter that PEFT has: the base model, the model as it is, and one adapter or another, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import corelm
from corelm.errors import CapabilityError
from helpers.plain_forward import assert_scores
from helpers.tiny_models import VOCAB, random_rows, tiny_model, tiny_tokenizer

ROWS = random_rows(9, 1, 24)
LAYERS = {"target_modules": ["q_proj", "v_proj"]}
TOKENS = list(range(0, VOCAB, 3))
#: By what is tried: the class of PEFT, and its options. They are those of `LAYERS` if nothing else is said.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {}),
    "head and embeddings": ("LoraConfig", {"target_modules": ["embed_tokens", "lm_head", "down_proj"]}),
    "DoRA": ("LoraConfig", {"use_dora": True}),
    "rsLoRA": ("LoraConfig", {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "layers_to_transform": [1]}),
    "bias of LoRA": ("LoraConfig", {"lora_bias": True}),
    "MiCA": ("LoraConfig", {"init_lora_weights": "mica"}),
    "modules to save": ("LoraConfig", {"modules_to_save": ["norm", "lm_head"]}),
    "trainable tokens and LoRA": ("LoraConfig", {"trainable_token_indices": {"embed_tokens": TOKENS}}),
    "trainable tokens": ("TrainableTokensConfig", {"token_indices": TOKENS, "target_modules": ["embed_tokens"]}),
    "AdaLoRA": ("AdaLoraConfig", {"total_step": 10}),
    "BEFT": ("BeftConfig", {"target_modules": ["v_proj"]}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4}),
    "C3A": ("C3AConfig", {"block_size": 8}),
    "DEFT": ("DeftConfig", {}),
    "DeLoRA": ("DeloraConfig", {}),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 50}),
    "FRoD": ("FrodConfig", {}),
    "GLoRA": ("GloraConfig", {}),
    "GraLoRA": ("GraloraConfig", {"r": 4, "gralora_k": 2}),
    "HiRA": ("HiraConfig", {}),
    "HRA": ("HRAConfig", {}),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "LN tuning": ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    "LoHa": ("LoHaConfig", {}),
    "LoKr": ("LoKrConfig", {}),
    "MiSS": ("MissConfig", {"r": 4}),
    "OFT": ("OFTConfig", {"oft_block_size": 4, "r": 0}),
    "OSF": ("OSFConfig", {}),
    "PEANuT": ("PeanutConfig", {}),
    "PSOFT": ("PsoftConfig", {"r": 4}),
    "PVeRA": ("PveraConfig", {"r": 8}),
    "RandLoRA": ("RandLoraConfig", {"r": 8}),
    "RoAd": ("RoadConfig", {"group_size": 8}),
    "Shadow": ("ShadowConfig", {"target_modules": None}),
    "SHiRA": ("ShiraConfig", {"r": 2}),
    "SuperTuning": ("SupertuningConfig", {}),
    "TinyLoRA": ("TinyLoraConfig", {}),
    "Uni-LoRA": ("UniLoraConfig", {}),
    "VB-LoRA": ("VBLoRAConfig", {"num_vectors": 16, "vector_length": 8, "topk": 2}),
    "VB-LoRA of the top k": (
        "VBLoRAConfig",
        {"num_vectors": 16, "vector_length": 8, "topk": 2, "save_only_topk_weights": True},
    ),
    "VeRA": ("VeraConfig", {"r": 8}),
    "WaveFT": ("WaveFTConfig", {"n_frequency": 50}),
}
#: What cannot be had, and what the refusal says.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "adaption prompt": ("AdaptionPromptConfig", {"adapter_len": 4, "adapter_layers": 2}, "replaces modules"),
    "bias": ("LoraConfig", {**LAYERS, "bias": "lora_only"}, "bias='lora_only' changes the base weights"),
    "KaSA": ("LoraConfig", {**LAYERS, "kasa_config": {}}, "kasa_config changes the base weights"),
    "layer replication": ("LoraConfig", {**LAYERS, "layer_replication": [(0, 2), (0, 2)]}, "changes the base weights"),
    "parameters": ("LoraConfig", {"target_parameters": ["mlp.down_proj.weight"]}, "changes the base weights"),
    "PiSSA": ("LoraConfig", {**LAYERS, "init_lora_weights": "pissa"}, "changes the base weights"),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 4}, "virtual tokens"),
}
QUICK = {"LoRA", "modules to save", "trainable tokens and LoRA", "AdaLoRA", "LN tuning", "VeRA"}
TIED = ["head and embeddings", "modules to save", "trainable tokens and LoRA", "trainable tokens"]


def model(**changes: Any) -> Any:
    return tiny_model("llama", attention_bias=True, **changes)


def trained(kind: str, options: dict[str, Any], seed: int, **changes: Any) -> Any:
    """Wrap the tiny model in PEFT, with an adapter that changes it much."""
    if not hasattr(peft, kind):
        pytest.skip(f"this release of PEFT has no {kind}")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        wrapped = peft.get_peft_model(model(**changes), getattr(peft, kind)(task_type="CAUSAL_LM", **options))
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape).to(parameter) * 0.1)
    return wrapped.eval()


@pytest.fixture
def folder(tmp_path: Path, tied: bool) -> Path:
    """A folder with the base model."""
    model(tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        *(pytest.param(name, False, marks=() if name in QUICK else pytest.mark.nightly) for name in METHODS),
        *(pytest.param(name, True, marks=pytest.mark.nightly) for name in TIED),
    ],
)
def test_the_base_model_and_each_adapter_are_exact(name: str, tied: bool, folder: Path, tmp_path: Path) -> None:
    kind, options = METHODS[name]
    base = model(tie_word_embeddings=tied)
    one, two, mine = (trained(kind, LAYERS | options, seed, tie_word_embeddings=tied) for seed in (1, 2, 1))
    one.save_pretrained(tmp_path / "one")
    with corelm.get_backend("transformers", folder) as backend:
        backend.load_adapter("one", tmp_path / "one")
        for adapter, wanted in ((None, base), (False, base), ("one", one), (None, base), (False, base)):
            assert_scores(backend, wanted, ROWS, adapter=adapter)
        if (name, tied) != ("trainable tokens", True):  # PEFT holds one of these
            backend.load_adapter("two", two)
            for adapter, wanted in (("two", two), ("one", one), (None, base), (False, base)):
                assert_scores(backend, wanted, ROWS, adapter=adapter)
        backend.unload_adapter("one")
        assert_scores(backend, base, ROWS)
    with corelm.get_backend("transformers", mine, tokenizer=tiny_tokenizer()) as backend:
        for adapter, wanted in ((False, base), (None, one), ("default", one), (False, base), (None, one)):
            found = assert_scores(backend, wanted, ROWS, adapter=adapter).logprobs.values
        with mine.disable_adapter():
            apart = assert_scores(backend, base, ROWS).logprobs.values - found
            assert_scores(backend, one, ROWS, adapter="default")
            assert_scores(backend, base, ROWS)
        assert_scores(backend, one, ROWS)
    assert float(apart.abs().max()) > 0.01


@pytest.mark.parametrize("tied", [False])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_switched_is_refused(name: str, folder: Path) -> None:
    kind, options, says = REFUSED[name]
    wrapped = trained(kind, options, 1)
    with corelm.get_backend("transformers", folder) as backend:
        with pytest.raises(CapabilityError, match=says):
            backend.load_adapter("one", wrapped)
        assert_scores(backend, model(), ROWS)
    # Prompts that are learnt are refused when the model is opened.
    with (
        pytest.raises(CapabilityError, match=says),
        corelm.get_backend("transformers", wrapped, tokenizer=tiny_tokenizer()) as backend,
    ):
        backend.score_logprobs(ROWS, adapter=False)


@pytest.mark.parametrize("tied", [False])
def test_adapters_may_be_in_different_layers(folder: Path) -> None:
    one, two = (
        trained("LNTuningConfig", {"target_modules": [name]}, seed)
        for seed, name in enumerate(("input_layernorm", "post_attention_layernorm"))
    )
    with corelm.get_backend("transformers", folder) as backend:
        backend.load_adapter("one", one)
        backend.load_adapter("two", two)
        for adapter, wanted in (("one", one), ("two", two), (None, model()), ("one", one)):
            assert_scores(backend, wanted, ROWS, adapter=adapter)


@pytest.mark.parametrize(
    ("options", "tied"),
    [
        ({"modules_to_save": ["embed_tokens", "lm_head"]}, False),
        pytest.param({"trainable_token_indices": {"embed_tokens": TOKENS}}, True, marks=pytest.mark.nightly),
    ],
)
def test_embeddings_that_were_saved_as_well_are_no_obstacle(
    options: dict[str, Any], tied: bool, folder: Path, tmp_path: Path
) -> None:
    one = trained("LoraConfig", LAYERS | options, 1, tie_word_embeddings=tied)
    one.save_pretrained(tmp_path / "one", save_embedding_layers=True)
    with corelm.get_backend("transformers", folder) as backend:
        backend.load_adapter("one", tmp_path / "one")
        for adapter, wanted in (("one", one), (None, model(tie_word_embeddings=tied))):
            assert_scores(backend, wanted, ROWS, adapter=adapter)


@pytest.mark.parametrize("tied", [True])
def test_a_second_adapter_of_tokens_is_refused_if_embeddings_are_tied(tied: bool, folder: Path) -> None:
    one, two = (trained(*METHODS["trainable tokens"], seed, tie_word_embeddings=tied) for seed in (1, 2))
    with corelm.get_backend("transformers", folder) as backend:
        backend.load_adapter("one", one)
        with pytest.raises(CapabilityError, match="unload"):
            backend.load_adapter("two", two)
        for adapter, wanted in (("one", one), (None, model(tie_word_embeddings=tied))):
            assert_scores(backend, wanted, ROWS, adapter=adapter)


def test_parameters_that_an_adapter_rewrites_are_named_as_the_cause() -> None:
    kind, options, _ = REFUSED["parameters"]
    wrapped = trained(kind, options, 1)
    with (
        corelm.get_backend("transformers", wrapped, tokenizer=tiny_tokenizer()) as backend,
        pytest.raises(CapabilityError, match="target_parameters"),
    ):
        backend.score_logprobs(ROWS)
