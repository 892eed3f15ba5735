"""Tiny random models of every cache kind in mlx-lm: fp32, seeded, evaluated, untied embeddings.

As few layers as show every kind of layer, and a later one of it where they differ: all tests pay
for each.

With tied random embeddings a model mostly repeats its input and every comparison passes.
`afm7` is left out for that reason (mlx-lm ties it, and it rounds K and V to 8 bits); its
ConcatenateKVCache is never in a prompt cache and is proven on `llama` instead.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.zoo.models import build, randomise

Model = Any  # an mlx.nn.Module, for which mlx has no types

VOCABULARY = 128
WINDOW = 32
CHUNK = 32

# Fields that nearly every config shares.
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
MLA: dict[str, Any] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}

CONFIGS: dict[str, dict[str, Any]] = {
    # KVCache; heads of 64 so that groups of 32 and 64 quantise.
    "llama": {"head_dim": 64},
    # No make_cache: the one kind of model on which `max_kv_size` has an effect.
    "qwen3": {"head_dim": 64},
    # RotatingKVCache, every fourth layer global.
    "gemma3_text": {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 4,
        "query_pre_attn_scalar": 16,
    },
    # RotatingKVCache and KVCache in turn, with attention sinks.
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # ArraysCache only.
    "mamba": {
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
        "intermediate_size": 128,
    },
    "mamba2": {
        "num_hidden_layers": 4,
        "num_heads": 8,
        "head_dim": 16,
        "intermediate_size": 128,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": (0.0, 100.0),
        "time_step_rank": "auto",
    },
    # ArraysCache, every fourth layer a KVCache.
    "qwen3_next": {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "partial_rotary_factor": 0.5,
    },
    # RotatingKVCache and ArraysCache in one model.
    "recurrent_gemma": {
        "head_dim": 16,
        "num_hidden_layers": 6,
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    # KVCache with K and V of different widths.
    "deepseek_v3": {
        **MLA,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
    },
    # CacheList of two KVCaches.
    "deepseek_v32": {
        **MLA,
        "index_head_dim": 32,
        "index_n_heads": 8,
        "index_topk": 16,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
    },
    # CacheList of an ArraysCache and a KVCache.
    "falcon_h1": {
        "head_dim": 16,
        "num_hidden_layers": 3,  # with two it answers nearly always the same
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_heads": 4,
        "mamba_n_groups": 1,
    },
    # ChunkedKVCache, every fourth layer a KVCache.
    "llama4": {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "attention_bias": False,
        "attention_chunk_size": CHUNK,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 96,
        "num_experts_per_tok": 1,
        "num_local_experts": 4,
        "rope_scaling": None,
        "use_qk_norm": True,
    },
    # Fewer caches than layers (the last ones read earlier caches) and two head sizes.
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 32,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCABULARY,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    # Its own LayerCache. Head sizes that are not multiples of 16 avoid its fp4 and fp8 rounding.
    "deepseek_v41": {
        "head_dim": 24,
        "num_hidden_layers": 4,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "o_groups": 2,
        "o_lora_rank": 32,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "compress_ratios": (0, 4, 4, 0),
        "kv_source_layer_ids": (1, 2),
        "index_source_layer_ids": (1, 2),
        "index_n_heads": 2,
        "index_head_dim": 24,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 4,
    },
}


def tiny(name: str, **changes: Any) -> Model:
    """A new tiny model of this architecture, with changes; equal calls give equal weights.

    One that is not here comes from the zoo, which has them all.
    """
    return ARCHITECTURES[name](**changes) if name in ARCHITECTURES else build(name, **changes)


def _build(name: str, **changes: Any) -> Model:
    arch = importlib.import_module(f"mlx_lm.models.{name}")
    config = {"model_type": name, **COMMON, **CONFIGS[name], **changes}
    if name == "llama4":
        config = {"model_type": name, "text_config": config}
    model: Model = arch.Model(arch.ModelArgs.from_dict(config))
    randomise(model)
    return model


ARCHITECTURES: dict[str, Callable[..., Model]] = {name: partial(_build, name) for name in CONFIGS}
# One model of each combination of layer kinds: rows, windows, states, states and rows together, and
# the same with states so large that only the last are kept.
LAYER_KINDS = ("llama", "gemma3_text", "mamba2", "falcon_h1", "qwen3_next")
# One model of each kind of cache: rows, windows of two classes, states of two, a composite.
CACHE_KINDS = ("llama", "gemma3_text", "llama4", "mamba2", "deepseek_v41", "falcon_h1")
