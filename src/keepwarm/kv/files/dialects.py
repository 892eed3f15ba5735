"""The layouts in which prompt-cache files have been written, each read as it stands.

A file is safetensors. Each layer's state is flattened into tensors named `3.0.1`; the metadata is
flattened too, and tells the layout before a tensor is touched:

    mlx-lm ≥ 0.32    [the user's metadata, class names, which tensors stand for plain values]
    mlx-lm ≤ 0.31    [each layer's numbers, the user's metadata, class names]
    mlx-swift-lm     as ≤ 0.31, with the numbers of a layer and of its parts in one flat list

Nothing in a file is trusted: class names are looked up in the tables below and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from keepwarm.errors import BadCacheFile
from keepwarm.kv.codec import TRIPLE, Encoded

MAX_DEPTH = 16
MAX_NAME = 64  # characters of a name, and slots of a state

Tree: TypeAlias = Any  # a leaf, or a dict of trees under "0", "1", …

# The order of a layer's state since 0.32; `idx` is where a rotating cache writes next.
STATE = {
    "KVCache": ("keys", "values", "offset"),
    "ConcatenateKVCache": ("keys", "values"),
    "QuantizedKVCache": ("keys", "values", "offset", "group_size", "bits"),
    "RotatingKVCache": ("keys", "values", "offset", "keep", "max_size", "idx"),
    "ChunkedKVCache": ("keys", "values", "offset", "chunk_size", "start_position"),
}
# The numbers that stood beside the tensors before 0.32, by how many there are. Swift and the
# first versions of mlx-lm write `step` too, later Swift also where the capacity came from.
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
STATE_CLASSES = {"ArraysCache": None, "MambaCache": 2}  # and how many slots each must have
UNSAVED = {"LayerCache": "mlx-lm does not save its window size and cannot load it"}
BATCHED = ("BatchKVCache", "BatchRotatingKVCache")
SWIFT_KV = "KVCacheSimple"
SWIFT_MODEL_STATE = "__mlx_lm_state_"


class Dialect(Enum):
    MLX_LM = "mlx-lm ≥ 0.32"
    EARLY_MLX_LM = "mlx-lm ≤ 0.31"
    SWIFT = "mlx-swift-lm"


class Place(NamedTuple):
    """Where in a file we are, for the sentence that says what is wrong there."""

    file: str
    layer: str

    def part(self, index: int) -> Place:
        if self.layer.count(".") >= MAX_DEPTH:
            raise self.bad(f"composites are nested more than {MAX_DEPTH} deep")
        return Place(self.file, f"{self.layer}.{index}")

    def bad(self, why: str) -> BadCacheFile:
        return BadCacheFile(f"{self.file}, layer {self.layer}: {why}.")


class Contents(NamedTuple):
    """A file as it stands: rows may be padded or rotated, and `offset` may be missing."""

    layers: list[Encoded]
    metadata: dict[str, str]
    dialect: Dialect


def read(file: str) -> Contents:
    """Tell the layout of a file and read it; the tensors are not evaluated yet."""
    header, tensors = _open(file)
    # The first value is empty in the new layout and a class name in both older ones.
    if header.get("2.0") == "" and "1.0" in header:
        layers = _read_current(file, header, tensors)
        return Contents(layers, _section(header, "0"), Dialect.MLX_LM)
    if header.get("2.0"):
        return _read_early(file, header, tensors)
    raise BadCacheFile(
        f"{file} is safetensors without the metadata of a prompt cache; "
        "pass a file written by mlx-lm's or Swift's save function."
    )


def _open(file: str) -> tuple[dict[str, str], dict[str, mx.array]]:
    """Metadata and lazy tensors. The header is checked in whole before MLX acts on it."""
    try:
        with safe_open(file, framework="numpy") as checked:
            header = dict(checked.metadata() or {})
        tensors = mx.load(file, format="safetensors")
    except OSError as error:
        raise BadCacheFile(f"{file} cannot be read: {error.strerror or error}.") from error
    except (SafetensorError, RuntimeError, ValueError) as error:
        raise BadCacheFile(f"{file} is not a whole safetensors file: {error}.") from error
    assert isinstance(tensors, dict)
    return header, tensors


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
            raise BadCacheFile(f"{file}: the key {key[:MAX_NAME]!r} does not fit the others.")
        node[last] = leaf
    return root


def _items(node: Tree, place: Place, what: str, counts: Sequence[int] = ()) -> list[Tree]:
    """The children "0", "1", … of a node; `counts` says how many there may be."""
    if not isinstance(node, dict) or any(str(i) not in node for i in range(len(node))):
        raise place.bad(f"{what} are missing or misnamed")
    if counts and len(node) not in counts:
        expected = " or ".join(map(str, counts))
        raise place.bad(f"there are {len(node)} {what}, expected {expected}")
    return [node[str(i)] for i in range(len(node))]


def _layers(file: str, names: Mapping[str, str], tensors: Mapping[str, Any]) -> list[Tree]:
    """For each layer its place, class and state; a layer without tensors has an empty state."""
    nested = _nest(file, tensors)
    surplus = sorted(set(nested) - set(names))
    if surplus or any(str(i) not in names for i in range(len(names))):
        what = f"tensors of {surplus[0]!r}" if surplus else "class names with gaps"
        raise BadCacheFile(f"{file} names {len(names)} layers, but there are {what}.")
    return [(Place(file, i), names[i], nested.get(i, {})) for i in map(str, range(len(names)))]


def _check_class(cls: Tree, place: Place, known: Mapping[str, Any]) -> None:
    if cls in BATCHED:
        raise place.bad(f"it is a batch ({cls}); extract one sequence and save that")
    if isinstance(cls, str) and cls in UNSAVED:
        raise place.bad(f"{cls} cannot be read: {UNSAVED[cls]}")
    if not isinstance(cls, str) or cls not in known:
        raise place.bad(f"{str(cls)[:MAX_NAME]!r} is not a cache class known to Keepwarm")


def _read_current(
    file: str, header: Mapping[str, str], tensors: Mapping[str, mx.array]
) -> list[Encoded]:
    values = _with_values(file, _section(header, "2"), tensors)
    layers = _layers(file, _section(header, "1"), values)
    return [_current(cls, state, place) for place, cls, state in layers]


def _with_values(
    file: str, tags: Mapping[str, str], tensors: Mapping[str, mx.array]
) -> dict[str, Any]:
    """The tensors, those that are tagged replaced by the plain value they stand for."""
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
    raise BadCacheFile(f"{file}: {key[:MAX_NAME]!r} is no {kind[:MAX_NAME]} that can be read.")


def _current(cls: str, state: Tree, place: Place) -> Encoded:
    _check_class(cls, place, {**STATE, "ArraysCache": (), "CacheList": ()})
    if cls == "CacheList":
        return Encoded(cls, parts=tuple(_current_parts(state, place)))
    if cls == "ArraysCache":
        slots, *padding = _items(state, place, "values", (3,))
        if any(array is not None for array in padding):
            raise place.bad("it is padded for a batch; extract one sequence and save that")
        return _arrays(dict(enumerate(_items(slots, place, "slots"))), len(slots), place)
    names = STATE[cls]
    values = dict(zip(names, _items(state, place, "values", (len(names),)), strict=True))
    rows = [values.pop("keys"), values.pop("values")]
    for name, value in values.items():
        if not isinstance(value, int):
            raise place.bad(f"{name} is not a number")
    is_empty = rows[0] is None and rows[1] is None
    return Encoded(cls, {} if is_empty else _rows(rows, place), values)


def _current_parts(state: Tree, place: Place) -> list[Encoded]:
    parts = []
    for i, item in enumerate(_items(state, place, "parts")):
        inner = place.part(i)
        part_state, cls = _items(item, inner, "values", (2,))
        parts.append(_current(cls, part_state, inner))
    return parts


def _rows(pair: Sequence[Tree], place: Place) -> dict[str, mx.array]:
    """K and V under the codec's names, each one tensor or a quantised triple."""
    found: dict[str, mx.array] = {}
    for name, rows in zip(("keys", "values"), pair, strict=True):
        if isinstance(rows, dict):
            triple = _items(rows, place, f"tensors of {name}", (len(TRIPLE),))
            found |= {f"{name}_{part}": x for part, x in zip(TRIPLE, triple, strict=True)}
        else:
            found[name] = rows
    if not all(isinstance(rows, mx.array) for rows in found.values()):
        raise place.bad("tensors of its keys or values are missing")
    return found


