"""GGUF files of the Llama architecture, read into the names and layout of the Hugging Face format.

Read here and not by `mx.load`, which opens the file for writing (a read-only one fails) and
trusts every count and offset in it (a bad one ends the process).
"""

from __future__ import annotations

import json
import mmap
import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.nn.layers.quantized import quantize
from mlx_lm.models import llama

from keepwarm.engine.gguf_tokenizer import broken, write_tokenizer
from keepwarm.engine.space import require_memory
from keepwarm.errors import BadModelFile, UnsupportedModel

SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
STRING, ARRAY = 8, 9
LARGEST_RANK = 4

Bytes = npt.NDArray[Any]


class TensorType(NamedTuple):
    name: str
    block: int  # weights in a block
    n_bytes: int  # of a block
    bits: int  # of a quantised weight, or 0


TYPES = {
    0: TensorType("F32", 1, 4, 0),
    1: TensorType("F16", 1, 2, 0),
    2: TensorType("Q4_0", 32, 18, 4),
    3: TensorType("Q4_1", 32, 20, 4),
    8: TensorType("Q8_0", 32, 34, 8),
}
OTHER_TYPES = {
    6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    20: "IQ4_NL", 23: "IQ4_XS", 30: "BF16", 39: "MXFP4",
}  # fmt: skip

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


class Tensor(NamedTuple):
    shape: tuple[int, ...]  # rows first, as MLX has it
    type: TensorType
    start: int  # in the file

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) // self.type.block * self.type.n_bytes


class Header(NamedTuple):
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


class Checkpoint(NamedTuple):
    config: dict[str, Any]
    weights: dict[str, mx.array]
    metadata: dict[str, Any]


def read(path: Path) -> Checkpoint:
    """Config and weights under the names of the Hugging Face format; quantised ones stay so."""
    header = read_header(path)
    config = _config(path, header)
    names = _names(path, header, config)
    require_memory(f"Reading {path}", path.stat().st_size)
    data = np.memmap(path, np.uint8, "r")
    weights = {}
    for theirs, ours in names.items():
        for part, array in _arrays(header.tensors[f"{theirs}.weight"], data).items():
            weights[f"{ours}.{part}"] = _arranged(ours, array, config)
    return Checkpoint(config, weights, header.metadata)


def build(checkpoint: Checkpoint) -> Any:
    """mlx-lm's model with these weights, quantised where they are."""
    config = checkpoint.config
    module = llama.Model(llama.ModelArgs.from_dict(config))
    quantised = config.get("quantization", {})
    quantize(module, class_predicate=lambda path, _: quantised.get(path, False))
    module.load_weights(list(checkpoint.weights.items()))
    module.eval()
    return module


def convert(path: Path, directory: Path) -> None:
    """Write the file as a model directory that mlx-lm loads as it is."""
    checkpoint = read(path)
    mx.save_safetensors(str(directory / "model.safetensors"), checkpoint.weights, {"format": "mlx"})
    _write_json(directory / "config.json", checkpoint.config)
    _write_json(
        directory / "generation_config.json", {"eos_token_id": checkpoint.config["eos_token_id"]}
    )
    write_tokenizer(path, checkpoint.metadata, directory)


# ---- the header


class _Cursor:
    """Reads forward in a file and never past its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def take(self, n_bytes: int) -> bytes:
        if n_bytes > len(self.data) - self.at:
            raise _cut_off(self.path)
        self.at += n_bytes
        return self.data[self.at - n_bytes : self.at]

    def numbers(self, code: str, n: int) -> tuple[Any, ...]:
        # The length is checked before the format is built: n is whatever the file says.
        return struct.unpack(f"<{n}{code}", self.take(n * struct.calcsize(f"<{code}")))

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def string(self) -> str:
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError as error:
            raise broken(self.path, "a name in its header is not UTF-8") from error

    def value(self) -> Any:
        kind = self.number("I")
        if kind == ARRAY:
            kind, n = self.number("I"), self.number("Q")
            if kind in SCALARS:
                return list(self.numbers(SCALARS[kind], n))
            if kind == STRING:
                return [self.string() for _ in range(n)]
        elif kind == STRING:
            return self.string()
        elif kind in SCALARS:
            return self.number(SCALARS[kind])
        raise broken(self.path, f"its header has a value of unknown type {kind}")


def read_header(path: Path) -> Header:
    """Metadata and tensor shapes, after checking that all of the file is where it says."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise BadModelFile(f"{path} is not a GGUF file: it does not begin with GGUF.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read_header(_Cursor(path, data))


