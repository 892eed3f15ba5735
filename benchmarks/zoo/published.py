"""Tiny vision-language checkpoints in the layouts in which they are published.

`LAYOUTS` has the config of each and the names of its weights, as transformers saves them and as
mlx-vlm does, by which mlx-community converts. The language part is that of `build`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten

from benchmarks.zoo.models import build, config_of
from keepwarm.models.catalog import CONTEXT_FIELDS

Weights: TypeAlias = dict[str, mx.array]
GROUP, BITS = 32, 4
SAVED = {r"^language_model\.model\.": "model.language_model.", r"^language_model\.": ""}
BARE = {r"^language_model\.": ""}


@dataclass(frozen=True)
class Layout:
    """One layout of one type. `names` is tried in its order; the first that fits is used."""

    kind: str  # of mlx-lm
    model_type: str  # in config.json
    senses: tuple[str, ...]  # weights that read images or sound
    names: Mapping[str, str] = field(default_factory=dict)  # by those of mlx-lm
    text: Mapping[str, Any] = field(default_factory=dict)  # changes to its config; None: left out
    default: Mapping[str, Any] = field(default_factory=dict)  # what is left out
    top: Mapping[str, Any] = field(default_factory=dict)
    is_nested: bool = True  # the language part has a config of its own
    is_tied: bool = False
    as_saved: Callable[[Weights], Weights] = dict  # weights in another shape than mlx-lm's
    is_quantised: bool = False


def build_text(layout: Layout) -> Any:
    """mlx-lm's model with the weights of the language part."""
    module = build(layout.kind, text_config=_built(layout))
    if layout.is_quantised:
        quantize(module, GROUP, BITS, class_predicate=_fits)
    return module


def write(layout: Layout, module: Any, folder: Path) -> None:
    """Config and weights; the tokenizer is the caller's."""
    text: Any = dict(tree_flatten(module.parameters()))
    named = {_name(layout, name): array for name, array in layout.as_saved(text).items()}
    senses = {name: mx.zeros((2, 2)) for name in layout.senses}
    mx.save_safetensors(str(folder / "model.safetensors"), {**named, **senses}, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(_config(layout)))
    processor = {"processor_class": "SomeProcessor", "image_processor_type": "SomeImageProcessor"}
    for name in ("processor_config.json", "preprocessor_config.json"):
        (folder / name).write_text(json.dumps(processor))


def _fits(_: str, module: Module) -> bool:
    return hasattr(module, "to_quantized") and module["weight"].shape[-1] % GROUP == 0


def _built(layout: Layout) -> dict[str, Any]:
    return {**_text(layout), **layout.default, "tie_word_embeddings": layout.is_tied}


def _text(layout: Layout) -> dict[str, Any]:
    given = config_of(layout.kind)["text_config"]
    return {name: value for name, value in given.items() if value is not None}


def _config(layout: Layout) -> dict[str, Any]:
    every = {**_text(layout), "tie_word_embeddings": None, **layout.text}
    text = {name: value for name, value in every.items() if value is not None}
    quantised = {"quantization": {"group_size": GROUP, "bits": BITS}}
    return {
        **({"text_config": text} if layout.is_nested else text),
        "model_type": layout.model_type,
        "tie_word_embeddings": layout.is_tied,
        "vision_config": {"hidden_size": 32, "depth": 1},
        **(quantised if layout.is_quantised else {}),
        **layout.top,
    }


def _name(layout: Layout, name: str) -> str:
    for old, new in layout.names.items():
        changed, n_changes = re.subn(old, new, name)
        if n_changes:
            return changed
    return name


# -- weights in another shape -------------------------------------------------------------------


def _fused(weights: Weights, old: str, new: str, *, transposed: bool) -> Weights:
    """Gate and up projections of all experts in one array."""
    gates = [name for name in weights if name.endswith(f"{old}.gate_proj.weight")]
    rest = dict(weights)
    for gate in gates:
        prefix = gate.removesuffix("gate_proj.weight")
        first, up, down = (rest.pop(f"{prefix}{of}_proj.weight") for of in ("gate", "up", "down"))
        both = mx.concatenate([first, up], axis=1)
        prefix = prefix.removesuffix(f"{old}.") + f"{new}."
        rest[f"{prefix}gate_up_proj"] = both.swapaxes(1, 2) if transposed else both
        rest[f"{prefix}down_proj"] = down.swapaxes(1, 2) if transposed else down
    return rest


