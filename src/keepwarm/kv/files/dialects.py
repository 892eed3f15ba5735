"""Reading the known formats of prompt-cache files.

A file is safetensors. Each layer's state is flattened into tensors named `3.0.1`; the metadata is
flattened too, and identifies the format before a tensor is read:

    mlx-lm ≥ 0.32    [the user's metadata, class names, which tensors encode plain values]
    mlx-lm ≤ 0.31    [each layer's numbers, the user's metadata, class names]
    mlx-swift-lm     as ≤ 0.31, with the numbers of a layer and its parts in one flat list

Nothing in a file is trusted: class names are looked up in the tables below and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from keepwarm.errors import BadCacheFile
from keepwarm.kv.codec import QUANT_PARTS, EncodedCache

MAX_DEPTH = 16
MAX_NAME = 64  # characters of a name, and slots of a state
MAX_HEADER_BYTES = 16 << 20  # JSON takes up to 20 times as much memory

Tree: TypeAlias = Any  # a leaf, or a dict of trees under "0", "1", …

# The order of a layer's state since 0.32; `idx` is the next row that a rotating cache writes.
STATE = {
    "KVCache": ("keys", "values", "offset"),
    "ConcatenateKVCache": ("keys", "values"),
    "QuantizedKVCache": ("keys", "values", "offset", "group_size", "bits"),
    "RotatingKVCache": ("keys", "values", "offset", "keep", "max_size", "idx"),
    "ChunkedKVCache": ("keys", "values", "offset", "chunk_size", "start_position"),
}
# The numbers stored with the tensors before 0.32, by their count. Swift and the first versions of
# mlx-lm also write `step`, later Swift the origin of the capacity.
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
NOT_NEEDED = frozenset({"step", "origin"})
STATE_CLASSES = {"ArraysCache": None, "MambaCache": 2}  # and their number of slots, if fixed
UNSAVED = {"LayerCache": "mlx-lm does not save its window size and cannot load it"}
BATCHED = ("BatchKVCache", "BatchRotatingKVCache")
SWIFT_KV = "KVCacheSimple"
SWIFT_MODEL_STATE = "__mlx_lm_state_"


class Dialect(Enum):
    """Who wrote a prompt-cache file; the name of one will do as well."""

    MLX_LM = "mlx-lm"
    EARLY_MLX_LM = "mlx-lm before 0.32"  # read, never written
    SWIFT = "swift"


class LayerLocation(NamedTuple):
    """A layer of a file, for error messages."""

    file: str
    layer: str

    def part(self, index: int) -> LayerLocation:
        if self.layer.count(".") >= MAX_DEPTH:
            raise self.error(f"composites are nested more than {MAX_DEPTH} deep")
        return LayerLocation(self.file, f"{self.layer}.{index}")

    def error(self, why: str) -> BadCacheFile:
        return BadCacheFile(f"{self.file}, layer {self.layer}: {why}.")


class FileContents(NamedTuple):
    """A file as written: rows may be padded or rotated, and `offset` may be missing."""

    layers: list[EncodedCache]
    metadata: dict[str, str]
    dialect: Dialect


def read(file: str) -> FileContents:
    """Identify the format of a file and read it; the tensors are not evaluated yet."""
    header, tensors = _open(file)
    # The first value is empty in the new format and a class name in both older ones.
    if header.get("2.0") == "" and "1.0" in header:
        layers = _read_current(file, header, tensors)
        return FileContents(layers, _section(header, "0"), Dialect.MLX_LM)
    if header.get("2.0"):
        return _read_early(file, header, tensors)
    raise BadCacheFile(
        f"{file} is safetensors but has no prompt-cache metadata; "
        "pass a file written by mlx-lm's or Swift's save function."
    )


def _open(file: str) -> tuple[dict[str, str], dict[str, mx.array]]:
    """Metadata and lazy tensors. The whole header is checked before MLX uses it."""
    try:
        _check_header_length(file)
        with safe_open(file, framework="numpy") as checked:
            header = dict(checked.metadata() or {})
        tensors = mx.load(file, format="safetensors")
    except OSError as error:
        raise BadCacheFile(f"{file} cannot be read: {error.strerror or error}.") from error
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise BadCacheFile(f"{file} is not a complete safetensors file: {error}.") from error
    assert isinstance(tensors, dict)
    return header, tensors


def _check_header_length(file: str) -> None:
    with Path(file).open("rb") as opened:
        n_bytes = int.from_bytes(opened.read(8), "little")
    if n_bytes > MAX_HEADER_BYTES:
        raise BadCacheFile(
            f"{file} is not a complete prompt cache: its header claims {n_bytes} bytes."
        )


def _section(header: Mapping[str, str], number: str) -> dict[str, str]:
    start = f"{number}."
    return {key.removeprefix(start): v for key, v in header.items() if key.startswith(start)}


def _nest(file: str, flat: Mapping[str, Any]) -> dict[str, Tree]:
    """Keys such as `3.0.1` as dicts within dicts."""
    root: dict[str, Tree] = {}
    for key, leaf in flat.items():
        *parents, last = key.split(".")
        node: Tree = root
        for name in parents[: 2 * MAX_DEPTH]:
            node = node.setdefault(name, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict) or last in node or len(parents) > 2 * MAX_DEPTH:
            raise BadCacheFile(f"{file}: the key {key[:MAX_NAME]!r} conflicts with the others.")
        node[last] = leaf
    return root


def _items(node: Tree, where: LayerLocation, what: str, counts: Sequence[int] = ()) -> list[Tree]:
    """The children "0", "1", … of a node; `counts` are the allowed numbers of them."""
    if not isinstance(node, dict) or any(str(i) not in node for i in range(len(node))):
        raise where.error(f"{what} are missing or misnamed")
    if counts and len(node) not in counts:
        expected = " or ".join(map(str, counts))
        raise where.error(f"there are {len(node)} {what}, expected {expected}")
    return [node[str(i)] for i in range(len(node))]


def _layers(file: str, names: Mapping[str, str], tensors: Mapping[str, Any]) -> list[Tree]:
    """For each layer its location, class and state; a layer without tensors has an empty state."""
    nested = _nest(file, tensors)
    surplus = sorted(set(nested) - set(names))
    if surplus or any(str(i) not in names for i in range(len(names))):
        what = f"tensors of {surplus[0]!r}" if surplus else "class names with gaps"
        raise BadCacheFile(f"{file} names {len(names)} layers, but there are {what}.")
    return [
        (LayerLocation(file, i), names[i], nested.get(i, {})) for i in map(str, range(len(names)))
    ]


def _check_class(cls: Tree, where: LayerLocation, known: Mapping[str, Any]) -> None:
    if cls in BATCHED:
        raise where.error(f"it is a batch ({cls}); extract one sequence and save that")
    if isinstance(cls, str) and cls in UNSAVED:
        raise where.error(f"{cls} cannot be read: {UNSAVED[cls]}")
    if not isinstance(cls, str) or cls not in known:
        raise where.error(f"{str(cls)[:MAX_NAME]!r} is not a cache class known to Keepwarm")


def _read_current(
    file: str, header: Mapping[str, str], tensors: Mapping[str, mx.array]
) -> list[EncodedCache]:
    values = _with_values(file, _section(header, "2"), tensors)
    layers = _layers(file, _section(header, "1"), values)
    return [_current(cls, state, where) for where, cls, state in layers]


def _with_values(
    file: str, tags: Mapping[str, str], tensors: Mapping[str, mx.array]
) -> dict[str, Any]:
    """The tensors, with tagged ones replaced by the plain value they encode."""
    values: dict[str, Any] = dict(tensors)
    for tag in (key for key in tags if key.endswith(".0")):
        key, kind = tags[tag], tags.get(f"{tag[:-2]}.1", "")
        if key not in tensors:
            raise BadCacheFile(f"{file}: the tensor {key[:MAX_NAME]!r} is missing.")
        values[key] = _value(file, key, kind, tensors[key])
    return values


def _value(file: str, key: str, kind: str, array: mx.array) -> int | str | None:
    integral = mx.issubdtype(array.dtype, mx.integer) or array.dtype == mx.bool_
    if kind == "none" and array.size == 0:
        return None
    if kind == "scalar" and array.ndim == 0 and integral:
        number: Any = array.item()
        return int(number)
    if kind == "string" and array.ndim == 1 and array.size <= MAX_NAME and integral:
        codes: Any = array.tolist()
        if all(0 <= code < 128 for code in codes):
            return "".join(map(chr, codes))
    raise BadCacheFile(f"{file}: {key[:MAX_NAME]!r} is not a valid {kind[:MAX_NAME]}.")


def _current(cls: str, state: Tree, where: LayerLocation) -> EncodedCache:
    _check_class(cls, where, {**STATE, "ArraysCache": (), "CacheList": ()})
    if cls == "CacheList":
        return EncodedCache(cls, parts=tuple(_current_parts(state, where)))
    if cls == "ArraysCache":
        slots, *padding = _items(state, where, "values", (3,))
        if any(array is not None for array in padding):
            raise where.error("it is padded for a batch; extract one sequence and save that")
        return _arrays(dict(enumerate(_items(slots, where, "slots"))), len(slots), where)
    names = STATE[cls]
    values = dict(zip(names, _items(state, where, "values", (len(names),)), strict=True))
    rows = [values.pop("keys"), values.pop("values")]
    for name, value in values.items():
        if not isinstance(value, int):
            raise where.error(f"{name} is not a number")
    is_empty = rows[0] is None and rows[1] is None
    return EncodedCache(cls, {} if is_empty else _rows(rows, where), values)


def _current_parts(state: Tree, where: LayerLocation) -> list[EncodedCache]:
    parts = []
    for i, item in enumerate(_items(state, where, "parts")):
        inner = where.part(i)
        part_state, cls = _items(item, inner, "values", (2,))
        parts.append(_current(cls, part_state, inner))
    return parts


def _rows(pair: Sequence[Tree], where: LayerLocation) -> dict[str, mx.array]:
    """K and V under the codec's names, each one tensor or a quantised triple."""
    found: dict[str, mx.array] = {}
    for name, rows in zip(("keys", "values"), pair, strict=True):
        if isinstance(rows, dict):
            triple = _items(rows, where, f"tensors of {name}", (len(QUANT_PARTS),))
            found |= {f"{name}_{part}": x for part, x in zip(QUANT_PARTS, triple, strict=True)}
        else:
            found[name] = rows
    if not all(isinstance(rows, mx.array) for rows in found.values()):
        raise where.error("tensors of its keys or values are missing")
    return found


