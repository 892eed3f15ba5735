"""Shared tiers in the contract of tiers, and what of it they cannot hold.

The exemptions below are tested: one that holds after all is a failure. They are written to
`docs/results/remote.md`:

    python -m tests.contract.shared
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from keepwarm.concurrency import CallDeadline
from keepwarm.prefix.blocks import BlockKey, Namespace
from keepwarm.records.cipher import Cipher
from keepwarm.records.record import Header, Part, Record
from keepwarm.remote.addresses import open_backend
from keepwarm.remote.backend import Backend
from keepwarm.remote.deleter import erase_from_tier
from keepwarm.remote.janitor import walk
from keepwarm.remote.records import read_header
from keepwarm.remote.tier import RemoteTier
from keepwarm.store.tier import NamedBlock, PutResult, StoredBlock

PAGE = Path(__file__).parents[2] / "docs" / "results" / "remote.md"
SOON = 60.0
N_TRIES = 3  # of a deletion, which is finished later if need be: moto loses its way sometimes
CLASS = "cpu-mlx-0.1"
HEADINGS = {"redis": "Redis, Valkey", "directory": "directory", "s3": "S3"}
KINDS = tuple(HEADINGS)


class SharedTier:
    """A shared tier, deleted from as `rm` does, and walked through as the place's owner would."""

    def __init__(self, address: str, cipher: Cipher | None = None) -> None:
        self._tier = RemoteTier(open_backend(address), CLASS, cipher, clock=lambda: 0.0)
        assert self._tier.health.wait_until_tried(SOON), self._tier.health.refused
        self._place = open_backend(address)
        self._cipher = cipher
        self.lacks = () if "file:" not in address else ("create",)  # see the last exemption
        self._put: dict[BlockKey, tuple[Namespace, NamedBlock]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def put(self, record: Record) -> PutResult:
        header = record.header
        block = NamedBlock(header.key, header.parent, len(header.tokens) // 4)
        self._put[header.key] = header.namespace, block
        return self._tier.put(record)

    def delete_all(self, keys: Collection[BlockKey]) -> None:
        for key in self._put.keys() & keys:
            namespace, block = self._put[key]
            tries = (erase_from_tier(self._tier, [namespace], [block], ()) for _ in range(N_TRIES))
            assert any(tries)

    def walk(self) -> Iterator[StoredBlock]:
        found: defaultdict[BlockKey, list[tuple[Header, int]]] = defaultdict(list)
        for name in names_in(self._place):
            n_bytes = self._place.sizes([name], SOON)[0] or 0
            opened = read_header(self._place, self._cipher, name, n_bytes, CallDeadline(SOON))
            if opened is not None:  # or it is deleted by now
                found[opened.header.key].append((opened.header, n_bytes))
        for key, records in found.items():
            header = records[0][0]
            sizes: dict[Part, int] = {one.part: n_bytes for one, n_bytes in records}
            yield StoredBlock(
                key,
                header.parent,
                header.namespace,
                header.number,
                len(header.tokens) // 4,
                sizes,
                0.0,
                False,
            )

    def close(self) -> None:
        self._tier.close()
        self._place.close()


def names_in(place: Backend, compute_class: str = CLASS) -> list[str]:
    """Those of all records."""
    return [one.name for one in walk(place) if one.name.startswith(f"{compute_class}/")]


class Exemption(NamedTuple):
    """A promise of other tiers that shared ones of these kinds cannot hold."""

    promise: str
    why: str
    tests: tuple[str, ...]
    kinds: tuple[str, ...] = KINDS


EXEMPTIONS = (
    Exemption(
        "never holds more than its bytes",
        "others write there too; Redis evicts by rules of its own, a directory or a bucket is "
        "swept every ten minutes",
        (
            "test_a_tier_stays_within_its_bytes",
            "test_a_record_larger_than_the_tier_is_not_kept_and_evicts_nothing",
            "test_a_block_is_not_evicted_for_its_own_child",
        ),
    ),
    Exemption(
        "a put evicts what was not used for longest, ends of prompts first",
        "the same; uses are noted for [eviction](../sharing.md#who-evicts)",
        ("test_the_least_recently_used_goes_first", "test_eviction_goes_from_the_tail"),
    ),
    Exemption(
        "tells which blocks it holds, and how many bytes",
        "to tell is to list the whole place, as the janitor and `keepwarm remote ls` do",
        ("test_stats_tell_what_is_held",),
    ),
    Exemption(
        "what follows a deleted block is still found",
        "it cannot be restored without its beginning, and counts as absent for 5 seconds",
        ("test_what_follows_a_deleted_block_stays",),
    ),
    Exemption(
        "a pin, a deletion or a walk that fails raises an error",
        "it has neither pins nor walks; a deletion that fails leaves a tombstone, and is finished "
        "later (see [deleting](../sharing.md#deleting))",
        ("test_what_must_be_known_to_fail_fails_in_our_words",),
    ),
    Exemption(
        "prepares for a read",
        "bytes would be sent twice",
        ("test_fetching_changes_nothing",),
    ),
    Exemption(
        "finds blocks that share only their first tokens with a prompt",
        "names tell keys and no tokens: at most 255 tokens are computed for it",
        ("test_the_nearest_of_many_children",),
    ),
    Exemption(
        "a record that two put at the same time is stored by one of them",
        "file systems on the network have no create-if-absent that is whole; both are stored, the "
        "later one stays, and equal keys hold equal blocks",
        ("test_of_two_puts_at_the_same_time_one_stores",),
        ("directory",),
    ),
)


def exemption_of(test: str, kind: str) -> Exemption | None:
    found = (one for one in EXEMPTIONS if test in one.tests and kind in one.kinds)
    return next(found, None)


BEGIN, END = "<!-- exemptions -->\n", "<!-- /exemptions -->\n"


def page(text: str) -> str:
    """The page with the table of exemptions in its place."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    rows = (f"| {one.promise} | {_where(one)} | {one.why} |\n" for one in EXEMPTIONS)
    head = "| promise | not in | because |\n|---|---|---|\n"
    return before + BEGIN + head + "".join(rows) + END + after


def _where(one: Exemption) -> str:
    return "all" if one.kinds == KINDS else ", ".join(HEADINGS[kind] for kind in one.kinds)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
