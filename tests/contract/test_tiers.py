"""What every tier promises, whatever it is made of. A new tier is one more maker here."""

import errno
import random
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count, pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepwarm.errors import StoreFailed
from keepwarm.prefix.blocks import Namespace, common_tokens, pack, root
from keepwarm.records.cipher import Cipher
from keepwarm.records.record import Part, ReadBuffer, Record, UnreadTensor
from keepwarm.store.disk.disk import DiskLimits, DiskTier
from keepwarm.store.marker import unlock
from keepwarm.store.memory import MemoryTier
from keepwarm.store.tiers import Tiers
from tests.contract import test_blobs
from tests.contract.shared import BEGIN, EXEMPTIONS, PAGE, SharedTier, exemption_of, page
from tests.kit.waiting import wait_until
from tests.store.kit import (
    NAMESPACE,
    BrokenFiles,
    chain_of,
    content,
    first_block,
    keys_of,
    record,
    refs_of,
    tensor,
)

MIB = 1 << 20
ROOMY = 256 * MIB


class Minutes:
    """A clock that advances a minute at every call, so that later blocks have higher priority."""

    def __init__(self):
        self._minutes = count()

    def __call__(self):
        return 60.0 * next(self._minutes)


def memory(directory, max_bytes):
    return MemoryTier(max_bytes, Minutes())


def disk(directory, max_bytes, cipher=None):
    limits = DiskLimits(max_bytes, min_free_bytes=0)
    return DiskTier(directory / "store", limits, BrokenFiles(), Minutes(), cipher)


def sealed(directory, max_bytes):
    root = directory / "store"
    return disk(directory, max_bytes, unlock(root, b64encode(bytes(range(32))).decode()))


MAKERS = {"memory": memory, "disk": disk, "sealed": sealed}
OFTEN = ("redis", "directory")  # of the shared ones; the others need --soak
SHARED = (*OFTEN, "redis sealed", "directory sealed", "s3", "s3 sealed", "s3 of SeaweedFS")
LONG = {  # with shared tiers
    "test_a_reader_sees_a_whole_record_or_none",
    "test_eviction_goes_from_the_tail",
    "test_have_on_more_keys_than_one_query_takes",
    "test_the_nearest_child_is_the_first",
    "test_walk_while_others_put_and_delete",
}
WRONG = (AssertionError, AttributeError, TypeError, StopIteration, pytest.fail.Exception)


def pytest_generate_tests(metafunc):
    """Every test is one for every maker, unless a shared tier is exempt: then it must fail."""
    if "make" in metafunc.fixturenames:
        name = metafunc.function.__name__
        shared = (pytest.param(one, marks=[*marks(name, one)]) for one in SHARED)
        metafunc.parametrize("make", [*MAKERS, *shared], indirect=True)


def marks(test, maker):
    exemption = exemption_of(test, maker.split()[0])
    if exemption is not None:
        yield pytest.mark.xfail(strict=True, raises=WRONG, reason=exemption.why)
    is_rare = maker == "redis" and exemption is not None
    if maker not in OFTEN or test in LONG or is_rare:
        yield pytest.mark.soak


@pytest.fixture
def make(request, tmp_path):
    """Makes the tier under test with a number of bytes it may hold, and closes it."""
    made = []

    def maker(max_bytes=ROOMY):
        if request.param in MAKERS:
            made.append(MAKERS[request.param](tmp_path, max_bytes))
        else:
            kind = request.param.removesuffix(" sealed")
            cipher = None if kind == request.param else Cipher(bytes(range(32)))
            made.append(SharedTier(request.getfixturevalue("new_address")(kind), cipher))
        return made[-1]

    yield maker
    for tier in made:
        tier.close()


@pytest.fixture
def tier(make):
    return make()


