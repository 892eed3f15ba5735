"""Records and chains of random bytes, and a file system that fails on demand."""

import errno
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from keepwarm.prefix.blocks import BLOCK_TOKENS, BlockKey, BlockRef, Namespace, chain, root
from keepwarm.records.at_rest import WANTED
from keepwarm.records.header import ITEM_BYTES
from keepwarm.records.record import (
    Header,
    Part,
    Record,
    Tensor,
    VerifiedHeader,
    encode_record,
    open_record,
    read_tensors,
)
from keepwarm.store.atomic import Files

NAMESPACE = Namespace(bytes(range(32)))
VOCABULARY = 1 << 17


def tokens_of(n_tokens: int, seed: int = 0) -> list[int]:
    """Repeatable token ids."""
    pick = random.Random(seed)
    return [pick.randrange(VOCABULARY) for _ in range(n_tokens)]


def refs_of(
    n_blocks: int, seed: int = 0, n_last: int = BLOCK_TOKENS, namespace: Namespace = NAMESPACE
) -> list[BlockRef]:
    """A prompt of whole blocks, the last of `n_last` tokens."""
    return list(chain(namespace, tokens_of(BLOCK_TOKENS * (n_blocks - 1) + n_last, seed)))


def first_block(tokens: Sequence[int], namespace: Namespace = NAMESPACE) -> BlockRef:
    """The first block of a prompt."""
    return next(chain(namespace, tokens))


def tensor(name: str, dtype: str = "F32", shape: tuple[int, ...] = (2, 4)) -> Tensor:
    """Random bytes; a BOOL is 0 or 1."""
    n_items = 1
    for n in shape:
        n_items *= n
    data = random.randbytes(n_items * ITEM_BYTES[dtype])
    if dtype == "BOOL":
        data = bytes(byte & 1 for byte in data)
    return Tensor(name, dtype, shape, memoryview(data))


def record(
    ref: BlockRef,
    part: Part = Part.DELTA,
    n_bytes: int = 1024,
    w_rows: int | None = None,
    namespace: Namespace = NAMESPACE,
) -> Record:
    """A record of this block with K and V of one layer, `n_bytes` together."""
    rows = ref.n_tokens if w_rows is None else w_rows
    extra = {"w_rows": rows} if part is Part.WINDOW else {}
    header = Header(namespace, ref.key, ref.parent, part, ref.number, ref.tokens, extra)
    names = (f"L0_B{ref.number}_K", f"L0_B{ref.number}_V")
    inner, rest = divmod(n_bytes // 2, max(1, rows))
    shape = (n_bytes // 2,) if rest else (1, rows, inner)
    return Record(header, tuple(tensor(name, "U8", shape) for name in names))


def wanting_q8(ref: BlockRef) -> Record:
    """A record of this block whose rows are rounded when it is written."""
    header = replace(record(ref).header, extra={WANTED: "q8"})
    shape = (1, 2, ref.n_tokens, 64)
    rows = memoryview(bytes(2 * ref.n_tokens * 64 * ITEM_BYTES["BF16"]))
    return Record(header, (Tensor(f"L0_B{ref.number}_K", "BF16", shape, rows),))


def chain_of(n_blocks: int, seed: int = 0, n_bytes: int = 1024) -> list[Record]:
    """Delta records of a prompt, first block first."""
    return [record(ref, n_bytes=n_bytes) for ref in refs_of(n_blocks, seed)]


def keys_of(records: Sequence[Record]) -> list[BlockKey]:
    return [r.header.key for r in records]


def root_key() -> BlockKey:
    return root(NAMESPACE)


def encode(made: Record) -> bytes:
    return b"".join(encode_record(made))


def decode(data: bytes) -> tuple[VerifiedHeader, tuple[Tensor, ...]]:
    """Everything in a file, verified."""
    file = BytesIO(data)
    opened = open_record(file, len(data))
    return opened, read_tensors(file, opened)


def content(made: Record) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    """The content of a record, for comparison."""
    return [(t.name, t.dtype, tuple(t.shape), bytes(t.data)) for t in made.tensors]


def files_under(directory: Path) -> Iterator[Path]:
    """Every file, links not followed; files deleted meanwhile are left out."""
    for where, _, names in os.walk(directory):
        yield from (Path(where) / name for name in names)


def disk_use(directory: Path) -> int:
    """Bytes of every file under a directory."""
    total = 0
    for path in files_under(directory):
        try:
            total += path.lstat().st_size
        except FileNotFoundError:
            continue
    return total


class BrokenFiles(Files):
    """A file system on which the operations in `failing` fail."""

    def __init__(self) -> None:
        self.failing: dict[str, int] = {}  # errno by operation
        self.read_delay_s = 0.0
        self.opened: list[str] = []

    def break_(self, code: int, *operations: str) -> None:
        self.failing = dict.fromkeys(operations, code)

    def mend(self) -> None:
        self.failing, self.read_delay_s = {}, 0.0

    def _check(self, operation: str, path: Path) -> None:
        if operation in self.failing:
            code = self.failing[operation]
            raise OSError(code, os.strerror(code), str(path))

    def make_directory(self, path: Path) -> None:
        self._check("make_directory", path)
        super().make_directory(path)

    def write(self, path: Path, pieces: Sequence[bytes | memoryview]) -> None:
        if self.failing.get("write") == errno.ENOSPC:
            self._fill_up(path, pieces)
        self._check("write", path)
        super().write(path, pieces)

    def _fill_up(self, path: Path, pieces: Sequence[bytes | memoryview]) -> None:
        """A full disk takes the first half."""
        half = b"".join(pieces)
        super().write(path, [half[: len(half) // 2]])

    def publish(self, temp: Path, target: Path) -> None:
        self._check("publish", target)
        super().publish(temp, target)

    def remove(self, path: Path) -> bool:
        self._check("remove", path)
        return super().remove(path)

    def sync(self, fd: int) -> None:
        """Nothing: power cuts are tested elsewhere, and syncing is slow."""

    def open(self, path: Path) -> BinaryIO:
        time.sleep(self.read_delay_s)
        self._check("open", path)
        self.opened.append(path.name)
        return super().open(path)
