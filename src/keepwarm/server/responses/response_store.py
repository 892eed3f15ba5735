"""Answers that clients refer to by their id. In memory only, and the oldest go first."""

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
    items: Sequence[Item]  # of the whole conversation, this answer included
    given: Sequence[Item]  # those that came with the request itself
    made: Sequence[Item]
    n_bytes: int


class ResponseStore:
    """Answers of all tenants; nobody finds another's. Used from the event loop alone."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._items: dict[tuple[str, str], Item] = {}  # by their own ids
        self.n_bytes = 0

    def put(self, tenant: str, response: ResponseOut, items: Sequence[Item], n_given: int) -> None:
        """Keep an answer to the last `n_given` items; those before them are counted already."""
        made = [Item.model_validate(item) for item in response["output"]]
        given = items[len(items) - n_given :]
        n_bytes = len(json.dumps([response, [item.model_dump() for item in given]]))
        stored = StoredResponse(response, [*items, *made], given, made, n_bytes)
        self._stored[tenant, response["id"]] = stored
        self._items |= {(tenant, item.id): item for item in (*given, *made) if item.id}
        self.n_bytes += n_bytes
        while self.n_bytes > self._max_bytes:
            self._drop(next(iter(self._stored)))

    def get(self, tenant: str, response_id: str) -> StoredResponse:
        """The answer of this id, or an error that says that there is none."""
        key = (tenant, response_id)
        if key not in self._stored:
            raise UnknownResponse(
                f"No response {response_id!r} is kept here; send the whole conversation as input."
            )
        self._stored.move_to_end(key)
        return self._stored[key]

    def delete(self, tenant: str, response_id: str) -> None:
        """Forget this answer; those that followed it keep what they need of it."""
        self.get(tenant, response_id)
        self._drop((tenant, response_id))

    def item(self, tenant: str, item_id: str) -> Item | None:
        """The item of this id in any conversation of this tenant."""
        return self._items.get((tenant, item_id))

    def _drop(self, key: tuple[str, str]) -> None:
        stored = self._stored.pop(key)
        self.n_bytes -= stored.n_bytes
        for item in (*stored.given, *stored.made):
            self._items.pop((key[0], item.id or ""), None)
