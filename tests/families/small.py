"""Tiny sizes: values for configuration fields in general, and what single model types need.

Windows are 24 tokens, chunks 32, sparse attention keeps 16 positions and longrope switches at 64, so that rows of up to
140 ids cross every one of them.
"""

from typing import Any

VOCAB = 512
WINDOW = 24
CHUNK = 32
SWITCH = 64
PAD, START, EOS = 0, 1, 2

#: Field → value, for every configuration class that has the field.
FIELDS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "pad_token_id": PAD,
    "bos_token_id": START,
    "eos_token_id": EOS,
    # Not what checkpoints of encoders say, but the only way to use them as causal models.
    "is_decoder": True,
    # Width.
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "emb_dim", "lru_width"], 64),
    **dict.fromkeys(["intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim", "dff", "n_inner"], 96),
    **dict.fromkeys(["dim_ff", "d_inner", "ffn_hidden_size", "feed_forward_size", "intermediate_size_mlp"], 96),
    **dict.fromkeys(["dense_intermediate_size", "prefix_dense_intermediate_size"], 96),
    # Depth.
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"], 2),
    **dict.fromkeys(["encoder_layers", "num_encoder_layers", "num_decoder_layers"], 2),
    # Heads.
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"], 4),
    **dict.fromkeys(["decoder_attention_heads", "encoder_attention_heads", "swa_num_attention_heads"], 4),
    **dict.fromkeys(["num_encoder_attention_heads", "num_decoder_attention_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads"], 2),
    **dict.fromkeys(["head_dim", "swa_head_dim", "dim_head", "attention_head_size", "kv_channels"], 16),
    "query_pre_attn_scalar": 16,
    "rotary_dim": 8,
    # Multi-head latent attention.
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    # Context.
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"], 512),
    "max_target_positions": 512,
    **dict.fromkeys(["sliding_window", "sliding_window_size", "attention_window_size", "local_attention"], WINDOW),
    "window_size": WINDOW,
    **dict.fromkeys(["chunk_size", "mamba_chunk_size", "attention_chunk_size", "block_size"], CHUNK),
    "original_max_position_embeddings": SWITCH,
    "keep_window_size": WINDOW,
    # Sparse attention.
    "index_topk": 16,
    "index_head_dim": 16,
    # Many, so that hardly any position has a score of exactly 0: between equal scores the choice is arbitrary.
    "index_n_heads": 16,
    # Experts.
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"], 32),
    **dict.fromkeys(["shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"], 32),
    "expert_ffn_hidden_size": 32,
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "moe_topk", "moe_k"], 2),
    **dict.fromkeys(["n_group", "topk_group"], 1),
    "zero_expert_num": 2,
    "unpadded_vocab_size": VOCAB,
    "first_k_dense_replace": 1,
    "max_window_layers": 1,
    "use_sliding_window": True,
    # State spaces and linear attention.
    **dict.fromkeys(["state_size", "mamba_d_state", "ssm_state_size"], 8),
    **dict.fromkeys(["mamba_n_heads", "mamba_num_heads"], 8),
    **dict.fromkeys(["mamba_d_head", "mamba_head_dim"], 16),
    "n_groups": 2,
    **dict.fromkeys(["linear_num_key_heads", "linear_num_heads"], 2),
    "linear_num_value_heads": 4,
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"], 16),
    # Embeddings.
    **dict.fromkeys(["embedding_size", "input_embedding_size", "word_embed_proj_dim", "altup_rank"], 32),
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    **dict.fromkeys(["initializer_range", "init_std"], 0.15),
    "num_nextn_predict_layers": 0,
    # Vision and audio towers, which see no input here.
    **dict.fromkeys(["out_hidden_size", "adapter_out_dim", "adapter_in_dim", "adapter_input_size"], 64),
    **dict.fromkeys(["depth", "num_blocks"], 2),
    **dict.fromkeys(["embed_dim", "vision_output_dim", "projector_output_dim", "projector_input_dim"], 64),
    **dict.fromkeys(["mlp_dim", "ext_pw_out_channel", "depthwise_separable_out_channel", "nemo_conv_channels"], 64),
}

#: Fields whose type decides about each layer by a pattern; such a model has four layers.
PATTERNS = frozenset(
    {"layer_types", "mlp_layer_types", "layers_block_type", "sliding_window_pattern", "no_rope_layers", "indexer_types"}
)

_SLIDING_AND_FULL = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_MAMBA_AND_ATTENTION = ["linear_attention", "full_attention", "linear_attention", "full_attention"]

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = _ROPE | {"mrope_section": [4, 2, 2]}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
    "long_factor": [2.0 + 0.5 * pair for pair in range(8)],
    "original_max_position_embeddings": SWITCH,
}

#: Model type → what it needs or should have in addition.
TYPES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1], "mamba_d_head": 16},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {
        # Its plain forward makes a cache, which asks for this field.
        "num_hidden_layers": 2,
        "encoder_hash_byte_group_vocab": 64,
        "encoder_config": {"hidden_size_global": 64},
        "decoder_config": {"hidden_size_global": 64},
    },
    "cohere_compass_text": {
        "layer_types": _SLIDING_AND_FULL,
        "rope_parameters": dict.fromkeys(["sliding_attention", "full_attention"], _MROPE),
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {"vision_config": {"mlp_layer_types": ["dense", "dense"]}},
    "dots3_note_text": {
        "head_dim": 24,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": _SLIDING_AND_FULL, "laurel_rank": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": _MAMBA_AND_ATTENTION},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": _MAMBA_AND_ATTENTION, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "llama4_text": {"floor_scale": 16},
    "longcat_flash": {"head_dim": 8, "qk_head_dim": 24},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "phi3": {"rope_parameters": _LONGROPE},
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 1,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "axial_pos_shape": [16, 32],
        "axial_pos_embds_dim": [16, 48],
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 32,
        "lsh_attn_chunk_length": 32,
    },
    "roformer": {"embedding_size": 64},
    **{name: {"rope_parameters": _MROPE} for name in ("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text")},
    "xlm": {"causal": True, "is_encoder": True},
    "xlstm": {"v_dim_factor": 1.0, "qk_dim_factor": 1.0, "chunk_size": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