@contextmanager
def busy(work: Callable[[], None], n_threads: int = 1):
    """Runs something over and over beside the test; what it raises fails the test."""
    stop = threading.Event()

    def loop():
        while not stop.is_set():
            work()

    with ThreadPoolExecutor(n_threads) as threads:
        running = [threads.submit(loop) for _ in range(n_threads)]
        try:
            yield
        finally:
            stop.set()
        for future in running:
            future.result()


# Put and read


def test_what_is_put_is_found_and_read(tier):
    (made,) = chain_of(1)
    put = tier.put(made)
    assert put.stored
    put.durable.result(timeout=300)
    known = tier.have(keys_of([made]))[made.header.key]
    assert known.parts == {Part.DELTA}
    assert known.n_tokens == 256
    assert known.n_bytes >= made.n_bytes
    found = tier.read(made.header.key, Part.DELTA)
    assert found.header == made.header
    assert content(found) == content(made)


def test_a_visitor_sees_what_is_read(tier):
    """Tensor by tensor, in memory that may be used again for the next."""
    made = chain_of(3, n_bytes=5000)
    for one in made:
        tier.put(one)
    buffer, seen = ReadBuffer(), []

    def use(visit):
        tensors = [(t.name, t.dtype, t.shape, bytes(t.data)) for t in visit.tensors]
        seen.append((visit.header, tensors))
        for one, (*_, data) in zip(visit.tensors, tensors, strict=True):
            assert bytes(read_into(one, len(data))) == data

    for one in made:
        assert tier.visit(one.header.key, Part.DELTA, use, buffer)
    expected = [[(t.name, t.dtype, t.shape, bytes(t.data)) for t in one.tensors] for one in made]
    assert seen == [(one.header, tensors) for one, tensors in zip(made, expected, strict=True)]
    assert tier.stats().hits == 3


def read_into(tensor, n_bytes):
    """Reading into the caller's own memory, which a tensor in a file does directly."""
    memory = memoryview(bytearray(n_bytes))
    if isinstance(tensor, UnreadTensor):
        tensor.read_into(pieces_of(memory))
    else:
        memory[:] = tensor.data
    return memory


