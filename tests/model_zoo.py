"""Tiny random configs of every causal language model of the installed Transformers, made generically."""

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.models import VOCABULARY

SIZES = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": 32,
    "hidden_dim": 32,
    "n_embd": 32,
    "d_model": 32,
    "embedding_size": 32,
    "intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "moe_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    "zero_expert_num": 2,
    "shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "n_inner": 48,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "n_ctx": 256,
    "sliding_window": 5,
    "attention_chunk_size": 6,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 12,
    "v_head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "dropout": 0.0,
    "hidden_dropout": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
    "residual_dropout": 0.0,
    "activation_dropout": 0.0,
    "layerdrop": 0.0,
    "is_decoder": True,
}


def model_types() -> list[str]:
    """The causal language model types whose attention goes through the attention interface."""
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if supports_interface(name)]


def other_types() -> list[str]:
    """The causal language model types with attention of their own."""
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if not supports_interface(name)]


def supports_interface(model_type: str) -> bool:
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    return bool(getattr(model_class, "_supports_attention_backend", False))


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MLA = {"num_key_value_heads": 4}  # latent attention expands its keys to all heads
EXCEPTIONS: dict[str, dict] = {
    "axk1": MLA,
    "axk2": MLA,
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "deepseek_v32": MLA,
    "dots3_note_text": MLA,
    "glm4_moe_lite": MLA,
    "glm_moe_dsa": MLA,
    "minicpm3": MLA,
    "sarvam_mla": MLA,
    "youtu": MLA,
    "longcat_flash": MLA | {"head_dim": 4},
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "attn_pdrop": 0.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "rope_parameters": ROPE,
    },
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "gemma3n_text": {"num_hidden_layers": 5, "num_kv_shared_layers": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
    "granitemoehybrid": {"mamba_n_heads": 4, "layer_types": ["attention", "attention"]},
    "ctrl": {"dff": 48},
}


# types of which no tiny model can be built and run alone, and why
NOT_BUILT = {
    "dots3_note": "its config keeps settings of layers that a tiny one lacks; see dots3_note_text",
    "gemma3n": "its vision tower needs the package timm; its language model is gemma3n_text",
    "gemma4_assistant": "it drafts tokens from the states of another model",
    "gemma4_unified_assistant": "it drafts tokens from the states of another model",
}


# compared in fp64 (through sdpa): scores that are not scaled put fp32's own noise above the tolerance
NEEDS_FP64 = {"gemma4", "gemma4_text", "gemma4_unified_text"}

# compared in evaluation mode: the router samples experts at random in training
RANDOM_IN_TRAINING = {"phimoe"}


def tiny_config(model_type: str):
    return shrink(CONFIG_MAPPING[model_type])


def shrink(config_class):
    """`config_class` with every size it has made tiny, its parts too."""
    changes = EXCEPTIONS.get(config_class.model_type, {})
    fields = set(getattr(config_class, "__dataclass_fields__", {}))
    sizes = {name: value for name, value in SIZES.items() if name in fields}
    parts = {}
    if names := getattr(config_class, "sub_configs", None):
        default = config_class()
        for name in names:
            part = type(getattr(default, name, None))
            if name not in changes and hasattr(part, "__dataclass_fields__"):
                parts[name] = shrink(part)
    return config_class(**{**sizes, **parts, **changes})