def _arrays(slots: Mapping[int, Tree], size: int, where: LayerLocation) -> EncodedCache:
    filled = {f"state{i}": array for i, array in slots.items() if array is not None}
    if not size or not all(isinstance(array, mx.array) for array in filled.values()):
        raise where.error("its state arrays are missing")
    return EncodedCache("ArraysCache", filled, {"size": size})


def _read_early(
    file: str, header: Mapping[str, str], tensors: Mapping[str, mx.array]
) -> FileContents:
    metadata, names = _section(header, "1"), _section(header, "2")
    if any(key.startswith(SWIFT_MODEL_STATE) for key in (*metadata, *tensors)):
        raise BadCacheFile(
            f"{file} also holds the state of a Swift vision model, which mlx-lm cannot load; it "
            "would continue at wrong positions, so prefill the prompt instead."
        )
    infos = _nest(file, _section(header, "0"))
    layers, swift = [], False
    for where, cls, state in _layers(file, names, tensors):
        info = infos.get(where.layer, "")
        layers.append(_early(cls, state, info, where))
        swift = swift or _is_swift(cls, state, info)
    return FileContents(layers, metadata, Dialect.SWIFT if swift else Dialect.EARLY_MLX_LM)


def _is_swift(cls: str, state: Tree, info: Tree) -> bool:
    """Whether only Swift writes a layer like this; many layers look the same from both."""
    if not isinstance(info, dict):
        return False
    if cls == "CacheList":
        return isinstance(info.get("0"), str)
    if cls == "QuantizedKVCache":
        return isinstance(state.get("0"), mx.array)
    return cls in STATE_CLASSES or len(info) in (1, 6)


