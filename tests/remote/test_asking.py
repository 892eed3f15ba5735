"""Questions about a prompt of 100,000 tokens: what they find, and in how many requests."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import product

import pytest

from keepwarm.concurrency import CallDeadline
from keepwarm.prefix.blocks import BLOCK_TOKENS, KEY_BYTES, chain, pack
from keepwarm.records.cipher import Cipher
from keepwarm.records.record import Part
from keepwarm.remote.addresses import open_backend
from keepwarm.remote.asking import LAST_ENDS, MAX_REQUESTS, Asker
from keepwarm.remote.backend import PAGE, Listed, Looked
from keepwarm.remote.directory import DirectoryBackend
from keepwarm.remote.known import ABSENT_S, KnownRecords
from keepwarm.remote.names import RecordPlace, RemoteNames, parse_last
from keepwarm.remote.question import CONNECTING, STATE_BLOCKS
from keepwarm.remote.resp import RespConnection
from keepwarm.remote.speed import TierSpeed
from keepwarm.remote.tier import RemoteTier
from tests.kit.faulty_proxy import FaultyProxy
from tests.remote.conftest import CLASS, DATABASES, SOON
from tests.remote.test_tier import question
from tests.store.kit import NAMESPACE, record, refs_of, tokens_of

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
        assert tier.wait_until_tried(SOON)
        assert all(put.stored for put in threads.map(tier.put, made(REFS)))


@pytest.fixture
def open_tier(clock):
    opened = []

    def opener(place, **options):
        backend = open_backend(place) if isinstance(place, str) else place
        opened.append(RemoteTier(backend, CLASS, clock=clock, **options))
        assert opened[-1].wait_until_tried(SOON)
        return opened[-1]

    yield opener
    for tier in opened:
        tier.close()


def ask(tier, tokens, **model):
    tier.look_up(question(tokens, **model), CallDeadline(SOON))


def check_found(tier, n_tokens, model):
    """Whether a tier knows what there is of a prompt that parts after so many tokens."""
    n_whole, n_common = divmod(n_tokens, BLOCK_TOKENS)
    known = tier.have([ref.key for ref in REFS])
    assert len(known) >= n_whole
    assert all(ref.key in known for ref in REFS[:n_whole])
    if model.get("n_window") and n_whole in ENDS:
        last = REFS[n_whole - N_WINDOW + 1 : n_whole]  # one less at the end of a block
        assert {known[ref.key].w_rows for ref in last} == {BLOCK_TOKENS}
    if model.get("has_states") and n_whole in ENDS:
        last = REFS[n_whole - 1]
        assert (last.key, last.parent, BLOCK_TOKENS) in tier.states([last.parent])
    return n_common


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


LAST = (N_BLOCKS - LAST_ENDS + 1) * BLOCK_TOKENS
PARTINGS = {
    "nothing there": 0,
    "inside of the first block": 100,
    "all there": N_BLOCKS * BLOCK_TOKENS,
    "inside of the last block": N_BLOCKS * BLOCK_TOKENS - 100,
    "near the end": LAST,
    "inside of a block near the end": LAST + 100,
}


@pytest.mark.parametrize("parting_at", PARTINGS)
@pytest.mark.parametrize("model", ["rows", "states", "only states"])
def test_redis_is_asked_in_one_round_trip(stored, open_tier, trips, parting_at, model):
    tier, n_tokens = open_tier(stored), PARTINGS[parting_at]
    trips.clear()
    ask(tier, parting(n_tokens), **MODELS[model])
    assert len(trips) == 1
    check_found(tier, n_tokens, MODELS[model])
    n_whole, n_common = divmod(n_tokens, BLOCK_TOKENS)
    if n_common:
        tokens = pack(parting(n_tokens)[n_whole * BLOCK_TOKENS :][:BLOCK_TOKENS])
        nearest = tier.children(REFS[n_whole].parent, tokens)[0]
        assert nearest == (REFS[n_whole].key, n_common)


@pytest.mark.parametrize("model", ["rows", "states", "only states"])
def test_where_a_prompt_parts_in_the_middle_a_second_one_tells_what_follows(
    stored, open_tier, trips, model
):
    tier, n_tokens = open_tier(stored), MIDDLE * BLOCK_TOKENS + 100
    trips.clear()
    ask(tier, parting(n_tokens), **MODELS[model])
    assert len(trips) == 2
    check_found(tier, n_tokens, MODELS[model])
    tokens = pack(parting(n_tokens)[MIDDLE * BLOCK_TOKENS :][:BLOCK_TOKENS])
    assert tier.children(REFS[MIDDLE].parent, tokens)[0] == (REFS[MIDDLE].key, 100)


def test_rows_of_windows_are_read_once_for_each_size(stored, open_tier, trips, clock):
    tier, n_tokens = open_tier(stored), N_BLOCKS * BLOCK_TOKENS
    for n_trips in (2, 1):
        trips.clear()
        ask(tier, parting(n_tokens), **MODELS["windows"])
        assert len(trips) == n_trips
        check_found(tier, n_tokens, MODELS["windows"])
        clock.now += 100.0  # nothing is remembered of the answers


def test_a_name_that_outlived_its_record_is_listed_no_more(redis, open_tier, clock):
    url = f"{redis.url}/{next(DATABASES)}"
    tier, other = open_tier(url), open_tier(url)
    (ref,) = refs_of(1, n_last=90)
    other.put(record(ref))
    name = RemoteNames(CLASS).of(RecordPlace.of(record(ref).header))
    other.backend._call([[b"UNLINK", f"keepwarm:{name}".encode()]], SOON)
    prompt = [*tokens_of(80), 1, 2, 3]
    for n_children in (1, 0):
        ask(tier, prompt)
        assert len(tier.children(ref.parent, pack(prompt))) == n_children
        assert tier.read(ref.key, Part.DELTA) is None
        clock.now += ABSENT_S
    assert not tier.is_open


@pytest.mark.parametrize("size", [b"", b"x", b"-5", b"0", b"9" * 400, b"1/2"])
def test_a_list_that_tells_odd_sizes_does_no_harm(redis, open_tier, size):
    url = f"{redis.url}/{next(DATABASES)}"
    tier, (ref,) = open_tier(url), refs_of(1, n_last=90)
    folder, name = RemoteNames(CLASS).folder(NAMESPACE, ref.parent), f"{ref.key.hex()}.d"
    member = f"{ref.tokens.hex()}!{name}/".encode() + size
    tier.backend._call([[b"ZADD", f"keepwarm:{folder}/".encode(), b"0", member]], SOON)
    ask(tier, [*tokens_of(90), 1])
    assert all(0 < info.n_bytes < 1e12 for info in tier.have([ref.key]).values())
    assert tier.read(ref.key, Part.DELTA) is None
    assert tier.stats().errors == 0


# S3


class CountedDirectory(DirectoryBackend):
    """A directory that is asked as a bucket is: each name, list and read is a request."""

    is_distant = True

    def __init__(self, root, seen):
        super().__init__(root)
        self.seen = seen
        self.folders = []

    def look(self, names, places, timeout_s):
        self.seen.update(HEAD=len(names), list=len(places))
        self.folders += [place.folder for place in places]
        return super().look(names, places, timeout_s)

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
    assert 0 < sum(seen.values()) <= MAX_REQUESTS + more, seen
    check_found(tier, n_tokens, MODELS[model])


def test_what_a_prompt_continues_is_known_by_its_key(bucket_like, open_tier):
    """No header is read for it; of another block only that tells the tokens."""
    opener, seen = bucket_like
    tier, other = open_tier(opener("keys")), open_tier(opener("keys"))
    begun, parted = refs_of(1, n_last=90)[0], next(chain(NAMESPACE, [*tokens_of(40), 7]))
    for n_read, ref, n_common in ((0, begun, 90), (1, parted, 40)):
        other.put(record(ref))
        other.put(record(ref, Part.STATE))
        seen.clear()
        prompt = [*tokens_of(90), *range(n_read + 3)]
        ask(tier, prompt)
        assert seen["GET"] == n_read
        assert (ref.key, n_common) in tier.children(ref.parent, pack(prompt))


def test_a_sealed_redis_knows_its_own_beginnings_too(redis, open_tier, trips):
    url, cipher = f"{redis.url}/{next(DATABASES)}", Cipher(b"s" * 32)
    tier, other = open_tier(url, cipher=cipher), open_tier(url, cipher=cipher)
    refs = refs_of(2, n_last=90)
    for ref in refs:
        other.put(record(ref))
    trips.clear()
    ask(tier, [*tokens_of(BLOCK_TOKENS + 90), 1])
    assert len(trips) == 1
    assert tier.have([refs[1].key])[refs[1].key].n_tokens == 90


# Any place


@pytest.mark.parametrize("n_children", [0, PAGE])
def test_a_prompt_of_100_000_tokens_costs_a_few_questions(n_children):
    """A round trip or two where a place answers for many names at once. Else 12 requests, each for
    one name or list, in no more round trips than are planned.
    """
    asked = question(tokens_of(391 * BLOCK_TOKENS))
    keys = [ref.key for ref in asked.refs]
    for n_there, in_batches in product((0, 1, 2, 195, 196, 256, 389, 390, 391), (True, False)):
        n_listed = 0 if in_batches else n_children
        place, known = Counted(asked.refs[:n_there], in_batches, n_listed), KnownRecords()
        ask_place(place, known, asked)
        assert len(known.have(keys)) == n_there
        assert place.n_calls <= (2 if in_batches else 12)
        assert in_batches or place.n_names <= 12
        assert in_batches or place.n_asked + 1 <= asked.n_round_trips - CONNECTING
        if n_listed and not n_there:
            assert place.n_names == 12, "what follows is looked at as far as requests are left"


def test_what_a_cut_list_does_not_tell_is_asked_for_by_name():
    asked = question(tokens_of(20 * BLOCK_TOKENS), has_states=True)
    for n_there in (0, 1, 7, 20):
        place, known = Counted(asked.refs[:n_there], False, PAGE), KnownRecords()
        ask_place(place, known, asked)
        assert len(known.have([ref.key for ref in asked.refs])) == n_there


@pytest.mark.parametrize("address", ["directory"], indirect=True)
def test_an_empty_file_is_no_record(machine, place):
    tier, (ref,) = machine(), refs_of(1, n_last=90)
    place.put(RemoteNames(CLASS).of(RecordPlace.of(record(ref).header)), [], SOON)
    ask(tier, [*tokens_of(90), 1])
    assert tier.have([ref.key]) == {}
    assert tier.children(ref.parent, ref.tokens) == []


def ask_place(place, known, asked):
    asker = Asker(place, RemoteNames(CLASS), known, None, TierSpeed())
    try:
        asker.ask(asked, CallDeadline(SOON))
    finally:
        asker.close()


class Counted:
    """A place that has the records of these blocks, and counts questions. With other children, its
    lists are full of them.
    """

    def __init__(self, refs, in_batches, n_children=0):
        self._refs, self.in_batches, self.is_distant = refs, in_batches, not in_batches
        self._keys = {ref.key: (1 << 20) + ref.number for ref in refs}
        self._n_children = n_children
        self.n_calls = self.n_names = 0
        self.n_asked = 0  # one after the other
        self._lock = threading.Lock()

    def look(self, names, places, timeout_s):
        self.n_asked += 1
        self._count(len(names) + len(places))
        sizes = [self._keys.get(parse_last(name)[0]) for name in names]
        return Looked(sizes, [self._list(place.folder) for place in places])

    def _list(self, folder):
        own = [ref.key for ref in self._refs if folder.endswith(ref.parent.hex())]
        others = [n.to_bytes(KEY_BYTES) for n in range(self._n_children)]
        names = [(key, part) for key in (*others, *own) for part in "dw"][:PAGE]
        sizes = (self._keys.get(key, 1 << 20) for key, _ in names)
        found = zip(names, sizes, strict=True)
        return [Listed(f"{folder}/{key.hex()}.{part}", b"", size) for (key, part), size in found]

    def read(self, name, take, timeout_s, start=0, n_bytes=None):
        self._count(1)

    def _count(self, n_names):
        with self._lock:
            self.n_calls, self.n_names = self.n_calls + 1, self.n_names + n_names


@pytest.mark.parametrize("in_batches", [True, False])
def test_headers_are_read_at_the_same_time(in_batches):
    """Each waits for all others."""
    asked = question(tokens_of(5 * BLOCK_TOKENS), n_window=4)
    place, known = Counted(asked.refs, in_batches), KnownRecords()
    meeting, met = threading.Barrier(4), []

    def read(*args, **options):
        meeting.wait(SOON)
        met.append(args)

    place.read = read
    ask_place(place, known, asked)
    assert len(met) == 4
