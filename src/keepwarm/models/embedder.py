"""How a model turns a text into a vector, as the files of sentence-transformers beside it say.

A model without such files is pooled by its last token: conversions to MLX leave them out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepwarm.errors import BadField, UnsupportedModel

LAST_TOKEN = "lasttoken"  # noqa: S105 (a way of pooling)
RUN = frozenset({"Transformer", "Pooling", "Normalize"})  # modules that are more than a name here
MODE = "pooling_mode"


@dataclass(frozen=True)
class Embedder:
    """What a model's files say about embedding."""

    prompts: Mapping[str, str] = field(default_factory=dict)  # texts to put first, by name
    default_prompt: str | None = None  # a name among them
    refusal: str | None = None  # why the model cannot embed
    is_declared: bool = False  # the model was made to embed

    def check(self) -> None:
        if self.refusal is not None:
            raise UnsupportedModel(self.refusal)

    def prompt(self, name: str | None) -> str:
        """The text to put before an input; of the default prompt where none is named."""
        name = self.default_prompt if name is None else name
        if name is not None and name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none"
            raise BadField(
                f"The model has no prompt {name!r}, only {known}; leave prompt_name out.",
                "prompt_name",
            )
        return self.prompts[name] if name is not None else ""


def read_embedder(path: Path, config: Mapping[str, Any]) -> Embedder:
    """Of a model directory; a .gguf file has none of these files."""
    try:
        found = _read(path / "config_sentence_transformers.json")
        options = found or {}
        refusal = _refusal(path, config)
        default = options.get("default_prompt_name")
        return Embedder(dict(options.get("prompts") or {}), default, refusal, found is not None)
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        return Embedder(
            refusal=f"How {path} embeds cannot be read ({error}); download the model again."
        )


def _refusal(path: Path, config: Mapping[str, Any]) -> str | None:
    if config.get("use_bidirectional_attention") or config.get("is_causal") is False:
        return (
            f"{path.name} reads texts in both directions, and mlx-lm only forwards, so its vectors "
            "would be wrong; use a decoder embedder, as Qwen3-Embedding."
        )
    for module in _read(path / "modules.json") or ():
        kind = module["type"].rpartition(".")[2]
        mode = (
            _mode(_read(path / module["path"] / "config.json") or {}) if kind == "Pooling" else ""
        )
        if kind not in RUN or (mode and mode != LAST_TOKEN):
            what = f"pools by {mode}" if mode else f"has a layer {kind} behind its last"
            return (
                f"{path.name} {what}, which Keepwarm does not compute; use an embedder that pools "
                "by the last token, as Qwen3-Embedding."
            )
    return None


def _mode(pooling: Mapping[str, Any]) -> str:
    """In the format of any version: a name, or a flag for each."""
    named = pooling.get(MODE)
    flags = [name.removeprefix(f"{MODE}_") for name, is_set in pooling.items() if is_set is True]
    modes = [named] if named else [name for name in flags if name != "include_prompt"]
    return " and ".join(modes).replace("_tokens", "")


def _read(file: Path) -> Any:
    """A JSON file; None if there is none."""
    try:
        return json.loads(file.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
