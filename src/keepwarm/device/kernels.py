"""Kernels that MLX compiles for CUDA, kept between starts.

MLX compiles a kernel when it is first needed, which takes seconds, and keeps it as files in
`MLX_PTX_CACHE_DIR`. Neither MLX's version nor the GPU's architecture is part of their names, and a
file can be seen before it is complete. So every process has a directory of its own. It is filled
from an archive in the home directory, and what is new goes back into the archive.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from keepwarm.files import replacing

LOG = logging.getLogger(__name__)
VARIABLE = "MLX_PTX_CACHE_DIR"
CHECK = "MLX_ENABLE_CACHE_THRASHING_CHECK"
PREFIX = "keepwarm-kernels-"
KEPT = (".txt", ".ptx")  # not the source, which MLX never reads


def are_compiled() -> bool:
    """Whether MLX compiles kernels for this device when they are first needed."""
    return mx.cuda.is_available()


def start(home: Path) -> None:
    """Have MLX find the kernels of earlier processes; call it before the first kernel.

    Does nothing on other devices. Where `MLX_PTX_CACHE_DIR` is set, no kernels are kept.
    """
    if not are_compiled():
        return
    # Else MLX fails at every new shape after 512 of attention, or 800 graphs, of a thread.
    os.environ.setdefault(CHECK, "0")
    if VARIABLE in os.environ:
        return
    own = Path(tempfile.mkdtemp(prefix=PREFIX))
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    unpack(archive(home), own)
    os.environ[VARIABLE] = str(own)


def keep(home: Path) -> None:
    """Keep what was compiled by now. Call it while nothing is being compiled."""
    own = Path(os.environ.get(VARIABLE, ""))
    if own.name.startswith(PREFIX):
        pack(own, archive(home))


def archive(home: Path) -> Path:
    """Where kernels of this MLX for this GPU are kept."""
    architecture = mx.device_info().get("architecture", "unknown")
    return home / "kernels" / f"mlx-{version('mlx')}-{architecture}.zip"


def n_kept(home: Path) -> int:
    return len(_names_in(archive(home)))


def unpack(kept: Path, own: Path) -> None:
    """A damaged archive is deleted: everything is compiled again."""
    try:
        with zipfile.ZipFile(kept) as files:
            files.extractall(own)  # checks every file's CRC
    except FileNotFoundError:
        return
    except (OSError, zipfile.BadZipFile, RuntimeError, ValueError) as error:
        LOG.warning("kept kernels cannot be used and are compiled again: %s", error)
        shutil.rmtree(own)
        own.mkdir()
        kept.unlink(missing_ok=True)


def pack(own: Path, kept: Path) -> None:
    """Write the archive anew if there is something to add."""
    found = {file.relative_to(own).as_posix(): file for file in _files(own)}
    if {name for name in found if name.endswith(".ptx")} <= _names_in(kept):
        return
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with replacing(kept) as temporary, zipfile.ZipFile(temporary, "w") as files:
            for name, file in found.items():
                files.write(file, name)
    except OSError as error:
        LOG.warning("compiled kernels cannot be kept in %s: %s", kept, error)


def _files(own: Path) -> Iterator[Path]:
    return (file for file in sorted(own.rglob("*")) if file.suffix in KEPT)


def _names_in(kept: Path) -> set[str]:
    """The kernels in an archive, one name for each."""
    try:
        with zipfile.ZipFile(kept) as files:
            return {name for name in files.namelist() if name.endswith(".ptx")}
    except (OSError, zipfile.BadZipFile):
        return set()
