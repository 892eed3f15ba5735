"""Answers that clients refer to by their id. In memory only, and the oldest go first."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from keepwarm.errors import UnknownResponse
from keepwarm.server.responses_shapes import Item, ResponseOut

MAX_BYTES = 64 << 20


class Stored(NamedTuple):
    response: ResponseOut
    items: Sequence[Item]  # of the whole conversation, this answer included
    n_input: int  # how many of them came with the request itself, before the answer's own


class ResponseStore:
    """Answers of all tenants; nobody finds another's. Used from the event loop alone."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._stored: OrderedDict[tuple[str, str], Stored] = OrderedDict()
        self._sizes: dict[tuple[str, str], int] = {}
        self.n_bytes = 0

    def put(self, tenant: str, response: ResponseOut, items: Sequence[Item], given: int) -> None:
        """Keep an answer to the last `given` items. Items of earlier answers are counted there."""
        output = [Item.model_validate(item) for item in response["output"]]
        key = (tenant, response["id"])
        new = [item.model_dump(exclude_none=True) for item in items[len(items) - given :]]
        self._sizes[key] = len(json.dumps([response, new]))
        self._stored[key] = Stored(response, [*items, *output], given)
        self.n_bytes += self._sizes[key]
        while self.n_bytes > self._max_bytes:
            self._drop(next(iter(self._stored)))

    def get(self, tenant: str, response_id: str) -> Stored:
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
        for (owner, _), stored in reversed(self._stored.items()):
            if owner == tenant:
                found = next((item for item in stored.items if item.id == item_id), None)
                if found is not None:
                    return found
        return None

    def _drop(self, key: tuple[str, str]) -> None:
        del self._stored[key]
        self.n_bytes -= self._sizes.pop(key)
