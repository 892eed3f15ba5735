"""Writing prompt-cache files as mlx-swift-lm's `savePromptCache` does (its version of August 2026).

Tensors of a layer are `3.0`, `3.1`, …; its numbers, the user's metadata and the class names are the
sections 0, 1 and 2 of the header. A composite is one layer whose parts are told in its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import mlx.core as mx

from keepwarm.errors import UnsupportedCache
from keepwarm.kv.codec import QUANT_PARTS, EncodedCache
from keepwarm.kv.layout import ROWS

STEP = "256"  # rows by which Swift's caches grow


class SwiftLayer(NamedTuple):
    cls: str
    arrays: list[mx.array]
    words: list[str]


def swift_file(
    layers: Sequence[EncodedCache], metadata: Mapping[str, str]
) -> tuple[dict[str, mx.array], dict[str, str]]:
    """The tensors and the header of a file."""
    tensors: dict[str, mx.array] = {}
    header = {f"1.{key}": value for key, value in metadata.items()}
    for i, layer in enumerate(map(_swift, layers)):
        tensors |= {f"{i}.{j}": array for j, array in enumerate(layer.arrays)}
        header |= {f"0.{i}.{j}": word for j, word in enumerate(layer.words)}
        header[f"2.{i}"] = layer.cls
    return tensors, header


def _swift(layer: EncodedCache) -> SwiftLayer:
    if layer.cls == "CacheList":
        return _list(layer)
    if layer.cls == "ArraysCache":
        return _arrays(layer)
    words = _words(layer)
    if words is None:
        raise UnsupportedCache(f"{layer.cls} cannot be exported: Swift has no such cache.")
    return SwiftLayer(layer.cls, _rows(layer), words)


def _words(layer: EncodedCache) -> list[str] | None:
    """The numbers of a layer, in Swift's order; None for a class that it does not know."""
    n = {name: str(value) for name, value in layer.scalars.items()}
    if layer.cls == "KVCache":
        return [""]
    if layer.cls == "QuantizedKVCache":
        return [STEP, n["offset"], n["group_size"], n["bits"]]
    if layer.cls == "RotatingKVCache":
        n_rows = next((array.shape[ROWS] for array in layer.tensors.values()), 0)
        return [n["keep"], n["max_size"], STEP, n["offset"], str(n_rows)]
    if layer.cls == "ChunkedKVCache":
        if layer.scalars["start_position"]:
            raise UnsupportedCache(
                "A ChunkedKVCache whose first rows have left the window cannot be exported: "
                "Swift does not save its token count."
            )
        return [n["chunk_size"], n["start_position"]]
    return None


def _rows(layer: EncodedCache) -> list[mx.array]:
    """K and V, or the three arrays of each."""
    names = [f"{name}_{part}" for name in ("keys", "values") for part in QUANT_PARTS]
    return [layer.tensors[name] for name in ("keys", "values", *names) if name in layer.tensors]


def _arrays(layer: EncodedCache) -> SwiftLayer:
    size = int(layer.scalars["size"])
    filled = [i for i in range(size) if f"state{i}" in layer.tensors]
    arrays = [layer.tensors[f"state{i}"] for i in filled]
    return SwiftLayer("ArraysCache", arrays, [str(size), ",".join(map(str, filled))])


def _list(layer: EncodedCache) -> SwiftLayer:
    parts = [_swift(part) for part in layer.parts]
    words = [str(len(parts))]
    for part in parts:
        words += [part.cls, str(len(part.arrays)), str(len(part.words)), *part.words]
    return SwiftLayer("CacheList", [array for part in parts for array in part.arrays], words)
