"""Writes GGUF files by the published format, independently of the reader."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from tests.kit.checkpoints import CHATML, EOS, SPECIALS, make_tokenizer

TYPE_NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8}
ALIGNMENT = 32
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class Encoded(NamedTuple):
    kind: str
    shape: tuple[int, ...]
    data: bytes


class U32(int):
    """A number that the file holds as uint32."""


def metadata_for(config: dict[str, Any]) -> dict[str, Any]:
    """The metadata that llama.cpp's converter writes for such a model."""
    tokenizer = make_tokenizer()
    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    return {
        "general.architecture": "llama",
        "llama.context_length": U32(config["max_position_embeddings"]),
        "llama.embedding_length": U32(config["hidden_size"]),
        "llama.block_count": U32(config["num_hidden_layers"]),
        "llama.feed_forward_length": U32(config["intermediate_size"]),
        "llama.attention.head_count": U32(config["num_attention_heads"]),
        "llama.attention.head_count_kv": U32(config["num_key_value_heads"]),
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_theta"],
        "llama.rope.dimension_count": U32(config["head_dim"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "tokenizer.ggml.merges": _merges(),
        "tokenizer.ggml.bos_token_id": U32(tokens.index(SPECIALS[1])),
        "tokenizer.ggml.eos_token_id": U32(tokens.index(EOS)),
        "tokenizer.ggml.padding_token_id": U32(tokens.index(SPECIALS[0])),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }


def encode_weights(
    config: dict[str, Any], weights: dict[str, mx.array], kind: str
) -> tuple[dict[str, Encoded], dict[str, mx.array]]:
    """The tensors of the file, and their exact values under our names."""
    tensors, meant = {}, {}
    for name, array in weights.items():
        values = np.array(array)
        stored_as = "F32" if values.ndim == 1 else kind
        data, exact = encode(values, stored_as)
        meant[name] = mx.array(exact)
        if ".q_proj." in name or ".k_proj." in name:
            data, _ = encode(interleaved(values, config["head_dim"]), stored_as)
        tensors[gguf_name(name)] = Encoded(stored_as, values.shape, data)
    return tensors, meant


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.weight"
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{NAMES[part]}.weight"


def interleaved(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of Q or K as llama.cpp's converter permutes them."""
    halves = values.reshape(-1, 2, head_dim // 2, values.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def encode(values: np.ndarray, kind: str) -> tuple[bytes, np.ndarray]:
    """Bytes of a tensor, and the fp32 values that a reader must decode."""
    if kind in ("F32", "F16"):
        stored = values.astype(np.float32 if kind == "F32" else np.float16)
        return stored.tobytes(), stored.astype(np.float32)
    blocks = values.astype(np.float32).reshape(-1, 32)
    encoded, exact = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}[kind](blocks)
    return encoded, exact.astype(np.float32).reshape(values.shape)


def _q4_0(blocks: np.ndarray) -> tuple[bytes, np.ndarray]:
    scale = (np.abs(blocks).max(1, keepdims=True) / 7).astype(np.float16)
    codes = np.clip(np.round(blocks / scale.astype(np.float32)), -8, 7).astype(np.int8)
    packed = _nibbles((codes + 8).astype(np.uint8))
    return _rows(scale, packed), scale.astype(np.float32) * codes


def _q4_1(blocks: np.ndarray) -> tuple[bytes, np.ndarray]:
    low = blocks.min(1, keepdims=True).astype(np.float16)
    scale = ((blocks.max(1, keepdims=True) - low) / 15).astype(np.float16)
    codes = np.clip(np.round((blocks - low) / scale.astype(np.float32)), 0, 15).astype(np.uint8)
    exact = scale.astype(np.float32) * codes + low.astype(np.float32)
    return _rows(scale, low, _nibbles(codes)), exact


def _q8_0(blocks: np.ndarray) -> tuple[bytes, np.ndarray]:
    scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
    codes = np.clip(np.round(blocks / scale.astype(np.float32)), -127, 127).astype(np.int8)
    return _rows(scale, codes), scale.astype(np.float32) * codes


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Weights j and j + 16 share byte j."""
    return codes[:, :16] | codes[:, 16:] << 4


def _rows(*parts: np.ndarray) -> bytes:
    return np.concatenate([part.view(np.uint8) for part in parts], axis=1).tobytes()


def _merges() -> list[str]:
    return [" ".join(pair) for pair in json.loads(make_tokenizer().to_str())["model"]["merges"]]


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, Encoded]) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for name, value in metadata.items():
        head += string(name) + typed(value)
    body = b""
    for name, tensor in tensors.items():
        dims = struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape[::-1])
        head += string(name) + struct.pack("<I", len(tensor.shape)) + dims
        head += struct.pack("<IQ", TYPE_NUMBERS[tensor.kind], len(body))
        body += tensor.data + bytes(-len(tensor.data) % ALIGNMENT)
    path.write_bytes(head + bytes(-len(head) % ALIGNMENT) + body)
    return path


def string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def typed(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, U32):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + string(value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(string, value))
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
