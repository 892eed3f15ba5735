"""Models in GGUF files, in the names and layout of the Hugging Face format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.nn.layers.quantized import quantize
from mlx_lm.models import llama, qwen2, qwen3

from keepwarm.device.space import require_memory
from keepwarm.models.gguf.architectures import GGUFPlan, plan
from keepwarm.models.gguf.file import GGUFHeader, GGUFTensor, TensorType, read_header
from keepwarm.models.gguf.tokenizer import write_tokenizer

MODELS = {
    "llama": (llama.Model, llama.ModelArgs),
    "qwen2": (qwen2.Model, qwen2.ModelArgs),
    "qwen3": (qwen3.Model, qwen3.ModelArgs),
}
EMBEDDINGS = "model.embed_tokens.weight"
LARGEST_HALF = 65504  # of fp16


class GGUFModel(NamedTuple):
    config: dict[str, Any]
    weights: dict[str, mx.array]
    metadata: dict[str, Any]


def read(path: Path, report: Callable[[str], None] = lambda _: None) -> GGUFModel:
    """Config and weights under their Hugging Face names; quantised weights mostly stay so."""
    header, on_gpu = read_header(path), mx.default_device() == mx.gpu
    data = np.memmap(path, np.uint8, "r")
    found = plan(path, header, data)
    if quantised := _quantised(header, found, on_gpu):
        found.config["quantization"] = {"group_size": GROUP, "bits": 4, **quantised}
    sizes = {name: held_bytes(header.tensors[name], on_gpu=on_gpu) for name in found.names}
    require_memory(f"Reading {path}", sum(sizes.values()))
    weights: dict[str, mx.array] = {}
    done = 0
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="keepwarm-gguf") as workers:
        for theirs, ours in found.names.items():
            report(f"converting weights, {100 * done // sum(sizes.values())} %")
            arrays = to_arrays(header.tensors[theirs], data, workers, on_gpu=on_gpu)
            weights |= _named(ours, arrays, found)
            done += sizes[theirs]
    return GGUFModel(found.config, weights, header.metadata)


def _named(name: str, arrays: dict[str, mx.array], found: GGUFPlan) -> dict[str, mx.array]:
    """The parts of a tensor beside each other: `weight` may be a `bias`, too."""
    module, own = name.rsplit(".", 1)
    placed = {part: _rearrange(name, array, found) for part, array in arrays.items()}
    return {
        f"{module}.{own if part == 'weight' else part}": array for part, array in placed.items()
    }


def build(model: GGUFModel) -> Any:
    """mlx-lm's model with these weights."""
    config, (made, arguments) = model.config, MODELS[model.config["model_type"]]
    module = made(arguments.from_dict(config))
    quantised = config.get("quantization", {})
    quantize(module, class_predicate=lambda path, _: quantised.get(path, False))
    module.load_weights(list(_for_device(model.weights).items()))
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


def _quantised(header: GGUFHeader, found: GGUFPlan, on_gpu: bool) -> dict[str, dict[str, int]]:
    kinds = {ours: header.tensors[theirs].type for theirs, ours in found.names.items()}
    bits = {name: held_bits(kind, on_gpu=on_gpu) for name, kind in kinds.items()}
    return {
        name.removesuffix(".weight"): {"group_size": GROUP, "bits": n}
        for name, n in bits.items()
        if n
    }


def _rearrange(name: str, array: mx.array, found: GGUFPlan) -> mx.array:
    """Rows of Q and K as two halves per head, where GGUF interleaves them for its kind of RoPE."""
    is_rotated = name.endswith((".q_proj.weight", ".k_proj.weight"))
    if found.architecture.interleaves and is_rotated:
        pairs = array.reshape(-1, found.config["head_dim"] // 2, 2, array.shape[-1])
        return pairs.swapaxes(1, 2).reshape(array.shape)
    return _to_float16(array) if array.ndim == 1 else array


def _to_float16(array: mx.array) -> mx.array:
    """fp16 if nothing is lost: one fp32 norm would make a GPU compute everything in fp32."""
    narrow = array.astype(mx.float16)
    same = mx.array_equal(narrow.astype(mx.float32), array.astype(mx.float32)).item()
    return narrow if same else array


def _for_device(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """A GPU computes in fp32 as soon as one array is: there all become fp16, unless most are."""
    if mx.default_device() != mx.gpu or weights[EMBEDDINGS].dtype == mx.float32:
        return weights
    return {name: _narrow(array) for name, array in weights.items()}


def _narrow(array: mx.array) -> mx.array:
    """fp16, unless a number is too large for it."""
    is_wide = array.dtype in (mx.float32, mx.bfloat16)
    fits = is_wide and (mx.abs(array).max() <= LARGEST_HALF).item()
    return array.astype(mx.float16) if fits else array


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2))


