"""From an address in the settings to the place that it names."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from keepwarm.errors import BadInput
from keepwarm.remote.backend import Backend
from keepwarm.remote.directory import DirectoryBackend
from keepwarm.remote.redis import RedisAddress, RedisBackend

FORMS = "redis://host:port, rediss://host:port, s3://bucket/prefix or file:///directory"


def open_backend(address: str, password: str = "") -> Backend:
    """The place at an address. Connects to nothing."""
    try:
        url = urlsplit(address)
    except ValueError as error:
        raise BadInput(f"remote is {address!r}, which is not an address; use {FORMS}.") from error
    if url.password is not None:
        raise BadInput(
            "remote has a password in it, which would be shown and logged; "
            "put it in KEEPWARM_REMOTE_PASSWORD, or in a file: remote_password = @file."
        )
    if url.scheme in ("redis", "rediss") and url.hostname:
        return RedisBackend(RedisAddress.parse(url), password)
    if url.scheme == "s3" and url.netloc:
        return _open_bucket(url, password)
    if url.scheme == "file" and url.path.startswith("/") and not url.netloc:
        return DirectoryBackend(Path(unquote(url.path)))
    raise BadInput(f"remote is {address!r}, which is not a supported address; use {FORMS}.")


def _open_bucket(url: SplitResult, secret: str) -> Backend:
    try:
        from keepwarm.remote.s3 import S3Address, S3Backend
    except ImportError as error:
        raise BadInput(
            "remote names a bucket, which needs the package obstore; install keepwarm[s3]."
        ) from error
    return S3Backend(S3Address.parse(url), secret)
