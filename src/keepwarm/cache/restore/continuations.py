"""What a store holds after a prompt: its token ids, read from the headers of blocks."""

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
    """Stored tokens that follow these, to the end of the block, those most like a guess first.

    Reads headers, no tensor. Of many that follow, a few are given. Blocks are found by how they
    begin: where a new one begins, only those that begin like one of the guesses are.
    """
    whole = [ref.key for ref in chain(namespace, tokens) if ref.n_tokens == BLOCK_TOKENS]
    parent = whole[-1] if whole else root(namespace)
    begun = pack(tokens[len(whole) * BLOCK_TOKENS :])
    likes = [begun + pack(guess[:BLOCK_TOKENS]) for guess in guesses[: 1 if begun else None]]
    children = (tiers.children(parent, like[: 4 * BLOCK_TOKENS]) for like in likes)
    found = list(dict.fromkeys(child.key for some in children for child in some))
    known = tiers.have(found)
    for key in found:
        held = _tokens(tiers, key, known[key]) if key in known else b""
        if held.startswith(begun) and len(held) > len(begun):
            yield unpack(held[len(begun) :])


def _tokens(tiers: Tiers, key: BlockKey, known: BlockInfo) -> bytes:
    """The token ids of a block, confirmed by its header; none if it cannot be read any more."""
    tokens: list[bytes] = []

    def look(record: RecordView) -> None:
        tokens.append(record.header.tokens)

    tiers.visit(key, min(known.parts), look, ReadBuffer())
    return tokens[0] if tokens else b""
