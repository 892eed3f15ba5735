"""Import and export of prompt-cache files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList

from keepwarm.errors import (
    BadCacheFile,
    BadInput,
    CacheError,
    CacheMismatch,
    InsufficientResources,
    UnsupportedCache,
)
from keepwarm.files import replacing
from keepwarm.kv.batch import batch_size, extract, merge, require_fed
from keepwarm.kv.codec import QUANT_PARTS, EncodedCache, Scalar, decode, encode
from keepwarm.kv.files import dialects
from keepwarm.kv.files.dialects import (
    MAX_NAME,
    STATE,
    Dialect,
    FileContents,
    LayerLocation,
)
from keepwarm.kv.kinds import Caches, is_batched, token_count
from keepwarm.kv.layout import ROWS, Layout
from keepwarm.kv.make import BITS, GROUP_SIZES

SUFFIX = ".safetensors"
N_ROWS = "keepwarm_rows"  # in the metadata of an exported batch
SWIFT_STEP = "256"  # rows by which Swift's caches grow


class PromptCacheFile(NamedTuple):
    """The content of a file; `metadata` is the user's, with the keys as in the file."""

    caches: Caches
    metadata: dict[str, str]
    dialect: Dialect


def export_prompt_cache(
    path: str | os.PathLike[str],
    caches: Caches,
    metadata: Mapping[str, str] | None = None,
    dialect: Dialect | Literal["mlx-lm", "swift"] = Dialect.MLX_LM,
) -> None:
    """Write a file that mlx-lm 0.32 and later loads, or mlx-swift-lm: live rows only, whole or not
    at all.

    The rows of a batch are written one by one, without padding; each layer of such a file is a
    CacheList of them. Readable by its owner alone. The caches are not changed; call it on the
    thread that owns them.
    """
    target = Path(path)
    if target.suffix != SUFFIX:
        raise BadInput(f"{target} must end in {SUFFIX}: mlx-lm loads no other name.")
    if not caches:
        raise BadInput("A prompt cache without layers cannot be exported.")
    notes, dialect = _check_metadata(metadata or {}), _writable(dialect)
    if any(is_batched(cache) for cache in caches):
        if dialect is Dialect.SWIFT:
            raise UnsupportedCache("Swift cannot load a batch; extract a row first.")
        notes[N_ROWS] = str(batch_size(caches))
        caches = _side_by_side(caches)
    layers = [encode(cache) for cache in caches]
    write = _swift_file if dialect is Dialect.SWIFT else _mlx_lm_file
    _publish(target, *write(layers, notes))


def _writable(dialect: Dialect | str) -> Dialect:
    known = (Dialect.MLX_LM, Dialect.SWIFT)
    found = next((one for one in known if dialect in (one, one.value)), None)
    if found is None:
        raise BadInput(f"Files are written for mlx-lm or swift, not for {dialect!r}.")
    return found


def import_prompt_cache(
    path: str | os.PathLike[str], layout: Layout | None = None
) -> PromptCacheFile:
    """The caches in a prompt-cache file of any known format, evaluated, so the file may change.

    With the `layout` of a model, caches of another model are refused. An exported batch comes back
    as a batch.
    """
    file = os.fspath(path)
    rows, contents = _read(file)
    _evaluate(file, rows)
    if layout is not None:
        for row in rows:
            layout.check(row)
    metadata = {key: value for key, value in contents.metadata.items() if key != N_ROWS}
    caches = _merge(file, rows) if N_ROWS in contents.metadata else rows[0]
    return PromptCacheFile(caches, metadata, contents.dialect)


def _side_by_side(batch: Caches) -> Caches:
    """For each layer a CacheList of its rows."""
    require_fed(batch)
    rows = [extract(batch, row) for row in range(batch_size(batch))]
    return [CacheList(*layers) for layers in zip(*rows, strict=True)]


def _read(file: str) -> tuple[list[Caches], FileContents]:
    """The sequences in a file, checked as far as possible without reading their tensors."""
    contents = dialects.read(file)
    n_tokens = next(_token_counts(contents.layers), None)
    locations = [LayerLocation(file, str(i)) for i in range(len(contents.layers))]
    caches = [
        decode(_normalize(raw, at, n_tokens))
        for raw, at in zip(contents.layers, locations, strict=True)
    ]
    rows = [caches]
    if N_ROWS in contents.metadata:
        rows = _rows_of_batch(file, caches, contents.metadata[N_ROWS])
    try:
        for row in rows:
            token_count(row)
    except CacheMismatch as error:
        raise BadCacheFile(f"{file}: its layers disagree: {error}") from error
    return rows, contents


