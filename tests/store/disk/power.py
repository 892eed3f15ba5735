"""What a disk may hold after a power cut, from a record of all system calls (`syscalls.c`).

    file        what was in it at its last sync, and any of the later writes, in pieces
    directory   its names at its last sync, and any of the later changes

A rename is one change, as in every file system with a journal. SQLite writes through the same
calls, so this holds for the index too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

ROOT = Path(__file__).parents[3]
SOURCE = Path(__file__).with_name("syscalls.c")
PIECE = 4096  # bytes
HANGS_S = 300


class Call(NamedTuple):
    """One call: O new file, M new directory, W write, T truncate, S sync, R rename, U unlink."""

    letter: str
    inode: int
    number: int  # an offset or a size
    path: str
    other: str = ""
    data: bytes = b""


def build(directory: Path) -> Path:
    """The library that records; needs a C compiler."""
    library = directory / "syscalls.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl", "-lpthread"], check=True
    )
    return library


def traced(library: Path, directory: Path, module: str, *arguments: str) -> list[Call]:
    """Run a program; all its calls for files under the directory."""
    trace = directory.with_name(f"{directory.name}.trace")
    trace.write_bytes(b"")
    where = {"LD_PRELOAD": str(library), "TRACE": str(trace), "TRACED": str(directory)}
    subprocess.run(
        [sys.executable, "-m", module, *arguments],
        check=True,
        cwd=ROOT,
        timeout=HANGS_S,
        env={**os.environ, **where},
    )
    return list(_parse(trace.read_bytes()))


def _parse(trace: bytes) -> Iterator[Call]:
    at = 0
    while at < len(trace):
        end = trace.index(b"\n", at)
        head, other = trace[at:end].split(b"\0")
        letter, inode, number, path = head.decode().split(" ", 3)
        at, data = end + 1, b""
        if letter == "W":
            end = trace.index(b"\n", at)
            size, at = int(trace[at:end]), end + 1
            data, at = trace[at : at + size], at + size
        yield Call(letter, int(inode), int(number), path, other.decode(), data)


Keeps: TypeAlias = Callable[[int, int], bool]  # of the call by its number, and of a piece of it


def everything(number: int, piece: int) -> bool:
    return True


@dataclass
class Node:
    """A file, or a directory with its entries."""

    content: bytearray = field(default_factory=bytearray)  # as of the last sync
    later: list[tuple[int, Call]] = field(default_factory=list)  # not synced
    entries: dict[str, Node] | None = None  # of a directory
    changes: list[Change] = field(default_factory=list)  # not synced

    def sync(self) -> None:
        _write(self.content, self.later, everything)
        self.later = []
        for change in list(self.changes):
            change.sync()

    def bytes_after(self, keeps: Keeps) -> bytes:
        content = bytearray(self.content)
        _write(content, self.later, keeps)
        return bytes(content)

    def names_after(self, keeps: Keeps) -> dict[str, Node]:
        entries = dict(self.entries or {})
        for change in self.changes:
            if keeps(change.number, 0):
                change.apply(self, entries)
        return entries


class Edit(NamedTuple):
    """A name in a directory gets a file, a directory or nothing."""

    directory: Node
    name: str
    node: Node | None


@dataclass
class Change:
    """Of one name, or of two: a rename survives as a whole or not at all."""

    number: int
    edits: Sequence[Edit]

    def apply(self, directory: Node, entries: dict[str, Node]) -> None:
        for edit in self.edits:
            if edit.directory is directory:
                entries.pop(edit.name, None)
                entries |= {edit.name: edit.node} if edit.node else {}

    def sync(self) -> None:
        for edit in self.edits:
            assert edit.directory.entries is not None
            self.apply(edit.directory, edit.directory.entries)
            edit.directory.changes = [
                other
                for other in edit.directory.changes
                if other.number > self.number or not other.names(edit)
            ]

    def names(self, edit: Edit) -> bool:
        """Whether it is about the same name."""
        return any(e.directory is edit.directory and e.name == edit.name for e in self.edits)


def _write(content: bytearray, calls: Sequence[tuple[int, Call]], keeps: Keeps) -> None:
    for number, call in calls:
        if call.letter == "T":
            if keeps(number, 0):
                del content[call.number :]
                content.extend(bytes(call.number - len(content)))
            continue
        for start in range(0, len(call.data), PIECE):
            piece, at = call.data[start : start + PIECE], call.number + start
            if keeps(number, start):
                content.extend(bytes(max(0, at - len(content))))
                content[at : at + len(piece)] = piece


class Disk:
    """The files under one directory, as calls change them."""

    def __init__(self, directory: Path) -> None:
        self._top = directory
        self._root = Node(entries={})
        self._by_inode: dict[int, Node] = {}
        self._number = -1  # of the last call

    def apply(self, call: Call) -> None:
        self._number += 1
        if call.letter == "O":
            self._by_inode[call.inode] = Node()
            self._change(self._edit(call.path, self._by_inode[call.inode]))
        elif call.letter == "M":
            self._change(self._edit(call.path, Node(entries={})))
        elif call.letter in "WT":
            self._by_inode[call.inode].later.append((self._number, call))
        elif call.letter == "R":
            old = self._edit(call.path, None)
            self._change(self._edit(call.other, self._find(call.path)), old)
        elif call.letter == "U":
            self._change(self._edit(call.path, None))
        elif call.letter == "S":
            self._synced(call).sync()

    def files_after(self, keeps: Keeps) -> Iterator[tuple[str, bytes]]:
        """What the disk holds after a cut, by name; directories end in `/`."""
        return _files_after(self._root, "", keeps)

    def write(self, copy: Path, keeps: Keeps, only: str = "") -> None:
        """Write what the disk holds after a cut into a directory; only files that begin so."""
        _write_out(self._root, copy, keeps, only)

    def _synced(self, call: Call) -> Node:
        if call.path.endswith(" (deleted)"):
            return self._by_inode[call.inode]
        return self._find(call.path)

    def _find(self, path: str) -> Node:
        node = self._root
        for name in Path(path).relative_to(self._top).parts:
            node = node.names_after(everything)[name]
        return node

    def _edit(self, path: str, node: Node | None) -> Edit:
        return Edit(self._find(str(Path(path).parent)), Path(path).name, node)

    def _change(self, *edits: Edit) -> None:
        change = Change(self._number, edits)
        for directory in {id(edit.directory): edit.directory for edit in edits}.values():
            directory.changes.append(change)


def _files_after(node: Node, path: str, keeps: Keeps) -> Iterator[tuple[str, bytes]]:
    for name, inner in sorted(node.names_after(keeps).items()):
        if inner.entries is None:
            yield path + name, inner.bytes_after(keeps)
        else:
            yield f"{path}{name}/", b""
            yield from _files_after(inner, f"{path}{name}/", keeps)


def _write_out(node: Node, copy: Path, keeps: Keeps, only: str) -> None:
    copy.mkdir()
    for name, inner in node.names_after(keeps).items():
        if inner.entries is not None:
            _write_out(inner, copy / name, keeps, only)
        elif name.startswith(only):
            (copy / name).write_bytes(inner.bytes_after(keeps))
