"""Look-ups of a prompt of 100,000 tokens: what they find, and in how many requests."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import product

import pytest

from keepwarm.concurrency import CallDeadline
from keepwarm.prefix.blocks import BLOCK_TOKENS, KEY_BYTES, chain, pack
from keepwarm.records.record import Part
from keepwarm.remote.addresses import open_backend
from keepwarm.remote.backend import BESIDE, Listed
from keepwarm.remote.directory import DirectoryBackend
from keepwarm.remote.health import RemoteSpeed
from keepwarm.remote.lookup import (
    ABSENT_S,
    CONNECTING,
    PRESENT_S,
    STATE_BLOCKS,
    Finder,
    KnownRecords,
    n_round_trips,
)
from keepwarm.remote.records import RemoteNames, RemoteRecord
from keepwarm.remote.redis import RespConnection
from keepwarm.remote.tier import RemoteTier
from keepwarm.store.tier import BlockInfo
from tests.kit.faulty_proxy import FaultyProxy
from tests.remote.conftest import CLASS, DATABASES, SOON
from tests.remote.test_tier import question
from tests.store.kit import NAMESPACE, record, refs_of, root_key, tokens_of

N_BLOCKS = 391
N_WINDOW = 5
MIDDLE = 196
STORED = tokens_of(N_BLOCKS * BLOCK_TOKENS)
REFS = refs_of(N_BLOCKS)
ENDS = (MIDDLE, N_BLOCKS)  # where the stored prompt can be restored
MODELS = {
    "rows": {},
    "windows": {"n_window": N_WINDOW},
    "states": {"has_states": True},
    "only states": {"has_rows": False, "has_states": True},
}


def parting(n_tokens):
    """A prompt that shares so many tokens with the stored one, and is longer."""
    return [*STORED[:n_tokens], *tokens_of((N_BLOCKS + 1) * BLOCK_TOKENS - 60 - n_tokens, seed=1)]


def made(refs):
    """The records of the stored prompt: rows of every block, windows and states at two ends."""
    for ref in refs:
        near = [end for end in ENDS if end - N_WINDOW - 3 <= ref.number < end]
        yield record(ref, n_bytes=64)
        yield record(ref, Part.WINDOW, n_bytes=512 if near else 0, w_rows=None if near else 0)
        if ref.number + 1 in ENDS:
            yield record(ref, Part.STATE, n_bytes=64)


def fill(place):
    with closing(RemoteTier(place, CLASS)) as tier, ThreadPoolExecutor(8) as threads:
        assert tier.health.wait_until_tried(SOON)
        assert all(put.stored for put in threads.map(tier.put, made(REFS)))


@pytest.fixture
def open_tier(clock):
    opened = []

    def opener(place, **options):
        backend = open_backend(place) if isinstance(place, str) else place
        opened.append(RemoteTier(backend, CLASS, clock=clock, **options))
        assert opened[-1].health.wait_until_tried(SOON)
        return opened[-1]

    yield opener
    for tier in opened:
        tier.close()


def ask(tier, tokens, **model):
    tier.look_up(question(tokens, **model), CallDeadline(SOON))


def check_found(tier, n_tokens, model):
    """Whether a tier knows what there is of a prompt that parts after so many tokens."""
    n_whole = n_tokens // BLOCK_TOKENS
    known = tier.have([ref.key for ref in REFS])
    needed = REFS[:n_whole] if model.get("has_rows", True) else REFS[n_whole - 1 : n_whole]
    assert all(ref.key in known for ref in needed)
    if model.get("n_window") and n_whole in ENDS:
        last = REFS[n_whole - N_WINDOW + 1 : n_whole]  # one less at the end of a block
        assert {known[ref.key].w_rows for ref in last} == {BLOCK_TOKENS}
    if model.get("has_states") and n_whole in ENDS:
        last = REFS[n_whole - 1]
        assert (last.key, last.parent, BLOCK_TOKENS) in tier.states([last.parent])


# Redis


@pytest.fixture(scope="module")
def stored(redis):
    url = f"{redis.url}/999"
    fill(open_backend(url))
    return url


@pytest.fixture
def trips(monkeypatch):
    """Round trips, but for those that connect."""
    exchange, seen = RespConnection.exchange, []

    def watched(self, commands, *args):
        if commands != [[b"PING"]] and commands[0][0] != b"SELECT":
            seen.append(len(commands))
        return exchange(self, commands, *args)

    monkeypatch.setattr(RespConnection, "exchange", watched)
    return seen


PARTINGS = {
    "nothing there": 0,
    "inside of the first block": 100,
    "all there": N_BLOCKS * BLOCK_TOKENS,
    "inside of the last block": N_BLOCKS * BLOCK_TOKENS - 100,
    "in the middle": MIDDLE * BLOCK_TOKENS,
    "inside of a block in the middle": MIDDLE * BLOCK_TOKENS + 100,
}


@pytest.mark.parametrize("parting_at", PARTINGS)
@pytest.mark.parametrize("model", MODELS)
def test_redis_is_asked_in_two_round_trips(stored, open_tier, trips, parting_at, model):
    """One if nothing is there."""
    tier, n_tokens = open_tier(stored), PARTINGS[parting_at]
    trips.clear()
    ask(tier, parting(n_tokens), **MODELS[model])
    assert len(trips) == (2 if n_tokens >= BLOCK_TOKENS else len(trips) or 1) <= 2
    check_found(tier, n_tokens, MODELS[model])


def test_a_name_that_outlived_its_record_is_listed_no_more(redis, open_tier):
    url = f"{redis.url}/{next(DATABASES)}"
    tier, other = open_tier(url), open_tier(url)
    (ref,) = refs_of(1, n_last=90)
    other.put(record(ref))
    name = RemoteNames(CLASS).of(RemoteRecord.of(record(ref).header))
    folder = name.rpartition("/")[0]
    other.backend._call([[b"UNLINK", f"keepwarm:{name}".encode()]], SOON)
    assert [one.name for one in other.backend.list_names(folder, SOON)] == [name]
    prompt = [*tokens_of(90), 1, 2, 3]
    ask(tier, prompt)
    assert tier.children(ref.parent, pack(prompt)) == []
    assert other.backend.list_names(folder, SOON) == []
    assert not tier.is_open


# S3


class CountedDirectory(DirectoryBackend):
    """A directory that is asked as a bucket is: each name, list and read is a request."""

    is_distant = True

    def __init__(self, root, seen):
        super().__init__(root)
        self.seen = seen
        self.folders = []

    def look(self, ranges, timeout_s):
        self.seen["list"] += len(ranges)
        self.folders += [one.folder for one in ranges]
        return super().look(ranges, timeout_s)

    def sizes(self, names, timeout_s):
        self.seen["HEAD"] += len(names)
        return super().sizes(names, timeout_s)

    def read(self, *args, **options):
        self.seen["GET"] += 1
        return super().read(*args, **options)


def counted_moto(bucket):
    """An address in moto, and the requests that look there."""
    address, _, options = bucket.partition("?")
    host, _, port = options.rpartition(":")
    proxy, seen = FaultyProxy(int(port)), Counter()

    def count(data):
        if data.startswith((b"GET ", b"HEAD ")):
            line = data.partition(b"\r\n")[0]
            seen["list" if b"list-type" in line else line.partition(b" ")[0].decode()] += 1

    proxy.answer = count
    return f"{address}/asking?{host}:{proxy.port}", seen


@pytest.fixture(scope="module", params=["directory", pytest.param("moto", marks=pytest.mark.soak)])
def bucket_like(request, tmp_path_factory):
    """Opens the place with the stored prompt, or an empty one; and the requests that look there."""
    if request.param == "moto":
        url, seen = counted_moto(request.getfixturevalue("bucket"))
        address, _, options = url.partition("?")
        return lambda name: open_backend(f"{address}-{name}?{options}"), seen
    root, seen = tmp_path_factory.mktemp("places"), Counter()

    def opener(name):
        (root / name).mkdir(exist_ok=True)
        return CountedDirectory(root / name, seen)

    return opener, seen


@pytest.fixture(scope="module")
def counted(bucket_like):
    opener, seen = bucket_like
    fill(opener("stored"))
    return opener, seen


PLACES = (0, 100, 256, 117 * 256 + 9, MIDDLE * 256, MIDDLE * 256 + 100, (N_BLOCKS - 1) * 256 + 7,
          N_BLOCKS * 256)  # fmt: skip


@pytest.mark.parametrize("n_tokens", PLACES)
@pytest.mark.parametrize("model", MODELS)
def test_a_bucket_is_asked_in_twelve_requests(counted, open_tier, model, n_tokens):
    """Only where a prompt parts in the middle and no state is near, the lists of some blocks before
    are more.
    """
    opener, seen = counted
    tier = open_tier(opener("stored"))
    seen.clear()
    ask(tier, parting(n_tokens), **MODELS[model])
    n_whole = n_tokens // BLOCK_TOKENS
    is_far = 0 < n_whole < N_BLOCKS and n_whole not in ENDS
    more = STATE_BLOCKS - 2 if is_far and MODELS[model].get("has_states") else 0
    assert 0 < sum(seen.values()) <= 12 + more, seen
    check_found(tier, n_tokens, MODELS[model])


def test_begun_blocks_that_a_prompt_continues_are_known_by_their_key(bucket_like, open_tier):
    """No record is read for it. One that parts from the prompt is not known."""
    opener, seen = bucket_like
    tier, other = open_tier(opener("keys")), open_tier(opener("keys"))
    begun, parted = refs_of(1, n_last=90)[0], next(chain(NAMESPACE, [*tokens_of(40), 7]))
    for ref in (begun, parted):
        other.put(record(ref))
        other.put(record(ref, Part.STATE))
    seen.clear()
    prompt = [*tokens_of(90), *range(3)]
    ask(tier, prompt)
    assert seen["GET"] == 0
    assert tier.children(begun.parent, pack(prompt)) == [(begun.key, 90)]
    assert tier.states([begun.parent]) == [(begun.key, begun.parent, 90)]


# Any store


def ask_place(place, known, asked):
    Finder(place, RemoteNames(CLASS), known, RemoteSpeed()).find(asked, CallDeadline(SOON))


class Counted:
    """A store that has the rows of these blocks, and counts requests."""

    def __init__(self, refs, in_batches):
        self.in_batches, self.is_distant = in_batches, not in_batches
        self._there = {
            RemoteNames(CLASS).of(RemoteRecord.of(record(ref).header)): 1 << 20 for ref in refs
        }
        self.n_calls = self.n_names = 0

    def sizes(self, names, timeout_s):
        self.n_calls, self.n_names = self.n_calls + 1, self.n_names + len(names)
        return [self._there.get(name) for name in names]

    def look(self, ranges, timeout_s):
        self.n_calls, self.n_names = self.n_calls + 1, self.n_names + len(ranges)
        stems = [f"{one.folder}/{one.stem}d.0" for one in ranges]
        return [[Listed(name, 1)] if name in self._there else [] for name in stems]


@pytest.mark.parametrize("model", ["rows", "windows"])
def test_a_prompt_of_100_000_tokens_costs_a_few_requests(model):
    """Each for one name or list, in no more round trips than are planned."""
    asked = question(tokens_of(391 * BLOCK_TOKENS), **MODELS[model])
    keys = [ref.key for ref in asked.refs]
    for n_there, in_batches in product((0, 1, 2, 195, 196, 256, 389, 390, 391), (True, False)):
        place, known = Counted(asked.refs[:n_there], in_batches), KnownRecords()
        ask_place(place, known, asked)
        assert len(known.have(keys)) == n_there
        assert place.n_calls <= (1 if in_batches else n_round_trips(asked) - CONNECTING)
        assert in_batches or place.n_names <= 12


@pytest.mark.parametrize("address", ["directory"], indirect=True)
def test_an_empty_file_is_no_record(machine, place):
    tier, (ref,) = machine(), refs_of(1, n_last=90)
    place.put(RemoteNames(CLASS).of(RemoteRecord.of(record(ref).header)), [], SOON)
    ask(tier, [*tokens_of(90), 1])
    assert tier.have([ref.key]) == {}
    assert tier.children(ref.parent, ref.tokens) == []


def test_a_crowded_folder_hides_no_whole_block(machine, place):
    """However many other blocks follow the same one."""
    tier, (ref,) = machine(), refs_of(1)
    folder = RemoteNames(CLASS).folder(NAMESPACE, ref.parent)
    for n in range(2 * BESIDE):
        place.put(f"{folder}/256.{n.to_bytes(KEY_BYTES).hex()}.d.0", [b"other"], SOON)
    machine().put(record(ref))
    machine().put(record(ref, Part.STATE))
    ask(tier, [*tokens_of(BLOCK_TOKENS), 1], has_states=True)
    assert tier.have([ref.key])[ref.key].parts == {Part.DELTA, Part.STATE}


# What is remembered, and for how long


@pytest.fixture
def known(clock):
    return KnownRecords(clock)


def told(ref, part=Part.DELTA, **fields):
    return RemoteRecord(NAMESPACE, ref.parent, ref.key, part, ref.n_tokens, n_bytes=1000, **fields)


def test_present_records_are_believed_for_a_minute_and_absent_ones_for_seconds(known, clock):
    there, gone = refs_of(2)
    known.add([told(there)])
    known.add_absent([gone])
    assert known.is_answered(there.key)
    assert known.is_answered(gone.key)
    assert known.have([there.key, gone.key]).keys() == {there.key}
    clock.now += ABSENT_S
    assert not known.is_answered(gone.key)
    assert known.is_answered(there.key)
    clock.now += PRESENT_S
    assert not known.is_answered(there.key)
    assert known.have([there.key]) == {}
    assert known.children(root_key(), there.tokens) == []


def test_parts_of_a_block_are_one_and_the_most_window_rows_count(known):
    (ref,) = refs_of(1)
    known.add([told(ref), told(ref, Part.WINDOW, w_rows=7), told(ref, Part.WINDOW, w_rows=3)])
    parts = frozenset({Part.DELTA, Part.WINDOW})
    assert known.have([ref.key])[ref.key] == BlockInfo(parts, 256, 7, 2000)


def test_all_that_follows_a_lost_block_is_absent(known, clock):
    refs = refs_of(4)
    (other,) = refs_of(1, seed=1)
    known.add(told(ref) for ref in (*refs, other))
    known.lose(refs[1].key)
    assert known.have([*(ref.key for ref in refs), other.key]).keys() == {refs[0].key, other.key}
    assert known.is_answered(refs[3].key)
    clock.now += ABSENT_S
    assert not known.is_answered(refs[3].key)


def test_children_are_those_that_the_tokens_continue(known):
    near, far = refs_of(1, n_last=200)[0], refs_of(1, seed=1, n_last=100)[0]
    known.add([told(near), told(far, Part.STATE)])
    assert known.children(root_key(), near.tokens + far.tokens) == [(near.key, 200)]
    assert known.children(root_key(), near.tokens[:-4]) == []
    assert known.states([root_key()]) == [(far.key, root_key(), 100)]


def test_the_oldest_blocks_are_forgotten(known, monkeypatch):
    monkeypatch.setattr("keepwarm.remote.lookup.MAX_KNOWN", 3)
    refs = refs_of(5)
    for ref in refs:
        known.add([told(ref)])
    assert known.have([ref.key for ref in refs]).keys() == {ref.key for ref in refs[2:]}
    assert known.children(refs[0].parent, refs[0].tokens) == []
