"""Models in the shape of real ones, with random weights.

The cost of a restore or a prefill depends on shapes, not on values.
"""

from __future__ import annotations

import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.requests.files import COPIED
from keepwarm.errors import UnknownModel
from keepwarm.models.catalog import read_config
from keepwarm.models.load import Model

BITS, GROUP = 4, 64
NO_EXPERTS: dict[str, Any] = {  # what a dense model of Qwen3-Next's kind says of them
    "num_experts": 0,
    "num_experts_per_tok": 0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 0,
    "shared_expert_intermediate_size": 0,
}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "gemma-3-12b": {
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "vocab_size": 262208,
        "rms_norm_eps": 1e-6,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131072,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e7,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    "hybrid-8b": {  # layers of Qwen3-Next, as many as a dense model of 8 billion has
        "model_type": "qwen3_next",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        **NO_EXPERTS,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e7,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
    },
    "small": {  # computes about as fast as a line of 50 MB/s brings its keys and values
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    "tiny-experts": {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
    "tiny-windows": {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
        "max_position_embeddings": 8192,
    },
    "tiny-hybrid": {  # three layers of four with a state
        "model_type": "qwen3_next",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.5,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        **NO_EXPERTS,
        "vocab_size": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
}


def build(shape: str, directory: Path, *, quantised: bool = True, seed: int = 0) -> Model:
    """A model of this shape; `directory` gets the files that identify it.

    Weights depend only on shape and seed.
    """
    config = config_of(shape)
    module = _random_module(config, quantised=quantised, seed=seed)
    path = _name_weights(directory / shape, {**config, "seed": seed, "quantised": quantised})
    return Model(shape, path, module, None, config, config["max_position_embeddings"])


def config_of(shape: str) -> dict[str, Any]:
    if shape not in SHAPES:
        raise UnknownModel(f"There is no shape {shape!r}; there are {', '.join(sorted(SHAPES))}.")
    return SHAPES[shape]


def _random_module(config: dict[str, Any], *, quantised: bool, seed: int) -> Any:
    home = import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    module = home.Model(home.ModelArgs.from_dict(config))
    module.set_dtype(mx.bfloat16 if mx.default_device() == mx.gpu else mx.float32)
    if quantised:
        nn.quantize(module, group_size=GROUP, bits=BITS)  # type: ignore[attr-defined]
    mx.eval(module)
    return module


def write_checkpoint(shape: str, tokenizer_of: Path, directory: Path) -> Path:
    """A model directory that servers load, with the vocabulary of another model; 4-bit on a GPU."""
    vocabulary = read_config(tokenizer_of)
    taken = ("vocab_size", "bos_token_id", "eos_token_id")
    config = config_of(shape) | {key: vocabulary[key] for key in taken if key in vocabulary}
    quantised = mx.default_device() == mx.gpu
    module = _random_module(config, quantised=quantised, seed=0)
    directory.mkdir(parents=True)
    for pattern in COPIED:
        for file in tokenizer_of.glob(pattern):
            shutil.copy(file, directory)
    weights: dict[str, mx.array] = dict(tree_flatten(module.parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    packed = {"quantization": {"group_size": GROUP, "bits": BITS}} if quantised else {}
    (directory / "config.json").write_text(json.dumps(config | packed))
    return directory


def make_tokenizer(shape: str, directory: Path) -> Any:
    """A tokenizer for every token id of the shape: bytes, then words without meaning."""
    n_vocab = SHAPES[shape]["vocab_size"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"w{i}" for i in range(n_vocab - len(alphabet)))]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1 << 20}
    (directory / "tokenizer_config.json").write_text(json.dumps(described))
    loaded = load_tokenizer(directory)
    loaded.eos_token_ids = set()  # answers end at their token limit
    return loaded


def _name_weights(path: Path, config: dict[str, Any]) -> Path:
    """Write a small file in place of the weights: it is equal if they are."""
    path.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config)
    (path / "config.json").write_text(text)
    words = mx.array(list(text.encode()), dtype=mx.uint8)
    mx.save_safetensors(str(path / "model.safetensors"), {"made_from": words})
    return path