def _read_header(cursor: _Cursor) -> Header:
    cursor.take(4)
    version = cursor.number("I")
    if version not in (2, 3):
        raise UnsupportedModel(f"{cursor.path} is GGUF version {version}; 2 and 3 can be read.")
    n_tensors, n_values = cursor.numbers("Q", 2)
    metadata = {}
    for _ in range(n_values):
        name = cursor.string()
        metadata[name] = cursor.value()
    infos = [_read_info(cursor) for _ in range(n_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise broken(cursor.path, f"its alignment is {alignment!r}, not a power of two")
    base = -(-cursor.at // alignment) * alignment
    tensors = {name: tensor._replace(start=base + tensor.start) for name, tensor in infos}
    if len(tensors) < n_tensors:
        raise broken(cursor.path, "two of its tensors have the same name")
    if any(tensor.start + tensor.n_bytes > len(cursor.data) for tensor in tensors.values()):
        raise _cut_off(cursor.path)
    return Header(metadata, tensors)


def _read_info(cursor: _Cursor) -> tuple[str, Tensor]:
    name, rank = cursor.string(), cursor.number("I")
    if not 1 <= rank <= LARGEST_RANK:
        raise broken(cursor.path, f"tensor {name} has {rank} dimensions")
    shape = cursor.numbers("Q", rank)[::-1]
    number, offset = cursor.number("I"), cursor.number("Q")
    if number not in TYPES:
        kind = OTHER_TYPES.get(number, f"number {number}")
        raise UnsupportedModel(
            f"{cursor.path} has tensors of type {kind}; F32, F16, Q4_0, Q4_1 and Q8_0 can be read."
        )
    if not all(shape) or shape[-1] % TYPES[number].block:
        raise broken(cursor.path, f"tensor {name} has the impossible shape {shape}")
    return name, Tensor(shape, TYPES[number], offset)


def _cut_off(path: Path) -> BadModelFile:
    return BadModelFile(f"{path} is cut off: it ends before its header says; fetch it again.")


# ---- tensors


def _arrays(tensor: Tensor, data: Bytes) -> dict[str, mx.array]:
    """The tensor as MLX holds it: packed weights, scales and biases if it is quantised."""
    raw = data[tensor.start : tensor.start + tensor.n_bytes]
    if not tensor.type.bits:
        dtype = np.float32 if tensor.type.name == "F32" else np.float16
        return {"weight": mx.array(raw.view(dtype).reshape(tensor.shape))}
    blocks = raw.reshape(-1, tensor.type.n_bytes)
    scales, biases, values = _dequantising(tensor.type.name, blocks)
    rows = tensor.shape[:-1]
    return {
        "weight": mx.array(values.view(np.uint32).reshape(*rows, -1)),
        "scales": mx.array(scales.reshape(*rows, -1)),
        "biases": mx.array(biases.reshape(*rows, -1)),
    }


def _dequantising(kind: str, blocks: Bytes) -> tuple[Bytes, Bytes, Bytes]:
    """Scale, bias and packed values of each block: a weight is scale * value + bias."""
    scales = blocks[:, :2].copy().view(np.float16)
    if kind == "Q8_0":
        return scales, scales * np.float16(-128), blocks[:, 2:] ^ 0x80
    if kind == "Q4_0":
        return scales, scales * np.float16(-8), _in_order(blocks[:, 2:])
    return scales, blocks[:, 2:4].copy().view(np.float16), _in_order(blocks[:, 4:])


def _in_order(packed: Bytes) -> Bytes:
    """GGUF's byte j holds weights j and j + 16; MLX's holds neighbours."""
    values = np.concatenate([packed & 15, packed >> 4], axis=1)
    ordered: Bytes = values[:, 0::2] | values[:, 1::2] << 4
    return ordered


# ---- what the header says of the model


def _config(path: Path, header: Header) -> dict[str, Any]:
    _refuse_variants(path, header)
    need = _Needed(path, header.metadata)
    n_heads = need.count("llama.attention.head_count")
    hidden = need.count("llama.embedding_length")
    head_dim = need.count("llama.attention.key_length", hidden // n_heads)
    if header.metadata.get("llama.rope.dimension_count", head_dim) != head_dim or head_dim % 2:
        raise UnsupportedModel(f"{path} turns only a part of each head (RoPE); MLX's Llama cannot.")
    vocabulary = header.tensors.get("token_embd.weight")
    if vocabulary is None:
        raise broken(path, "tensor token_embd.weight is missing")
    if len(header.metadata.get("tokenizer.ggml.tokens", [])) > vocabulary.shape[0]:
        raise broken(path, "it has more tokens than embeddings")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": need.count("llama.feed_forward_length"),
        "num_hidden_layers": need.count("llama.block_count"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": need.count("llama.attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "vocab_size": vocabulary.shape[0],
        "max_position_embeddings": need.count("llama.context_length"),
        "rms_norm_eps": need.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": need.number("llama.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_tokens(path, header.metadata),
    }


class _Needed(NamedTuple):
    """Metadata that must be numbers above 0."""

    path: Path
    metadata: dict[str, Any]

    def number(self, name: str, default: float | None = None) -> float:
        value = self.metadata.get(name, default)
        if isinstance(value, int | float) and value > 0:
            return value
        raise broken(self.path, f"its {name} is {value!r}, not a number above 0")

    def count(self, name: str, default: int | None = None) -> int:
        return int(self.number(name, default))


def _refuse_variants(path: Path, header: Header) -> None:
    """What would run and give wrong answers is refused by name."""
    architecture = header.metadata.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedModel(
            f"{path} is of architecture {architecture!r}; from GGUF only 'llama' can be loaded, "
            f"so use the model's MLX or Hugging Face directory."
        )
    scaling = header.metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in header.tensors:
        raise UnsupportedModel(f"{path} scales its RoPE; load its Hugging Face directory instead.")
    if header.metadata.get("llama.expert_count", 0):
        raise UnsupportedModel(f"{path} is a mixture of experts; load its directory instead.")


def _end_tokens(path: Path, metadata: dict[str, Any]) -> list[int]:
    """End of text and end of turn, whichever are named."""
    names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    found = [metadata[name] for name in names if name in metadata]
    if not found:
        raise broken(path, "it names no end-of-text token")
    return list(dict.fromkeys(found))


def _names(path: Path, header: Header, config: dict[str, Any]) -> dict[str, str]:
    """GGUF name → our name, without the part; also records what is quantised in `config`."""
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    if config["tie_word_embeddings"]:
        del names["output"]
    for index in range(min(config["num_hidden_layers"], len(header.tensors))):
        names |= {
            f"blk.{index}.{theirs}": f"model.layers.{index}.{ours}"
            for theirs, ours in LAYER.items()
        }
    shapes = _shapes(config)
    quantised: dict[str, Any] = {}
    for theirs, ours in names.items():
        tensor = header.tensors.get(f"{theirs}.weight")
        if tensor is None:
            raise broken(path, f"tensor {theirs}.weight is missing")
        wanted = shapes[theirs.rpartition(".")[2]]
        if tensor.shape != wanted:
            raise broken(path, f"tensor {theirs}.weight is {tensor.shape}, not {wanted}")
        if tensor.type.bits:
            quantised[ours] = {"group_size": tensor.type.block, "bits": tensor.type.bits}
    if extra := header.tensors.keys() - {f"{name}.weight" for name in names}:
        raise UnsupportedModel(f"{path} has a tensor that no Llama has: {min(extra)}.")
    if quantised:
        config["quantization"] = {"group_size": 32, "bits": 4, **quantised}
    return names


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


def _arranged(name: str, array: mx.array, config: dict[str, Any]) -> mx.array:
    """Rows of Q and K as two halves a head; GGUF interleaves them for its kind of RoPE."""
    if name.endswith((".q_proj", ".k_proj")):
        pairs = array.reshape(-1, config["head_dim"] // 2, 2, array.shape[-1])
        return pairs.swapaxes(1, 2).reshape(array.shape)
    return _narrowed(array)


def _narrowed(array: mx.array) -> mx.array:
    """fp16 where nothing is lost: one fp32 norm would make a GPU compute everything in fp32."""
    narrow = array.astype(mx.float16)
    same = array.ndim == 1 and mx.array_equal(narrow.astype(mx.float32), array).item()
    return narrow if same else array


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2))