def _arrays(slots: Mapping[int, Tree], size: int, place: Place) -> Encoded:
    filled = {f"state{i}": array for i, array in slots.items() if array is not None}
    if not size or not all(isinstance(array, mx.array) for array in filled.values()):
        raise place.bad("its state arrays are missing")
    return Encoded("ArraysCache", filled, {"size": size})


def _read_early(file: str, header: Mapping[str, str], tensors: Mapping[str, mx.array]) -> Contents:
    metadata, names = _section(header, "1"), _section(header, "2")
    if any(key.startswith(SWIFT_MODEL_STATE) for key in (*metadata, *tensors)):
        raise BadCacheFile(
            f"{file} carries state of a Swift vision model beside its caches; mlx-lm has no place "
            "for it and would continue at wrong positions, so prefill the prompt instead."
        )
    infos = _nest(file, _section(header, "0"))
    layers, swift = [], False
    for place, cls, state in _layers(file, names, tensors):
        info = infos.get(place.layer, "")
        layers.append(_early(cls, state, info, place))
        swift = swift or _is_swift(cls, state, info)
    return Contents(layers, metadata, Dialect.SWIFT if swift else Dialect.EARLY_MLX_LM)


def _is_swift(cls: str, state: Tree, info: Tree) -> bool:
    """Signs that only Swift leaves; layers without one are written alike by both."""
    if not isinstance(info, dict):
        return False
    if cls == "CacheList":
        return isinstance(info.get("0"), str)
    if cls == "QuantizedKVCache":
        return isinstance(state.get("0"), mx.array)
    return cls in STATE_CLASSES or len(info) in (1, 6)


