"""Caches of several sequences as one batch: merge, extend, filter, pad, extract.

mlx-lm's batch caches do the work. What they accept silently and get wrong (mixed dtypes, a lost
`keep`, mismatched layers) is refused here, with layer and reason. Functions take one cache per
layer for the whole batch, as a model does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple, Self, TypeAlias

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.cache import (
    ArraysCache,
    BatchRotatingKVCache,
    CacheList,
    QuantizedKVCache,
    RotatingKVCache,
)

from keepwarm.errors import BadInput, CacheMismatch, UnsupportedCache
from keepwarm.kv.codec import encode, require_finalized
from keepwarm.kv.kinds import Cache, Caches, Kind, is_batched, is_empty, kind_of, leaves
from keepwarm.kv.quant import BatchQuantizedKVCache, QuantKVCache
from keepwarm.kv.rows import RowsKVCache, RowsQuantKVCache

BATCHABLE = ("KVCache", "QuantizedKVCache", "RotatingKVCache", "ArraysCache")
# Model types of mlx-lm that take padding for tokens of their state.
FOLDING = frozenset(
    (
        *("baichuan_m1", "bailing_moe_linear", "jamba", "longcat_flash_ngram", "mamba"),
        *("nemotron_h", "olmo_hybrid", "recurrent_gemma", "rwkv7"),
    )
)
States: TypeAlias = Sequence[Sequence[mx.array | None]]
SETTINGS = ("group_size", "bits", "max_size", "keep", "size")


@dataclass(frozen=True)
class LeftPadding:
    """Row i starts with `amounts[i]` padding tokens. Only an empty batch can take it."""

    amounts: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "amounts", _checked_counts("Padding amounts", self.amounts))


@dataclass(frozen=True)
class RightPadding:
    """Row i has `lengths[i]` tokens, followed by padding up to the longest row."""

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", _checked_counts("Padded lengths", self.lengths))

    @property
    def amounts(self) -> tuple[int, ...]:
        return tuple(max(self.lengths) - n for n in self.lengths)


@dataclass(frozen=True)
class TwoSidedPadding:
    """Padding on both sides; `right.lengths` include the left padding."""

    left: LeftPadding
    right: RightPadding

    def __post_init__(self) -> None:
        n_rows = len(self.left.amounts)
        if n_rows != len(self.right.lengths):
            raise CacheMismatch(
                "Right padding", "the number of rows", n_rows, len(self.right.lengths)
            )
        pairs = zip(self.left.amounts, self.right.lengths, strict=True)
        for row, (amount, length) in enumerate(pairs):
            if amount > length:
                raise BadInput(
                    f"Row {row} has {amount} tokens of left padding and a length of {length}; "
                    "a length includes the left padding."
                )


Padding = LeftPadding | RightPadding | TwoSidedPadding


class _AnnouncedSlice(NamedTuple):
    """What `prepare` said about the next slice. Each layer keeps it until `finalize`."""

    left: tuple[int, ...]  # padding before each row
    lengths: tuple[int, ...]  # tokens of each row with its left padding, if they were given
    start: int = 0  # tokens that the layer was fed before

    @classmethod
    def of(cls, padding: Padding) -> Self:
        if isinstance(padding, TwoSidedPadding):
            return cls(padding.left.amounts, padding.right.lengths)
        if isinstance(padding, RightPadding):
            return cls((), padding.lengths)
        return cls(padding.amounts, ())

    @property
    def is_padded(self) -> bool:
        """Whether rows have padding at all."""
        return any(self.left) or len(set(self.lengths)) > 1

    def arguments(self) -> dict[str, list[int]]:
        """As mlx-lm's caches take it."""
        arguments = {"left_padding": list(self.left)} if self.left else {}
        if self.lengths:
            padding = RightPadding(self.lengths).amounts
            arguments |= {"lengths": list(self.lengths), "right_padding": list(padding)}
        return arguments


