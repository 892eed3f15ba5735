"""mlx-lm's prompt-cache files: every layout there has been is read, the current one is written.

A file is safetensors. Each layer's state is flattened into tensors named `3.0.1`; the metadata is
flattened too, and tells the layout before a tensor is touched:

    mlx-lm ≥ 0.32    [the user's metadata, class names, which tensors stand for plain values]
    mlx-lm ≤ 0.31    [each layer's numbers, the user's metadata, class names]
    mlx-swift-lm     as ≤ 0.31, with the numbers of a layer and of its parts in one flat list

Nothing in a file is trusted: class names are looked up in the tables below and nowhere else.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
from mlx.utils import tree_flatten
from safetensors import SafetensorError, safe_open

from keepwarm.errors import BadCacheFile, BadInput, CacheMismatch, UnsupportedCache
from keepwarm.kv.codec import TRIPLE, Encoded, decode, encode
from keepwarm.kv.kinds import Caches, is_batched, token_count
from keepwarm.kv.layout import ROWS, Layout
from keepwarm.kv.make import BITS

SUFFIX = ".safetensors"
MAX_DEPTH = 16
MAX_NAME = 64
GROUP_SIZES = (32, 64, 128)

Tree: TypeAlias = Any  # a leaf, or a dict of trees under "0", "1", …

# The order of a layer's state since 0.32; `idx` is where a rotating cache writes next.
STATE = {
    "KVCache": ("keys", "values", "offset"),
    "ConcatenateKVCache": ("keys", "values"),
    "QuantizedKVCache": ("keys", "values", "offset", "group_size", "bits"),
    "RotatingKVCache": ("keys", "values", "offset", "keep", "max_size", "idx"),
    "ChunkedKVCache": ("keys", "values", "offset", "chunk_size", "start_position"),
}
# The numbers that stood beside the tensors before 0.32, by how many there are: early mlx-lm and
# Swift write `step` too, and newer Swift where the capacity came from.
EARLY: dict[str, dict[int, tuple[str, ...]]] = {
    "KVCache": {0: ()},
    "ConcatenateKVCache": {0: ()},
    "QuantizedKVCache": {
        3: ("offset", "group_size", "bits"),
        4: ("step", "offset", "group_size", "bits"),
    },
    "RotatingKVCache": {
        4: ("keep", "max_size", "offset", "idx"),
        5: ("keep", "max_size", "step", "offset", "idx"),
        6: ("keep", "max_size", "step", "offset", "idx", "origin"),
    },
    "ChunkedKVCache": {2: ("chunk_size", "start_position")},
}
NOT_KEPT = frozenset({"step", "origin", "idx"})
OLD_NAMES = {"KVCacheSimple": "KVCache", "MambaCache": "ArraysCache"}
BATCHES = ("BatchKVCache", "BatchRotatingKVCache")
SWIFT_MODEL_STATE = "__mlx_lm_state_"


class Dialect(Enum):
    MLX_LM = "mlx-lm ≥ 0.32"
    EARLY_MLX_LM = "mlx-lm ≤ 0.31"
    SWIFT = "mlx-swift-lm"


class PromptCacheFile(NamedTuple):
    """What a file held; `metadata` is the user's, its keys as they stand in the file."""

    caches: Caches
    metadata: dict[str, str]
    dialect: Dialect


class _Place(NamedTuple):
    """Where in a file we are, for the sentence that says what is wrong there."""

    file: str
    layer: str

    def part(self, index: int) -> _Place:
        if self.layer.count(".") >= MAX_DEPTH:
            raise self.bad(f"composites are nested more than {MAX_DEPTH} deep")
        return _Place(self.file, f"{self.layer}.{index}")

    def bad(self, why: str) -> BadCacheFile:
        return BadCacheFile(f"{self.file}, layer {self.layer}: {why}.")


