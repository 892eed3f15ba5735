"""Empty places that machines share, one of each kind, for tests that hold for all of them."""

from __future__ import annotations

import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

from tests.kit.redis_server import redis_server
from tests.kit.s3_server import program, running

KINDS = ("redis", "directory", "s3")
WEED = "S3 of SeaweedFS"
FUSE = "directory over FUSE"  # only with --soak: not every machine lets a test mount anything

OpenPlace: TypeAlias = Callable[[Path], AbstractContextManager[str]]


@contextmanager
def redis(path: Path) -> Iterator[str]:
    with redis_server(path) as server:
        yield server.url


@contextmanager
def directory(path: Path) -> Iterator[str]:
    yield path.as_uri()


@contextmanager
def directory_over_fuse(path: Path) -> Iterator[str]:
    """A directory that every call reaches through FUSE, as it does in many network file systems."""
    behind, shown = path / "behind", path / "shown"
    behind.mkdir()
    shown.mkdir()
    programs = [program(name) for name in ("rclone", "fusermount3")]
    options = ["--vfs-cache-mode=writes", f"--cache-dir={path / 'cache'}"]
    with running([programs[0], "mount", str(behind), str(shown), *options]) as mount:
        while not shown.is_mount():
            assert mount.poll() is None, "rclone ended instead of mounting"
            time.sleep(0.05)
        try:
            (shown / "within").mkdir()  # a mount cannot be moved away
            yield (shown / "within").as_uri()
        finally:
            subprocess.run([programs[1], "-uz", str(shown)], check=True)


def places(bucket: Callable[[str], str]) -> dict[str, OpenPlace]:
    """By kind; `bucket` gives the address of a bucket, in a server that many tests share: the
    fixture of this name.
    """

    @contextmanager
    def s3(path: Path, server: str = "bucket") -> Iterator[str]:
        address, _, options = bucket(server).partition("?")
        yield f"{address}/{uuid.uuid4().hex}?{options}"

    return {
        "redis": redis,
        "directory": directory,
        "s3": s3,
        WEED: partial(s3, server="weed_bucket"),
        FUSE: directory_over_fuse,
    }