def _mlx_lm_file(
    layers: Sequence[EncodedCache], metadata: Mapping[str, str]
) -> tuple[dict[str, mx.array], dict[str, str]]:
    tensors, tags = _as_arrays(dict(tree_flatten([_state(layer) for layer in layers])))
    classes = [layer.cls for layer in layers]
    # mlx-lm skips the first tag: without it the list could be empty and would vanish.
    return tensors, dict(tree_flatten([dict(metadata), classes, ["", *tags]]))


def _rows_of_batch(file: str, caches: Caches, n_rows: str) -> list[Caches]:
    if any(type(c) is not CacheList or str(len(c.caches)) != n_rows for c in caches):
        raise BadCacheFile(f"{file} claims {n_rows[:MAX_NAME]} rows, but its layers hold others.")
    return [list(row) for row in zip(*(cache.caches for cache in caches), strict=True)]


def _merge(file: str, rows: list[Caches]) -> Caches:
    try:
        return merge(rows)
    except CacheError as error:
        raise BadCacheFile(f"{file}: its rows do not form a batch: {error}") from error


def _state(layer: EncodedCache) -> list[Any]:
    """A layer as mlx-lm's own `state`, without spare rows."""
    if layer.cls in dialects.UNSAVED:
        raise UnsupportedCache(f"{layer.cls} cannot be exported: {dialects.UNSAVED[layer.cls]}.")
    if layer.cls in ("CacheList", "ConcatenateKVCache") and not (layer.parts or layer.tensors):
        raise UnsupportedCache(f"mlx-lm cannot load an empty {layer.cls}; feed it first.")
    if layer.parts:
        return [[_state(part), part.cls] for part in layer.parts]
    if layer.cls == "ArraysCache":
        slots = [layer.tensors.get(f"state{i}") for i in range(layer.scalars["size"])]
        return [slots, None, None]
    rows = {"keys": _rows_of(layer, "keys"), "values": _rows_of(layer, "values")}
    values = {**layer.scalars, **rows, "idx": _n_rows(layer)}
    return [values[name] for name in STATE[layer.cls]]


def _rows_of(layer: EncodedCache, name: str) -> mx.array | list[mx.array] | None:
    if not layer.tensors or name in layer.tensors:
        return layer.tensors.get(name)
    return [layer.tensors[f"{name}_{part}"] for part in QUANT_PARTS]


def _n_rows(layer: EncodedCache) -> int:
    return next((a.shape[ROWS] for a in layer.tensors.values() if a.ndim > ROWS), 0)


def _as_arrays(
    leaves: Mapping[str, Any],
) -> tuple[dict[str, mx.array], list[tuple[str, str]]]:
    """Every leaf as an array, and tags for those that encode a number, a string or None."""
    tensors: dict[str, mx.array] = {}
    tags: list[tuple[str, str]] = []
    for key, leaf in leaves.items():
        if isinstance(leaf, mx.array):
            tensors[key] = leaf
        elif isinstance(leaf, str):
            tensors[key] = mx.array([ord(char) for char in leaf])
            tags.append((key, "string"))
        else:
            tensors[key] = mx.array([] if leaf is None else leaf)
            tags.append((key, "none" if leaf is None else "scalar"))
    return tensors, tags


def _check_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise BadInput(f"Metadata keys and values must be strings; {key!r}: {value!r} is not.")
        if key == N_ROWS:
            raise BadInput(f"Metadata key {N_ROWS!r} marks an exported batch; use another one.")
        if not key or "." in key or key.isdecimal():
            raise BadInput(
                f"Metadata key {key!r} would be changed on loading: mlx-lm splits keys at dots and "
                "turns numeric keys into lists; use letters, '-' and '_'."
            )
    return dict(metadata)


def _publish(target: Path, tensors: dict[str, mx.array], header: dict[str, str]) -> None:
    mx.eval(tensors)
    try:
        with replacing(target, sync=True) as temp:
            mx.save_safetensors(str(temp), tensors, header)
            _check_readable(target, str(temp))
    except OSError as error:
        raise BadInput(f"{target} cannot be written: {error.strerror}.") from error
    except RuntimeError as error:
        n_bytes = sum(array.nbytes for array in tensors.values())
        raise InsufficientResources(
            f"{target} could not be written whole and was left as it was; "
            f"it needs {n_bytes:,} bytes of disk."
        ) from error


def _check_readable(target: Path, file: str) -> None:
    try:
        _read(file)
    except BadCacheFile as error:
        why = str(error).replace(file, str(target))
        raise UnsupportedCache(f"Nothing was exported; it could not be read back: {why}") from error


def _evaluate(file: str, rows: Sequence[Caches]) -> None:
    try:
        mx.eval([encode(cache).arrays() for row in rows for cache in row])
    except RuntimeError as error:
        raise BadCacheFile(f"{file} could not be read, or changed meanwhile: {error}.") from error


