"""Responses that clients refer to by id, in memory; the least recently used are evicted first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from sys import getsizeof
from typing import NamedTuple

from pydantic import BaseModel

from keepwarm.errors import UnknownResponse
from keepwarm.server.responses.shapes import Item, ResponseOut

MAX_BYTES = 64 << 20
ENTRY_BYTES = 256  # an entry of a dictionary here, with its key


class StoredResponse(NamedTuple):
    response: ResponseOut
    items: Sequence[Item]  # the whole conversation, this answer included
    given: Sequence[Item]  # the input of the request itself
    output: Sequence[Item]
    n_bytes: int  # without the items, which other responses may hold too
    agent: str = ""  # that it belongs to
    on_disk: bool = False  # or queued for it


class ResponseStore:
    """Responses of all tenants, isolated from each other. Used by the event loop only."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._items: dict[tuple[str, str], Item] = {}  # by tenant and item id
        self._held = HeldItems()
        self._n_bytes = 0  # without items

    @property
    def n_bytes(self) -> int:
        """Everything that is held: responses, items, ids and the tables themselves."""
        return self._n_bytes + self._held.n_bytes

    def put(
        self,
        tenant: str,
        response: ResponseOut,
        items: Sequence[Item],
        n_given: int,
        *,
        agent: str = "",
        on_disk: bool = False,
    ) -> None:
        """Store the response to the last `n_given` items."""
        output = [Item.model_validate(item) for item in response["output"]]
        given = items[len(items) - n_given :]
        key, whole = (tenant, response["id"]), [*items, *output]
        n_bytes = (
            memory_of([key, response]) + sum(map(getsizeof, (whole, given, output))) + ENTRY_BYTES
        )
        made = StoredResponse(response, whole, given, output, n_bytes, agent, on_disk)
        self._stored[key] = made
        self._items |= {(tenant, item.id): item for item in (*given, *output) if item.id}
        self._n_bytes += n_bytes
        self._held.add(whole)
        while self.n_bytes > self._max_bytes:
            self._remove(next(iter(self._stored)))

    def get(self, tenant: str, response_id: str) -> StoredResponse:
        """The response with this id; raises if there is none."""
        key = (tenant, response_id)
        if key not in self._stored:
            raise UnknownResponse(
                f"Response with id {response_id!r} not found; send the whole conversation as input."
            )
        self._stored.move_to_end(key)
        return self._stored[key]

    def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        """The response with this id, if it is here; does not count as a use."""
        return self._stored.get((tenant, response_id))

    def forget(self, is_deleted: Callable[[str], bool]) -> None:
        """Delete all responses of agents that are deleted."""
        for key in [key for key, stored in self._stored.items() if is_deleted(stored.agent)]:
            self._remove(key)

    def delete(self, tenant: str, response_id: str) -> None:
        """Delete this response; later responses of its conversation keep their items."""
        self.get(tenant, response_id)
        self._remove((tenant, response_id))

    def item(self, tenant: str, item_id: str) -> Item | None:
        """The item with this id, in any conversation of this tenant."""
        return self._items.get((tenant, item_id))

    def _remove(self, key: tuple[str, str]) -> None:
        stored = self._stored.pop(key)
        self._n_bytes -= stored.n_bytes
        self._held.remove(stored.items)
        for item in (*stored.given, *stored.output):
            self._items.pop((key[0], item.id or ""), None)


class HeldItems:
    """Items that responses hold, each counted once, for as long as any response holds it."""

    def __init__(self) -> None:
        self._uses: dict[int, _Use] = {}  # by `id`, which is unique while the item is held
        self.n_bytes = 0

    def add(self, items: Iterable[Item]) -> None:
        for item in items:
            n_times, n_bytes = self._uses.get(id(item)) or _Use(0, _item_bytes(item))
            self._uses[id(item)] = _Use(n_times + 1, n_bytes)
            self.n_bytes += 0 if n_times else n_bytes

    def remove(self, items: Iterable[Item]) -> None:
        for item in items:
            n_times, n_bytes = self._uses.pop(id(item))
            if n_times > 1:
                self._uses[id(item)] = _Use(n_times - 1, n_bytes)
            else:
                self.n_bytes -= n_bytes


class _Use(NamedTuple):
    n_times: int
    n_bytes: int


def _item_bytes(item: Item) -> int:
    return memory_of([item]) + 2 * ENTRY_BYTES  # by its id, and among the items held


def memory_of(values: Sequence[object]) -> int:
    """The memory of these values and all that they hold, each object counted once."""
    seen: dict[int, object] = {}
    waiting: list[object] = list(values)
    while waiting:
        value = waiting.pop()
        if id(value) not in seen:
            seen[id(value)] = value
            waiting += _parts(value)
    return sum(map(getsizeof, seen.values()))


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, BaseModel):
        return (value.__dict__, value.__pydantic_extra__, value.__pydantic_fields_set__)
    return value if isinstance(value, list | tuple) else ()
