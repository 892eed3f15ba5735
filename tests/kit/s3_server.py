"""Real servers that speak S3, started for a test or a measurement."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

from tests.kit.redis_server import free_port

BUCKET = "shared"
KEY = "testing"
START_S = 300.0


@contextmanager
def moto_server() -> Iterator[str]:
    """The address of an empty bucket in moto."""
    port = free_port()
    with running([sys.executable, "-m", "moto.server", "-p", str(port)]):
        yield _address(port, "PUT")


@contextmanager
def weed_server(directory: Path) -> Iterator[str]:
    """The same in SeaweedFS, which must be told to make more volumes than it does by itself."""
    port = free_port()
    names = [
        f"{part}.port{kind}" for part in ("master", "volume", "filer") for kind in ("", ".grpc")
    ]
    ports = [f"-{name}={free_port()}" for name in (*names, "s3.port.grpc")]
    options = [f"-dir={directory}", "-s3", f"-s3.port={port}", "-volume.max=100", *ports]
    with running([program("weed"), "server", "-ip=127.0.0.1", *options]):
        address = _address(port, "PUT")
        _address(port, "PUT", "/ready")  # it has room for objects later than for a bucket
        yield address


@contextmanager
def rclone_server(directory: Path) -> Iterator[str]:
    """The same in rclone, which cannot do all that a tier needs."""
    port = free_port()
    (directory / BUCKET).mkdir()
    with running([program("rclone"), "serve", "s3", "--addr", f"127.0.0.1:{port}", str(directory)]):
        yield _address(port, "GET")


def program(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = shutil.which(name) or (str(beside) if beside.exists() else None)
    if found is None:
        pytest.skip(f"needs `{name}`")
    return found


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _address(port: int, method: str, name: str = "") -> str:
    """Of the bucket, once a server answers that it is there, or an object in it."""
    request = Request(f"http://127.0.0.1:{port}/{BUCKET}{name}", method=method)
    until = time.monotonic() + START_S
    while True:
        try:
            urlopen(request, timeout=START_S).close()
            break
        except HTTPError as error:
            if error.code == 409:  # it is there
                break
        except (URLError, OSError):
            pass
        assert time.monotonic() < until, "the server did not start"
        time.sleep(0.05)
    return f"s3://{KEY}@{BUCKET}?endpoint=http://127.0.0.1:{port}"