def _token_counts(layers: Sequence[EncodedCache]) -> Iterator[int]:
    """Token counts of the layers that store them, for those that do not (see `_chunk_rows`)."""
    for raw in layers:
        yield from _token_counts(raw.parts)
        if raw.cls == "KVCache":
            yield raw.scalars.get("offset", _n_rows(raw))
        elif "offset" in raw.scalars:
            yield raw.scalars["offset"]


def _normalize(raw: EncodedCache, where: LayerLocation, n_tokens: int | None) -> EncodedCache:
    """Check a layer as written and bring it into the codec's form: live rows in token order."""
    if raw.cls == "CacheList":
        if not raw.parts:
            raise where.error("a CacheList without parts cannot be used")
        parts = enumerate(raw.parts)
        return EncodedCache(
            raw.cls, parts=tuple(_normalize(p, where.part(i), n_tokens) for i, p in parts)
        )
    if raw.cls == "ArraysCache":
        _check_single(raw, where, 1)
        return raw
    _check_rows(raw, where)
    return NORMALIZERS[raw.cls](raw, where, n_tokens)


def _check_single(raw: EncodedCache, where: LayerLocation, n_axes: int) -> None:
    for name, array in raw.tensors.items():
        if array.ndim < n_axes:
            raise where.error(f"{name} has the shape {array.shape}")
        if array.shape[0] != 1:
            raise where.error(
                f"{name} holds {array.shape[0]} sequences; extract one of them and save that"
            )


def _check_rows(raw: EncodedCache, where: LayerLocation) -> None:
    """K and V must match: one sequence, the same heads and rows, valid dtypes."""
    _check_single(raw, where, 4)
    if any(array.ndim != 4 for array in raw.tensors.values()):
        raise where.error("keys and values must have four axes")
    if len({array.shape[1:3] for array in raw.tensors.values()}) > 1:
        raise where.error("keys and values differ in heads or rows")
    quantized = raw.cls == "QuantizedKVCache"
    for name, array in raw.tensors.items():
        packed = name.endswith("_weights")
        if not (array.dtype == mx.uint32 if packed else mx.issubdtype(array.dtype, mx.floating)):
            raise where.error(f"{name} cannot be of dtype {array.dtype}")
        if quantized != (name not in ("keys", "values")):
            raise where.error(f"{raw.cls} cannot hold {name}")
    if quantized:
        _check_groups(raw, where)


def _check_groups(raw: EncodedCache, where: LayerLocation) -> None:
    group_size, bits = raw.scalars["group_size"], raw.scalars["bits"]
    if group_size not in GROUP_SIZES or bits not in BITS:
        raise where.error(f"{bits} bits in groups of {group_size} are not supported")
    for name in ("keys", "values") if raw.tensors else ():
        weights, scales, biases = (raw.tensors[f"{name}_{part}"].shape[-1] for part in QUANT_PARTS)
        if scales != biases or weights * 32 != scales * group_size * bits:
            raise where.error(f"{name} are not quantised to {bits} bits in groups of {group_size}")


def _take_rows(raw: EncodedCache, n_rows: int, scalars: Mapping[str, Scalar]) -> EncodedCache:
    tensors = {name: array[..., :n_rows, :] for name, array in raw.tensors.items()}
    return EncodedCache(raw.cls, tensors if n_rows else {}, scalars)


def _delta_rows(raw: EncodedCache, where: LayerLocation, _: int | None) -> EncodedCache:
    offset = raw.scalars.get("offset", _n_rows(raw))
    if not 0 <= offset <= _n_rows(raw):
        raise where.error(f"it claims {offset} tokens but holds {_n_rows(raw)} rows")
    return _take_rows(raw, offset, {**raw.scalars, "offset": offset})


def _chunk_rows(raw: EncodedCache, where: LayerLocation, n_tokens: int | None) -> EncodedCache:
    """Before 0.32 the offset was not saved; if rows have left the window, it is `n_tokens`."""
    n_rows, start = _n_rows(raw), raw.scalars["start_position"]
    offset = raw.scalars.get("offset", n_tokens if start else n_rows)
    if offset is None:
        raise where.error(
            f"{start} rows have left the window and no layer stores the token count, because "
            "neither mlx-lm before 0.32 nor Swift saves it for a ChunkedKVCache; "
            "prefill the prompt instead"
        )
    if not 0 <= start <= offset <= start + n_rows or raw.scalars["chunk_size"] < 1:
        raise where.error(f"it claims tokens {start} to {offset} but holds {n_rows} rows")
    return _take_rows(raw, offset - start, {**raw.scalars, "offset": offset})