def pieces_of(memory):
    """A long one, an empty one and some short ones."""
    cuts = [0, len(memory) // 2, len(memory) // 2, *range(len(memory) // 2 + 1, len(memory), 999)]
    return [memory[a:b] for a, b in pairwise([*cuts, len(memory)])]


def test_fetching_changes_nothing(tier):
    """What is there, what is not, and what is there in another part."""
    here, gone = chain_of(2)
    tier.put(here)
    before = tier.stats()
    found = [
        (key, part) for key in keys_of([here, gone]) for part in Part if tier.prefetch(key, part)
    ]
    assert found == [(here.header.key, Part.DELTA)]
    assert tier.stats() == before
    assert content(tier.read(here.header.key, Part.DELTA)) == content(here)


def test_what_was_never_put_is_a_miss(tier):
    (made,) = chain_of(1)
    assert tier.have(keys_of([made])) == {}
    assert tier.read(made.header.key, Part.DELTA) is None
    assert not tier.visit(made.header.key, Part.DELTA, pytest.fail, ReadBuffer())
    assert tier.stats().misses == 2
    assert tier.children(made.header.parent, made.header.tokens) == []
    assert tier.states([made.header.parent]) == []
    assert list(tier.walk()) == []


def test_a_record_is_put_once(tier):
    """Immutable: a second put of a key changes nothing, not even with other bytes."""
    (ref,) = refs_of(1)
    first, second = record(ref), record(ref)
    assert tier.put(first).stored
    again = tier.put(second)
    assert not again.stored
    again.durable.result(timeout=300)
    assert content(tier.read(ref.key, Part.DELTA)) == content(first)
    assert tier.stats().puts == 1


def test_parts_of_a_block_are_put_apart(tier):
    (ref,) = refs_of(1)
    for n, part in enumerate(Part):
        assert tier.put(record(ref, part)).stored
        assert len(tier.have([ref.key])[ref.key].parts) == n + 1
    assert all(tier.read(ref.key, part).header.part is part for part in Part)
    (stored,) = tier.walk()
    assert set(stored.n_bytes) == set(Part)


def test_an_empty_record_is_a_record(tier):
    """A layer may hold an array without rows."""
    (ref,) = refs_of(1)
    made = Record(record(ref).header, (tensor("L0_B0_K", "F32", (1, 0)),))
    tier.put(made)
    assert tier.have([ref.key])[ref.key].parts == {Part.DELTA}
    assert content(tier.read(ref.key, Part.DELTA)) == content(made)
    assert not tier.put(made).stored


def test_more_window_rows_replace_fewer(tier):
    """Rows slide out while decoding; a later prefill completes the block. Never the reverse."""
    (ref,) = refs_of(1)
    few, more, fewer = (record(ref, Part.WINDOW, 256 * n, w_rows=n) for n in (32, 100, 8))
    assert [tier.put(made).stored for made in (few, more, fewer)] == [True, True, False]
    known = tier.have([ref.key])[ref.key]
    assert known.w_rows == 100
    assert content(tier.read(ref.key, Part.WINDOW)) == content(more)
    (stored,) = tier.walk()
    assert stored.n_bytes[Part.WINDOW] < more.n_bytes + few.n_bytes


def test_named_tensors_only(tier):
    (ref,) = refs_of(1)
    tensors = tuple(tensor(f"L{i}_B0_K", "F16", (3, i)) for i in range(6))
    tier.put(Record(record(ref).header, tensors))
    some = tier.read(ref.key, Part.DELTA, ["L4_B0_K", "L1_B0_K", "L9_B0_K"])
    assert content(some) == content(Record(some.header, (tensors[1], tensors[4])))
    none = tier.read(ref.key, Part.DELTA, [])
    assert none.header == some.header
    assert none.tensors == ()


def test_have_on_more_keys_than_one_query_takes(tier):
    held = [first_block([n]) for n in range(40)]
    for ref in held:
        tier.put(record(ref))
    asked = [first_block([n]).key for n in range(35_000)]
    assert set(tier.have(asked)) == {ref.key for ref in held}
    assert tier.have([]) == {}


# Children of a prefix


def brute_force(held, tokens):
    """How many tokens each stored sequence shares with these, the most first."""
    shared = (common_tokens(pack(h), pack(tokens)) for h in held)
    return sorted((n for n in shared if n), reverse=True)


SEQUENCES = st.lists(st.sampled_from([0, 1, 255, 256, 1 << 24]), min_size=1, max_size=7)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(SEQUENCES, max_size=12, unique_by=tuple),
    SEQUENCES,
    st.binary(min_size=32, max_size=32),
)
def test_the_nearest_child_is_the_first(tier, held, asked, name):
    """The longest common prefix at any fan-out, as comparing with every child would find it."""
    namespace = Namespace(name)
    keys = {}
    for tokens in held:
        ref = first_block(tokens, namespace)
        keys[ref.key] = tokens
        tier.put(record(ref, namespace=namespace, n_bytes=16))
    found = tier.children(root(namespace), pack(asked))
    expected = brute_force(keys.values(), asked)
    assert [child.n_common for child in found[:1]] == expected[:1]
    assert len({child.key for child in found}) == len(found)
    for child in found:
        assert child.n_common == common_tokens(pack(keys[child.key]), pack(asked))
    assert [c.n_common for c in found] == sorted((c.n_common for c in found), reverse=True)
    for ref in keys:
        tier.delete_all([ref])


def test_the_nearest_of_many_children(tier):
    pick = random.Random(5)
    held = [[pick.randrange(4) for _ in range(8)] for _ in range(120)]
    for tokens in held:
        tier.put(record(first_block(tokens), n_bytes=16))
    for _ in range(50):
        asked = [pick.randrange(4) for _ in range(8)]
        found = tier.children(root(NAMESPACE), pack(asked))
        assert 0 < len(found) < 20
        assert found[0].n_common == brute_force(held, asked)[0]


