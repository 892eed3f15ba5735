"""Which checkpoints of a conversation are too many: a state may be as large as a thousand rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from keepwarm.prefix.blocks import BlockKey

# Of a conversation: where its prompt ended, where its answer did, even one that was cancelled, and
# the end of the turn before, from which that is asked again in other words.
LAST_KEPT = 3


class Checkpoint(NamedTuple):
    """A state on the way to some block."""

    at: int  # tokens before it
    key: BlockKey
    beside: BlockKey  # the block of the conversation at that place; mostly it is the same
    n_bytes: int
    held: bool  # pinned, or conversations part here


def find_surplus(checkpoints: Sequence[Checkpoint], kv_bytes: int) -> list[Checkpoint]:
    """Those to drop so that states take no more than K and V rows, the smallest gaps first.

    The gap before a state is what its loss costs: it is computed again from the one before. Where
    there are no K and V rows nothing is said.
    """
    kept, gone = sorted(checkpoints), []
    while kv_bytes and sum(state.n_bytes for state in kept) > kv_bytes:
        places = [0, *(state.at for state in kept)]
        loose = [n for n, state in enumerate(kept[:-LAST_KEPT]) if not state.held]
        if not loose:
            break
        gone.append(kept.pop(min(loose, key=lambda n: places[n + 1] - places[n])))
    return gone