def _qwen3_vl_moe(weights: Weights) -> Weights:
    return _fused(weights, "switch_mlp", "experts", transposed=True)


def _llama4(weights: Weights) -> Weights:
    return _fused(weights, "feed_forward.experts", "feed_forward.experts", transposed=True)


def _qwen3_5(weights: Weights) -> Weights:
    """Norms are saved less one, convolutions with their axes as torch has them."""
    norms = ("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight")
    saved = {name: array - 1 if name.endswith(norms) else array for name, array in weights.items()}
    return _fused(_convolutions(saved), "switch_mlp", "experts", transposed=False)


def _convolutions(weights: Weights) -> Weights:
    is_one = re.compile(r"conv(1d)?\.weight$")
    return {n: array.swapaxes(1, 2) if is_one.search(n) else array for n, array in weights.items()}


def _kimi_vl(weights: Weights) -> Weights:
    """Experts one by one, and the two halves of attention's low rank in one matrix."""
    saved: Weights = {}
    for name, array in weights.items():
        if "switch_mlp" in name:
            for expert, own in enumerate(array):
                saved[name.replace("switch_mlp", f"experts.{expert}")] = own
        elif name.endswith("embed_q.weight"):
            values = weights[name.replace("embed_q", "unembed_out")]
            both = mx.concatenate([array.swapaxes(1, 2), values], axis=1)
            saved[name.replace("embed_q", "kv_b_proj")] = both.reshape(-1, both.shape[-1])
        elif not name.endswith("unembed_out.weight"):
            saved[name] = array
    return saved


# -- the layouts --------------------------------------------------------------------------------

IN_MODEL = ("model.visual.blocks.0.attn.qkv.weight", "model.visual.merger.norm.weight")
TOWER = ("vision_tower.blocks.0.attn.qkv.weight", "vision_tower.merger.norm.weight")
LLAVA = ("vision_tower.patch_conv.weight", "multi_modal_projector.linear_1.weight")
GEMMA = (
    *("vision_tower.encoder.layers.0.mlp.weight", "embed_vision.embedding.weight"),
    *("audio_tower.conformer.0.norm.weight", "embed_audio.embedding.weight"),
)
MROPE = {"type": "mrope", "mrope_section": [4, 6, 6]}
INTERLEAVED = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 6, 6]}
MISTRAL = {"model_type": "mistral", "rope_parameters": None}


def _in_model(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"model.{name}" for name in names)


