"""The index: its counts are right, and its queries use SQL indexes."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from keepwarm.prefix.blocks import BlockKey, root
from keepwarm.records.record import Part
from keepwarm.store.index.index import MAX_TOUCHES, Index
from keepwarm.store.names import path_of
from tests.store.kit import NAMESPACE, first_block, record, refs_of

TREE = [*refs_of(4, seed=1), *refs_of(4, seed=2), *refs_of(3, seed=1, n_last=9)[2:]]
KEYS = [ref.key for ref in TREE]


def held_below(key, held):
    """What descends from a block without a gap."""
    children = {ref.key for ref in TREE if ref.parent == key and ref.key in held}
    return children | {k for child in children for k in held_below(child, held)}


class Bookkeeping(RuleBasedStateMachine):
    """Any order of adding, dropping, pinning and reserving, against plain Python."""

    def __init__(self):
        super().__init__()
        self.directory = TemporaryDirectory()
        self.index = Index(Path(self.directory.name) / "index.sqlite")
        self.sizes = {}  # by key and part
        self.w_rows = {}
        self.pins = set()
        self.reserved = {}
        self.now = 0.0
        self.followed, self.number = {}, 0

    @rule(ref=st.sampled_from(TREE), part=st.sampled_from(Part), n_bytes=st.integers(1, 1000))
    def add(self, ref, part, n_bytes):
        self.now += 1
        rows = n_bytes % (ref.n_tokens + 1)
        self.index.add(record(ref, part, w_rows=rows).header, n_bytes, self.now)
        self.sizes[ref.key, part] = n_bytes
        if part is Part.WINDOW:
            self.w_rows[ref.key] = rows

    @rule(key=st.sampled_from(KEYS), part=st.sampled_from(Part))
    def delete_part(self, key, part):
        self.index.delete_part(key, part)
        was_held = self.sizes.pop((key, part), None)
        if part is Part.WINDOW:
            self.w_rows.pop(key, None)
        held = {key for key, _ in self.sizes}
        if was_held and key not in held:  # its pins still protect what is before it
            (parent,) = (ref.parent for ref in TREE if ref.key == key)
            below = {key} | held_below(key, held)
            self.pins |= {(parent, owner) for pinned, owner in self.pins if pinned in below}

    @rule(key=st.sampled_from(KEYS))
    def delete(self, key):
        self.index.mark_deleting([key])
        assert self.index.lookups.have([key]) == {}
        self.changes_lead_to_what_a_walk_finds()
        self.index.delete_marked([key])
        self.w_rows.pop(key, None)
        for part in Part:
            self.sizes.pop((key, part), None)

    @rule(key=st.sampled_from(KEYS), owner=st.sampled_from("ab"))
    def pin(self, key, owner):
        self.index.pin(key, owner)
        self.pins.add((key, owner))

    @rule(keys=st.sets(st.sampled_from(KEYS)), owner=st.sampled_from("ab"))
    def pin_only(self, keys, owner):
        self.index.pin_only(owner, keys)
        self.pins = {pin for pin in self.pins if pin[1] != owner} | {(key, owner) for key in keys}

    @rule(ref=st.sampled_from(TREE), n_bytes=st.integers(1, 1000))
    def reserve(self, ref, n_bytes):
        ticket = self.index.reserve(ref.key, ref.parent, n_bytes, "me", None)
        self.reserved[ticket] = (ref, n_bytes)

    @rule(data=st.data())
    def cancel(self, data):
        if self.reserved:
            ticket = data.draw(st.sampled_from(sorted(self.reserved)))
            self.index.cancel(ticket)
            del self.reserved[ticket]

    @rule()
    def cancel_writes(self):
        self.index.cancel_writes("me")
        self.reserved.clear()

    @invariant()
    def changes_lead_to_what_a_walk_finds(self):
        self.number, changed = self.index.lookups.changes(self.number)
        found = {block.key: block.n_bytes for block in self.index.walk()}
        if changed is None:
            assert not self.followed, "only at the beginning"
            self.followed = dict(found)
        self.followed |= {key: block and block.n_bytes for key, block in (changed or {}).items()}
        assert {key: sizes for key, sizes in self.followed.items() if sizes} == found

    @invariant()
    def bytes_add_up(self):
        reserved = sum(n for _, n in self.reserved.values())
        assert self.index.lookups.n_bytes() == sum(self.sizes.values()) + reserved

    @invariant()
    def blocks_are_those_with_parts(self):
        held = {key for key, _ in self.sizes}
        assert set(self.index.lookups.have(KEYS)) == held
        assert self.index.lookups.n_blocks() == len(held)
        for key, known in self.index.lookups.have(KEYS).items():
            assert known.parts == {part for k, part in self.sizes if k == key}
            assert known.w_rows == self.w_rows.get(key, 0)
        names = {path_of(Path(), *name).name: n for name, n in self.sizes.items()}
        assert self.index.lookups.names() == names

    @invariant()
    def walk_agrees(self):
        pinned = {key for key, _ in self.pins}
        for stored in self.index.walk():
            assert stored.pinned == (stored.key in pinned)
            assert stored.n_bytes == {p: n for (k, p), n in self.sizes.items() if k == stored.key}

    @invariant()
    def victims_are_unpinned_and_come_after_their_descendants(self):
        writes = [ref for ref, _ in self.reserved.values()]
        stays = {key for key, _ in self.pins}
        stays |= {ref.key for ref in writes} | {ref.parent for ref in writes}
        held = {key for key, _ in self.sizes}
        evictable = {key for key in held - stays if not held_below(key, held) & stays}
        n_bytes = sum(n for (key, _), n in self.sizes.items() if key in evictable)
        chosen = [victim.key for victim in self.index.find_victims(n_bytes)]
        assert len(chosen) == len(set(chosen))
        assert set(chosen) == evictable
        for n, key in enumerate(chosen):
            assert not held_below(key, held) & set(chosen[n:])
        assert self.index.find_victims(n_bytes + 1) == []

    @invariant()
    def children_are_those_held(self):
        held = {key for key, _ in self.sizes}
        for ref in TREE:
            near = {child.key for child in self.index.lookups.children(ref.parent, ref.tokens)}
            assert (ref.key in near) == (ref.key in held)

    def teardown(self):
        self.index.close()
        self.directory.cleanup()


Bookkeeping.TestCase.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
TestBookkeeping = Bookkeeping.TestCase


@pytest.fixture
def index(tmp_path):
    made = Index(tmp_path / "index.sqlite")
    yield made
    made.close()


def fill(index, refs, n_bytes=10):
    for now, ref in enumerate(refs):
        index.add(record(ref).header, n_bytes, now)


def test_victims_free_no_more_than_needed(index):
    fill(index, [first_block([n]) for n in range(20)], n_bytes=10)
    assert [v.n_bytes for v in index.find_victims(25)] == [10, 10, 10]
    assert index.find_victims(25)[0].key == first_block([0]).key
    spared = index.find_victims(25, exclude={first_block([0]).key})
    assert [v.key for v in spared] == [first_block([n]).key for n in (1, 2, 3)]


def test_selected_victims_are_hidden_at_once(index):
    refs = [first_block([n]) for n in range(3)]
    fill(index, refs)
    index.select_victims(15)
    assert set(index.lookups.have([r.key for r in refs])) == {refs[2].key}
    assert {s.key for s in index.walk()} == {refs[2].key}
    assert len(index.lookups.children(root(NAMESPACE), refs[0].tokens)) == 0
    assert set(index.lookups.deleting()) == {refs[0].key, refs[1].key}
    assert index.lookups.n_bytes() == 30  # until the files are gone


def test_a_reservation_counts_and_keeps_to_the_limit(index):
    ref = first_block([1])
    ticket = index.reserve(ref.key, ref.parent, 60, "me", 100)
    assert ticket is not None
    assert index.reserve(ref.key, ref.parent, 41, "you", 100) is None
    index.add(record(ref).header, 60, 1.0, ticket)
    assert index.lookups.n_bytes() == 60
    assert index.lookups.writers() == set()


@pytest.mark.parametrize(
    "query",
    [
        "SELECT key, d, w, s FROM blocks WHERE deleting = 0 AND key IN (?, ?)",
        "SELECT key, tokens FROM tokens WHERE parent = ? AND tokens <= ? ORDER BY tokens DESC",
        "SELECT key FROM blocks WHERE s > 0 AND deleting = 0 AND parent IN (?, ?)",
        "SELECT key FROM blocks WHERE parent = ? OR parent = ?",
        "SELECT key FROM blocks b WHERE children = 0 AND pins = 0 AND deleting = 0 "
        "AND used + value + cost <= ? AND b.key != ? ORDER BY used + value + cost",
    ],
)
def test_no_look_up_reads_a_whole_table(query, index):
    """Nor sorts: the cost of a look-up must not grow with the store."""
    steps = [row[3] for row in index.database.rows(f"EXPLAIN QUERY PLAN {query}", (b"", b""))]
    assert not [step for step in steps if step.startswith("SCAN") or "TEMP B-TREE" in step]


def test_holding_changes_in_one_step(tmp_path):
    """A crash in the middle leaves the old pins."""
    index = Index(tmp_path / "i")
    first, second = (first_block([n]) for n in (1, 2))
    index.pin_only("me", [first.key])

    def keys():
        yield second.key
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index.pin_only("me", keys())
    assert (index.lookups.owners(first.key), index.lookups.owners(second.key)) == (["me"], [])
    index.pin_only("me", [second.key])
    assert (index.lookups.owners(first.key), index.lookups.owners(second.key)) == ([], ["me"])
    index.close()


def test_uses_are_written_down_with_the_next_change(tmp_path):
    """A restore of 100,000 tokens uses 391 blocks; to write that at once took it 14 ms."""
    one, two = Index(tmp_path / "i"), Index(tmp_path / "i")
    refs = refs_of(3)
    fill(one, refs)
    one.touch([ref.key for ref in refs], 50.0)
    assert {stored.used for stored in two.walk()} == {0.0, 1.0, 2.0}
    assert {stored.used for stored in one.walk()} == {50.0}, "who asks this one is told"
    assert {stored.used for stored in two.walk()} == {50.0}
    one.touch([refs[0].key], 60.0)
    one.pin(refs[0].key, "me")
    assert max(stored.used for stored in two.walk()) == 60.0
    one.touch([refs[1].key], 70.0)
    one.close()
    assert max(stored.used for stored in two.walk()) == 70.0
    two.close()


def test_uses_that_wait_are_bounded(tmp_path):
    one, two = Index(tmp_path / "i"), Index(tmp_path / "i")
    ref = first_block([1])
    one.add(record(ref).header, 10, 0.0)
    for n in range(1, MAX_TOUCHES + 2):
        one.touch([ref.key], float(n))
    assert len(one._touched) == MAX_TOUCHES
    one.pin(ref.key, "any change writes them")
    assert [stored.used for stored in two.walk()] == [MAX_TOUCHES + 1]
    one.close()
    two.close()


def test_waiting_uses_count_when_victims_are_chosen(index):
    refs = [first_block([n]) for n in range(3)]
    fill(index, refs)
    index.touch([refs[0].key], 100.0)
    assert index.select_victims(10) == [refs[1].key]


def test_an_error_undoes_the_whole_step(index):
    ref = first_block([1])
    with pytest.raises(OverflowError):
        index.add(record(ref).header, 1 << 80, 1.0)
    assert index.lookups.have([ref.key]) == {}
    assert index.lookups.n_bytes() == 0
    index.add(record(ref).header, 10, 1.0)
    assert index.lookups.have([BlockKey(ref.key)])


def test_a_cancelled_reservation_ends_although_the_next_step_fails(index):
    ref = first_block([1])
    index._cancelled.append(index.reserve(ref.key, ref.parent, 1000, "me", None))
    with pytest.raises(OverflowError):
        index.add(record(ref).header, 1 << 80, 1.0)
    assert index.lookups.n_bytes() == 1000
    index.add(record(ref).header, 10, 1.0)
    assert index.lookups.n_bytes() == 10


def test_who_is_too_far_behind_is_told_so(index):
    for number, ref in enumerate(refs_of(3)):
        index.add(record(ref).header, 10, float(number))
    number, changed = index.lookups.changes(0)
    assert changed is None
    assert index.lookups.changes(number) == (number, {})
    assert set(index.lookups.changes(number - 2).blocks) == {ref.key for ref in refs_of(3)[1:]}
    for other in (number - 10, number + 1):  # another index, or long ago
        assert index.lookups.changes(other) == (number, None)