def empty_batch(caches: Caches, n_rows: int) -> Caches:
    """A batch of `n_rows` empty sequences, from empty caches of the model."""
    return merge([caches] * n_rows)


def merge(rows: Sequence[Caches], *, own_ends: bool = False) -> Caches:
    """One batch from single sequences of any lengths, including 0. The originals are not changed.

    Rows are right-aligned, with left padding. With `own_ends` each row ends where it ends, and
    `trim` can take back a number of tokens of each; such a batch takes no padding. Everything is
    checked before anything is copied. An empty state joins only empty ones: not every model begins
    as from zeros.
    """
    if not rows:
        raise UnsupportedCache("A batch needs at least one sequence.")
    _check_rows_fit(rows)
    return [_merge_layer([row[i] for row in rows], own_ends) for i in range(len(rows[0]))]


def batch_size(batch: Caches) -> int:
    sizes = [_n_rows(path, leaf) for path, leaf in leaves(batch)]
    if not sizes:
        raise UnsupportedCache("The batch has no layers; a model without caches cannot be batched.")
    return sizes[0]


def _n_rows(path: str, leaf: Cache) -> int:
    if isinstance(leaf, ArraysCache):
        return int(leaf.batch_size)
    if not is_batched(leaf):
        raise UnsupportedCache(f"Layer {path}: {type(leaf).__name__} is not a batch; merge rows.")
    return int(leaf.offset.shape[0])


def require_fed(batch: Caches) -> None:
    """Raise if the rows cannot be told from their padding: it was announced and not fed."""
    for path, leaf in leaves(batch):
        require_finalized(leaf)
        if is_empty(leaf) and leaf.left_padding is not None and mx.any(leaf.left_padding > 0):
            raise UnsupportedCache(f"Layer {path}: feed the left-padded slice first.")


def prepare(batch: Caches, padding: Padding, model: Any = None) -> None:
    """Set the padding of the next slice; then feed it in one call, and call `finalize`.

    Call it before every slice of more than one token, even with equal lengths: it puts a window's
    ring into token order, because mlx-lm masks a slice after a rotated ring wrongly. With `model`,
    one that takes padding for tokens of its state is refused; its caches do not show that before.
    """
    announced = _AnnouncedSlice.of(padding)
    architecture = getattr(model, "model_type", None)
    if announced.is_padded and architecture in FOLDING:
        raise UnsupportedCache(
            f"{architecture} takes padding for tokens of its state; feed each row alone, and merge "
            "them."
        )
    for counts in filter(None, (announced.left, announced.lengths)):
        _check_rows(batch, counts)
    for path, leaf in leaves(batch):
        if isinstance(leaf, RowsKVCache):
            raise UnsupportedCache(f"Layer {path}: rows with their own ends take no padding.")
        _check_can_prepare(path, leaf, announced)
    for _, leaf in leaves(batch):
        leaf.announced = announced._replace(start=_n_fed(leaf))
        _prepare_leaf(leaf, announced.arguments())


def finalize(batch: Caches) -> None:
    """Turn right padding into left padding, so that all rows end together.

    Raises if something else was fed than `prepare` announced: then the rows of the batch are wrong.
    """
    if all(is_empty(layer) for layer in batch):
        raise UnsupportedCache("No tokens were run since prepare; run the padded slice first.")
    for path, leaf in leaves(batch):
        if announced := getattr(leaf, "announced", None):
            _check_was_fed(path, leaf, announced)
    for layer in batch:
        layer.finalize()
    _forget_announced(batch)


def filter_rows(batch: Caches, keep: Iterable[int] | mx.array) -> None:
    """Keep these rows, in this order, in place; common left padding is dropped.

    Any list or array of row numbers will do. A row may be kept twice, as beam search does.
    """
    n_rows, rows = batch_size(batch), _whole_numbers("The rows to keep", keep)
    if not rows or not all(0 <= i < n_rows for i in rows):
        raise CacheMismatch("The batch", "the rows to keep", f"some of 0 to {n_rows - 1}", keep)
    require_fed(batch)
    for layer in batch:
        layer.filter(rows)
    _forget_announced(batch)