def _window_rows(raw: EncodedCache, where: LayerLocation, _: int | None) -> EncodedCache:
    """A rotating cache is a list that ends at `idx`, or a full ring with its next write there."""
    n_rows = _n_rows(raw)
    scalars = dict(raw.scalars)
    idx, offset = scalars.pop("idx"), scalars["offset"]
    keep, max_size = scalars["keep"], scalars["max_size"]
    if not 0 <= keep < max_size:
        raise where.error(f"a window of {max_size} cannot keep {keep} first tokens")
    is_list = idx == n_rows and min(offset, max_size) <= n_rows <= offset
    if is_list or 0 <= idx == offset < n_rows:
        return _take_rows(raw, idx, scalars)
    if not (n_rows == max_size <= offset and keep <= idx < n_rows):
        raise where.error(f"it claims {offset} tokens up to row {idx} but holds {n_rows} rows")
    parts = (slice(0, keep), slice(idx, n_rows), slice(keep, idx))
    tensors = {
        name: mx.concatenate([rows[..., part, :] for part in parts], axis=ROWS)
        for name, rows in raw.tensors.items()
    }
    return EncodedCache(raw.cls, tensors, scalars)


NORMALIZERS: dict[str, Callable[[EncodedCache, LayerLocation, int | None], EncodedCache]] = {
    "KVCache": _delta_rows,
    "ConcatenateKVCache": _delta_rows,
    "QuantizedKVCache": _delta_rows,
    "RotatingKVCache": _window_rows,
    "ChunkedKVCache": _chunk_rows,
}


# Files as mlx-swift-lm's `savePromptCache` writes them (its version of August 2026). Tensors of a
# layer are `3.0`, `3.1`, …; its numbers, the user's metadata and the class names are the sections
# 0, 1 and 2 of the header. A composite is one layer whose parts are told in its numbers.


class _SwiftLayer(NamedTuple):
    cls: str
    arrays: list[mx.array]
    words: list[str]


def _swift_file(
    layers: Sequence[EncodedCache], metadata: Mapping[str, str]
) -> tuple[dict[str, mx.array], dict[str, str]]:
    """The tensors and the header of a file."""
    tensors: dict[str, mx.array] = {}
    header = {f"1.{key}": value for key, value in metadata.items()}
    for i, layer in enumerate(map(_swift_layer, layers)):
        tensors |= {f"{i}.{j}": array for j, array in enumerate(layer.arrays)}
        header |= {f"0.{i}.{j}": word for j, word in enumerate(layer.words)}
        header[f"2.{i}"] = layer.cls
    return tensors, header


def _swift_layer(layer: EncodedCache) -> _SwiftLayer:
    if layer.cls == "CacheList":
        return _swift_list(layer)
    if layer.cls == "ArraysCache":
        return _swift_arrays(layer)
    words = _swift_words(layer)
    if words is None:
        raise UnsupportedCache(f"{layer.cls} cannot be exported: Swift has no such cache.")
    return _SwiftLayer(layer.cls, _swift_rows(layer), words)


def _swift_words(layer: EncodedCache) -> list[str] | None:
    """The numbers of a layer, in Swift's order; None for a class that it does not know."""
    n = {name: str(value) for name, value in layer.scalars.items()}
    if layer.cls == "KVCache":
        return [""]
    if layer.cls == "QuantizedKVCache":
        return [SWIFT_STEP, n["offset"], n["group_size"], n["bits"]]
    if layer.cls == "RotatingKVCache":
        return [n["keep"], n["max_size"], SWIFT_STEP, n["offset"], str(_n_rows(layer))]
    if layer.cls == "ChunkedKVCache":
        if layer.scalars["start_position"]:
            raise UnsupportedCache(
                "A ChunkedKVCache whose first rows have left the window cannot be exported: "
                "Swift does not save its token count."
            )
        return [n["chunk_size"], n["start_position"]]
    return None


def _swift_rows(layer: EncodedCache) -> list[mx.array]:
    """K and V, or the three arrays of each."""
    names = [f"{name}_{part}" for name in ("keys", "values") for part in QUANT_PARTS]
    return [layer.tensors[name] for name in ("keys", "values", *names) if name in layer.tensors]


def _swift_arrays(layer: EncodedCache) -> _SwiftLayer:
    size = int(layer.scalars["size"])
    filled = [i for i in range(size) if f"state{i}" in layer.tensors]
    arrays = [layer.tensors[f"state{i}"] for i in filled]
    return _SwiftLayer("ArraysCache", arrays, [str(size), ",".join(map(str, filled))])


def _swift_list(layer: EncodedCache) -> _SwiftLayer:
    parts = [_swift_layer(part) for part in layer.parts]
    words = [str(len(parts))]
    for part in parts:
        words += [part.cls, str(len(part.arrays)), str(len(part.words)), *part.words]
    return _SwiftLayer("CacheList", [array for part in parts for array in part.arrays], words)
