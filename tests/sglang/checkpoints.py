"""config.json of the checkpoints that the shipped profiles name, without weights."""

import json
from pathlib import Path

_LATENT = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_TEXT = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    **_LATENT,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "vocab_size": 163840,
    "max_position_embeddings": 262144,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "torch_dtype": "bfloat16",
}
_INT4 = {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group", "symmetric": True}
_NVFP4 = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
KIMI_INT4 = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": _TEXT
    | {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4}},
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
        }
    },
    "vision_config": {"vt_num_hidden_layers": 27, "vt_hidden_size": 1152},
}
KIMI_NVFP4 = KIMI_INT4 | {
    "text_config": _TEXT,
    "quantization_config": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _NVFP4}},
        "ignore": ["lm_head", "*self_attn*", "*shared_experts*"],
    },
}
KIMI_DFLASH = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 6,
    "hidden_size": 7168,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 18432,
    "vocab_size": 163840,
    "max_position_embeddings": 262144,
    "block_size": 8,
    "num_target_layers": 61,
    "dflash_config": {"target_layer_ids": [1, 12, 24, 35, 47, 58], "mask_token_id": 163838},
    "torch_dtype": "bfloat16",
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN3_DFLASH = QWEN3 | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 5,
    "block_size": 16,
    "num_target_layers": 36,
    "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669},
}
CONFIGS = {
    "kimi-k2.6-int4": KIMI_INT4,
    "kimi-k2.6-nvfp4": KIMI_NVFP4,
    "kimi-k2.6-dflash": KIMI_DFLASH,
    "qwen3-8b": QWEN3,
    "qwen3-8b-dflash-b16": QWEN3_DFLASH,
}


def write(folder: Path) -> dict[str, Path]:
    """A folder with a config.json for each shape, by the shape's name."""
    for name, config in CONFIGS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return {name: folder / name for name in CONFIGS}
