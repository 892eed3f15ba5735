"""Models in GGUF files, in the names and layout of the Hugging Face format."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.nn.layers.quantized import quantize
from mlx_lm.models import llama, qwen2, qwen3

from keepwarm.device.space import require_memory
from keepwarm.models.gguf.architectures import GGUFPlan, plan
from keepwarm.models.gguf.file import GGUFHeader, read_header
from keepwarm.models.gguf.tensors import GROUP, WORKERS, held_bits, held_bytes, to_arrays
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
