"""Checkpoints as they are published, in the words that mlx-lm reads.

mlx-lm runs the language part of vision-language models. Its own reader knows some of the names
under which transformers and mlx-vlm save them; the others are written here as it knows them, and
the weights that read images and sound are left out. The settings of RoPE have the names of
transformers 4, where mlx-lm knows these alone. What it reads by itself is read as before, so that
the numbers are those of mlx-lm.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

import mlx.core as mx
from mlx_lm.utils import MODEL_REMAPPING

from keepwarm.errors import UnsupportedModel

# Parts of a checkpoint that read images or sound, as they are called beside the language part.
SENSES = (
    *("vision_tower", "vision_model", "visual", "vision_embedder", "embed_vision"),
    *("audio_tower", "embed_audio", "multi_modal_projector", "mm_projector"),
)
# By the type that is published; the second of each reads the names of its weights, too.
TYPES = {"lfm2_vl": "lfm2-vl", "kimi_vl": "kimi_k25"}
# The prefix of the language part, as transformers and as mlx-vlm saves it.
SAVED, CONVERTED = "model.language_model.", "language_model.model."
# What mlx-lm's models call the frequencies of RoPE, of all layers and of those with a window.
THETA = ("rope_theta", "rotary_emb_base")
WINDOW_THETA = ("rope_local_base_freq", "swa_rope_theta")
PARTIAL = ("partial_rotary_factor", "rotary_pct")
# What tells models the same in another way, outside of `rope_parameters`.
ROTATED = ("rotary_dim", "qk_rope_head_dim", "partial_rotary_factors")


def is_vision_language(config: Mapping[str, Any]) -> bool:
    return isinstance(config.get("text_config"), dict)


def config_changes(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """What to change in the config of such a checkpoint, whose weights have these names."""
    has_head = any("lm_head" in name for name in names)
    tied = {"tie_word_embeddings": not has_head}  # transformers 5 says so outside of the text's
    text = {**tied, **config["text_config"]} if has_head else {**config["text_config"], **tied}
    changes = {"model_type": _type(config), "text_config": text}
    text |= rope_changes(text)
    if "vocab_size" in text and "vocab_size" not in config:
        changes["vocab_size"] = text["vocab_size"]  # Gemma's models look for it here alone
    return changes


def rope_changes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `rope_parameters` of a config under the names that they had before transformers 5.

    Most of mlx-lm's models read these alone, and without them take a frequency of their own.
    """
    given = config.get("rope_parameters") or {}
    all_layers = given.get("full_attention", given)
    windows = given.get("sliding_attention", {})
    kind = all_layers.get("rope_type", all_layers.get("type", "default"))
    scaling = {"type": kind, **all_layers}  # the name that some models look for alone
    found = {
        **dict.fromkeys(THETA, all_layers.get("rope_theta")),
        **dict.fromkeys(PARTIAL, all_layers.get("partial_rotary_factor")),
        **dict.fromkeys(WINDOW_THETA, windows.get("rope_theta")),
        "rope_scaling": scaling if kind != "default" else None,
    }
    missing = [name for name in found if config.get(name) is None]
    return {name: found[name] for name in missing if found[name] is not None}


def read_rope_changes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a text model; raises UnsupportedModel if mlx-lm's would not read one of them."""
    changes, kind = rope_changes(config), config["model_type"]
    if not changes:
        return {}
    known = {field.name for field in fields(_module(kind).ModelArgs)}
    if "rope_parameters" in known:
        # A model with one for each kind of layer reads them itself, others the frequency alone.
        return {} if "full_attention" in config["rope_parameters"] else changes
    needed = [THETA, ("rope_scaling",)]
    if changes.get(PARTIAL[0]) != 1.0:
        needed.append((*PARTIAL, *ROTATED))
    if changes.get(WINDOW_THETA[0]) != changes.get(THETA[0]):
        needed.append(WINDOW_THETA)
    for names in needed:
        if changes.keys() & names and not known & {*names}:
            raise UnsupportedModel(
                f"mlx-lm's models of type {kind!r} read no {names[0]}, which rope_parameters in "
                "config.json sets; their answers would be wrong."
            )
    return changes


def _module(kind: str) -> Any:
    try:
        return import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(kind, kind)}")
    except ImportError as error:
        raise ValueError(f"Model type {kind} not supported.") from error


def _type(config: Mapping[str, Any]) -> str:
    """Pixtral is a Llava to transformers; its text config lacks fields that are Mistral's."""
    kind = str(config["model_type"])
    vision = config.get("vision_config") or {}
    is_pixtral = kind == "llava" and vision.get("model_type") == "pixtral"
    return "pixtral" if is_pixtral else TYPES.get(kind, kind)


def model_classes(config: Mapping[str, Any]) -> tuple[type, type]:
    """mlx-lm's classes for a config, its model with weights by their published names."""
    kind = config["model_type"]
    found = _module(kind)
    base: Any = found.Model

    class Published(base):  # type: ignore[misc]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            known = {_known(name, kind): array for name, array in weights.items()}
            rest = super().sanitize({name: known[name] for name in known if not _is_sense(name)})
            # This type's model does not ask its language part, as the others do.
            return dict(self.language_model.sanitize(rest) if kind == "lfm2-vl" else rest)

    return Published, found.ModelArgs


def _known(name: str, kind: str) -> str:
    """The name that mlx-lm's model of this type reads."""
    if kind == "gemma3n":
        return _moved(name, CONVERTED, SAVED)
    return _moved(_moved(name, SAVED, CONVERTED), "lm_head.", "language_model.lm_head.")


def _moved(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name


def _is_sense(name: str) -> bool:
    return name.removeprefix("model.").startswith(SENSES)