def extend(batch: Caches, other: Caches) -> None:
    """Append the rows of another batch in place. `other` must not be used afterwards."""
    _check_same_layers([batch, other])
    for one in (batch, other):
        require_fed(one)
    for layer, joining in zip(batch, other, strict=True):
        layer.extend(joining)
    _forget_announced(batch)


def extract(batch: Caches, row: int) -> Caches:
    """One row as single-sequence caches, without its padding; the batch is not changed."""
    n_rows = batch_size(batch)
    if not 0 <= row < n_rows:
        raise CacheMismatch("The batch", "the row", f"one of 0 to {n_rows - 1}", row)
    for _, leaf in leaves(batch):
        require_finalized(leaf)
    return [_extract_layer(layer, row) for layer in batch]


def states_of(caches: Caches) -> States:
    """What the layers with a state hold, for `trim`; nothing is copied."""
    return [list(leaf.cache) for _, leaf in leaves(caches) if isinstance(leaf, ArraysCache)]


def trim(caches: Caches, n_tokens: int | Sequence[int], states: States = ()) -> None:
    """Forget the last `n_tokens` of a single sequence, in place, or raise and change nothing.

    A list has a number for each row of a batch that was merged with `own_ends`. A layer with a
    state forgets nothing by itself: `states` are what `states_of` returned before these tokens.
    """
    if not isinstance(n_tokens, int):
        _trim_rows(caches, _checked_counts("The tokens to forget", n_tokens))
        return
    _checked_counts("The tokens to forget", [n_tokens])
    for path, leaf in leaves(caches):
        if is_batched(leaf):
            raise UnsupportedCache(f"Layer {path} is a batch; extract a row and trim that.")
        is_given = states and isinstance(leaf, ArraysCache)
        if not is_given and not _can_trim(leaf, n_tokens):
            raise UnsupportedCache(
                f"Layer {path}: {type(leaf).__name__} cannot forget {n_tokens} tokens; "
                "restore it from a block or a checkpoint instead."
            )
    earlier = iter(states)
    for _, leaf in leaves(caches):
        if isinstance(leaf, ArraysCache):
            leaf.cache = list(next(earlier))
            continue
        leaf.trim(n_tokens)
        if isinstance(leaf, mlx_cache.ConcatenateKVCache) and leaf.keys is not None:
            # mlx-lm moves the offset and keeps the rows, which come back at the next update.
            leaf.keys, leaf.values = (x[..., : leaf.offset, :] for x in (leaf.keys, leaf.values))


def _trim_rows(batch: Caches, counts: Sequence[int]) -> None:
    _check_rows(batch, counts)
    for path, leaf in leaves(batch):
        if not isinstance(leaf, RowsKVCache):
            raise UnsupportedCache(
                f"Layer {path}: rows of {type(leaf).__name__} end together; merge them with "
                "own_ends, which a layer with a state cannot."
            )
        if any(n > end for n, end in zip(counts, leaf.ends, strict=True)):
            raise UnsupportedCache(f"Layer {path} holds {leaf.ends} tokens a row, not {counts}.")
    for _, leaf in leaves(batch):
        leaf.trim_rows(counts)


def _can_trim(leaf: Cache, n_tokens: int) -> bool:
    if kind_of(leaf) is Kind.STATE or n_tokens > leaf.offset:
        return False
    if isinstance(leaf, mlx_cache.ChunkedKVCache):
        return bool(leaf.start_position == 0)
    return bool(leaf.is_trimmable())


def _merge_layer(caches: list[Cache], own_ends: bool = False) -> Cache:
    first = caches[0]
    if isinstance(first, CacheList):
        parts = zip(*(c.caches for c in caches), strict=True)
        return CacheList(*(_merge_layer(list(part), own_ends) for part in parts))
    if own_ends and not isinstance(first, ArraysCache):
        rows = RowsQuantKVCache if isinstance(first, QuantizedKVCache) else RowsKVCache
        return rows.merge(caches)
    if isinstance(first, QuantizedKVCache):
        return BatchQuantizedKVCache.merge(caches)
    return first.merge(caches)


