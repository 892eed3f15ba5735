"""Stored responses on disk, where they survive a restart; those in use are in memory too."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from keepwarm.cache.restore.forgetting import Deletions
from keepwarm.cache.store import Store
from keepwarm.cache.texts.files import AgentTexts
from keepwarm.server.responses.response_store import ResponseStore, StoredResponse
from keepwarm.server.responses.shapes import Item, ResponseOut

VERSION = 1
LOG = logging.getLogger(__name__)


class KeptResponses:
    """Responses of all tenants, for the event loop; a thread writes and reads files. Close it.

    A response that was written lives as long as its file: whoever deletes that, deletes it here.
    """

    def __init__(self, store: Callable[[], Store], ttl_s: float) -> None:
        """`store` raises while no model is loaded. With a `ttl_s` of 0 nothing is on disk."""
        self._store = ResponseStore()
        self._on_disk = store
        self._ttl_s = ttl_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unwritten: set[str] = set()  # names
        self._on_forget: Callable[[], None] = lambda: None
        self._files = ThreadPoolExecutor(1, thread_name_prefix="keepwarm-responses")

    def on_forget(self, listener: Callable[[], None]) -> None:
        """Call the listener on the event loop when anything was deleted."""
        self._on_forget = listener

    async def begin(self) -> int:
        """Before a request reads anything that is stored: the store's generation, for `put`."""
        self._listen()
        return await asyncio.to_thread(self._on_disk().catch_up)

    def _listen(self) -> None:
        """Have deletions noticed from the first request on."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._on_disk().add_forget(self._forget_deleted)

    def put(
        self,
        tenant: str,
        response: ResponseOut,
        items: Sequence[Item],
        n_given: int,
        *,
        since: int,
        agent: str = "",
        to_disk: bool = True,
    ) -> None:
        """Store the response to the last `n_given` items, unless its agent was deleted since."""
        if self._on_disk().has_deleted(agent, since):
            return
        to_disk = to_disk and self._ttl_s > 0
        self._store.put(tenant, response, items, n_given, agent=agent, on_disk=to_disk)
        if to_disk:
            name = _name(tenant, response["id"])
            self._unwritten.add(name)
            fields = {"agent": agent, "response": response, "items": items, "n_given": n_given}
            self._files.submit(self._write, self._on_disk(), since, name, fields)

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        """The response with this id; raises if there is none."""
        await self._refresh(tenant, response_id)
        return self._store.get(tenant, response_id)

    async def delete(self, tenant: str, response_id: str) -> None:
        """Delete this response; later responses of its conversation keep their items."""
        await self._refresh(tenant, response_id)
        self._store.delete(tenant, response_id)
        await self._run(self._texts().remove, _name(tenant, response_id))

    def _forget_deleted(self, deletions: Deletions) -> None:
        """From any thread: drop from memory what any process has deleted."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._forget, deletions)

    def _forget(self, deletions: Deletions) -> None:
        self._store.forget(deletions.include)
        self._on_forget()

    def holds(self, tenant: str, response_id: str) -> bool:
        """Whether this response is in memory."""
        return self._store.find(tenant, response_id) is not None

    def item(self, tenant: str, item_id: str) -> Item | None:
        """The item with this id, among the responses in memory."""
        return self._store.item(tenant, item_id)

    def close(self) -> None:
        """Write what is queued."""
        self._files.shutdown(wait=True)

    async def _refresh(self, tenant: str, response_id: str) -> None:
        """Have in memory what is on disk, and nothing that no longer is."""
        self._listen()
        name, stored = _name(tenant, response_id), self._store.find(tenant, response_id)
        if stored is not None:
            if self._is_gone(name, stored):
                self._store.delete(tenant, response_id)
            return
        found = await self._run(self._read, self._texts(), name) if self._ttl_s else None
        if found is not None:
            self._store.put(tenant, **found, on_disk=True)

    def _is_gone(self, name: str, stored: StoredResponse) -> bool:
        if not stored.on_disk or name in self._unwritten:
            return False
        is_old = time.time() - stored.response["created_at"] > self._ttl_s
        return is_old or not self._texts().path_of(stored.agent, name).exists()

    def _texts(self) -> AgentTexts:
        return self._on_disk().on_disk.agents.responses

    async def _run(self, work: Any, *arguments: Any) -> Any:
        """After what was queued before."""
        return await asyncio.get_running_loop().run_in_executor(self._files, work, *arguments)

    def _write(self, store: Store, since: int, name: str, fields: dict[str, Any]) -> None:
        items = [item.model_dump(exclude_none=True) for item in fields["items"]]
        data = json.dumps({"version": VERSION, **fields, "items": items}).encode()
        texts = store.on_disk.agents.responses
        try:
            texts.put(fields["agent"], name, data, self._ttl_s)
            store.catch_up()
            if store.has_deleted(fields["agent"], since):  # its files went before this one came
                texts.remove(name)
        except Exception:
            LOG.exception("a response could not be stored on disk; it is in memory only")
        else:
            self._unwritten.discard(name)

    def _read(self, texts: AgentTexts, name: str) -> dict[str, Any] | None:
        data = texts.get(name, self._ttl_s)
        try:
            fields: dict[str, Any] = json.loads(data) if data else {"version": 0}
            if fields.pop("version") != VERSION:
                return None
            return fields | {"items": [Item.model_validate(item) for item in fields["items"]]}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            LOG.warning("a stored response could not be read: %s", error)
            return None


def _name(tenant: str, response_id: str) -> str:
    return f"{tenant}/{response_id}"