Bytes = npt.NDArray[Any]
Arrays = dict[str, mx.array]

# Tensors as MLX arrays. MLX's quantised weights are scale * value + bias in groups of 32. Types of
# that form stay packed, with the same values. The others, such as Q6_K with its groups of 16, are
# decoded by llama.cpp's own package; a GPU then keeps them at 8 bits, which moves a weight of Q6_K
# by at most a quarter of its step.

GROUP = 32
PLAIN = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
OTHER_BITS = 8  # on a GPU, of types that MLX has no equal for
WORKERS = 8  # NumPy works without Python's lock
PIECE_WEIGHTS = 1 << 22  # decoded at once: what is in between takes several times the memory


def held_bits(kind: TensorType, *, on_gpu: bool) -> int:
    """Bits of a weight while MLX has it; 0 if it is not quantised then."""
    return kind.bits or (OTHER_BITS if kind.is_quantised and on_gpu else 0)


def held_bytes(tensor: GGUFTensor, *, on_gpu: bool) -> int:
    """Bytes of the arrays, at most."""
    n_weights = prod(tensor.shape)
    if not tensor.type.is_quantised:
        return tensor.n_bytes
    if bits := held_bits(tensor.type, on_gpu=on_gpu):
        return n_weights * bits // 8 + n_weights // GROUP * 2 * (2 if on_gpu else 4)
    return n_weights * 4


def to_arrays(tensor: GGUFTensor, data: Bytes, workers: Executor, *, on_gpu: bool) -> Arrays:
    """The tensor as MLX stores it: packed weights, scales and biases if it is quantised.

    The workers decode several pieces at once; their arrays are made on this thread.
    """
    decode = partial(_decoded, tensor.type, on_gpu=on_gpu)
    pieces = [
        _arrays(tensor.type, parts, on_gpu)
        for some in _batches(list(_pieces(tensor, data)))
        for parts in workers.map(decode, some)
    ]
    joined = {part: mx.concatenate([piece[part] for piece in pieces]) for part in pieces[0]}
    shaped = {part: array.reshape(*tensor.shape[:-1], -1) for part, array in joined.items()}
    mx.eval(shaped)
    return shaped


def _batches(pieces: list[Bytes]) -> Iterator[list[Bytes]]:
    """So many that every worker has one, and no more are decoded ahead."""
    yield from (pieces[at : at + WORKERS] for at in range(0, len(pieces), WORKERS))


