"""Stored tokens that follow a prompt, read from the headers of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, Namespace, chain, pack, root, unpack
from keepwarm.store.record import ReadBuffer, RecordView
from keepwarm.store.tier import BlockInfo
from keepwarm.store.tiers import Tiers


def continuations(
    namespace: Namespace,
    tiers: Tiers,
    tokens: Sequence[int],
    guesses: Sequence[Sequence[int]],
) -> Iterator[list[int]]:
    """Stored tokens that follow these, up to the end of the block, most similar to a guess first.

    Reads headers, no tensors, and yields only a few of many. Blocks are found by their first
    tokens: at the start of a block only those that begin like one of the guesses are found.
    """
    whole = [ref.key for ref in chain(namespace, tokens) if ref.n_tokens == BLOCK_TOKENS]
    parent = whole[-1] if whole else root(namespace)
    open_tokens = pack(tokens[len(whole) * BLOCK_TOKENS :])
    starts = [
        open_tokens + pack(guess[:BLOCK_TOKENS]) for guess in guesses[: 1 if open_tokens else None]
    ]
    children = (tiers.children(parent, start[: 4 * BLOCK_TOKENS]) for start in starts)
    found = list(dict.fromkeys(child.key for some in children for child in some))
    known = tiers.have(found)
    for key in found:
        held = _tokens(tiers, key, known[key]) if key in known else b""
        if held.startswith(open_tokens) and len(held) > len(open_tokens):
            yield unpack(held[len(open_tokens) :])


def _tokens(tiers: Tiers, key: BlockKey, known: BlockInfo) -> bytes:
    """The token ids of a block from its header; empty if it can no longer be read."""
    tokens: list[bytes] = []

    def keep_tokens(record: RecordView) -> None:
        tokens.append(record.header.tokens)

    tiers.visit(key, min(known.parts), keep_tokens, ReadBuffer())
    return tokens[0] if tokens else b""