LAYOUTS = {
    "Qwen2.5-VL": Layout(
        *("qwen2_vl", "qwen2_5_vl", ("visual.blocks.0.attn.qkv.weight",)),
        names=BARE,
        text={"rope_scaling": MROPE},
        is_nested=False,
    ),
    "Qwen2.5-VL, transformers 5": Layout(
        *("qwen2_vl", "qwen2_5_vl", IN_MODEL),
        names=SAVED,
        text={"model_type": "qwen2_5_vl_text", "rope_scaling": MROPE},
    ),
    "Qwen2.5-VL, mlx-community": Layout(
        *("qwen2_vl", "qwen2_5_vl", TOWER),
        text={"rope_scaling": MROPE},
        is_nested=False,
        is_quantised=True,
    ),
    "Qwen3-VL": Layout(
        *("qwen3_vl", "qwen3_vl", IN_MODEL),
        names=SAVED,
        text={"model_type": "qwen3_vl_text", "rope_scaling": INTERLEAVED},
    ),
    "Qwen3-VL 4B": Layout(
        *("qwen3_vl", "qwen3_vl", IN_MODEL),
        names=SAVED,
        text={"model_type": "qwen3_vl_text"},
        is_tied=True,
    ),
    "Qwen3-VL, mlx-community": Layout(
        *("qwen3_vl", "qwen3_vl", TOWER), text={"model_type": "qwen3_vl_text"}, is_quantised=True
    ),
    "Qwen3-VL-MoE": Layout(
        *("qwen3_vl_moe", "qwen3_vl_moe", IN_MODEL),
        names=SAVED,
        text={"model_type": "qwen3_vl_moe_text", "rope_scaling": INTERLEAVED},
        as_saved=_qwen3_vl_moe,
    ),
    "Qwen3-VL-MoE, mlx-community": Layout(
        *("qwen3_vl_moe", "qwen3_vl_moe", TOWER),
        text={"model_type": "qwen3_vl_moe_text"},
        is_quantised=True,
    ),
    "Qwen3.5": Layout(
        *("qwen3_5_moe", "qwen3_5_moe", (*IN_MODEL, "mtp.fc.weight")),
        names=SAVED,
        text={"model_type": "qwen3_5_moe_text"},
        as_saved=_qwen3_5,
    ),
    "Qwen3.5, mlx-community": Layout(
        *("qwen3_5", "qwen3_5", TOWER), text={"model_type": "qwen3_5_text"}, is_quantised=True
    ),
    "Gemma 3": Layout(
        *("gemma3", "gemma3", LLAVA),
        text={"model_type": "gemma3_text", **dict.fromkeys(CONTEXT_FIELDS)},
        is_tied=True,
    ),
    "Gemma 3, fine-tuned": Layout(
        *("gemma3", "gemma3", _in_model(LLAVA)),
        names=SAVED,
        text={"model_type": "gemma3_text"},
        is_tied=True,
    ),
    "Gemma 3, mlx-community": Layout(
        *("gemma3", "gemma3", LLAVA), text={"model_type": "gemma3_text"}, is_quantised=True
    ),
    "Gemma 3n": Layout(
        *("gemma3n", "gemma3n", _in_model(GEMMA)),
        text={"model_type": "gemma3n_text"},
        is_tied=True,
    ),
    "Gemma 3n, mlx-community": Layout(
        *("gemma3n", "gemma3n", GEMMA),
        names={r"^model\.language_model\.": "language_model.model."},
        text={"model_type": "gemma3n_text"},
        is_tied=True,
        is_quantised=True,
    ),
    "Gemma 4": Layout(
        *("gemma4", "gemma4", _in_model(GEMMA)),
        names=SAVED,
        text={"model_type": "gemma4_text"},
        is_tied=True,
    ),
    "Gemma 4, mlx-community": Layout(
        *("gemma4", "gemma4", GEMMA),
        text={"model_type": "gemma4_text"},
        is_tied=True,
        is_quantised=True,
    ),
    "Mistral Small 3.1": Layout(*("mistral3", "mistral3", LLAVA), text=MISTRAL),
    "Mistral Small 3.1, transformers 5": Layout(
        *("mistral3", "mistral3", _in_model(LLAVA)), names=SAVED, text=MISTRAL
    ),
    "Mistral Small 3.1, mlx-community": Layout(
        *("mistral3", "mistral3", LLAVA), text=MISTRAL, is_quantised=True
    ),
    "Pixtral": Layout(
        *("pixtral", "llava", LLAVA),
        text={**MISTRAL, "num_attention_heads": None},
        default={"num_attention_heads": 32},
        top={"vision_config": {"model_type": "pixtral"}},
    ),
    "Pixtral, mlx-community": Layout(
        *("pixtral", "pixtral", LLAVA), text=MISTRAL, is_quantised=True
    ),
    "Llama 4": Layout(
        *("llama4", "llama4", ("vision_model.layernorm_pre.weight", LLAVA[1])),
        text={"model_type": "llama4_text", "attn_temperature_tuning": 4},
        default={"attn_temperature_tuning": 4},
        as_saved=_llama4,
    ),
    "Llama 4, mlx-community": Layout(
        *("llama4", "llama4", ("vision_model.layernorm_pre.weight", LLAVA[1])),
        text={"model_type": "llama4_text"},
        is_quantised=True,
    ),
    "Kimi-VL": Layout(
        *("kimi_vl", "kimi_vl", LLAVA),
        text={"model_type": "deepseek_v3"},
        as_saved=_kimi_vl,
    ),
    "Kimi-K2.5": Layout(
        *("kimi_k25", "kimi_k25", ("vision_tower.patch_embed.weight", "mm_projector.proj.weight")),
        text={"model_type": "kimi_k2"},
        as_saved=_kimi_vl,
    ),
    "LFM2-VL": Layout(
        *("lfm2-vl", "lfm2_vl", _in_model(LLAVA)),
        names=SAVED,
        text={"model_type": "lfm2"},
        is_tied=True,
        as_saved=_convolutions,
    ),
    "LFM2-VL, mlx-community": Layout(
        *("lfm2-vl", "lfm2_vl", LLAVA),
        text={"model_type": "lfm2"},
        is_tied=True,
        is_quantised=True,
    ),
}
