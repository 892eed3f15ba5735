"""Llama models in GGUF files, in the names and layout of the Hugging Face format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.nn.layers.quantized import quantize
from mlx_lm.models import llama

from keepwarm.device.space import require_memory
from keepwarm.errors import UnsupportedModel
from keepwarm.models.gguf.file import GGUFHeader, invalid_file, read_header, to_arrays
from keepwarm.models.gguf.tokenizer import write_tokenizer

LAYER = {
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


class GGUFModel(NamedTuple):
    config: dict[str, Any]
    weights: dict[str, mx.array]
    metadata: dict[str, Any]


def read(path: Path) -> GGUFModel:
    """Config and weights under their Hugging Face names; quantised weights stay quantised."""
    header = read_header(path)
    config = _config(path, header)
    names = _names(path, header, config)
    if quantised := _quantised(header, names):
        config["quantization"] = {"group_size": 32, "bits": 4, **quantised}
    require_memory(f"Reading {path}", path.stat().st_size)
    data = np.memmap(path, np.uint8, "r")
    weights = {}
    for theirs, ours in names.items():
        for part, array in to_arrays(header.tensors[f"{theirs}.weight"], data).items():
            weights[f"{ours}.{part}"] = _rearrange(ours, array, config)
    return GGUFModel(config, weights, header.metadata)


def build(model: GGUFModel) -> Any:
    """mlx-lm's model with these weights."""
    config = model.config
    module = llama.Model(llama.ModelArgs.from_dict(config))
    quantised = config.get("quantization", {})
    quantize(module, class_predicate=lambda path, _: quantised.get(path, False))
    module.load_weights(list(model.weights.items()))
    module.eval()
    return module


def convert(path: Path, directory: Path) -> None:
    """Write a model directory that mlx-lm loads."""
    model = read(path)
    mx.save_safetensors(str(directory / "model.safetensors"), model.weights, {"format": "mlx"})
    _write_json(directory / "config.json", model.config)
    _write_json(
        directory / "generation_config.json", {"eos_token_id": model.config["eos_token_id"]}
    )
    write_tokenizer(path, model.metadata, directory)


def _config(path: Path, header: GGUFHeader) -> dict[str, Any]:
    _refuse_variants(path, header)
    numbers = _PositiveNumbers(path, header.metadata)
    n_heads = numbers.count("llama.attention.head_count")
    hidden = numbers.count("llama.embedding_length")
    head_dim = numbers.count("llama.attention.key_length", hidden // n_heads)
    if header.metadata.get("llama.rope.dimension_count", head_dim) != head_dim or head_dim % 2:
        raise UnsupportedModel(
            f"{path} applies RoPE to a part of each head, which mlx-lm's Llama does not support."
        )
    vocabulary = header.tensors.get("token_embd.weight")
    if vocabulary is None:
        raise invalid_file(path, "tensor token_embd.weight is missing")
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > vocabulary.shape[0]:
        raise invalid_file(path, "it has more tokens than embeddings")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": numbers.count("llama.feed_forward_length"),
        "num_hidden_layers": numbers.count("llama.block_count"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": numbers.count("llama.attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "vocab_size": vocabulary.shape[0],
        "max_position_embeddings": numbers.count("llama.context_length"),
        "rms_norm_eps": numbers.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": numbers.number("llama.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_tokens(path, header.metadata),
    }


class _PositiveNumbers(NamedTuple):
    """Metadata values that must be positive numbers."""

    path: Path
    metadata: dict[str, Any]

    def number(self, name: str, default: float | None = None) -> float:
        value = self.metadata.get(name, default)
        if isinstance(value, int | float) and value > 0:
            return value
        raise invalid_file(self.path, f"its {name} is {value!r}, not a positive number")

    def count(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if isinstance(value, int):
            return value
        raise invalid_file(self.path, f"its {name} is {value!r}, not a whole number")


def _refuse_variants(path: Path, header: GGUFHeader) -> None:
    """Refuse models that would run but give wrong answers."""
    architecture = header.metadata.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedModel(
            f"{path} is of architecture {architecture!r}; only 'llama' is supported in GGUF files, "
            f"so use the model's MLX or Hugging Face directory."
        )
    scaling = header.metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in header.tensors:
        raise UnsupportedModel(f"{path} scales its RoPE; load its Hugging Face directory instead.")
    if header.metadata.get("llama.expert_count", 0):
        raise UnsupportedModel(f"{path} is a mixture of experts; load its directory instead.")


def _end_tokens(path: Path, metadata: dict[str, Any]) -> list[int]:
    """The ids of end of text and end of turn, as far as the file has them."""
    names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    found = [metadata[name] for name in names if name in metadata]
    if not found or not all(isinstance(token, int) for token in found):
        raise invalid_file(path, "it has no end-of-text token")
    return list(dict.fromkeys(found))


def _names(path: Path, header: GGUFHeader, config: dict[str, Any]) -> dict[str, str]:
    """GGUF name → Hugging Face name; raises unless tensors and shapes are exactly as expected."""
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    if not config["tie_word_embeddings"]:
        names["output"] = "lm_head"
    for index in range(min(config["num_hidden_layers"], len(header.tensors))):
        for theirs, ours in LAYER.items():
            names[f"blk.{index}.{theirs}"] = f"model.layers.{index}.{ours}"
    shapes = _shapes(config)
    for name in names:
        tensor, wanted = header.tensors.get(f"{name}.weight"), shapes[name.rpartition(".")[2]]
        if tensor is None:
            raise invalid_file(path, f"tensor {name}.weight is missing")
        if tensor.shape != wanted:
            raise invalid_file(path, f"tensor {name}.weight is {tensor.shape}, not {wanted}")
        if len(wanted) == 1 and tensor.type.bits:
            raise invalid_file(path, f"tensor {name}.weight is quantised, and no norm can be")
    if extra := header.tensors.keys() - {f"{name}.weight" for name in names}:
        raise UnsupportedModel(
            f"{path} has a tensor that is not part of a Llama model: {min(extra)}."
        )
    return names


def _quantised(header: GGUFHeader, names: dict[str, str]) -> dict[str, dict[str, int]]:
    types = {ours: header.tensors[f"{theirs}.weight"].type for theirs, ours in names.items()}
    return {
        name: {"group_size": kind.block, "bits": kind.bits}
        for name, kind in types.items()
        if kind.bits
    }


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    words = (config["vocab_size"], hidden)
    return {
        "token_embd": words, "output": words, "output_norm": (hidden,),
        "attn_norm": (hidden,), "ffn_norm": (hidden,),
        "attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
    }  # fmt: skip


def _rearrange(name: str, array: mx.array, config: dict[str, Any]) -> mx.array:
    """Rows of Q and K as two halves per head; GGUF interleaves them for its kind of RoPE."""
    if name.endswith((".q_proj", ".k_proj")):
        pairs = array.reshape(-1, config["head_dim"] // 2, 2, array.shape[-1])
        return pairs.swapaxes(1, 2).reshape(array.shape)
    return _to_float16(array)


def _to_float16(array: mx.array) -> mx.array:
    """fp16 if nothing is lost: one fp32 norm would make a GPU compute everything in fp32."""
    narrow = array.astype(mx.float16)
    same = array.ndim == 1 and mx.array_equal(narrow.astype(mx.float32), array).item()
    return narrow if same else array


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2))
