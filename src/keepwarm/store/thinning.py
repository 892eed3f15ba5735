"""Which checkpoints of a conversation to delete: a state may be as large as a thousand rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from keepwarm.prefix.blocks import BlockKey

# The end of the last prompt, the end of its answer (also a cancelled one), and the end of the turn
# before, from which the prompt may be asked again in other words.
LAST_KEPT = 3


class Checkpoint(NamedTuple):
    """A state on the path to a block."""

    at: int  # its position in tokens
    key: BlockKey
    beside: BlockKey  # the conversation's block at that position; mostly the same as `key`
    n_bytes: int
    held: bool  # pinned, or conversations fork here


def find_surplus(checkpoints: Sequence[Checkpoint], kv_bytes: int) -> list[Checkpoint]:
    """Those to delete until states take no more bytes than K and V rows, smallest gaps first.

    The gap before a state is what its loss costs: it is recomputed from the state before. None
    where there are no K and V rows.
    """
    kept, deleted = sorted(checkpoints), []
    while kv_bytes and sum(state.n_bytes for state in kept) > kv_bytes:
        positions = [0, *(state.at for state in kept)]
        unheld = [n for n, state in enumerate(kept[:-LAST_KEPT]) if not state.held]
        if not unheld:
            break
        gap = [after - before for before, after in pairwise(positions)]
        deleted.append(kept.pop(min(unheld, key=gap.__getitem__)))
    return deleted
