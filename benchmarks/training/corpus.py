"""Text and code that an installation of Python brings along, as tokens."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

Tokens = NDArray[np.int32]

END_OF_TEXT = 0
MAX_FILE_BYTES = 200_000  # larger ones are mostly tables
HELD_OUT_IN = 50  # one file of so many is not trained on
CODE = {".py", ".pyi"}
PROSE = {".md", ".rst", ".txt", ""}


class File(NamedTuple):
    name: str
    text: str

    @property
    def is_code(self) -> bool:
        return Path(self.name).suffix in CODE

    @property
    def held_out(self) -> bool:
        return int.from_bytes(_digest(self.name)[:4]) % HELD_OUT_IN == 0


class Part(NamedTuple):
    """Some of the files: their texts, and all their code and prose as tokens."""

    texts: list[str]
    code: Tokens
    prose: Tokens


class Corpus(NamedTuple):
    train: Part
    held_out: Part
    n_bytes: int


def roots() -> list[Path]:
    """The standard library, and where packages are installed."""
    installed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return sorted({Path(sysconfig.get_paths()["stdlib"]), *map(Path, installed)})


def read_files(folders: list[Path], n_bytes: int) -> list[File]:
    """Files in an order that depends on their names alone, each text once, up to so many bytes."""
    files: list[File] = []
    seen: set[bytes] = set()
    left = n_bytes
    for name, path in sorted(_candidates(folders), key=lambda item: _digest(item[0])):
        text = _read(path)
        digest = _digest(text)
        if not text or digest in seen:
            continue
        seen.add(digest)
        files.append(File(name, text))
        left -= len(text)
        if left < 0:
            break
    return files


def tokenized(files: list[File], tokenizer: Tokenizer) -> Corpus:
    train = [file for file in files if not file.held_out]
    held_out = [file for file in files if file.held_out]
    n_bytes = sum(len(file.text) for file in files)
    return Corpus(_part(train, tokenizer), _part(held_out, tokenizer), n_bytes)


def _part(files: list[File], tokenizer: Tokenizer) -> Part:
    code = [file.text for file in files if file.is_code]
    prose = [file.text for file in files if not file.is_code]
    return Part(code, _encode(code, tokenizer), _encode(prose, tokenizer))


def _encode(texts: list[str], tokenizer: Tokenizer) -> Tokens:
    ids: list[int] = []
    for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
        ids.extend(encoding.ids)
        ids.append(END_OF_TEXT)
    return np.array(ids, dtype=np.int32)


def _candidates(folders: list[Path]) -> Iterator[tuple[str, Path]]:
    """Files by their names inside a folder; a folder inside another is walked once."""
    for folder in folders:
        for parent, below, names in os.walk(folder):
            below[:] = [name for name in below if Path(parent, name) not in folders]
            paths = [Path(parent, name) for name in names]
            yield from ((p.relative_to(folder).as_posix(), p) for p in paths if _wanted(p))


def _wanted(path: Path) -> bool:
    if path.suffix not in CODE | PROSE or (not path.suffix and path.name != "METADATA"):
        return False
    return path.is_file() and 200 < path.stat().st_size < MAX_FILE_BYTES


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return ""


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()
