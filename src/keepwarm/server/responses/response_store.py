"""Responses that clients refer to by id: in memory only, least recently used evicted first."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from keepwarm.errors import UnknownResponse
from keepwarm.server.responses.shapes import Item, ResponseOut

MAX_BYTES = 64 << 20


class StoredResponse(NamedTuple):
    response: ResponseOut
    items: Sequence[Item]  # the whole conversation, this answer included
    given: Sequence[Item]  # the input of the request itself
    output: Sequence[Item]
    n_bytes: int


class ResponseStore:
    """Responses of all tenants, isolated from each other. Used by the event loop only."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._items: dict[tuple[str, str], Item] = {}  # by tenant and item id
        self.n_bytes = 0

    def put(self, tenant: str, response: ResponseOut, items: Sequence[Item], n_given: int) -> None:
        """Store the response to the last `n_given` items; earlier items were counted before."""
        output = [Item.model_validate(item) for item in response["output"]]
        given = items[len(items) - n_given :]
        n_bytes = len(json.dumps([response, [item.model_dump() for item in given]]))
        stored = StoredResponse(response, [*items, *output], given, output, n_bytes)
        self._stored[tenant, response["id"]] = stored
        self._items |= {(tenant, item.id): item for item in (*given, *output) if item.id}
        self.n_bytes += n_bytes
        while self.n_bytes > self._max_bytes:
            self._remove(next(iter(self._stored)))

    def get(self, tenant: str, response_id: str) -> StoredResponse:
        """The response with this id; raises if there is none."""
        key = (tenant, response_id)
        if key not in self._stored:
            raise UnknownResponse(
                f"Response {response_id!r} is not stored; send the whole conversation as input."
            )
        self._stored.move_to_end(key)
        return self._stored[key]

    def delete(self, tenant: str, response_id: str) -> None:
        """Delete this response; later responses of its conversation keep their items."""
        self.get(tenant, response_id)
        self._remove((tenant, response_id))

    def item(self, tenant: str, item_id: str) -> Item | None:
        """The item with this id, in any conversation of this tenant."""
        return self._items.get((tenant, item_id))

    def _remove(self, key: tuple[str, str]) -> None:
        stored = self._stored.pop(key)
        self.n_bytes -= stored.n_bytes
        for item in (*stored.given, *stored.output):
            self._items.pop((key[0], item.id or ""), None)