def export_prompt_cache(
    path: str | os.PathLike[str], caches: Caches, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a file that mlx-lm 0.32 and later loads: live rows only, whole or not at all.

    Readable by its owner alone. The caches are not changed; call it on the thread that owns them.
    """
    target = Path(path)
    if target.suffix != SUFFIX:
        raise BadInput(f"{target} must end in {SUFFIX}, because mlx-lm reads no other name.")
    if not caches:
        raise BadInput("A prompt cache of no layers cannot be exported.")
    encoded = [_exportable(str(i), cache) for i, cache in enumerate(caches)]
    tensors, kinds = _with_arrays(tree_flatten([_state(layer) for layer in encoded]))
    classes = [layer.cls for layer in encoded]
    # mlx-lm skips the first entry: without it the list could be empty and would vanish.
    header = dict(tree_flatten([_checked(metadata or {}), classes, ["", *kinds]]))
    _publish(target, tensors, header)


def _exportable(path: str, cache: Any) -> Encoded:
    if is_batched(cache):
        raise UnsupportedCache(f"Layer {path} is a batch; extract a row first.")
    encoded = encode(cache)
    if encoded.cls == "ConcatenateKVCache" and not encoded.tensors:
        raise UnsupportedCache(f"Layer {path}: mlx-lm cannot load an empty ConcatenateKVCache.")
    for i, part in enumerate(getattr(cache, "caches", ())):
        _exportable(f"{path}.{i}", part)
    return encoded


def _state(layer: Encoded) -> list[Any]:
    """A layer as mlx-lm's own `state` would be, without the rows that no token needs."""
    if layer.parts:
        return [[_state(part), part.cls] for part in layer.parts]
    if layer.cls == "ArraysCache":
        slots = [layer.tensors.get(f"state{i}") for i in range(layer.scalars["size"])]
        return [slots, None, None]
    keys = next((n for n in layer.tensors if n.startswith("keys")), None)
    values: dict[str, Any] = {**layer.scalars, "keys": None, "values": None, "idx": 0}
    if keys is not None:
        values["idx"] = layer.tensors[keys].shape[ROWS]
        values |= {name: _rows_of(layer, name) for name in ("keys", "values")}
    return [values[name] for name in STATE[layer.cls]]


def _rows_of(layer: Encoded, name: str) -> mx.array | list[mx.array]:
    if name in layer.tensors:
        return layer.tensors[name]
    return [layer.tensors[f"{name}_{part}"] for part in TRIPLE]


def _with_arrays(
    leaves: Sequence[tuple[str, Any]],
) -> tuple[dict[str, mx.array], list[tuple[str, str]]]:
    """Every leaf as an array, and which of them stand for a number, a name or nothing."""
    tensors: dict[str, mx.array] = {}
    kinds: list[tuple[str, str]] = []
    for key, leaf in leaves:
        if isinstance(leaf, mx.array):
            tensors[key] = leaf
        elif isinstance(leaf, str):
            tensors[key] = mx.array([ord(char) for char in leaf])
            kinds.append((key, "string"))
        else:
            tensors[key] = mx.array([]) if leaf is None else mx.array(leaf)
            kinds.append((key, "none" if leaf is None else "scalar"))
    return tensors, kinds


def _checked(metadata: Mapping[str, str]) -> dict[str, str]:
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise BadInput(f"Metadata must be text under text; {key!r}: {value!r} is not.")
        if not key or "." in key or key.isdecimal():
            raise BadInput(
                f"Metadata key {key!r} would come back changed from mlx-lm, which splits keys at "
                "dots and counts by numbers; use letters, '-' and '_'."
            )
    return dict(metadata)


def _publish(target: Path, tensors: dict[str, mx.array], header: dict[str, str]) -> None:
    """Write beside the target, then rename: a reader sees the old file or the new one."""
    try:
        handle, name = tempfile.mkstemp(SUFFIX, f".{target.stem}.", target.parent)
    except OSError as error:
        raise BadInput(f"{target} cannot be written: {error.strerror}.") from error
    try:
        mx.save_safetensors(name, tensors, header)
        os.fsync(handle)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)
    _sync_directory(target.parent)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def import_prompt_cache(
    path: str | os.PathLike[str], layout: Layout | None = None
) -> PromptCacheFile:
    """The caches in a prompt-cache file of any layout, evaluated, so the file may go or change.

    With the `layout` of a model, caches of another model are refused.
    """
    file = os.fspath(path)
    header, tensors = _open(file)
    dialect = _dialect_of(file, header, tensors)
    read = _read_current if dialect is Dialect.MLX_LM else _read_early
    raw = read(file, header, tensors)
    n_known = next(chain.from_iterable(_known_lengths(layer) for layer in raw), None)
    encoded = [_live(layer, _Place(file, str(i)), n_known) for i, layer in enumerate(raw)]
    mx.eval([layer.arrays() for layer in encoded])
    caches = [decode(layer) for layer in encoded]
    try:
        token_count(caches)
    except CacheMismatch as error:
        raise BadCacheFile(f"{file}: its layers disagree: {error}") from error
    if layout is not None:
        layout.check(caches)
    metadata = _section(header, "0" if dialect is Dialect.MLX_LM else "1")
    return PromptCacheFile(caches, metadata, dialect)
