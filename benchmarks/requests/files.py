"""Model directories made for the bench, so that all targets run the same weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from keepwarm import config
from keepwarm.errors import BadInput
from keepwarm.models.catalog import locate, read_config
from keepwarm.models.load import load

ROOT = Path(__file__).parents[2]
COPIED = ("tokenizer*.json", "tokenizer.model", "special_tokens_map.json", "generation_config.json")
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def model_directory(name: str) -> Path:
    """The path of a model, which must have a `tokenizer.json` to count tokens with."""
    path = locate(name, config.load())
    if not (path / "tokenizer.json").is_file():
        raise BadInput(f"The bench needs a model directory with a tokenizer.json; {name} has none.")
    return path


def as_published(model: str) -> str:
    """A name or directory in a command, without the folders of this machine."""
    path = Path(model)
    if not path.is_absolute():
        return model
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def full_precision(source: Path, folder: Path) -> Path:
    """The weights in fp32, as Keepwarm runs them on a CPU; mlx-lm would not convert them."""
    if mx.default_device() == mx.gpu or _is_float32(source):
        return source
    target = _copy_tokenizer(source, folder / source.name)
    loaded = load(str(source))
    weights: dict[str, mx.array] = dict(tree_flatten(loaded.module.parameters()))
    mx.save_safetensors(str(target / "model.safetensors"), weights, {"format": "mlx"})
    _write_config(target, {k: v for k, v in read_config(source).items() if "quantization" not in k})
    return target


def _is_float32(source: Path) -> bool:
    for file in source.glob("model*.safetensors"):
        weights: Any = mx.load(str(file))  # lazy: reads names and dtypes only
        if any(array.dtype != mx.float32 for array in weights.values()):
            return False
    return True


def tiny_like(source: Path, folder: Path) -> Path:
    """Two layers of random weights with a real tokenizer: only the server costs time."""
    target = _copy_tokenizer(source, folder / "tiny")
    original = read_config(source)
    tokens = {key: original[key] for key in ("bos_token_id", "eos_token_id") if key in original}
    made = TINY | tokens | {"vocab_size": original["vocab_size"]}
    keys = iter(mx.random.split(mx.random.key(0), 64))
    weights = {
        name: mx.random.normal(shape, key=next(keys)) * shape[-1] ** -0.5
        if len(shape) > 1
        else mx.ones(shape)
        for name, shape in llama_shapes(made).items()
    }
    mx.save_safetensors(str(target / "model.safetensors"), weights, {"format": "mlx"})
    _write_config(target, made)
    return target


def llama_shapes(made: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The weights of a Llama with this config, under the names of the Hugging Face format."""
    wide, inner, n_vocab = made["hidden_size"], made["intermediate_size"], made["vocab_size"]
    n_queries = made["num_attention_heads"] * made["head_dim"]
    n_keys = made["num_key_value_heads"] * made["head_dim"]
    layer = {
        "self_attn.q_proj": (n_queries, wide),
        "self_attn.k_proj": (n_keys, wide),
        "self_attn.v_proj": (n_keys, wide),
        "self_attn.o_proj": (wide, n_queries),
        "mlp.gate_proj": (inner, wide),
        "mlp.up_proj": (inner, wide),
        "mlp.down_proj": (wide, inner),
        "input_layernorm": (wide,),
        "post_attention_layernorm": (wide,),
    }
    layers = {
        f"model.layers.{i}.{name}.weight": shape
        for i in range(made["num_hidden_layers"])
        for name, shape in layer.items()
    }
    ends: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (n_vocab, wide),
        "model.norm.weight": (wide,),
        "lm_head.weight": (n_vocab, wide),
    }
    return ends | layers


def _copy_tokenizer(source: Path, target: Path) -> Path:
    target.mkdir(parents=True, exist_ok=True)
    for pattern in COPIED:
        for file in source.glob(pattern):
            shutil.copy(file, target)
    return target


def _write_config(target: Path, made: dict[str, Any]) -> None:
    (target / "config.json").write_text(json.dumps(made))


def stop_tokens(source: Path) -> list[int]:
    """The tokens that end an answer."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = source / name
        ids = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        found |= set(ids) if isinstance(ids, list) else {ids} if ids is not None else set()
    return sorted(found)


def kv_bytes_per_token(source: Path) -> int | None:
    """Bytes of keys and values that a token adds, in layers with a window too; without states. None
    if the layout is unknown.
    """
    found = read_config(source)
    heads = found.get("num_key_value_heads") or found.get("num_attention_heads")
    if not heads or "num_hidden_layers" not in found:
        return None
    n_layers = found["num_hidden_layers"] // found.get("full_attention_interval", 1)
    width = found.get("head_dim") or found["hidden_size"] // found["num_attention_heads"]
    n_bytes = 2 if mx.default_device() == mx.gpu else 4
    return int(2 * n_layers * heads * width * n_bytes)