def _early(cls: str, state: Tree, info: Tree, where: LayerLocation) -> EncodedCache:
    cls = "KVCache" if cls == SWIFT_KV else cls
    _check_class(cls, where, {**EARLY, **STATE_CLASSES, "CacheList": ()})
    if cls == "CacheList":
        return EncodedCache(cls, parts=tuple(_early_parts(state, info, where)))
    if cls in STATE_CLASSES:
        return _early_arrays(cls, state, info, where)
    words = [] if info in ("", {"0": ""}) else _words(info, where)
    names = EARLY[cls].get(len(words))
    if names is None:
        raise where.error(f"{cls} has {len(words)} numbers; no known version writes that many")
    named = zip(names, words, strict=True)
    numbers = {name: _number(word, where) for name, word in named if name not in NOT_NEEDED}
    return EncodedCache(cls, _early_rows(cls, state, where), numbers)


def _early_rows(cls: str, state: Tree, where: LayerLocation) -> dict[str, mx.array]:
    """K and V; Swift writes a quantised pair as six tensors in a list, and may write none."""
    arrays = _items(state, where, "tensors")
    if cls == "QuantizedKVCache" and len(arrays) == 4:
        raise where.error("it is quantised without biases, which mlx-lm's cache cannot hold")
    if cls == "QuantizedKVCache" and len(arrays) == 6:
        arrays = [_node(arrays[:3]), _node(arrays[3:])]
    if len(arrays) not in (0, 2):
        raise where.error(f"there are {len(arrays)} tensors, expected keys and values")
    return _rows(arrays, where) if arrays else {}