def _extract_layer(layer: Cache, row: int) -> Cache:
    if isinstance(layer, CacheList):
        return CacheList(*(_extract_layer(part, row) for part in layer.caches))
    if not is_empty(layer) or isinstance(layer, RowsKVCache):
        return layer.extract(row)
    # mlx-lm raises on an empty batch; a row of it is an empty cache.
    if isinstance(layer, ArraysCache):
        return ArraysCache(len(layer.cache))
    if isinstance(layer, BatchRotatingKVCache):
        return RotatingKVCache(layer.max_size)
    if isinstance(layer, BatchQuantizedKVCache):
        return QuantKVCache(layer.group_size, layer.bits)
    return mlx_cache.KVCache()


def _forget_announced(batch: Caches) -> None:
    for _, leaf in leaves(batch):
        leaf.announced = None


def _prepare_leaf(leaf: Cache, arguments: dict[str, list[int]]) -> None:
    if isinstance(leaf, BatchRotatingKVCache):
        leaf._temporal_order()
    if not isinstance(leaf, ArraysCache):
        leaf.prepare(**arguments)
        return
    # mlx-lm's ArraysCache ignores left padding in `prepare`, so the attribute is set.
    if "lengths" in arguments:
        leaf.prepare(lengths=arguments["lengths"])
    if "left_padding" in arguments:
        leaf.left_padding = mx.array(arguments["left_padding"])


def can_batch(caches: Caches) -> bool:
    """Whether these caches can join a batch; others run alone."""
    return not any(_why_unbatchable(leaf) for _, leaf in leaves(caches))


def _why_unbatchable(leaf: Cache) -> str | None:
    if is_batched(leaf):
        return "it is already a batch, so extract its rows first"
    encoded = encode(leaf)
    if encoded.cls not in BATCHABLE:
        return "this class has no batched form"
    if any(array.shape[0] > 1 for array in encoded.tensors.values()):
        return "it holds several sequences"
    if isinstance(leaf, ArraysCache):
        missing = [array is None for array in leaf.cache]
        return "some of its arrays are missing" if any(missing) and not all(missing) else None
    return _why_rows_unbatchable(leaf)


def _why_rows_unbatchable(leaf: Cache) -> str | None:
    if isinstance(leaf, RotatingKVCache) and leaf.keep:
        return f"a batch would lose its first {leaf.keep} tokens"
    if isinstance(leaf.keys, mx.array) and leaf.keys.dtype != leaf.values.dtype:
        return "mlx-lm would convert its values to the dtype of its keys"
    return None


def _check_rows_fit(rows: Sequence[Caches]) -> None:
    _check_same_layers(rows)
    for number, row in enumerate(rows):
        for path, leaf in leaves(row):
            if why := _why_unbatchable(leaf):
                raise UnsupportedCache(
                    f"Row {number}, layer {path}: {type(leaf).__name__} cannot join a batch: {why}."
                )


def _check_same_layers(rows: Sequence[Caches]) -> None:
    """Every row must have the layers of the first: classes, settings, heads, widths, dtypes."""
    expected: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise CacheMismatch(f"Row {number}", "the number of layers", len(rows[0]), len(row))
        for path, leaf in leaves(row):
            first = expected.setdefault(path, {})
            for what, value in _signature(leaf).items():
                if first.setdefault(what, value) != value:
                    raise CacheMismatch(f"Row {number}, layer {path}", what, first[what], value)


