"""Stored responses: files that survive a restart, or bytes in memory if not allowed on disk."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from pydantic import TypeAdapter
from pydantic_core import to_json

from keepwarm.agents.texts import AgentTexts
from keepwarm.cache.restore.forgetting import Deletions
from keepwarm.cache.store import Store
from keepwarm.errors import UnknownResponse
from keepwarm.server.responses.request import AnyItem, Item

VERSION = 1
MAX_BYTES = 64 << 20  # in memory
ENTRY_BYTES = 256  # an entry of the table in memory, without its name and data
LOG = logging.getLogger(__name__)
T = TypeVar("T")


class StoredResponse(NamedTuple):
    response: dict[str, Any]  # with a name of `logprobs` in the place of each list of them
    items: Sequence[Item] = ()  # the whole conversation, this answer included
    input: Sequence[Item] = ()  # the input of the request itself
    logprobs: Mapping[str, bytes] = {}  # JSON without brackets, by name

    def filled(self, shown: bytes) -> bytes:
        """JSON made of `response`, with the log-probabilities that it names.

        They may be megabytes, and the events repeat them: so they become JSON when they are
        stored, and are copied since.
        """
        for name, written in self.logprobs.items():
            shown = shown.replace(f'"{name}"'.encode(), written)
        return shown


class _InMemory(NamedTuple):
    agent: str
    data: bytes


class ResponseStore:
    """The responses of all tenants. Close it.

    One thread reads and writes them in the order of the calls, so a response can be read as soon
    as `put` has returned. What is on disk is read from there: the file is the only copy, and
    whoever deletes it deletes the response. The rest is in memory, the least recently used
    evicted first.
    """

    def __init__(
        self, store: Callable[[], Store], ttl_s: float, max_bytes: int = MAX_BYTES
    ) -> None:
        """`store` raises while no model is loaded. With a `ttl_s` of 0 nothing is on disk."""
        self._store = store
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._memory: OrderedDict[str, _InMemory] = OrderedDict()  # by name
        self.n_bytes = 0  # of these
        self._is_listening = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keepwarm-responses")

    def generation(self) -> int:
        """Before a request reads anything that is stored; `put` takes it. Asks the disk."""
        return self._store().catch_up()

    def put(
        self,
        tenant: str,
        response: dict[str, Any],
        items: Sequence[Item],
        n_input: int,
        *,
        since: int,
        agent: str = "",
        to_disk: bool = True,
    ) -> None:
        """Store the response to the last `n_input` items, unless its agent is deleted since then:
        the generation in which the request began.
        """
        name = _name(tenant, response["id"])
        fields = {"agent": agent, "response": response, "items": items, "n_input": n_input}
        to_disk = to_disk and self._ttl_s > 0
        self._thread.submit(self._write, self._store(), since, name, fields, to_disk)

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        """The response with this id; raises if there is none."""
        found = await self._run(self._read, _name(tenant, response_id))
        if found is None:
            raise _unknown(response_id)
        return found

    async def delete(self, tenant: str, response_id: str) -> None:
        """Delete this response; later responses of its conversation keep their items."""
        if not await self._run(self._delete, _name(tenant, response_id)):
            raise _unknown(response_id)

    def close(self) -> None:
        """Write what is queued."""
        self._thread.shutdown(wait=True)

    async def _run(self, work: Callable[[str], T], name: str) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, name)

    # On the store's own thread

    def _write(
        self, store: Store, since: int, name: str, fields: dict[str, Any], to_disk: bool
    ) -> None:
        if not self._is_listening:
            self._is_listening = True
            store.add_forget(self._forget_deleted)
        try:
            items = [item.model_dump(exclude_none=True) for item in fields["items"]]
            response, logprobs = _without_logprobs(fields["response"])
            named = {"items": items, "response": response, "logprobs": list(logprobs)}
            head = to_json({"version": VERSION, **fields, **named})
            data = b"\n".join([head, *logprobs.values()])
            if not (to_disk and self._write_file(store, fields["agent"], name, data)):
                self._put_in_memory(name, _InMemory(fields["agent"], data))
            store.catch_up()
            if store.has_deleted(fields["agent"], since):  # its files went before this one came
                self._delete(name)
        except Exception:
            LOG.exception("a response could not be stored")

    def _write_file(self, store: Store, agent: str, name: str, data: bytes) -> bool:
        try:
            store.on_disk.agents.responses.put(agent, name, data, self._ttl_s)
        except Exception:
            LOG.exception("a response could not be stored on disk; it is in memory only")
            return False
        return True

    def _put_in_memory(self, name: str, entry: _InMemory) -> None:
        self._drop(name)
        self._memory[name] = entry
        self.n_bytes += _size(name, entry)
        while self.n_bytes > self._max_bytes:
            self._drop(self._oldest_of_largest())

    def _oldest_of_largest(self) -> str:
        """The response that was used longest ago, of the tenant with most."""
        n_bytes: Counter[str] = Counter()
        for name, entry in self._memory.items():
            n_bytes[name.partition("/")[0]] += _size(name, entry)
        ((largest, _),) = n_bytes.most_common(1)
        return next(name for name in self._memory if name.partition("/")[0] == largest)

    def _drop(self, name: str) -> None:
        if entry := self._memory.pop(name, None):
            self.n_bytes -= _size(name, entry)

    def _read(self, name: str) -> StoredResponse | None:
        data = self._data(name)
        try:
            head, *written = data.split(b"\n") if data else [b'{"version": 0}']
            fields: dict[str, Any] = json.loads(head)
            if fields["version"] != VERSION:
                return None
            logprobs = dict(zip(fields.get("logprobs", ()), written, strict=True))
            response = fields["response"]
            items, output = _items(fields["items"]), _items(response["output"])
            own = items[len(items) - fields["n_input"] :]
            return StoredResponse(response, [*items, *output], own, logprobs)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            LOG.warning("a stored response could not be read: %s", error)
            return None

    def _data(self, name: str) -> bytes | None:
        if name in self._memory:
            self._memory.move_to_end(name)
            return self._memory[name].data
        return self._texts().get(name, self._ttl_s) if self._ttl_s else None

    def _delete(self, name: str) -> bool:
        """Whether there was one."""
        found = self._data(name) is not None
        self._drop(name)
        self._texts().remove(name)
        return found

    def _texts(self) -> AgentTexts:
        return self._store().on_disk.agents.responses

    def _forget_deleted(self, deletions: Deletions) -> None:
        """From any thread: what any process has deleted; files are gone already."""
        with suppress(RuntimeError):  # this is closed
            self._thread.submit(self._forget, deletions)

    def _forget(self, deletions: Deletions) -> None:
        for name in [name for name, e in self._memory.items() if deletions.include(e.agent)]:
            self._drop(name)


def _without_logprobs(response: dict[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The response with names in their place, and their JSON by these names."""
    written: dict[str, bytes] = {}

    def named(part: dict[str, Any]) -> dict[str, Any]:
        if not part.get("logprobs"):
            return part
        name = secrets.token_hex(16)  # so that no other text of the response is the same
        # NOTE: one at a time, because other threads wait while one of them is written.
        written[name] = b",".join([to_json(each) for each in part["logprobs"]])
        return part | {"logprobs": [name]}

    def of_item(item: dict[str, Any]) -> dict[str, Any]:
        if item.get("type") != "message":
            return item
        return item | {"content": [named(part) for part in item["content"]]}

    return response | {"output": [of_item(item) for item in response["output"]]}, written


def _items(stored: object) -> list[Item]:
    return TypeAdapter(list[AnyItem]).validate_python(stored)


def _size(name: str, entry: _InMemory) -> int:
    return len(name) + len(entry.agent) + len(entry.data) + ENTRY_BYTES


def _name(tenant: str, response_id: str) -> str:
    return f"{tenant}/{response_id}"


def _unknown(response_id: str) -> UnknownResponse:
    return UnknownResponse(
        f"Response with id {response_id!r} not found; send the whole conversation as input."
    )