def _early_arrays(cls: str, state: Tree, info: Tree, where: LayerLocation) -> EncodedCache:
    arrays = _items(state, where, "state arrays")
    slots, size = dict(enumerate(arrays)), len(arrays)
    if isinstance(info, dict) and len(info) > 1:
        slots, size = _swift_slots(arrays, _words(info, where), where)
    elif info != "" and cls == "ArraysCache":
        raise where.error("this version of Swift did not save which of its slots were filled")
    if STATE_CLASSES[cls] not in (None, size):
        raise where.error(f"{cls} has {size} state arrays, expected {STATE_CLASSES[cls]}")
    return _arrays(slots, size, where)


def _swift_slots(
    arrays: list[Tree], words: list[str], where: LayerLocation
) -> tuple[dict[int, Tree], int]:
    count, filled, *padding = words
    if any(padding):
        raise where.error("it is padded for a batch; extract one sequence and save that")
    size = _number(count, where)
    indices = [_number(word, where) for word in filled.split(",")] if filled else []
    is_one_each = len(indices) == len(set(indices)) == len(arrays)
    if not is_one_each or size > MAX_NAME or any(i >= size for i in indices):
        raise where.error(f"{len(arrays)} arrays do not fill slots {filled[:MAX_NAME]!r} of {size}")
    return dict(zip(indices, arrays, strict=True)), size


def _early_parts(state: Tree, info: Tree, where: LayerLocation) -> list[EncodedCache]:
    if isinstance(info, dict) and isinstance(info.get("0"), dict):
        names, numbers = _items(info, where, "lists", (2,))
        classes = _items(names, where, "parts")
        states, infos = (_items(x, where, "parts", (len(classes),)) for x in (state, numbers))
        parts = enumerate(zip(classes, states, infos, strict=True))
        return [_early(cls, tree, words, where.part(i)) for i, (cls, tree, words) in parts]
    if info in ("", {"0": ""}):
        raise where.error("this version did not save the classes of a CacheList's parts")
    return _swift_parts(state, _words(info, where), where)


def _swift_parts(state: Tree, words: list[str], where: LayerLocation) -> list[EncodedCache]:
    """A flat list: the number of parts, then for each its class, the counts of its tensors and
    numbers, and the numbers."""
    arrays, rest = _items(state, where, "tensors"), words[1:]
    parts: list[EncodedCache] = []
    while len(rest) >= 3:
        inner = where.part(len(parts))
        n_arrays, n_words = _number(rest[1], inner), _number(rest[2], inner)
        info = _node(rest[3 : 3 + n_words])
        parts.append(_early(rest[0], _node(arrays[:n_arrays]), info, inner))
        arrays, rest = arrays[n_arrays:], rest[3 + n_words :]
    if len(parts) != _number(words[0], where) or arrays or rest:
        raise where.error("its parts do not match their counts")
    return parts


def _node(items: Sequence[Tree]) -> Tree:
    return {str(i): item for i, item in enumerate(items)}


def _words(info: Tree, where: LayerLocation) -> list[str]:
    words = _items(info, where, "numbers")
    if not all(isinstance(word, str) for word in words):
        raise where.error("its numbers are nested")
    return words


def _number(word: str, where: LayerLocation) -> int:
    if not (word.isascii() and word.isdecimal() and len(word) < 16):
        raise where.error(f"{word[:MAX_NAME]!r} is not a count")
    return int(word)