def _early(cls: str, state: Tree, info: Tree, place: Place) -> Encoded:
    cls = "KVCache" if cls == SWIFT_KV else cls
    _check_class(cls, place, {**EARLY, **STATE_CLASSES, "CacheList": ()})
    if cls == "CacheList":
        return Encoded(cls, parts=tuple(_early_parts(state, info, place)))
    if cls in STATE_CLASSES:
        return _early_arrays(cls, state, info, place)
    words = [] if info in ("", {"0": ""}) else _words(info, place)
    names = EARLY[cls].get(len(words))
    if names is None:
        raise place.bad(f"{cls} has {len(words)} numbers, which no known version writes")
    named = zip(names, words, strict=True)
    numbers = {name: _number(word, place) for name, word in named if name not in NOT_NEEDED}
    return Encoded(cls, _early_rows(cls, state, place), numbers)


def _early_rows(cls: str, state: Tree, place: Place) -> dict[str, mx.array]:
    """K and V; Swift writes a quantised pair as six tensors in a row, and may write none."""
    arrays = _items(state, place, "tensors")
    if cls == "QuantizedKVCache" and len(arrays) == 4:
        raise place.bad("it is quantised without biases, which mlx-lm's cache cannot hold")
    if cls == "QuantizedKVCache" and len(arrays) == 6:
        arrays = [_node(arrays[:3]), _node(arrays[3:])]
    if len(arrays) not in (0, 2):
        raise place.bad(f"there are {len(arrays)} tensors, expected keys and values")
    return _rows(arrays, place) if arrays else {}


def _early_arrays(cls: str, state: Tree, info: Tree, place: Place) -> Encoded:
    arrays = _items(state, place, "state arrays")
    slots, size = dict(enumerate(arrays)), len(arrays)
    if isinstance(info, dict) and len(info) > 1:
        slots, size = _swift_slots(arrays, _words(info, place), place)
    elif info != "" and cls == "ArraysCache":
        raise place.bad("this version of Swift did not save which of its slots were filled")
    if STATE_CLASSES[cls] not in (None, size):
        raise place.bad(f"{cls} has {size} state arrays, expected {STATE_CLASSES[cls]}")
    return _arrays(slots, size, place)


def _swift_slots(arrays: list[Tree], words: list[str], place: Place) -> tuple[dict[int, Tree], int]:
    count, filled, *padding = words
    if any(padding):
        raise place.bad("it is padded for a batch; extract one sequence and save that")
    size = _number(count, place)
    indices = [_number(word, place) for word in filled.split(",")] if filled else []
    if len(set(indices)) != len(arrays) or size > MAX_NAME or any(i >= size for i in indices):
        raise place.bad(f"{len(arrays)} arrays do not fill slots {filled[:MAX_NAME]!r} of {size}")
    return dict(zip(indices, arrays, strict=True)), size


def _early_parts(state: Tree, info: Tree, place: Place) -> list[Encoded]:
    if isinstance(info, dict) and isinstance(info.get("0"), dict):
        names, numbers = _items(info, place, "lists", (2,))
        classes = _items(names, place, "parts")
        states, infos = (_items(x, place, "parts", (len(classes),)) for x in (state, numbers))
        parts = enumerate(zip(classes, states, infos, strict=True))
        return [_early(cls, tree, words, place.part(i)) for i, (cls, tree, words) in parts]
    if info in ("", {"0": ""}):
        raise place.bad("this version did not save the classes of a CacheList's parts")
    return _swift_parts(state, _words(info, place), place)


def _swift_parts(state: Tree, words: list[str], place: Place) -> list[Encoded]:
    """Flat: how many parts, then for each its class, its counts of tensors and numbers, these."""
    arrays, rest = _items(state, place, "tensors"), words[1:]
    parts: list[Encoded] = []
    while len(rest) >= 3:
        inner = place.part(len(parts))
        n_arrays, n_words = _number(rest[1], inner), _number(rest[2], inner)
        info = _node(rest[3 : 3 + n_words])
        parts.append(_early(rest[0], _node(arrays[:n_arrays]), info, inner))
        arrays, rest = arrays[n_arrays:], rest[3 + n_words :]
    if len(parts) != _number(words[0], place) or arrays or rest:
        raise place.bad("its parts do not add up")
    return parts


def _node(items: Sequence[Tree]) -> Tree:
    return {str(i): item for i, item in enumerate(items)}


def _words(info: Tree, place: Place) -> list[str]:
    words = _items(info, place, "numbers")
    if not all(isinstance(word, str) for word in words):
        raise place.bad("its numbers are nested")
    return words


def _number(word: str, place: Place) -> int:
    if not (word.isascii() and word.isdecimal() and len(word) < 16):
        raise place.bad(f"{word[:MAX_NAME]!r} is not a count")
    return int(word)
