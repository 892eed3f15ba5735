"""From a GGUF header to a config and names of the Hugging Face format, or to a reason why not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from keepwarm.errors import UnsupportedModel
from keepwarm.models.gguf.file import GGUFHeader, invalid_file, read_header
from keepwarm.models.gguf.tokenizer import find_scheme

ATTENTION = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
BIASES = {
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
}
HEAD_NORMS = {
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
# What mlx-lm's models do not do, and the values that ask for nothing.
UNREAD: Mapping[str, tuple[float, ...]] = {
    "attention.causal": (True,),
    "attention.scale": (0,),
    "pooling_type": (0, 3),  # none, and the last token
    "rope.scaling.attn_factor": (1,),
}
ROPE_FACTORS = "rope_freqs.weight"
# The factors that llama.cpp's converter writes for Llama 3.1 to 3.3 come from these.
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class Architecture(NamedTuple):
    name: str  # GGUF's and mlx-lm's
    hub_class: str
    layer: Mapping[str, str]  # tensors of a layer → the Hugging Face names of its parameters
    interleaves: bool = False  # rows of Q and K, for another kind of RoPE


ARCHITECTURES = {
    each.name: each
    for each in (
        Architecture("llama", "LlamaForCausalLM", ATTENTION, interleaves=True),
        Architecture("qwen2", "Qwen2ForCausalLM", ATTENTION | BIASES),
        Architecture("qwen3", "Qwen3ForCausalLM", ATTENTION | HEAD_NORMS),
    )
}


class GGUFPlan(NamedTuple):
    """What a file holds, in the words of the Hugging Face format."""

    architecture: Architecture
    config: dict[str, Any]
    names: dict[str, str]  # of tensors → of parameters


def plan(path: Path, header: GGUFHeader, data: npt.NDArray[Any]) -> GGUFPlan:
    """Raises unless every tensor and value is one that mlx-lm's model takes as it is meant."""
    architecture = _architecture(path, header)
    config = _config(path, header, architecture)
    if scaling := _rope_scaling(path, header, data, config):
        config["rope_scaling"] = scaling
    return GGUFPlan(architecture, config, _names(path, header, architecture, config))


def describe(path: Path) -> dict[str, Any]:
    """The config of the model in the file; raises if it cannot be loaded."""
    header = read_header(path)
    find_scheme(path, header.metadata)
    return plan(path, header, np.memmap(path, np.uint8, "r")).config


def _architecture(path: Path, header: GGUFHeader) -> Architecture:
    """Refuse models that would run but give wrong answers."""
    name, values = header.metadata.get("general.architecture"), header.metadata
    known = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if known is None:
        raise UnsupportedModel(
            f"{path} is of architecture {name!r}; GGUF files are read for "
            f"{', '.join(map(repr, ARCHITECTURES))} only, so use the model's MLX or Hugging Face "
            "directory."
        )
    if values.get(f"{name}.expert_count", 0):
        raise UnsupportedModel(f"{path} is a mixture of experts; load its directory instead.")
    if values.get(f"{name}.attention.sliding_window", 0):
        raise UnsupportedModel(f"{path} has a sliding window; load its directory instead.")
    for key, harmless in UNREAD.items():
        if (value := values.get(f"{name}.{key}")) not in (None, *harmless):
            raise UnsupportedModel(
                f"{path} has {name}.{key} {value!r}, which mlx-lm's {name} does not do, so its "
                "answers or vectors would be wrong; use another model."
            )
    if values.get("split.count", 0) not in (0, 1):
        raise UnsupportedModel(
            f"{path} is one of several parts; join them with llama.cpp's `llama-gguf-split "
            "--merge`, or load the model's directory."
        )
    return known


