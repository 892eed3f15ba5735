"""A file that is restored once is dropped from the page cache; one restored again stays."""

import ctypes
import mmap
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from benchmarks.requests.measure import drop_files

from keepwarm.records.record import Part, ReadBuffer
from keepwarm.store.atomic import Files
from keepwarm.store.disk import disk as disk_module
from keepwarm.store.disk.disk import DiskLimits, DiskTier, Pages
from tests.store.kit import chain_of

MIB = 1 << 20


class System(Files):
    """Files; the test decides which are cached."""

    def __init__(self):
        self.cached = set()
        self.dropped = []

    def is_cached(self, file):
        return Path(file.name).name in self.cached

    def drop_cached_pages(self, file):
        self.dropped.append(Path(file.name).name)
        self.cached.discard(Path(file.name).name)


@pytest.fixture
def system():
    return System()


@pytest.fixture
def disk(tmp_path, system):
    tier = DiskTier(tmp_path / "store", DiskLimits(min_free_bytes=0), files=system)
    yield tier
    tier.close()


@pytest.fixture
def records(disk):
    made = chain_of(3, n_bytes=5000)
    for record in made:
        assert disk.put(record).stored
    return made


def names_of(disk, records):
    return [disk.records.path_of(record.header.key, Part.DELTA).name for record in records]


def restore(disk, records):
    """Every tensor of them, as a restore reads it."""
    for record in records:
        found = []
        assert disk.visit(
            record.header.key,
            Part.DELTA,
            lambda visit, found=found: found.extend(bytes(t.data) for t in visit.tensors),
            ReadBuffer(),
        )
        assert found == [bytes(tensor.data) for tensor in record.tensors]


def test_what_is_read_for_the_first_time_is_not_kept_twice(disk, system, records):
    restore(disk, records)
    assert system.dropped == names_of(disk, records)


def test_what_is_read_again_is_kept(disk, system, records):
    restore(disk, records)
    system.dropped.clear()
    restore(disk, records[:2])  # another agent with the same prefix
    restore(disk, records)
    assert system.dropped == []


def test_what_was_in_memory_before_stays_there(disk, system, records):
    """It has just been written, or is read often."""
    first, *others = names_of(disk, records)
    system.cached = {first}
    restore(disk, records)
    assert system.dropped == others


@pytest.mark.parametrize("bring", [DiskTier.prefetch, DiskTier.read], ids=["fetched", "warmed"])
def test_what_was_brought_before_is_in_memory_because_of_us(bring, disk, system, records):
    for record in records:
        assert bring(disk, record.header.key, Part.DELTA)
    assert system.dropped == []
    system.cached = set(names_of(disk, records))
    restore(disk, records)
    assert system.dropped == names_of(disk, records)


def test_a_look_at_a_header_is_no_reading(disk, system, records):
    """The next restore counts as the first."""
    seen = []
    for record in records:
        assert disk.visit(record.header.key, Part.DELTA, seen.append, ReadBuffer())
    assert [visit.header for visit in seen] == [record.header for record in records]
    assert system.dropped == []
    restore(disk, records)
    assert system.dropped == names_of(disk, records)


def test_not_more_is_remembered_than_was_allowed(disk, system, records, monkeypatch):
    """What is forgotten counts as never read, or as there before."""
    monkeypatch.setattr(disk_module, "MAX_KNOWN", 2)
    restore(disk, records)
    system.dropped.clear()
    restore(disk, records[:1])
    assert system.dropped == names_of(disk, records[:1])
    disk.records.pages = Pages(disk.files)
    for record in records:
        disk.read(record.header.key, Part.DELTA)
    system.cached, system.dropped = set(names_of(disk, records)), []
    restore(disk, records)
    assert system.dropped == names_of(disk, records[2:])


@pytest.fixture
def on_disk(pytestconfig):
    """A folder beside the project, because other tests have their files in memory."""
    with TemporaryDirectory(dir=pytestconfig.cache.mkdir("pages")) as folder:
        yield Path(folder)


@pytest.mark.linux
def test_pages_really_go_and_stay(on_disk):
    """If that file system drops pages at all."""
    (made,) = chain_of(1, n_bytes=8 * MIB)
    with closing(DiskTier(on_disk / "store", DiskLimits(min_free_bytes=0))) as tier:
        assert tier.put(made).stored
        path = tier.records.path_of(made.header.key, Part.DELTA)
        restore(tier, [made])
        assert is_resident(path)  # it had just been written
        drop_files([path])
        stay = is_resident(path)

        def goes():
            tier.records.pages = Pages(tier.files)
            drop_files([path])
            restore(tier, [made])
            return not is_resident(path)

        assert stay or any(goes() for _ in range(5))  # a page that another core holds may stay
        drop_files([path])
        restore(tier, [made])
        assert is_resident(path)


def is_resident(path):
    """Whether the last page of a file is in memory."""
    n_bytes = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), n_bytes, access=mmap.ACCESS_COPY) as m:
        pages = (ctypes.c_ubyte * -(-n_bytes // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(m)
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        assert mincore(ctypes.addressof(first), n_bytes, pages) == 0
        del first
        return bool(pages[-1] & 1)