def test_children_are_those_of_one_parent(tier):
    """Equal tokens after another prefix, or in another namespace, do not match."""
    other = Namespace(bytes(32))
    tier.put(record(first_block([1, 2, 3], other), namespace=other))
    one, two = refs_of(2)
    tier.put(record(two))
    assert tier.children(root(NAMESPACE), pack([1, 2, 3])) == []
    assert [c.key for c in tier.children(one.key, two.tokens)] == [two.key]


def test_states_are_checkpoints_below_these_parents(tier):
    one, two = refs_of(2, n_last=77)
    tier.put(record(one, Part.STATE))
    tier.put(record(two, Part.STATE))
    tier.put(record(two, Part.DELTA))
    tier.put(record(first_block([5]), Part.DELTA))
    assert set(tier.states([root(NAMESPACE), one.key])) == {
        (one.key, root(NAMESPACE), 256),
        (two.key, one.key, 77),
    }
    assert [state.key for state in tier.states([one.key])] == [two.key]
    assert tier.states([two.key]) == []


# Deleting, walking, pins


def test_delete_takes_every_part(tier):
    (one,), (two,) = refs_of(1), refs_of(1, seed=1)
    for part in Part:
        tier.put(record(one, part))
    tier.put(record(two))
    tier.delete_all([one.key])
    assert set(tier.have([one.key, two.key])) == {two.key}
    assert all(tier.read(one.key, part) is None for part in Part)
    assert tier.children(root(NAMESPACE), one.tokens) == []
    assert tier.states([root(NAMESPACE)]) == []
    assert [stored.key for stored in tier.walk()] == [two.key]
    tier.delete_all([one.key])  # what is not there is no error
    assert tier.put(record(one)).stored


def test_what_follows_a_deleted_block_stays(tier):
    one, two = made = chain_of(2)
    for each in made:
        tier.put(each)
    tier.delete_all([one.header.key])
    assert set(tier.have(keys_of(made))) == {two.header.key}
    assert content(tier.read(two.header.key, Part.DELTA)) == content(two)


def test_walk_shows_every_block(tier):
    made = chain_of(5)
    for one in made:
        tier.put(one)
    seen = {stored.key: stored for stored in tier.walk()}
    assert seen.keys() == set(keys_of(made))
    for one in made:
        stored = seen[one.header.key]
        assert stored.parent == one.header.parent
        assert stored.namespace == NAMESPACE
        assert (stored.number, stored.n_tokens) == (one.header.number, 256)


def test_walk_while_others_put_and_delete(tier):
    """A block that stays is shown exactly once; others may be shown or not."""
    stays = [record(first_block([n])) for n in range(60)]
    moves = [record(first_block([n, n])) for n in range(1000, 1010)]
    for one in stays:
        tier.put(one)

    def come_and_go():
        one = random.choice(moves)
        tier.put(one)
        tier.delete_all([one.header.key])

    with busy(come_and_go, n_threads=2):
        for _ in range(15):
            seen = [stored.key for stored in tier.walk()]
            assert len(seen) == len(set(seen))
            assert set(seen) >= set(keys_of(stays))
            assert set(seen) <= set(keys_of(stays)) | set(keys_of(moves))


