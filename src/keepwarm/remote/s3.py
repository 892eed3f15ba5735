"""Blobs as objects of a bucket: S3, and servers that speak its protocol.

The client's own retries are off: they are what makes an outage long. Only a call that a bucket has
no time for is made once more. Needs obstore, and is imported only where a bucket is named.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import SplitResult, parse_qs, unquote

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from keepwarm.concurrency import AbandonableExecutor, CallError
from keepwarm.errors import BadInput
from keepwarm.remote.backend import Backend, FolderRange, Listed, Take, check_name

if TYPE_CHECKING:
    from typing import Unpack

    from obstore import GetOptions, PutMode
    from obstore.store import S3Config

MAX_MESSAGE = 500  # characters
T = TypeVar("T")
MAX_CALLS = 16  # at the same time
PAGE = 1000  # names in one answer
REQUEST_S = "10s"  # the longest that a call which nobody waits for any more goes on
FORM = "s3://bucket/prefix, or s3://key@bucket/prefix?endpoint=https://host:port&region=name"
ENDPOINT = re.compile(r"https?://([\w.-]+|\[[\da-fA-F:.]+\])(:\d{1,5})?(/[!-~]*)?", re.ASCII)
BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
NO_ROOM = re.compile(
    r"QuotaExceeded|StorageFull|InsufficientStorage|EntityTooLarge|AccessDenied|\b507\b"
)
PANIC = "PanicException"  # obstore does not export the class
THROTTLED = re.compile(r"SlowDown|\b503\b")
BACK_OFF_S = 0.05, 0.15


class S3Address(NamedTuple):
    bucket: str
    prefix: str = ""
    key_id: str = ""  # "": the credentials of the environment
    endpoint: str = ""  # "": that of AWS
    region: str = ""

    @classmethod
    def parse(cls, url: SplitResult) -> S3Address:
        options = parse_qs(url.query, keep_blank_values=True)
        endpoint, region = (options.pop(name, [""])[-1] for name in ("endpoint", "region"))
        bucket, prefix = url.netloc.rpartition("@")[2], unquote(url.path).strip("/")
        endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL", "")
        if endpoint and not ENDPOINT.fullmatch(endpoint):
            raise BadInput(
                "The endpoint of a bucket, in remote or AWS_ENDPOINT_URL, is not that of a server; "
                "use https://host:port."
            )
        if options or url.fragment or not BUCKET.fullmatch(bucket):
            raise BadInput(f"remote has an address that names no bucket; use {FORM}.")
        return cls(bucket, check_name(prefix) if prefix else "", unquote(url.username or ""),
                   endpoint, region)  # fmt: skip


class S3Backend(Backend):
    """A bucket, or what lies under a prefix in it. For all threads."""

    in_batches = False
    is_distant = True

    def __init__(self, address: S3Address, secret: str = "") -> None:
        """Without `key_id` in the address, credentials are those that AWS's tools use."""
        self._store = open_store(address, secret)
        self._one_by_one = open_store(address, secret, disable_bulk_delete=True)
        self._workers = AbandonableExecutor(MAX_CALLS)

    def sizes(self, names: Sequence[str], timeout_s: float) -> list[int | None]:
        calls = [partial(self._size, check_name(name)) for name in names]
        return self._run(calls, timeout_s)

    def look(self, ranges: Sequence[FolderRange], timeout_s: float) -> list[list[Listed]]:
        calls = [partial(self._look, check_name(one.folder), one.stem) for one in ranges]
        return self._run(calls, timeout_s)

    def fetch(
        self,
        name: str,
        take: Take,
        use: Callable[[memoryview], T],
        timeout_s: float,
        n_bytes: int | None = None,
    ) -> T | None:
        path = check_name(name)
        wanted: GetOptions = {} if n_bytes is None else {"range": (0, n_bytes)}

        def fetch() -> T | None:
            memory = self._read(path, wanted, take)
            return None if memory is None else use(memory)

        return self._run([fetch], timeout_s)[0]

    def put(
        self,
        name: str,
        pieces: Sequence[bytes | memoryview],
        timeout_s: float,
        replace: bool = False,
    ) -> bool:
        path = check_name(name)
        mode: PutMode = "overwrite" if replace else "create"
        return self._run([lambda: self._put(path, pieces, mode)], timeout_s)[0]

    def touch(self, names: Sequence[str], timeout_s: float) -> None:
        """Nothing: a bucket knows when an object was put, and to change that is to put it again."""

    def delete(self, names: Sequence[str], timeout_s: float) -> None:
        """In one request, if it knows that: no question waits behind it."""
        paths = [check_name(name) for name in names]
        self._run([lambda: self._delete(paths)], timeout_s)

    def list_names(self, folder: str, timeout_s: float) -> list[Listed]:
        path = check_name(folder)
        return self._run([lambda: self._list(path, None)], timeout_s)[0]

    def list_page(self, folder: str, timeout_s: float, after: str = "") -> list[Listed]:
        path = check_name(folder)
        return self._run([lambda: self._list(path, 1, after or None)], timeout_s)[0]

    def close(self) -> None:
        self._workers.close()

    def _run(self, works: Sequence[Callable[[], T]], timeout_s: float) -> list[T]:
        return self._workers.run_all([partial(_patiently, work) for work in works], timeout_s)

    # On threads of its own: a call that hangs cannot be ended

    def _size(self, path: str) -> int | None:
        try:
            with _blob_errors():
                return obstore.head(self._store, path)["size"] or None
        except FileNotFoundError:
            return None

    def _read(self, path: str, wanted: GetOptions, take: Take) -> memoryview | None:
        try:
            with _blob_errors():
                found = obstore.get(self._store, path, options=wanted)
                start, end = found.range
                take(end - start)  # only to ask: the client has memory of its own, not to be copied
                memory = memoryview(found.bytes())
        except FileNotFoundError:
            return None
        if len(memory) != end - start:
            raise CallError("an object is shorter than it says")
        return memory if memory else None

    def _put(self, path: str, pieces: Sequence[bytes | memoryview], mode: PutMode) -> bool:
        try:
            with _blob_errors():
                obstore.put(self._store, path, pieces, mode=mode, use_multipart=False)
        except FileExistsError:
            return False
        except CallError as error:
            if NO_ROOM.search(str(error)):
                return False
            raise
        return True

    def _delete(self, paths: Sequence[str]) -> None:
        try:
            _delete(self._store, paths)
        except CallError as error:
            if THROTTLED.search(str(error)):
                raise
            _delete(self._one_by_one, paths)  # not every server has DeleteObjects

    def _look(self, folder: str, stem: str) -> list[Listed]:
        """One page. Where more lie before what is wanted, a second one begins there."""
        found = self._list(folder, 1)
        if len(found) < PAGE or any(one.name.startswith(f"{folder}/{stem}") for one in found):
            return found
        return found + self._list(folder, 1, offset=f"{folder}/{stem}")

    def _list(self, folder: str, n_pages: int | None, offset: str | None = None) -> list[Listed]:
        with _blob_errors():
            pages = obstore.list(self._store, folder, offset=offset, chunk_size=PAGE)
            return [
                Listed(one["path"], one["size"], one["last_modified"].timestamp())
                for page in islice(pages, n_pages)
                for one in page
            ]


