"""Padding of a batch's next slice: what was announced, and whether it was fed so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple, Self

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, BatchRotatingKVCache

from keepwarm.errors import BadInput, CacheMismatch, UnsupportedCache
from keepwarm.kv.codec import require_finalized
from keepwarm.kv.kinds import Cache, Kind, is_empty, kind_of


@dataclass(frozen=True)
class LeftPadding:
    """Row i starts with `amounts[i]` padding tokens. Only an empty batch can take it."""

    amounts: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "amounts", checked_counts("Padding amounts", self.amounts))


@dataclass(frozen=True)
class RightPadding:
    """Row i has `lengths[i]` tokens, followed by padding up to the longest row."""

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", checked_counts("Padded lengths", self.lengths))

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


class AnnouncedSlice(NamedTuple):
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

    def arguments(self) -> dict[str, list[int]]:
        """As mlx-lm's caches take it."""
        arguments = {"left_padding": list(self.left)} if self.left else {}
        if self.lengths:
            padding = RightPadding(self.lengths).amounts
            arguments |= {"lengths": list(self.lengths), "right_padding": list(padding)}
        return arguments


def check_can_prepare(path: str, leaf: Cache, announced: AnnouncedSlice) -> None:
    require_finalized(leaf)
    earlier = getattr(leaf, "announced", None)
    if earlier and earlier.start == n_fed(leaf) and not isinstance(leaf, ArraysCache):
        raise UnsupportedCache(f"Layer {path} is prepared already; feed the padded slice first.")
    if announced.left and not is_empty(leaf):
        raise UnsupportedCache(f"Layer {path}: left padding can only be added to an empty batch.")
    if announced.lengths and kind_of(leaf) is Kind.WINDOW and not min(announced.lengths):
        # mlx-lm would drop the oldest row of its window and keep padding instead.
        raise UnsupportedCache(
            f"Layer {path}: a window layer cannot take a padded slice in which a row has no "
            "tokens; filter that row out first."
        )


def check_was_fed(path: str, leaf: Cache, announced: AnnouncedSlice) -> None:
    if isinstance(leaf, ArraysCache):
        _check_was_heeded(path, leaf, announced)
        return
    n_tokens, at_least = n_fed(leaf) - announced.start, max(announced.left, default=0)
    if not n_tokens:
        raise UnsupportedCache(
            f"Layer {path} was fed nothing since prepare; feed the padded slice first."
        )
    if n_tokens != max(announced.lengths, default=max(n_tokens, at_least)):
        length = max(announced.lengths, default=f"at least {at_least}")
        raise UnsupportedCache(
            f"Layer {path} was fed {n_tokens} tokens a row since prepare, which announced "
            f"{length}; build the batch again."
        )


def _check_was_heeded(path: str, leaf: ArraysCache, announced: AnnouncedSlice) -> None:
    """A model that masks padding counts it down; any other has it in its state now."""
    is_left, is_right = any(announced.left), len(set(announced.lengths)) > 1
    if (is_left and leaf.left_padding.tolist() == [*announced.left]) or (
        is_right and leaf.lengths.tolist() == [*announced.lengths]
    ):
        raise UnsupportedCache(
            f"Layer {path}: this model takes padding for tokens of its state; build the batch "
            "again by feeding each row alone, and merge them."
        )


def n_fed(leaf: Cache) -> int:
    """Tokens that a batch was fed, padding included; 0 for states, which do not count them."""
    if isinstance(leaf, ArraysCache):
        return 0
    return int(leaf._offset if isinstance(leaf, BatchRotatingKVCache) else leaf._idx)


def whole_numbers(what: str, values: Iterable[int] | mx.array) -> list[int]:
    """The numbers of a list or an array."""
    listed: Any = values.tolist() if hasattr(values, "tolist") else values
    listed = list(listed) if isinstance(listed, Iterable) else listed
    if not isinstance(listed, list) or not all(
        hasattr(n, "__index__") and not isinstance(n, bool) for n in listed
    ):
        raise BadInput(f"{what} must be a list of whole numbers, not {values}.")
    return [index(n) for n in listed]


def checked_counts(what: str, values: Iterable[int] | mx.array) -> tuple[int, ...]:
    numbers = whole_numbers(what, values)
    if min(numbers, default=0) < 0:
        raise BadInput(f"{what} cannot be negative, but are {numbers}.")
    return tuple(numbers)