def flood(tier, n, n_bytes=MIB // 4, seed=10_000):
    """Puts unrelated blocks, one after another."""
    for i in range(n):
        tier.put(record(first_block([seed + i]), n_bytes=n_bytes))


@pytest.fixture
def small(make):
    """A tier with room for some 20 blocks of 256 KiB."""
    return make(6 * MIB)


def test_a_tier_stays_within_its_bytes(small):
    for i in range(60):
        flood(small, 1, seed=i)
        assert small.stats().n_bytes <= small.stats().max_bytes
    assert small.stats().evicted >= 30
    assert small.stats().blocks >= 10


def test_the_least_recently_used_goes_first(small):
    old, used = (record(first_block([n]), n_bytes=MIB // 4) for n in (1, 2))
    small.put(old)
    small.put(used)
    for i in range(40):
        small.touch([used.header.key])
        flood(small, 1, seed=100 + i)
    assert set(small.have(keys_of([old, used]))) == {used.header.key}


def test_a_record_larger_than_the_tier_is_not_kept_and_evicts_nothing(small):
    (one,) = chain_of(1)
    small.put(one)
    assert not small.put(record(first_block([1]), n_bytes=7 * MIB)).stored
    assert set(small.have(keys_of([one]))) == set(keys_of([one]))
    assert small.stats().evicted == 0


def test_eviction_goes_from_the_tail(small):
    """At every moment what is left of a chain is its beginning."""
    made = chain_of(16, n_bytes=MIB // 4)
    for one in made:
        small.put(one)
    for i in range(30):
        flood(small, 1, seed=200 + i)
        numbers = sorted(s.number for s in small.walk() if s.key in keys_of(made))
        assert numbers == list(range(len(numbers)))
    assert len(numbers) < 16


def test_a_block_is_not_evicted_for_its_own_child(make):
    """A chain that outgrows the tier keeps its beginning, and the next block is refused."""
    tier = make(6 * MIB)
    made = chain_of(40, n_bytes=MIB // 4)
    n_stored = next(n for n, one in enumerate(made) if not tier.put(one).stored)
    assert sorted(stored.number for stored in tier.walk()) == list(range(n_stored))
    assert n_stored > 10
    assert tier.stats().evicted == 0


# Many at once


def test_a_reader_sees_a_whole_record_or_none(tier):
    """Atomic visibility, with a record that is put, grows and is deleted."""
    (ref,) = refs_of(1)
    made = {n: record(ref, Part.WINDOW, 50_000 * n, w_rows=n) for n in (1, 2, 3)}
    seen = set()

    def read():
        found = tier.read(ref.key, Part.WINDOW)
        if found is not None:
            assert content(found) == content(made[found.header.w_rows])
            seen.add(found.header.w_rows)

    with busy(read, n_threads=2):
        for _ in range(40):
            for one in made.values():
                tier.put(one)
                time.sleep(0.0005)  # or readers never get Python's lock in between
            tier.delete_all([ref.key])
        tier.put(made[1])
        wait_until(lambda: seen)
    assert tier.stats().quarantined == 0


def test_racing_puts_of_one_record_store_it_once(tier):
    (made,) = chain_of(1, n_bytes=100_000)
    with ThreadPoolExecutor(8) as threads:
        stored = list(threads.map(lambda _: tier.put(made).stored, range(16)))
    if "create" not in getattr(tier, "lacks", ()):
        assert stored.count(True) == 1
    assert tier.stats().puts == stored.count(True) >= 1
    assert content(tier.read(made.header.key, Part.DELTA)) == content(made)


def test_racing_puts_and_deletes_leave_all_or_nothing(tier):
    made = [record(first_block([n])) for n in range(4)]

    def work(seed):
        pick = random.Random(seed)
        for _ in range(40):
            one = pick.choice(made)
            if pick.random() < 0.5:
                tier.put(one)
            else:
                tier.delete_all([one.header.key])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    for one in made:
        found = tier.read(one.header.key, Part.DELTA)
        assert (found is not None) == (one.header.key in tier.have(keys_of([one])))
        assert found is None or content(found) == content(one)
        tier.delete_all([one.header.key])
    assert list(tier.walk()) == []
    assert tier.stats().blocks == 0


# Counting and closing


def test_stats_add_up(tier):
    made = chain_of(3)
    for one in made * 2:
        tier.put(one)
    for one in made[:2] * 2:
        tier.read(one.header.key, Part.DELTA)
    for n in range(5):
        tier.read(first_block([n]).key, Part.DELTA)
    tier.delete_all([made[2].header.key])
    stats = tier.stats()
    assert (stats.puts, stats.hits, stats.misses) == (3, 4, 5)
    assert (stats.evicted, stats.quarantined, stats.errors) == (0, 0, 0)


def test_stats_tell_what_is_held(tier):
    made = chain_of(3)
    for one in made:
        tier.put(one)
    tier.delete_all([made[2].header.key])
    stats = tier.stats()
    assert stats.blocks == 2
    assert stats.n_bytes >= sum(sum(s.n_bytes.values()) for s in tier.walk()) >= 2 * 1024
    assert stats.max_bytes == ROOMY


def test_counting_is_exact_with_many_readers(tier):
    (made,) = chain_of(1)
    tier.put(made)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: tier.read(made.header.key, Part.DELTA), range(200)))
    assert tier.stats().hits == 200


def ask_everything(tier, made):
    """No look-up raises, whatever is broken."""
    tier.have(keys_of(made))
    tier.children(root(NAMESPACE), made[0].header.tokens)
    tier.states([root(NAMESPACE)])
    tier.touch(keys_of(made))
    tier.prefetch(made[0].header.key, Part.DELTA)


def test_a_closed_tier_answers_nothing(make):
    """Requests may still be under way when a process ends."""
    tier = make()
    made = chain_of(2)
    for one in made:
        tier.put(one)
    tier.close()
    ask_everything(tier, made)
    for one in made:
        found = tier.read(one.header.key, Part.DELTA)
        assert found is None or content(found) == content(one)
    assert tier.have(keys_of(made)) == {}
    assert not tier.put(record(first_block([1]))).stored
    tier.close()


@pytest.mark.parametrize(
    "do",
    [
        lambda tier, key: tier.delete_all([key]),
        lambda tier, _: list(tier.walk()),
    ],
    ids=["delete", "walk"],
)
def test_what_must_be_known_to_fail_fails_in_our_words(do, make):
    """No error of SQLite or of the system leaves a tier."""
    tier = make()
    (made,) = chain_of(1)
    tier.put(made)
    tier.close()
    with pytest.raises(StoreFailed, match="The store could not"):
        do(tier, made.header.key)
    tier.touch([made.header.key])
    tier.delete_superseded(made.header.key)
    assert tier.stats().blocks == 0
    assert tier.stats().errors >= 1


# Outages: a failing tier misses, and hits again once it is repaired


def no_open(tier):
    tier.files.break_(errno.EIO, "open")
    return tier.files.mend


def no_access(tier):
    tier.files.break_(errno.EACCES, "open", "make_directory", "write", "publish", "remove")
    return tier.files.mend


def directory_away(tier):
    blocks = tier.root / "blocks"
    blocks.rename(tier.root / "away")

    def mend():
        if blocks.exists():
            blocks.rmdir()
        (tier.root / "away").rename(blocks)

    return mend


def file_for_directory(tier):
    mend = directory_away(tier)
    blocks = tier.root / "blocks"
    blocks.write_bytes(b"")

    def mend_all():
        blocks.unlink()
        mend()

    return mend_all


OUTAGES = {
    "EIO": (no_open, True),
    "EACCES": (no_access, True),
    "no directory": (directory_away, False),
    "a file for a directory": (file_for_directory, True),
}


@pytest.mark.parametrize("name", OUTAGES)
def test_an_outage_is_a_miss(name, tmp_path):
    """On disk; memory has none but the end. What is only out of reach is kept in the index."""
    tier = disk(tmp_path, ROOMY)
    made = chain_of(2)
    for one in made:
        tier.put(one)
    cause, keeps_rows = OUTAGES[name]
    mend = cause(tier)
    for one in made:
        assert tier.read(one.header.key, one.header.part) is None
    ask_everything(tier, made)
    before = tier.stats()
    assert before.hits == 0
    assert before.quarantined == 0
    assert before.misses == 2
    mend()
    if keeps_rows:
        assert set(tier.have(keys_of(made))) == set(keys_of(made))
    tier.close()
    again = disk(tmp_path, ROOMY)
    for one in made:
        assert content(again.read(one.header.key, Part.DELTA)) == content(one)
    again.close()


@pytest.mark.parametrize("operation", ["make_directory", "write", "publish"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_write_that_fails_is_counted_and_leaves_nothing(operation, code, tmp_path):
    tier = disk(tmp_path, ROOMY)
    (made,) = chain_of(1, n_bytes=100_000)
    before = tier.stats().n_bytes
    tier.files.break_(code, operation)
    put = tier.put(made)
    assert not put.stored
    assert put.durable.exception(timeout=300).errno == code
    assert tier.have(keys_of([made])) == {}
    assert tier.read(made.header.key, Part.DELTA) is None
    assert tier.stats().errors == 1
    assert tier.stats().n_bytes - before < 50_000
    assert not list(tmp_path.rglob("*.tmp"))
    tier.files.mend()
    assert tier.put(made).stored
    tier.close()


def test_a_deletion_that_fails_is_said_and_finished_later(tmp_path):
    tier = disk(tmp_path, ROOMY)
    one, two = made = chain_of(2)
    for record_ in made:
        tier.put(record_)
    tier.files.break_(errno.EROFS, "remove")
    with pytest.raises(StoreFailed, match=r"delete blocks .*Read-only"):
        tier.delete_all([two.header.key])
    assert set(tier.have(keys_of(made))) == {one.header.key}
    tier.close()
    again = disk(tmp_path, ROOMY)
    assert set(again.have(keys_of(made))) == {one.header.key}
    assert not again.records.path_of(two.header.key, Part.DELTA).exists()
    again.close()


def test_window_rows_are_read_from_the_tier_with_the_most(tmp_path):
    """Memory may have caught a block while decoding, with fewer rows than lie on disk."""
    slow, fast = disk(tmp_path, ROOMY), memory(tmp_path, ROOMY)
    (ref,) = refs_of(1)
    few, more = (record(ref, Part.WINDOW, w_rows=n) for n in (8, 200))
    fast.put(few)
    slow.put(more)
    tiers = Tiers([("fast", fast), ("slow", slow)])
    assert tiers.have([ref.key])[ref.key].w_rows == 200
    seen = []
    assert tiers.visit(ref.key, Part.WINDOW, seen.append, ReadBuffer()) == "slow"
    assert seen[0].header.w_rows == 200
    slow.close()
    fast.close()


@pytest.mark.parametrize("take", [lambda one: one.data, lambda one: read_into(one, 2500)])
def test_a_tensor_found_bad_half_way_is_a_miss_and_quarantined(take, tmp_path):
    """The caller never gets a byte that was not put."""
    tier = disk(tmp_path, ROOMY)
    (made,) = chain_of(1, n_bytes=5000)
    tier.put(made)
    path = tier.records.path_of(made.header.key, Part.DELTA)
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    seen = []

    def use(visit):
        for one in visit.tensors:
            seen.append(bytes(take(one)))

    assert not tier.visit(made.header.key, Part.DELTA, use, ReadBuffer())
    assert seen == [bytes(made.tensors[0].data)]
    assert tier.stats().quarantined == 1
    assert tier.have([made.header.key]) == {}
    tier.close()


def test_exemptions_are_of_tests_that_are_there():
    named = {name for one in EXEMPTIONS for name in one.tests}
    assert named <= globals().keys() | vars(test_blobs).keys()


def test_the_page_tells_the_exemptions():
    text = PAGE.read_text()
    assert BEGIN in text
    assert text == page(text), "run: python -m tests.contract.shared"