def _signature(leaf: Cache) -> dict[str, Any]:
    """What must be equal in all rows; an empty cache has no tensors to compare."""
    encoded = encode(leaf)
    same: dict[str, Any] = {"the class": encoded.cls}
    same |= {f"the {name}": encoded.scalars[name] for name in SETTINGS if name in encoded.scalars}
    if isinstance(leaf, ArraysCache):
        same["the state"] = "empty" if is_empty(leaf) else "filled"
    for name, array in encoded.tensors.items():
        if name.startswith(("keys", "values")):
            same[f"(dtype, heads, width) of {name}"] = (array.dtype, *array.shape[1::2])
        elif name.startswith("state"):
            same[f"(dtype, shape) of {name}"] = (array.dtype, array.shape[1:])
    return same


def _check_rows(batch: Caches, amounts: Sequence[int]) -> None:
    if len(amounts) != batch_size(batch):
        raise CacheMismatch("The padding", "the number of rows", batch_size(batch), len(amounts))


def _check_can_prepare(path: str, leaf: Cache, announced: _AnnouncedSlice) -> None:
    require_finalized(leaf)
    earlier = getattr(leaf, "announced", None)
    if earlier and earlier.start == _n_fed(leaf) and not isinstance(leaf, ArraysCache):
        raise UnsupportedCache(f"Layer {path} is prepared already; run the padded slice first.")
    if announced.left and not is_empty(leaf):
        raise UnsupportedCache(f"Layer {path}: left padding can only be added to an empty batch.")
    if announced.lengths and kind_of(leaf) is Kind.WINDOW and not min(announced.lengths):
        # mlx-lm would drop the oldest row of its window and keep padding instead.
        raise UnsupportedCache(
            f"Layer {path}: a window layer cannot take a padded slice in which a row has no "
            "tokens; filter that row out first."
        )


def _check_was_fed(path: str, leaf: Cache, announced: _AnnouncedSlice) -> None:
    if isinstance(leaf, ArraysCache):
        _check_was_heeded(path, leaf, announced)
        return
    n_tokens, at_least = _n_fed(leaf) - announced.start, max(announced.left, default=0)
    if not n_tokens:
        raise UnsupportedCache(
            f"Layer {path} got no tokens since prepare; run the padded slice first."
        )
    if n_tokens != max(announced.lengths, default=max(n_tokens, at_least)):
        length = max(announced.lengths, default=f"at least {at_least}")
        raise UnsupportedCache(
            f"Layer {path} got {n_tokens} tokens a row since prepare, which announced "
            f"{length}; build the batch again."
        )


def _check_was_heeded(path: str, leaf: ArraysCache, announced: _AnnouncedSlice) -> None:
    """A model that masks padding counts it down; any other has it in its state now."""
    is_left, is_right = any(announced.left), len(set(announced.lengths)) > 1
    if (is_left and leaf.left_padding.tolist() == [*announced.left]) or (
        is_right and leaf.lengths.tolist() == [*announced.lengths]
    ):
        raise UnsupportedCache(
            f"Layer {path}: this model takes padding for tokens of its state; build the batch "
            "again by feeding each row alone, and merge them."
        )


def _n_fed(leaf: Cache) -> int:
    """Tokens that a batch was fed, padding included; 0 for states, which do not count them."""
    if isinstance(leaf, ArraysCache):
        return 0
    return int(leaf._offset if isinstance(leaf, BatchRotatingKVCache) else leaf._idx)


def _whole_numbers(what: str, values: Iterable[int] | mx.array) -> list[int]:
    """The numbers of a list or an array."""
    listed: Any = values.tolist() if hasattr(values, "tolist") else values
    listed = list(listed) if isinstance(listed, Iterable) else listed
    if not isinstance(listed, list) or not all(
        hasattr(n, "__index__") and not isinstance(n, bool) for n in listed
    ):
        raise BadInput(f"{what} must be a list of whole numbers, not {values}.")
    return [index(n) for n in listed]


def _checked_counts(what: str, values: Iterable[int] | mx.array) -> tuple[int, ...]:
    numbers = _whole_numbers(what, values)
    if not numbers:
        raise BadInput(f"{what} are missing; give one for each row.")
    if min(numbers) < 0:
        raise BadInput(f"{what} cannot be negative, but are {numbers}.")
    return tuple(numbers)
