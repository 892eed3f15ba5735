"""The identity of a model: digests of weights, tokenizer and layout.

Weights count by content. A file is read once; its digest is cached by path, size, mtime and inode,
so that the next start reads nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from keepwarm.config import Settings
from keepwarm.errors import BadInput
from keepwarm.kv import make_caches, probe
from keepwarm.kv.layout import LayerSpec, Layout
from keepwarm.models.catalog import TOKENIZER, WEIGHTS, locate, read_config
from keepwarm.models.published import rope_changes
from keepwarm.prefix.fingerprint import Identity, digest
from keepwarm.records.at_rest import EXACT
from keepwarm.state_file import MACHINE, StateFile

MAKE_OPTIONS = frozenset({"max_kv_size", "kv_bits", "kv_group_size", "at_rest"})
DEFAULT_AT_REST = ("at_rest", EXACT)


def identity_of(
    model: Any,
    source: Path | str,
    settings: Settings,
    *,
    adapter: Path | str | None = None,
    layout: Layout | None = None,
    salt: str = "",
    **kv_options: Any,
) -> Identity:
    """The identity that this model's blocks belong to; reads the weights once, then caches it."""
    if adapter is None:
        _refuse_adapter(model)
    layout = layout or probe(model, make_caches(model, **kv_options))
    digests = DigestsFile(settings.home)
    path = locate(str(source), settings)
    weights = None if adapter is None else Path(adapter)
    found = identify(path, layout, digests, adapter=weights, kv_options=kv_options, salt=salt)
    rope = _rope_in(model, path)
    return replace(found, config=digest([found.config, rope])) if rope else found


def _rope_in(model: Any, path: Path) -> dict[str, Any]:
    """RoPE as the model has it, where mlx-lm alone would not have read it from the config."""
    config = read_config(path) if path.is_dir() else {}
    named = [*rope_changes(config.get("text_config") or config)]
    args = getattr(getattr(model, "language_model", model), "args", None)
    if hasattr(args, "rope_parameters"):  # from which mlx-lm may have read the frequency alone
        named = [name for name in named if name == "rope_scaling"]
    return {name: getattr(args, name) for name in named if hasattr(args, name)}


def _refuse_adapter(model: Any) -> None:
    """Without the adapter's files its blocks would have the identity of the bare model."""
    layers: list[Any] = getattr(model, "modules", list)()
    if any("lora_a" in layer for layer in layers):  # in LoRA and DoRA layers
        raise BadInput(
            "The model has an adapter, which changes its keys and values; name the adapter's "
            "directory (attach(…, adapter=…)), or fuse it into the weights with mlx_lm.fuse."
        )


class DigestsFile:
    """Content digests of files, kept in the home directory."""

    def __init__(self, home: Path) -> None:
        self._file = StateFile(home / MACHINE, "digests", _known_digests)
        self._known = self._file.read()

    def of(self, path: Path) -> str:
        label = _label(path)
        if label not in self._known:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if _label(path) != label:
                raise BadInput(f"{path} was changed while it was read; try again.")
            self._known[label] = found
            with suppress(OSError):  # the next start reads it again
                self._file.change(lambda kept: {**kept, **self._known})
        return self._known[label]


def _label(path: Path) -> str:
    status = path.stat()
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ino}"


def _known_digests(kept: Mapping[str, str]) -> dict[str, str]:
    return {str(label): str(found) for label, found in kept.items()}


def identify(
    source: Path,
    layout: Layout,
    digests: DigestsFile,
    *,
    adapter: Path | None = None,
    kv_options: Mapping[str, Any] | None = None,
    salt: str = "",
) -> Identity:
    """The identity of this model with these options."""
    weights = _digests(source, WEIGHTS, digests)
    if not weights:
        raise BadInput(f"There are no weights in {source}, so its blocks could not be identified.")
    adapter_files = _digests(adapter, ("*",), digests) if adapter and adapter.is_dir() else {}
    if adapter and not adapter_files:
        raise BadInput(f"There is no adapter in {adapter}; name its directory.")
    config = source / "config.json"
    found = Identity(
        weights=weights,
        config=digests.of(config) if config.is_file() else "",
        tokenizer=digest(_digests(source, TOKENIZER, digests)) if source.is_dir() else "",
        layout="",
        adapter=digest(adapter_files) if adapter else "",
    )
    return with_options(found, layout, kv_options or {}, salt)


def with_options(
    identity: Identity, layout: Layout, kv_options: Mapping[str, Any], salt: str
) -> Identity:
    """That of the same files with these options."""
    layers = digest([_layer_json(layer) for layer in layout.layers])
    return replace(identity, layout=layers, kv_options=_without_exact(kv_options), salt=salt)


def _without_exact(kv_options: Mapping[str, Any]) -> dict[str, Any]:
    """Naming what is the default anyway makes no other identity."""
    return {name: value for name, value in kv_options.items() if (name, value) != DEFAULT_AT_REST}


def make_options_in(identity: Identity) -> dict[str, Any]:
    """The KV options of an identity that `kv.make_caches` takes; an unknown one makes it differ."""
    return {name: value for name, value in identity.kv_options.items() if name in MAKE_OPTIONS}


def _digests(source: Path, patterns: tuple[str, ...], digests: DigestsFile) -> dict[str, str]:
    """By file name, so that the same files in another directory are the same model."""
    if source.is_file():
        return {"": digests.of(source)}
    files = {path for pattern in patterns for path in source.glob(pattern) if path.is_file()}
    return {path.name: digests.of(path) for path in sorted(files)}


def _layer_json(layer: LayerSpec) -> dict[str, Any]:
    return {
        "kind": layer.kind.value,
        "class": layer.cls,
        "scalars": dict(layer.scalars),
        "tensors": {n: [list(t.shape), str(t.dtype)] for n, t in layer.tensors.items()},
        "parts": [_layer_json(part) for part in layer.parts],
    }
