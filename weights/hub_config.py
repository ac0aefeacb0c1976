"""ModelConfig -> config.json in the layout of released checkpoints (docs/molmo2.md 1.6)."""

from text.tokenizer import SPECIAL

SPECIAL_IDS = {
    "image_start_token_id": "im_start",
    "image_end_token_id": "im_end",
    "image_patch_id": "im_patch",
    "image_col_id": "im_col",
    "low_res_image_start_token_id": "low_res_im_start",
    "image_high_res_id": "im_patch",
    "image_low_res_id": "im_low",
    "frame_start_token_id": "frame_start",
    "frame_end_token_id": "frame_end",
}
COMMON = {
    "attention_dropout": 0.0,
    "attn_implementation": "sdpa",
    "initializer_range": 0.02,
    "residual_dropout": 0.0,
}


def hub_config(config, dtype):
    """ModelConfig -> config.json in the Hub's form, which transformers, vLLM and the official code
    all read. dtype: as a word, "bfloat16".

    Two values differ from the published files, which are wrong there (docs/molmo2.md 0.6, 1.6):
    frame tokens are on, and the ViT has as many blocks as there are weights for.
    """
    return {
        "architectures": ["Molmo2ForConditionalGeneration"],
        "model_type": "molmo2",
        "dtype": dtype,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_frame_special_tokens": True,
        **{key: config.n_vocab + SPECIAL.index(name) for key, name in SPECIAL_IDS.items()},
        "text_config": hub_text_config(config),
        **hub_vision_configs(config),
    }


def hub_text_config(config):
    yarn = config.yarn
    scaling = {
        "rope_type": "yarn",
        "factor": yarn.factor,
        "attention_factor": yarn.attention_factor,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "original_max_position_embeddings": yarn.original_max,
    }
    olmo = config.family == "olmo"
    return {
        **COMMON,
        "model_type": "molmo2_text",
        "hidden_size": config.n_embd,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head,
        "head_dim": config.head_dim,
        "intermediate_size": config.n_hidden,
        "vocab_size": config.n_vocab,
        "additional_vocab_size": config.n_extra,
        "norm_after": olmo,
        "use_qk_norm": True,
        "qk_norm_type": "olmo" if olmo else "qwen3",
        "qkv_bias": False,
        "hidden_act": "silu",
        "embedding_dropout": 0.0,
        "layer_norm_eps": config.eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling if yarn.layers else None,
        "rope_scaling_layers": list(yarn.layers) or None,
        "use_cache": True,
        "max_position_embeddings": 65536 if olmo else 36864,
    }


def hub_vision_configs(config):
    """-> vit_config and adapter_config."""
    vision = config.vision
    heads = {
        "num_attention_heads": vision.n_head,
        "num_key_value_heads": vision.n_head,
        "head_dim": vision.n_embd // vision.n_head,
    }
    shared = {
        **COMMON,
        **heads,
        "model_type": "molmo2",
        "hidden_size": vision.n_embd,
        "float32_attention": True,
    }
    vit = {
        **shared,
        "num_hidden_layers": vision.n_layer,
        "intermediate_size": vision.n_hidden,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": vision.eps,
        "image_default_input_size": [vision.crop, vision.crop],
        "image_patch_size": vision.patch,
        "image_num_pos": vision.n_patch,
    }
    adapter = {
        **shared,
        "intermediate_size": config.n_hidden,
        "text_hidden_size": config.n_embd,
        "vit_layers": list(vision.feature_layers),
        "hidden_act": "silu",
        "image_feature_dropout": 0.0,
        "pooling_attention_mask": True,
    }
    return {"vit_config": vit, "adapter_config": adapter}
