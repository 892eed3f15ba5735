"""Blobs as files of a directory that machines share, as over NFS or SMB.

Files are written under another name and renamed. There are no locks, no links and no database in
the directory: network file systems do these badly. Links that others put there are not followed:
they would lead to this machine's own files.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from heapq import nsmallest
from pathlib import Path
from typing import TypeVar

from keepwarm.concurrency import AbandonableExecutor, CallError
from keepwarm.files import write_all
from keepwarm.remote.backend import BESIDE, Backend, FolderRange, Listed, Take, check_name

T = TypeVar("T")
# Without O_NONBLOCK a pipe in the place of a file would hang.
READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
NO_FILE = frozenset({errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP})
UNFINISHED = "tmp"  # where files are written
REFUSED = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS}
)


class DirectoryBackend(Backend):
    """A directory that exists: a share that is not mounted must not be replaced by a new one."""

    in_batches = False
    is_distant = False

    def __init__(self, root: Path) -> None:
        self._root = root
        self._workers = AbandonableExecutor()

    def sizes(self, names: Sequence[str], timeout_s: float) -> list[int | None]:
        paths = self._paths_of(names)

        def size_of(name: str) -> int | None:
            return None if self._is_linked(name) else _size_of(paths[name])

        return self._workers.run(lambda: [size_of(name) for name in names], timeout_s)

    def look(self, ranges: Sequence[FolderRange], timeout_s: float) -> list[list[Listed]]:
        folders = [(*one, self._path_of(one.folder)) for one in ranges]

        def look() -> list[list[Listed]]:
            return [[] if self._is_linked(f"{one[0]}/") else _look(*one) for one in folders]

        return self._workers.run(look, timeout_s)

    def fetch(
        self,
        name: str,
        take: Take,
        use: Callable[[memoryview], T],
        timeout_s: float,
        n_bytes: int | None = None,
    ) -> T | None:
        path = f"{self._root}/{check_name(name)}"  # a Path takes ten times as long to make

        def fetch() -> T | None:
            memory = None if self._is_linked(name) else _read(path, take, n_bytes)
            return None if memory is None else use(memory)

        return self._workers.run(fetch, timeout_s)

    def put(
        self,
        name: str,
        pieces: Sequence[bytes | memoryview],
        timeout_s: float,
        replace: bool = False,
    ) -> bool:
        target = self._path_of(name)
        temp = self._root / UNFINISHED / uuid.uuid4().hex

        def put() -> bool:
            if self._is_linked(name) or self._is_linked(f"{UNFINISHED}/"):
                return False
            return _put(temp, target, pieces, replace)

        return self._workers.run(put, timeout_s)

    def touch(self, names: Sequence[str], timeout_s: float) -> None:
        paths = self._paths_of(names)

        def touch() -> None:
            for path in self._not_linked(paths):
                try:
                    os.utime(path, follow_symlinks=False)
                except OSError as error:
                    if error.errno not in REFUSED | {errno.ENOENT}:
                        raise

        self._workers.run(touch, timeout_s)

    def delete(self, names: Sequence[str], timeout_s: float) -> None:
        paths = self._paths_of(names)

        def delete() -> None:
            own = self._not_linked(paths)
            for path in own:
                path.unlink(missing_ok=True)
            for folder in {path.parent for path in own} - {self._root}:
                with suppress(OSError):  # not empty
                    folder.rmdir()

        self._workers.run(delete, timeout_s)

    def list_names(self, folder: str, timeout_s: float) -> list[Listed]:
        path = self._path_of(folder)

        def list_names() -> list[Listed]:
            return [] if self._is_linked(f"{folder}/") else list(_listed(folder, path))

        return self._workers.run(list_names, timeout_s)

    def close(self) -> None:
        self._workers.close()

    def _path_of(self, name: str) -> Path:
        return self._root / check_name(name)

    def _paths_of(self, names: Sequence[str]) -> dict[str, Path]:
        return {name: self._path_of(name) for name in names}

    def _not_linked(self, paths: Mapping[str, Path]) -> list[Path]:
        return [path for name, path in paths.items() if not self._is_linked(name)]

    def _is_linked(self, name: str) -> bool:
        """Whether a folder of this name is a link."""
        ends = [at for at, char in enumerate(name) if char == "/"]
        return any(os.path.islink(f"{self._root}/{name[:end]}") for end in ends)  # noqa: PTH114


def _read(path: str, take: Take, n_bytes: int | None) -> memoryview | None:
    try:
        file = os.open(path, READ)  # a file object costs more calls
    except OSError as error:
        if error.errno in NO_FILE:
            return None
        raise
    try:
        there = os.fstat(file).st_size
        memory = take(there if n_bytes is None else min(there, n_bytes))
        _fill(memory, file)
    finally:
        os.close(file)
    return memory if len(memory) else None


def _fill(memory: memoryview, file: int) -> None:
    while memory:
        n_read = os.readv(file, [memory])
        if not n_read:
            raise CallError("a file became shorter while it was read")
        memory = memory[n_read:]


def _look(folder: str, stem: str, path: Path) -> list[Listed]:
    """A folder may have thousands of names, and only these are worth a call each for their size."""
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        names = os.listdir(path)  # noqa: PTH208  entries of a scan cost more than the names
        own = [name for name in names if name.startswith(stem)]
        chosen = dict.fromkeys([*own, *nsmallest(BESIDE, names)])
        return [Listed(f"{folder}/{name}", _size_of(path / name) or 0) for name in chosen]
    return []


def _listed(folder: str, path: Path) -> Iterator[Listed]:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # deleted meanwhile
                if entry.is_symlink():
                    continue
                status = entry.stat()
                n_bytes = status.st_size if entry.is_file() else 0
                yield Listed(f"{folder}/{entry.name}", n_bytes, status.st_mtime)


def _size_of(path: Path) -> int | None:
    try:
        about = path.lstat()
        return about.st_size or None if stat.S_ISREG(about.st_mode) else None
    except (FileNotFoundError, PermissionError):
        return None


def _put(temp: Path, target: Path, pieces: Sequence[bytes | memoryview], replace: bool) -> bool:
    """Folders are made when they turn out to be missing: on a network every call counts."""
    try:
        if not replace and _is_taken(target):
            return False
        try:
            _write(temp, pieces)
            _rename(temp, target)
        except BaseException:
            with suppress(OSError):
                temp.unlink(missing_ok=True)
            raise
    except OSError as error:
        if error.errno in REFUSED:
            return False
        raise
    return True


def _is_taken(target: Path) -> bool:
    """An empty file, as a crash of its machine leaves one, is read as none."""
    try:
        about = target.lstat()
    except OSError:  # if it is not missing, the rename fails too
        return False
    return about.st_size > 0 or not stat.S_ISREG(about.st_mode)


def _write(temp: Path, pieces: Sequence[bytes | memoryview]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        file = os.open(temp, flags, 0o666)
    except FileNotFoundError:
        temp.parent.mkdir(exist_ok=True)  # not its parents: the share must be there
        file = os.open(temp, flags, 0o666)
    try:
        write_all(file, pieces)
    finally:
        os.close(file)  # some file systems say only here that there is no room


def _rename(temp: Path, target: Path) -> None:
    try:
        temp.replace(target)
    except FileNotFoundError:
        target.parent.mkdir(parents=True, exist_ok=True)
        temp.replace(target)
