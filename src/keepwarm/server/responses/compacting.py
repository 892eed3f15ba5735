"""`/v1/responses/compact`: a conversation as its user's messages and the model's summary."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from keepwarm.errors import BadInput
from keepwarm.server.http.receipts import receipt_dict
from keepwarm.server.http.sse import new_id
from keepwarm.server.responses.events import usage_of
from keepwarm.server.responses.request import encode_reasoning
from keepwarm.server.responses.shapes import CompactedOut, Item
from keepwarm.text.request import Done, Result


def compacted(items: Sequence[Item], result: Result, writes: bool) -> CompactedOut:
    """The items that replace these; raises if the model wrote no summary."""
    summary = result.choices[0].text.strip()
    if not summary:
        raise BadInput("The model wrote no summary, so nothing was compacted; try again.")
    kept = [_message(item) for item in items if item.role == "user"]
    item = {
        "type": "compaction",
        "id": new_id("cmp_"),
        "encrypted_content": encode_reasoning(summary),
    }
    return {
        "id": new_id("resp_"),
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [*kept, item],
        "usage": usage_of(Done(result.usage, result.receipt), writes),
        "keepwarm": receipt_dict(result.receipt),
    }


def _message(item: Item) -> dict[str, Any]:
    """A message as an output item, which has an id, a status and parts."""
    fields = item.model_dump(exclude_none=True)
    content = fields.get("content") or ""
    if isinstance(content, str):
        content = [{"type": "input_text", "text": content}]
    made = {"type": "message", "id": item.id or new_id("msg_"), "status": "completed"}
    return {**made, **fields, "content": content}