def _config(path: Path, header: GGUFHeader, architecture: Architecture) -> dict[str, Any]:
    name = architecture.name
    numbers = _PositiveNumbers(path, header.metadata, name)
    n_heads, hidden = numbers.count("attention.head_count"), numbers.count("embedding_length")
    vocabulary = header.tensors.get("token_embd.weight")
    if vocabulary is None:
        raise invalid_file(path, "tensor token_embd.weight is missing")
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > vocabulary.shape[0]:
        raise invalid_file(path, "it has more tokens than embeddings")
    return {
        "architectures": [architecture.hub_class],
        "model_type": name,
        "hidden_size": hidden,
        "intermediate_size": numbers.count("feed_forward_length"),
        "num_hidden_layers": numbers.count("block_count"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": numbers.count("attention.head_count_kv", n_heads),
        "head_dim": _head_dim(path, numbers, architecture, hidden // n_heads),
        "vocab_size": vocabulary.shape[0],
        "max_position_embeddings": numbers.count("context_length"),
        "rms_norm_eps": numbers.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": numbers.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_tokens(path, header.metadata),
    }


class _PositiveNumbers(NamedTuple):
    """Metadata values of an architecture that must be positive numbers."""

    path: Path
    metadata: dict[str, Any]
    architecture: str

    def number(self, name: str, default: float | None = None) -> float:
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if isinstance(value, int | float) and value > 0:
            return value
        raise invalid_file(
            self.path, f"its {self.architecture}.{name} is {value!r}, not a positive number"
        )

    def count(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if isinstance(value, int):
            return value
        raise invalid_file(
            self.path, f"its {self.architecture}.{name} is {value!r}, not a whole number"
        )


def _head_dim(
    path: Path, numbers: _PositiveNumbers, architecture: Architecture, default: int
) -> int:
    head_dim = numbers.count("attention.key_length", default)
    if numbers.count("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{path} has keys and values of different sizes; not supported.")
    if numbers.count("rope.dimension_count", head_dim) != head_dim or head_dim % 2:
        raise UnsupportedModel(
            f"{path} applies RoPE to a part of each head, which mlx-lm's {architecture.name} does "
            "not support."
        )
    if architecture.name == "qwen2" and head_dim != default:
        raise UnsupportedModel(
            f"{path} has heads of {head_dim}, and mlx-lm's qwen2 supports {default} only."
        )
    return head_dim


def _rope_scaling(
    path: Path, header: GGUFHeader, data: npt.NDArray[Any], config: dict[str, Any]
) -> dict[str, Any] | None:
    name = config["model_type"]
    kind = header.metadata.get(f"{name}.rope.scaling.type", "linear")  # llama.cpp's default
    numbers = _PositiveNumbers(path, header.metadata, name)
    factor = numbers.number("rope.scaling.factor", numbers.number("rope.scale_linear", 1.0))
    is_plain = kind == "none" or (kind == "linear" and factor == 1)
    if is_plain:
        return _llama3(path, header, data, config) if ROPE_FACTORS in header.tensors else None
    if kind == "linear" and ROPE_FACTORS not in header.tensors:
        return {"rope_type": "linear", "factor": factor}
    raise UnsupportedModel(
        f"{path} scales its RoPE by {kind!r}; load its Hugging Face directory instead."
    )


def _llama3(
    path: Path, header: GGUFHeader, data: npt.NDArray[Any], config: dict[str, Any]
) -> dict[str, Any]:
    """The factors of all frequencies are in the file, and are taken if they are Llama 3's."""
    tensor, half = header.tensors[ROPE_FACTORS], config["head_dim"] // 2
    if tensor.type.name != "F32" or tensor.shape != (half,):
        raise invalid_file(path, f"tensor {ROPE_FACTORS} is not {half} numbers of type F32")
    found = data[tensor.start : tensor.start + tensor.n_bytes].view(np.float32).astype(np.float64)
    factor = float(found.max())
    if not (factor >= 1 and np.allclose(found, _llama3_factors(config, factor), rtol=1e-4)):
        raise UnsupportedModel(
            f"{path} scales its RoPE in another way than Llama 3; load its Hugging Face directory."
        )
    return LLAMA3 | {"factor": factor}


def _llama3_factors(config: dict[str, Any], factor: float) -> npt.NDArray[np.float64]:
    """What each wavelength is multiplied by: short ones stay, long ones are stretched."""
    half, low, high = config["head_dim"] // 2, LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    with np.errstate(all="ignore"):  # a file may have any base
        wavelengths = 2 * np.pi * config["rope_theta"] ** (np.arange(half) / half)
        turns = LLAMA3["original_max_position_embeddings"] / wavelengths
        share = np.clip((turns - low) / (high - low), 0, 1)
    factors: npt.NDArray[np.float64] = 1 / ((1 - share) / factor + share)
    return factors


def _end_tokens(path: Path, metadata: dict[str, Any]) -> list[int]:
    """The ids of end of text, turn and message, as far as the file has them."""
    names = (f"tokenizer.ggml.{each}_token_id" for each in ("eos", "eot", "eom"))
    found = [metadata[name] for name in names if name in metadata]
    if not found or not all(isinstance(token, int) for token in found):
        raise invalid_file(path, "it has no end-of-text token")
    return list(dict.fromkeys(found))


def _names(
    path: Path, header: GGUFHeader, architecture: Architecture, config: dict[str, Any]
) -> dict[str, str]:
    """GGUF name → Hugging Face name; raises unless tensors and shapes are exactly as expected."""
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    if not config["tie_word_embeddings"]:
        names["output.weight"] = "lm_head.weight"
    for index in range(min(config["num_hidden_layers"], len(header.tensors))):
        for theirs, ours in architecture.layer.items():
            names[f"blk.{index}.{theirs}"] = f"model.layers.{index}.{ours}"
    shapes = _shapes(config)
    for name in names:
        _check(path, header, name, shapes[name.removeprefix("blk.").lstrip("0123456789.")])
    if extra := header.tensors.keys() - names.keys() - {ROPE_FACTORS}:
        raise UnsupportedModel(
            f"{path} has a tensor that is not part of a {architecture.name} model: {min(extra)}."
        )
    return names


def _check(path: Path, header: GGUFHeader, name: str, wanted: tuple[int, ...]) -> None:
    tensor = header.tensors.get(name)
    if tensor is None:
        raise invalid_file(path, f"tensor {name} is missing")
    if tensor.shape != wanted:
        raise invalid_file(path, f"tensor {name} is {tensor.shape}, not {wanted}")
    if len(wanted) == 1 and tensor.type.is_quantised:
        raise invalid_file(path, f"tensor {name} is quantised, and no norm or bias can be")


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    words = (config["vocab_size"], hidden)
    return {
        "token_embd.weight": words, "output.weight": words, "output_norm.weight": (hidden,),
        "attn_norm.weight": (hidden,), "ffn_norm.weight": (hidden,),
        "attn_q.weight": (queries, hidden), "attn_q.bias": (queries,),
        "attn_k.weight": (keys, hidden), "attn_k.bias": (keys,),
        "attn_v.weight": (keys, hidden), "attn_v.bias": (keys,),
        "attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,),
        "attn_output.weight": (hidden, queries),
        "ffn_gate.weight": (inner, hidden), "ffn_up.weight": (inner, hidden),
        "ffn_down.weight": (hidden, inner),
    }  # fmt: skip