def _delete(store: S3Store, paths: Sequence[str]) -> None:
    try:
        with _blob_errors():
            obstore.delete(store, paths)
    except FileNotFoundError:  # it stops at the first that is gone
        for path in paths:
            with suppress(FileNotFoundError), _blob_errors():
                obstore.delete(store, path)


def _patiently(work: Callable[[], T]) -> T:
    try:
        return work()
    except CallError as error:
        if not THROTTLED.search(str(error)):
            raise
    time.sleep(random.uniform(*BACK_OFF_S))  # noqa: S311
    return work()


@contextmanager
def _blob_errors() -> Iterator[None]:
    """Errors of the client, in our words."""
    try:
        yield
    except AlreadyExistsError as error:
        raise FileExistsError from error
    except BaseException as error:  # also a panic of its Rust code, which is no Exception
        if not isinstance(error, BaseError | ValueError) and type(error).__name__ != PANIC:
            raise
        message = " ".join(str(error).split())  # servers answer in several lines of XML
        raise CallError(message[:MAX_MESSAGE]) from error


def open_store(address: S3Address, secret: str, **options: Unpack[S3Config]) -> S3Store:
    is_plain = address.endpoint.startswith("http://")  # then only a signature protects what is put
    config: S3Config = {"unsigned_payload": not is_plain, **options}
    if address.endpoint:
        config["endpoint"] = address.endpoint
    if address.region:
        config["region"] = address.region
    if address.key_id:
        config |= {"access_key_id": address.key_id, "secret_access_key": secret}
    try:
        return S3Store(
            address.bucket,
            prefix=address.prefix or None,
            config=config,
            client_options={"allow_http": is_plain, "timeout": REQUEST_S},
            retry_config={"max_retries": 0},
        )
    except BaseError as error:
        why = str(error).partition("\n")[0]
        raise BadInput(
            f"The bucket in remote cannot be used with the AWS_ variables that are set: {why}; "
            "correct them."
        ) from error
