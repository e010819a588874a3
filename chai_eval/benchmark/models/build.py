"""A small random model of every causal type that transformers has."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LAYERS, HEADS, VOCABULARY, POSITIONS, WINDOW = 4, 4, 288, 512, 24
# A field that was forgotten here would make a model of billions of parameters.
MOST_PARAMETERS = 8_000_000

# What fields of a config are set to, where a type has them. Their names differ, what they mean does not.
_SIZES: tuple[tuple[Any, str], ...] = (
    (64, "hidden_size n_embd d_model embedding_size input_embedding_size output_embedding_size word_embed_proj_dim "
         "emb_dim embedding_dim lru_width"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_blocks "
             "num_decoder_layers num_encoder_layers"),
    (HEADS, "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads "
            "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads "
            "swa_num_attention_heads linear_num_heads linear_num_value_heads"),
    (HEADS // 2, "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads"),
    (16, "head_dim swa_head_dim kv_channels d_head dim_head attention_head_size linear_head_dim "
         "linear_key_head_dim linear_value_head_dim"),
    (96, "intermediate_size ffn_dim dff dim_ff d_inner ffn_hidden_size intermediate_size_mlp decoder_ffn_dim "
         "encoder_ffn_dim feed_forward_size dense_intermediate_size"),
    (32, "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size "
         "shared_experts_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size "
         "router_hidden_size"),
    (8, "mamba_n_heads n_mamba_heads mamba_num_heads"),
    (16, "mamba_d_head mamba_headdim mamba_head_dim mamba_d_state state_size ssm_state_size chunk_size "
         "mamba_chunk_size"),
    (128, "mamba_d_ssm"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k"),
    (1, "n_group topk_group num_expert_group n_shared_experts num_shared_experts first_k_dense_replace "
        "num_dense_layers"),
    (VOCABULARY, "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size"),
    (POSITIONS, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions model_max_length "
                "context_length original_max_position_embeddings"),
    (0.2, "initializer_range init_std"),
    (32, "q_lora_rank o_lora_rank laurel_rank hidden_size_per_layer_input ple_embed_dim hc_lowrank gated_norm_rank "
         "loop_gate_rank"),
    (16, "kv_lora_rank qk_head_dim index_topk index_head_dim"),
    (8, "qk_rope_head_dim qk_nope_head_dim"),
    (12, "v_head_dim"),
    (LAYERS // 2, "max_window_layers"),
    (True, "use_sliding_window is_decoder"),
    (0, "pad_token_id"),
    (1, "bos_token_id"),
    (2, "index_n_heads sliding_window_pattern _sliding_window_pattern global_attn_every_n_layers "
        "no_rope_layer_interval eos_token_id"),
)  # fmt: skip
# State spaces have heads times head dimension twice the hidden size.
SIZES = {name: value for value, names in _SIZES for name in names.split()}

# How far a query looks: these are what texts are longer than.
WINDOWS = (
    "sliding_window", "sliding_window_size", "attention_chunk_size", "attention_window_size", "local_attention",
    "window_size", "keep_window_size", "local_attention_window_len",
)  # fmt: skip

# Multi-head latent attention: as many keys as queries, and a head dimension that is only that of the turned part.
LATENT = {"num_key_value_heads": HEADS, "head_dim": 8}
SLIDING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
LINEAR = ["linear_attention", "full_attention"] * (LAYERS // 2)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
           "indexer_compress_ratio": 4}  # fmt: skip

# What a type needs besides.
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        "encoder_hash_byte_group_vocab": VOCABULARY,
        "global_config": {"hidden_size": 128, "head_dim": 32},
        "decoder_config": {"hidden_size_global": 128},
        "encoder_config": {"hidden_size_global": 128},
    },
    "codegen": {"rotary_dim": 8},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0},
    "cohere2_moe": {"logit_scale": 1.0},
    "cohere_compass_text": {
        "layer_types": SLIDING,
        "rope_parameters": {name: {**ROPE, "mrope_section": [4, 2, 2]} for name in SLIDING},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96},
    },
    "dots3_note": {
        "vision_config": {"per_layer_config": {}, "adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 16},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": LINEAR},
    "inkling_text": {"logits_mup_width_multiplier": 1.0},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"layer_types": SLIDING},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "mellum": {"layer_types": SLIDING},
    "ministral": {"layer_types": SLIDING},
    "qwen2_moe": {"layer_types": SLIDING},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "reformer": {"attn_layers": ["local", "lsh"] * 2, "axial_pos_embds": False},
    "roc_bert": {"shape_vocab_size": 288, "shape_embed_dim": 16, "pronunciation_embed_dim": 16},
    "rwkv": {"attention_hidden_size": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid_sliding", "hybrid"] * 2},
}


def kinds() -> list[str]:
    """Every causal model type of the installed transformers."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def windows(config: PretrainedConfig) -> list[str]:
    """Names of the fields that bound how far a query looks."""
    text = config.get_text_config(decoder=True)
    return [name for name in WINDOWS if hasattr(text, name)]


def _fields(default: PretrainedConfig, window: int) -> dict[str, Any]:
    named = {default.attribute_map.get(name, name): value for name, value in SIZES.items()}
    named |= {default.attribute_map.get(name, name): window for name in WINDOWS}
    known = default.to_dict()
    fields = {name: value for name, value in named.items() if name in known}
    if len(set(known.get("layer_types") or ())) > 1:
        different = list(dict.fromkeys(known["layer_types"]))
        fields["layer_types"] = [different[layer % len(different)] for layer in range(LAYERS)]
    if "kv_lora_rank" in known:
        fields |= {name: value for name, value in LATENT.items() if name in known}
    for name in default.sub_configs:
        if isinstance(inner := getattr(default, name, None), PretrainedConfig):
            fields[name] = _fields(inner, window)
    for name, value in SPECIAL.get(default.model_type, {}).items():
        fields[name] = {**fields[name], **value} if isinstance(fields.get(name), dict) else value
    return fields


def small_model(kind: str, window: int = WINDOW) -> PreTrainedModel:
    """A small model of a type, with every window or chunk `window` tokens wide and random weights, always the same.

    Raises whatever transformers does where the type can't be built so, and ValueError where it isn't small: a field of
    the config stands neither in `SIZES` nor in `SPECIAL`.
    """
    config = AutoConfig.for_model(kind, **_fields(AutoConfig.for_model(kind), window))
    with torch.device("meta"):
        size = sum(each.numel() for each in AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for each in model.parameters():
            if each.numel() > 1 and bool((each == each.flatten()[0]).all()):
                each += 0.1 * torch.randn_like(each)  # a part that begins as noughts could be left out unseen
    return model
