"""The archive of a bundle: what `tarfile` wrote is read, and nothing else that tar knows."""

import io
import tarfile
from pathlib import Path

import pytest

from keepwarm.agents.bundle import MANIFEST, ArchiveReader, write_archive
from keepwarm.errors import BadRecord

GOLDEN = sorted(Path("tests/data/golden/stores").glob("*.bundle"))
RECORD = f"{'0a' * 20}.d.safetensors"
OTHER = f"{'0b' * 20}.s.safetensors"
CONTENT = {MANIFEST: b"{}", RECORD: b"x" * 512, OTHER: b"y" * 1000}


class CountedFile(io.BytesIO):
    """Counts the bytes that were asked for."""

    asked = 0

    def readinto(self, buffer):
        self.asked += len(buffer)
        return super().readinto(buffer)


def contents(data, n_bytes=None):
    archive = ArchiveReader(io.BytesIO(data), len(data) if n_bytes is None else n_bytes)
    return {entry.name: entry.read() for entry in archive}


def written(entries=CONTENT):
    return b"".join(write_archive((n, [d[:1], memoryview(d)[1:]]) for n, d in entries.items()))


def by_tarfile(*members, **how):
    """What `tarfile` writes of (name, data, changes of the member)."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", **how) as archive:
        for name, data, changes in members:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o600
            for field, value in changes.items():
                setattr(info, field, value)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def changed(data, at, new):
    """The first header with other bytes in one place, and the checksum made right again."""
    block = bytearray(data[:512])
    block[at : at + len(new)] = new
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + data[512:]


def test_what_is_written_is_what_tarfile_writes():
    """Any tar opens a bundle, and the bytes are those of the versions that used `tarfile`."""
    assert written() == by_tarfile(*((name, data, {}) for name, data in CONTENT.items()))
    assert contents(written()) == CONTENT


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_bundles_of_older_versions_are_read(path):
    with tarfile.open(path) as archive:
        members = {m.name: archive.extractfile(m).read() for m in archive}
    assert contents(path.read_bytes()) == members
    assert written(members) == path.read_bytes()


PAX = {"format": tarfile.PAX_FORMAT}
GNU = {"format": tarfile.GNU_FORMAT}
HOSTILE = {
    "a compressed archive": b"\x1f\x8b" + bytes(2000),
    "a link": by_tarfile((MANIFEST, b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"})),
    "a hard link": by_tarfile((MANIFEST, b"", {"type": tarfile.LNKTYPE, "linkname": RECORD})),
    "a directory": by_tarfile((MANIFEST, b"", {"type": tarfile.DIRTYPE})),
    "a pipe": by_tarfile((MANIFEST, b"", {"type": tarfile.FIFOTYPE})),
    "a sparse file": by_tarfile((MANIFEST, b"", {"type": tarfile.GNUTYPE_SPARSE})),
    "a file of the oldest kind": by_tarfile((MANIFEST, b"{}", {"type": tarfile.AREGTYPE})),
    "a path": by_tarfile(("../" + MANIFEST, b"{}", {})),
    "a name with a line break": by_tarfile((RECORD + "\n", b"{}", {})),
    "a name in capitals": by_tarfile((RECORD.replace("0a", "0A"), b"{}", {})),
    "a long name": by_tarfile(("a" * 300, b"{}", {}), **GNU),
    "an extended header": by_tarfile((MANIFEST, b"{}", {"pax_headers": {"size": "1"}}), **PAX),
    "a header for all": by_tarfile((MANIFEST, b"{}", {}), **PAX, pax_headers={"path": RECORD}),
    "a prefix": changed(written(), 345, b"home"),
    "a user's name": changed(written(), 265, b"somebody\0"),
    "a time": changed(written(), 136, b"14601234567\0"),
    "no name": by_tarfile(("", b"", {})),
    "GNU's magic": changed(written(), 257, b"ustar  \0"),
    "a size in base 256": changed(written(), 124, b"\x80" + bytes(10) + b"\x02"),
    "a negative size": changed(written(), 124, b"-0000000002\0"),
    "a size with spaces": changed(written(), 124, b"          2\0"),
    "a size beyond the end": changed(written(), 124, b"77777777777\0"),
    "a name twice": by_tarfile((RECORD, b"x", {}), (RECORD, b"x", {})),
    "bytes behind the content": by_tarfile((MANIFEST, b"{}", {})).replace(b"{}\0", b"{}x"),
    "bytes behind the end": written() + b"x",
    "another unit behind the end": written() + bytes(10240),
    "no end": written()[: -(len(written()) - 512 * 7)],
    "nothing": b"",
    "a wrong checksum": written()[:150] + b"7" + written()[151:],
}  # fmt: skip


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_all_else_that_tar_knows_is_refused(data):
    with pytest.raises(BadRecord):
        contents(data)


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_a_header_that_claims_much_costs_its_own_bytes(kind):
    """A long name of 800 MiB went into memory, and an extended header of 42 kB into a regular
    expression for 18 seconds.
    """
    data = by_tarfile((MANIFEST, b"1" * 42_000, {"type": kind}))
    file = CountedFile(changed(data, 124, b"%011o\0" % (800 << 20)))
    with pytest.raises(BadRecord, match="does not belong in a bundle"):
        list(ArchiveReader(file, 1 << 40))
    assert file.asked == 512


def test_a_cut_archive_is_refused_wherever_it_is_cut():
    """Nobody makes room for 8 GiB that were only claimed."""
    whole = written()
    with pytest.raises(BadRecord, match="cut short"):
        next(iter(ArchiveReader(io.BytesIO(changed(whole, 124, b"77777777777\0")), len(whole))))
    for n_bytes in range(0, len(whole), 100):
        with pytest.raises(BadRecord, match=r"cut short|longer than"):
            contents(whole[:n_bytes], n_bytes=len(whole))


def test_an_entry_that_was_not_read_is_not_passed_over():
    """What nobody has looked at is not accepted."""
    entries = iter(ArchiveReader(io.BytesIO(written()), len(written())))
    next(entries).read()
    next(entries).read(100)
    with pytest.raises(BadRecord, match="longer than its content"):
        next(entries)
