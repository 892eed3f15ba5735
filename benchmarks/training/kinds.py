"""The three kinds of model, as the `config.json` that mlx-lm reads."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["attention", "window", "hybrid"]
Config: TypeAlias = dict[str, Any]

KINDS: tuple[Kind, ...] = ("attention", "window", "hybrid")
VOCABULARY = 4096
MAX_PARAMETERS = 8_000_000

_SHARED: Config = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,  # of whole groups when keys and values are quantised
    "max_position_embeddings": 8192,
    "rope_theta": 100_000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
_OWN: dict[Kind, Config] = {
    "attention": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "window": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 512,
        "sliding_window_pattern": 3,
        "rope_local_base_freq": 10_000.0,
        "query_pre_attn_scalar": 64,
    },
    "hybrid": {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "full_attention_interval": 3,
        "partial_rotary_factor": 0.5,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 0,
        "shared_expert_intermediate_size": 0,
    },
}
_TINY: Config = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3}
_TINY_WINDOW: Config = {"sliding_window": 64}


def config_of(kind: Kind, tiny: bool = False) -> Config:
    """What is trained; a tiny one shows in a minute on a CPU that every step works."""
    config = _SHARED | _OWN[kind]
    if tiny:
        config |= _TINY | (_TINY_WINDOW if kind == "window" else {})
    return config