def _pieces(tensor: GGUFTensor, data: Bytes) -> Iterator[Bytes]:
    """Some rows at a time, as bytes."""
    raw = data[tensor.start : tensor.start + tensor.n_bytes]
    rows = raw.reshape(-1, tensor.shape[-1] // tensor.type.block * tensor.type.n_bytes)
    n_rows = max(1, PIECE_WEIGHTS // tensor.shape[-1])
    yield from (rows[at : at + n_rows] for at in range(0, len(rows), n_rows))


def _arrays(kind: TensorType, parts: dict[str, Bytes], on_gpu: bool) -> Arrays:
    arrays = {name: mx.array(part) for name, part in parts.items()}
    if not kind.is_quantised:
        return {"weight": arrays["weight"].view(PLAIN[kind.name])}
    if kind.bits or not on_gpu:
        return arrays
    weight, scales, *biases = mx.quantize(arrays["weight"], group_size=GROUP, bits=OTHER_BITS)
    narrow = {"scales": scales, "biases": biases[0]}
    return {"weight": weight} | {part: a.astype(mx.float16) for part, a in narrow.items()}


def _decoded(kind: TensorType, rows: Bytes, *, on_gpu: bool) -> dict[str, Bytes]:
    with np.errstate(all="ignore"):  # a scale may be any fp16 number
        if not kind.is_quantised:
            return {"weight": rows.view(f"u{kind.n_bytes}")}
        return _packed(kind, rows, on_gpu) if kind.bits else {"weight": _dense(kind, rows)}


def _dense(kind: TensorType, rows: Bytes) -> Bytes:
    from gguf import GGMLQuantizationType, quants

    decoded: Bytes = quants.dequantize(rows, GGMLQuantizationType[kind.name])
    return decoded


def _packed(kind: TensorType, rows: Bytes, on_gpu: bool) -> dict[str, Bytes]:
    """Neighbours in one byte, as MLX has them, with a scale and a bias for each 32."""
    split = _split_k if kind.block == 256 else _split
    scales, biases, values = split(kind.name, rows.reshape(-1, kind.n_bytes))
    if on_gpu:  # with fp32 scales it would compute everything in fp32
        scales, biases = scales.astype(np.float16), biases.astype(np.float16)
    words = _pack(values.reshape(-1, 8), kind.bits).reshape(-1).view(np.uint32)
    parts = {"weight": words, "scales": scales, "biases": biases}
    return {name: part.reshape(len(rows), -1) for name, part in parts.items()}


def _split(kind: str, blocks: Bytes) -> tuple[Bytes, Bytes, Bytes]:
    """Scale, bias and values of each block of 32: a weight is scale * value + bias."""
    scales = _halves(blocks[:, :2])
    if kind == "Q8_0":
        return scales, scales * np.float16(-128), blocks[:, 2:] ^ 0x80
    if kind == "Q4_0":
        return scales, scales * np.float16(-8), _nibbles(blocks[:, 2:])
    if kind == "Q5_0":
        return scales, scales * np.float16(-16), _fifth(blocks[:, 2:6]) | _nibbles(blocks[:, 6:])
    biases = _halves(blocks[:, 2:4])
    if kind == "Q5_1":
        return scales, biases, _fifth(blocks[:, 4:8]) | _nibbles(blocks[:, 8:])
    return scales, biases, _nibbles(blocks[:, 4:])


def _split_k(kind: str, blocks: Bytes) -> tuple[Bytes, Bytes, Bytes]:
    """The same for Q4_K and Q5_K: 256 weights in 8 groups, whose scales are quantised too.

    fp32, because the product of the two scales of a group needs more digits than fp16 has.
    """
    scale, low = _halves(blocks[:, :2]), _halves(blocks[:, 2:4])
    scales, lows = _six_bits(blocks[:, 4:16])
    at = 16 if kind == "Q4_K" else 48
    quarters = blocks[:, at:].reshape(-1, 4, 32)  # each byte: the same place of two groups
    values = np.stack([quarters & 15, quarters >> 4], axis=2).reshape(-1, 8, 32)
    if kind == "Q5_K":
        group = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
        values |= (blocks[:, 16:48].reshape(-1, 1, 32) >> group & 1) << 4
    wide = np.float32
    return scale.astype(wide) * scales, -(low.astype(wide) * lows), values


def _six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """8 scales and 8 minima of 6 bits each, from 12 bytes."""
    scale, low, both = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([scale & 63, both & 15 | scale >> 2 & 48], axis=1)
    lows = np.concatenate([low & 63, both >> 4 | low >> 2 & 48], axis=1)
    return scales, lows


def _halves(packed: Bytes) -> Bytes:
    return packed.copy().view(np.float16)


def _nibbles(packed: Bytes) -> Bytes:
    """Byte j holds weights j and j + 16."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth(packed: Bytes) -> Bytes:
    """The fifth bit of 32 weights, in its place."""
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def _pack(values: Bytes, bits: int) -> Bytes:
    """Rows of 8 values, `bits` each, in as many bytes; the first value is the lowest."""
    if bits == 8:
        return values
    if bits == 4:
        pairs: Bytes = values[:, 0::2] | values[:, 1::2] << 4
        return pairs
    shifts = np.arange(0, 8 * bits, bits, dtype=np.uint64)
    words: Bytes = np.bitwise_or.reduce(values.astype(np.uint64) << shifts, axis=1)
    return words.view(np.uint8).reshape(-1, 8)[:, :bits].copy()
