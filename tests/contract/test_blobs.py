"""What every place for blobs promises, whatever it is. A new one is one more maker here."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import count

import pytest

from keepwarm.concurrency import CallError
from keepwarm.errors import BadInput, BadRecord
from keepwarm.remote.addresses import open_backend
from keepwarm.remote.backend import BESIDE, FolderRange
from tests.contract.shared import exemption_of
from tests.kit.places import FUSE, KINDS

SOON = 30.0  # seconds: nothing here may hang
NUMBERS = count()


@pytest.fixture(scope="module", params=[*KINDS, pytest.param(FUSE, marks=pytest.mark.soak)])
def place(request, places, tmp_path_factory):
    with places[request.param](tmp_path_factory.mktemp("place")) as url:
        yield url


@pytest.fixture
def blobs(place):
    with closing(open_backend(place)) as opened:
        yield opened


@pytest.fixture
def folder():
    """One that no other test uses."""
    return f"class-1/{next(NUMBERS):04d}"


def take(n_bytes):
    return memoryview(bytearray(n_bytes))


def read(blobs, name, **some):
    found = blobs.read(name, take, SOON, **some)
    return None if found is None else bytes(found)


def put(blobs, name, data=b"bytes", **how):
    return blobs.put(name, [data], SOON, **how)


def names(blobs, folder):
    return {listed.name for listed in blobs.list_names(folder, SOON)}


def test_what_is_fetched_is_used_by_the_thread_that_has_read_it(blobs, folder):
    threads = []

    def take_here(n_bytes):
        threads.append(threading.get_ident())
        return take(n_bytes)

    def use(memory):
        threads.append(threading.get_ident())
        return len(memory), bytes(memory[:2])

    put(blobs, f"{folder}/x.d", b"bytes")
    assert blobs.fetch(f"{folder}/x.d", take_here, use, SOON) == (5, b"by")
    assert len(threads) == 2
    assert len(set(threads)) == 1
    assert blobs.fetch(f"{folder}/y.d", take_here, use, SOON) is None
    assert len(threads) == 2


def test_what_is_wrong_with_fetched_bytes_is_told(blobs, folder):
    def refuse(memory):
        raise BadRecord("it is bad")

    put(blobs, f"{folder}/x.d", b"bytes")
    with pytest.raises(BadRecord, match="it is bad"):
        blobs.fetch(f"{folder}/x.d", take, refuse, SOON)
    assert read(blobs, f"{folder}/x.d") == b"bytes"


def test_what_is_put_is_read_in_pieces_of_any_size(blobs, folder):
    pieces = [b"a", bytes(range(256)) * 1000, memoryview(b"\r\n$5\r\n"), b"", b"z" * 5000]
    assert blobs.put(f"{folder}/x.d", pieces, SOON)
    assert read(blobs, f"{folder}/x.d") == b"".join(pieces)
    assert blobs.sizes([f"{folder}/x.d"], SOON) == [len(b"".join(pieces))]


def test_a_part_is_read(blobs, folder):
    put(blobs, f"{folder}/x.d", bytes(range(100)))
    assert read(blobs, f"{folder}/x.d", n_bytes=3) == bytes(range(3))
    assert read(blobs, f"{folder}/x.d", n_bytes=150) == bytes(range(100))


def test_what_is_not_there_is_missing_and_no_error(blobs, folder):
    put(blobs, f"{folder}/x.d")
    some = [f"{folder}/{name}" for name in ("a.d", "x.d", "b.d")]
    assert blobs.sizes(some, SOON) == [None, 5, None]
    assert blobs.sizes([], SOON) == []
    assert read(blobs, f"{folder}/a.d") is None
    assert read(blobs, f"{folder}/a.d", n_bytes=9) is None
    assert names(blobs, f"{folder}/none") == set()
    blobs.delete([some[0]], SOON)
    blobs.touch(some, SOON)


def test_the_first_put_stays_unless_it_is_to_be_replaced(blobs, folder):
    name = f"{folder}/x.w"
    assert put(blobs, name, b"first")
    assert not put(blobs, name, b"second")
    assert read(blobs, name) == b"first"
    assert put(blobs, name, b"third", replace=True)
    assert read(blobs, name) == b"third"


class Interrupted(list):
    """Pieces of a put during which another put is made."""

    def __init__(self, pieces, other):
        super().__init__(pieces)
        self._other = other

    def __iter__(self):
        other, self._other = self._other, lambda: None
        other()
        return super().__iter__()


def test_of_two_puts_at_the_same_time_one_stores(request, blobs, folder):
    kind = request.node.callspec.params["place"].split()[0]
    name, stored = f"{folder}/x.d", []
    pieces = Interrupted([b"same"], lambda: stored.append(put(blobs, name, b"same")))
    stored.append(blobs.put(name, pieces, SOON))
    is_exempt = exemption_of("test_of_two_puts_at_the_same_time_one_stores", kind) is not None
    assert sorted(stored) == ([True, True] if is_exempt else [False, True])
    assert read(blobs, name) == b"same"


def test_what_is_deleted_is_gone(blobs, folder):
    put(blobs, f"{folder}/x.d")
    put(blobs, f"{folder}/y.d")
    blobs.delete([f"{folder}/x.d"], SOON)
    assert names(blobs, folder) == {f"{folder}/y.d"}
    assert blobs.sizes([f"{folder}/x.d", f"{folder}/y.d"], SOON) == [None, 5]
    assert put(blobs, f"{folder}/x.d", b"again")
    assert read(blobs, f"{folder}/x.d") == b"again"


def test_a_folder_lists_its_own_names(blobs, folder):
    for name in ("a.d", "a.s", "b.d"):
        put(blobs, f"{folder}/one/{name}")
    put(blobs, f"{folder}/other/c.d")
    assert names(blobs, f"{folder}/one") == {f"{folder}/one/{n}" for n in ("a.d", "a.s", "b.d")}


def test_a_look_lists_what_begins_with_a_stem_and_some_others(blobs, folder):
    for name, data in (("one/a.d", b"12345"), ("one/a.w", b"123"), ("two/b.d", b"1234567")):
        put(blobs, f"{folder}/{name}", data)
    for number in range(2 * BESIDE):
        put(blobs, f"{folder}/three/a{number:03d}.d", b"1")
    put(blobs, f"{folder}/three/b.d", b"12")
    ranges = [FolderRange(f"{folder}/{name}", "b.") for name in ("two", "none", "one", "three")]
    two, none, one, three = blobs.look(ranges, SOON)
    assert [(found.name, found.n_bytes) for found in two] == [(f"{folder}/two/b.d", 7)]
    assert none == []
    both = {(f"{folder}/one/a.d", 5), (f"{folder}/one/a.w", 3)}
    assert {(found.name, found.n_bytes) for found in one} == both
    assert (f"{folder}/three/b.d", 2) in {(found.name, found.n_bytes) for found in three}
    assert f"{folder}/three/a000.d" in {found.name for found in three}
    assert blobs.look([], SOON) == []


def test_readers_see_whole_blobs(blobs, folder):
    """While one is replaced over and over. A read may fail then: moto loses its way sometimes."""
    name, wholes = f"{folder}/x.w", [bytes([n]) * 300_000 for n in range(4)]
    put(blobs, name, wholes[0])
    stop = threading.Event()

    def write():
        while not stop.is_set():
            for data in wholes:
                with suppress(CallError):
                    put(blobs, name, data, replace=True)

    with ThreadPoolExecutor(2) as threads:
        writing = threads.submit(write)
        try:
            n_read = sum(is_whole(blobs, name, wholes) for _ in range(60))
        finally:
            stop.set()
        writing.result()
    assert n_read > 0


def is_whole(blobs, name, wholes):
    try:
        found = read(blobs, name)
    except CallError:
        return False
    assert found in wholes
    return True


def test_threads_do_not_mix_their_answers(blobs, folder):
    mine = {f"{folder}/{n}.d": bytes([n]) * (1000 + n) for n in range(24)}
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda item: put(blobs, *item), mine.items()))
        found = threads.map(lambda name: read(blobs, name), mine)
        assert dict(zip(mine, found, strict=True)) == mine


@pytest.mark.parametrize("name", ["", "../x", "a/../b", "a//b", "/a", "a/", ".a", "a b", "a\nb"])
def test_a_name_that_could_mean_something_else_is_refused(blobs, name):
    for call in (put, read):
        with pytest.raises(BadInput):
            call(blobs, name)
    with pytest.raises(BadInput):
        blobs.list_names(name, SOON)


def test_memory_that_is_not_given_fails_the_read_alone(blobs, folder):
    put(blobs, f"{folder}/x.d", b"x" * 100)

    def refuse(n_bytes):
        raise CallError(f"{n_bytes} are too many")

    with pytest.raises(CallError, match="too many"):
        blobs.read(f"{folder}/x.d", refuse, SOON)
    assert read(blobs, f"{folder}/x.d") == b"x" * 100
