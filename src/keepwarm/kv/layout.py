"""The layout of a model's caches: kind and class of each layer, shape and dtype of each tensor.

It is found once, by feeding the model a few tokens, and then decides whether a block or a cache
fits. Nothing is assumed from the architecture's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from keepwarm.errors import BadInput, CacheMismatch
from keepwarm.kv.codec import EncodedCache, Scalar, encode
from keepwarm.kv.kinds import Caches, Kind, kind_of, leaves
from keepwarm.kv.quant import QuantKVCache
from keepwarm.kv.slabs import on_cuda

ROWS = 2  # the token axis of K and V
POSITIONS = frozenset({"offset", "start_position"})  # scalars that change with every token


class ArrayLike(Protocol):
    """An MLX array, or host bytes that will become one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def ndim(self) -> int: ...

    @property
    def dtype(self) -> mx.Dtype: ...


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor; None is the row axis, or another axis that grows."""

    shape: tuple[int | None, ...]
    dtype: mx.Dtype

    def __str__(self) -> str:
        shape = ", ".join("any" if n is None else str(n) for n in self.shape)
        return f"{self.dtype} ({shape})"

    def with_rows(self, n_rows: int) -> tuple[int, ...]:
        return tuple([n_rows if n is None else n for n in self.shape])

    def n_bytes(self, n_rows: int) -> int:
        return self.dtype.size * prod(self.with_rows(n_rows))

    def check(self, array: ArrayLike, n_rows: int | None, where: str) -> None:
        """Raise unless the array is like this; `n_rows` is None if any number of rows will do."""
        if array.dtype != self.dtype:
            raise CacheMismatch(where, "the dtype", self.dtype, array.dtype)
        expected = self.shape if n_rows is None else self.with_rows(n_rows)
        if not _fits(array.shape, expected):
            raise CacheMismatch(where, "the shape", expected, array.shape)

    def accepts(self, other: TensorSpec) -> bool:
        return self.dtype == other.dtype and _fits(other.shape, self.shape)

    def opened(self, later: TensorSpec) -> TensorSpec:
        """The same, with the axes open that are longer after some more tokens."""
        pairs = zip(self.shape, later.shape, strict=True)
        return replace(self, shape=tuple(m if m == n else None for m, n in pairs))


def _fits(shape: tuple[int | None, ...], expected: tuple[int | None, ...]) -> bool:
    return len(shape) == len(expected) and all(
        m in (None, n) for m, n in zip(expected, shape, strict=True)
    )


@dataclass(frozen=True)
class LayerSpec:
    """One layer, or one part of a composite layer. An empty layer has no tensors."""

    path: str
    kind: Kind
    cls: str
    scalars: Mapping[str, Scalar]
    tensors: Mapping[str, TensorSpec]
    parts: tuple[LayerSpec, ...] = ()

    @property
    def window(self) -> int | None:
        """Rows needed to continue; None means all of them."""
        if self.kind is not Kind.WINDOW:
            return None
        return self.scalars.get("max_size") or self.scalars["chunk_size"]

    def first_row_needed(self, n_tokens: int) -> int:
        return max(0, n_tokens - self.window) if self.window else 0

    def state_rows(self, n_tokens: int) -> int | None:
        """Rows of a state as of `n_tokens`; None is any number."""
        max_size = self.scalars.get("max_size")
        return None if max_size is None else min(n_tokens, max_size)

    def opened(self, later: LayerSpec) -> LayerSpec:
        """The same as of some tokens later, with the axes open that grew since."""
        if self.has_variable_tensors:
            return self
        tensors = {
            name: self.tensors[name].opened(spec) if name in self.tensors else spec
            for name, spec in later.tensors.items()
        }
        parts = zip(self.parts, later.parts, strict=True)
        return replace(self, tensors=tensors, parts=tuple(a.opened(b) for a, b in parts))

    @property
    def has_variable_tensors(self) -> bool:
        """Whether arrays appear and grow with later tokens: one token does not show them all."""
        return self.cls == "LayerCache"

    def check(self, other: LayerSpec) -> None:
        """Raise if another layer differs from this one."""
        where = f"Layer {self.path}"
        for what, name in (("class", "cls"), ("kind", "kind"), ("settings", "scalars")):
            wanted, found = getattr(self, name), getattr(other, name)
            if wanted != found:
                raise CacheMismatch(where, f"the {what}", wanted, found)
        if len(self.parts) != len(other.parts):
            wanted, found = len(self.parts), len(other.parts)
            raise CacheMismatch(where, "the number of parts", wanted, found)
        _check_tensors(self, other.tensors)
        for part, own in zip(self.parts, other.parts, strict=True):
            part.check(own)

    def leaves(self) -> Iterator[LayerSpec]:
        if self.kind is Kind.COMPOSITE:
            for part in self.parts:
                yield from part.leaves()
        else:
            yield self


@dataclass(frozen=True)
class Layout:
    layers: tuple[LayerSpec, ...]

    def leaves(self) -> Iterator[LayerSpec]:
        for layer in self.layers:
            yield from layer.leaves()

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset(leaf.kind for leaf in self.leaves())

    @property
    def dtypes(self) -> set[mx.Dtype]:
        return {spec.dtype for leaf in self.leaves() for spec in leaf.tensors.values()}

    def check(self, caches: Caches) -> None:
        """Raise if filled caches differ from this layout in layers, classes, shapes or dtypes."""
        if len(caches) != len(self.layers):
            raise CacheMismatch("The cache", "the number of layers", len(self.layers), len(caches))
        for expected, got in zip(self.layers, layout_of(caches).layers, strict=True):
            expected.check(got)

    def fits(self, caches: Caches) -> bool:
        """Whether `check` passes."""
        try:
            self.check(caches)
        except CacheMismatch:
            return False
        return True


def _check_tensors(leaf: LayerSpec, found: Mapping[str, TensorSpec]) -> None:
    wanted = leaf.tensors
    if leaf.has_variable_tensors:
        found = {name: spec for name, spec in found.items() if name in wanted}
    for name in {**wanted, **found}:
        spec, own = wanted.get(name), found.get(name)
        if spec is None or own is None or not spec.accepts(own):
            expected, got = spec or "nothing", own or "missing"
            raise CacheMismatch(f"Layer {leaf.path}", f"the tensor {name}", expected, got)


def layout_of(caches: Caches) -> Layout:
    """The layout of filled caches."""
    specs = (_spec(str(i), kind_of(c), c, encode(c)) for i, c in enumerate(caches))
    return Layout(tuple(specs))


class Probe(NamedTuple):
    """What one run of a model shows."""

    layout: Layout
    n_logits: int  # often more than the tokenizer has tokens


def probe(model: Callable[..., Any], caches: Caches, token: int = 0) -> Layout:
    """The layout of a model; it may not run with the options of these caches."""
    is_quantised = _is_quantised(caches)
    if is_quantised and on_cuda():
        # MLX 0.32.4 has no kernel for most shapes, and is wrong for grouped-query attention.
        raise BadInput("MLX cannot compute with quantised keys and values on CUDA; remove kv_bits.")
    try:
        return run_probe(model, caches, token).layout
    except Exception as error:
        if not (is_quantised or isinstance(error, ValueError | TypeError)):
            raise
        # Quantised keys are not an array: a model with attention of its own cannot use them. Or a
        # group size does not divide a head, or there are attention sinks.
        is_reason = isinstance(error, ValueError | RuntimeError)
        why = str(error).partition("\n")[0] if is_reason else "its attention takes arrays only"
        name = getattr(model, "model_type", "This model")
        raise BadInput(
            f"{name} does not run with these KV options ({why}); change or remove them."
        ) from error


def run_probe(model: Callable[..., Any], caches: Caches, token: int = 0) -> Probe:
    """Feed a model one token with empty caches, and two more.

    The second slice has a mask, with which some models do not take quantised keys, and shows which
    states grow. Layers without either need only the first.
    """
    n_logits = _feed(model, caches, [token])
    layout = layout_of(caches)
    if _is_quantised(caches) or Kind.STATE in layout.kinds:
        _feed(model, caches, [token, token])
    later = zip(layout.layers, layout_of(caches).layers, strict=True)
    return Probe(Layout(tuple(layer.opened(grown) for layer, grown in later)), n_logits)


def _is_quantised(caches: Caches) -> bool:
    return any(isinstance(leaf, QuantKVCache) for _, leaf in leaves(caches))


def _feed(model: Callable[..., Any], caches: Caches, tokens: list[int]) -> int:
    logits: mx.array = model(mx.array([tokens]), cache=caches)
    mx.eval(logits)  # some models keep arrays of their first call, for every thread
    mx.eval([array for cache in caches for array in encode(cache).arrays()])
    return int(logits.shape[-1])


def _spec(path: str, kind: Kind, cache: Any, encoded: EncodedCache) -> LayerSpec:
    parts = tuple(
        _spec(f"{path}.{i}", kind_of(part), part, encoded.parts[i])
        for i, part in enumerate(cache.caches if encoded.parts else ())
    )
    fixed = {name: value for name, value in encoded.scalars.items() if name not in POSITIONS}
    tensors = {
        name: TensorSpec(_shape(encoded.cls, name, array), array.dtype)
        for name, array in encoded.tensors.items()
    }
    return LayerSpec(path, kind, encoded.cls, fixed, tensors, parts)


def _shape(cls: str, name: str, array: mx.array) -> tuple[int | None, ...]:
    """State arrays mostly have a fixed shape; K and V grow along their rows."""
    if cls == "LayerCache":
        return (array.shape[0], None, *array.shape[2:])
    if name.startswith("state"):
        return array.shape
    return (*array.shape[:ROWS], None, *array.shape[ROWS + 1 :])
