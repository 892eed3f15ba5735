"""A prompt as a chain of blocks: a key identifies a block and everything before it.

    key = hash(namespace, parent key, token ids)

So equal keys mean equal prefixes, whichever process computed them.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple, NewType

BLOCK_TOKENS = 256
KEY_BYTES = 20

Namespace = NewType("Namespace", bytes)
BlockKey = NewType("BlockKey", bytes)


class BlockRef(NamedTuple):
    """One block of a prompt: its position in the chain, and its packed token ids."""

    key: BlockKey
    parent: BlockKey
    number: int
    tokens: bytes

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // 4


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids as big-endian 32-bit words, so that bytes sort as token sequences do."""
    words = array("I", tokens)
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()


def as_text(tokens: Sequence[int]) -> str:
    """Token ids as characters: texts are searched faster than words."""
    return pack(tokens).decode("utf-32-be", "surrogatepass")


def unpack(packed: bytes) -> list[int]:
    words = array("I", packed)
    if sys.byteorder == "little":
        words.byteswap()
    return words.tolist()


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """How many leading items (tokens, characters, bytes, keys) two sequences share."""
    if type(a) is not type(b):
        a, b = list(a), list(b)
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:  # a[:low] is shared, a[: high + 1] is not
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def common_tokens(a: bytes, b: bytes) -> int:
    """How many leading tokens two packed sequences share."""
    return common_prefix(a, b) // 4


def common_tokens_beyond(a: bytes, b: bytes, n_tokens: int) -> int:
    """How many leading tokens two packed sequences share, if more than `n_tokens`; else 0.

    Sequences that differ earlier mostly differ in token `n_tokens` too, so one look rejects them.
    """
    at = slice(4 * n_tokens, 4 * n_tokens + 4)
    if min(len(a), len(b)) < at.stop or a[at] != b[at] or not a.startswith(b[: at.stop]):
        return 0
    return common_tokens(a, b)


def root(namespace: Namespace) -> BlockKey:
    """The parent of every first block of a namespace."""
    return BlockKey(
        blake2b(digest_size=KEY_BYTES, key=namespace, person=b"keepwarm.root.1").digest()
    )


def block_key(namespace: Namespace, parent: BlockKey, tokens: bytes) -> BlockKey:
    digest = blake2b(tokens, digest_size=KEY_BYTES, key=namespace, person=b"keepwarm.block.1")
    digest.update(parent)
    return BlockKey(digest.digest())


def chain(namespace: Namespace, tokens: Sequence[int]) -> Iterator[BlockRef]:
    """The blocks of a prompt in order; the last may be short."""
    return chain_packed(namespace, pack(tokens))


def chain_packed(namespace: Namespace, packed: bytes) -> Iterator[BlockRef]:
    """The same for packed tokens."""
    parent = root(namespace)
    for number, start in enumerate(range(0, len(packed), 4 * BLOCK_TOKENS)):
        words = packed[start : start + 4 * BLOCK_TOKENS]
        key = block_key(namespace, parent, words)
        yield BlockRef(key, parent, number, words)
        parent = key
