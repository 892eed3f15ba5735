"""Bundles on their way in and out: a few at once, and never in a file.

An export is made while the client reads it. An import is verified while it arrives; its records are
staged by the store, so they are encrypted and counted like all others. Whoever leaves takes all of
it along.
"""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from keepwarm.errors import BadInput, Busy, Cancelled, TooLarge

MAX_TRANSFERS = 8
MAX_OF_ONE_KEY = 4
CHUNK_BYTES = 1 << 20
TAR = "application/x-tar"
T = TypeVar("T")


class Transfers:
    """The exports and imports of a server, with threads of their own: a slow client keeps one."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._pool = ThreadPoolExecutor(MAX_TRANSFERS, "bundle")

    @contextmanager
    def one_more(self, tenant: str) -> Iterator[None]:
        """Count a transfer while it runs; raises if there are too many."""
        if self._running.total() >= MAX_TRANSFERS:
            raise Busy(
                f"{MAX_TRANSFERS} bundles are being exported or imported, which is the limit; "
                "retry when one is done."
            )
        if self._running[tenant] >= MAX_OF_ONE_KEY:
            raise Busy(
                f"This API key has {MAX_OF_ONE_KEY} bundles under way, its limit; wait for one."
            )
        self._running[tenant] += 1
        try:
            yield
        finally:
            self._running[tenant] -= 1

    async def run(self, work: Callable[..., T], *given: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *given)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class ExportResponse(StreamingResponse):
    """Sends a bundle piece by piece; `release` is called when it ends, however it does."""

    media_type = TAR

    def __init__(
        self,
        pieces: Iterator[bytes | memoryview],
        name: str,
        transfers: Transfers,
        release: Callable[[], None],
    ) -> None:
        headers = {"Content-Disposition": f'attachment; filename="{name}.tar"'}
        super().__init__(_chunks(pieces, transfers), headers=headers)
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._release()


async def _chunks(
    pieces: Iterator[bytes | memoryview], transfers: Transfers
) -> AsyncIterator[bytes]:
    while (piece := await transfers.run(next, pieces, None)) is not None:
        view = memoryview(piece).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            yield bytes(view[start : start + CHUNK_BYTES])


class UploadedFile(io.RawIOBase):
    """A body that a thread reads as a file while it arrives."""

    def __init__(self, chunks: AsyncIterator[bytes], max_bytes: int) -> None:
        self._chunks = chunks
        self._max_bytes = max_bytes
        self._loop = asyncio.get_running_loop()
        self._n_bytes = 0
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            self._rest = memoryview(self._next_chunk())
        n_read = min(len(buffer), len(self._rest))
        buffer[:n_read], self._rest = self._rest[:n_read], self._rest[n_read:]
        return n_read

    def _next_chunk(self) -> bytes:
        """The next bytes of the body; none at its end."""
        chunk = asyncio.run_coroutine_threadsafe(self._received(), self._loop).result()
        self._n_bytes += len(chunk)
        if not self._n_bytes:
            raise BadInput("The body is empty; send the bundle as the body.")
        if self._n_bytes > self._max_bytes:
            raise TooLarge(f"The bundle is larger than the store, {self._max_bytes} bytes.")
        return chunk

    async def _received(self) -> bytes:
        try:
            async for chunk in self._chunks:
                if chunk:
                    return chunk
        except ClientDisconnect as error:
            raise Cancelled("The client left in the middle of a bundle.") from error
        return b""
