"""From an address in the settings to the place that it names."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from keepwarm.errors import BadInput
from keepwarm.remote.backend import Backend
from keepwarm.remote.directory import DirectoryBackend
from keepwarm.remote.redis import RedisAddress, RedisBackend

FORMS = (
    "redis://host:port/database, rediss://host:port/database, s3://bucket/prefix or "
    "file:///directory"
)
PASSWORD = re.compile(r"(?!file:)\w+://.*:.*@")  # also one with a / in it, which ends a host


def open_backend(address: str, password: str = "") -> Backend:
    """The place at an address. Connects to nothing. No error repeats the address: a mistyped one
    may have a secret in it.
    """
    if PASSWORD.match(address):
        raise BadInput(
            "remote has a password in it, which would be shown and logged; "
            "put it in KEEPWARM_REMOTE_PASSWORD, or in a file: remote_password = @file."
        )
    try:
        return _open(urlsplit(address), password)
    except ValueError:
        raise BadInput(f"remote has an address that names no place; use {FORMS}.") from None


def _open(url: SplitResult, password: str) -> Backend:
    """Raises ValueError if it names none."""
    is_bare = not (url.query or url.fragment or "%00" in url.path)
    if url.scheme in ("redis", "rediss") and url.hostname and is_bare:
        return RedisBackend(RedisAddress.parse(url), password)
    if url.scheme == "s3" and url.netloc:
        return _open_bucket(url, password)
    if url.scheme == "file" and url.path.startswith("/") and not url.netloc and is_bare:
        return DirectoryBackend(Path(unquote(url.path)))
    raise ValueError(url.scheme)


def _open_bucket(url: SplitResult, secret: str) -> Backend:
    try:
        from keepwarm.remote.s3 import S3Address, S3Backend
    except ImportError as error:
        raise BadInput(
            "remote names a bucket, which needs the package obstore; install keepwarm[s3]."
        ) from error
    return S3Backend(S3Address.parse(url), secret)
