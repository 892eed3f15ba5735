"""The events of a stored response, for a client that retrieves it as a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from keepwarm.server.responses.calls import CUSTOM_CALL, FUNCTION_CALL, Frames
from keepwarm.server.responses.shapes import ResponseOut

CALLS = {shape.item: shape for shape in (FUNCTION_CALL, CUSTOM_CALL)}
LAST = {"completed": "completed", "incomplete": "incomplete", "failed": "failed"}


def replayed(response: ResponseOut) -> Frames:
    """Its events, every text in one piece."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "completed_at": None}
    events: Frames = [
        {"type": f"response.{n}", "response": begun} for n in ("created", "in_progress")
    ]
    for index, item in enumerate(response["output"]):
        events += _item(index, item)
    last = LAST.get(response["status"], "incomplete")
    return [*events, {"type": f"response.{last}", "response": dict(response)}]


def _item(index: int, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    shape = CALLS.get(item["type"])
    empty: dict[str, Any] = {shape.field: ""} if shape else {"content": []}
    place = {"output_index": index}
    begun = {**item, **empty, "status": "in_progress"}
    yield {"type": "response.output_item.added", **place, "item": begun}
    if shape:
        at = {"item_id": item["id"], **place}
        yield {"type": f"{shape.event}.delta", **at, "delta": item[shape.field]}
        named = {"name": item["name"]} if shape is FUNCTION_CALL else {}
        yield {"type": f"{shape.event}.done", **at, **named, shape.field: item[shape.field]}
    else:
        yield from _parts(item, place)
    yield {"type": "response.output_item.done", **place, "item": dict(item)}


def _parts(item: Mapping[str, Any], place: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    for number, part in enumerate(item.get("content") or ()):
        at = {"item_id": item["id"], **place, "content_index": number}
        logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
        kind, text = f"response.{part['type']}", part["text"]
        yield {"type": f"{kind}.delta", **at, "delta": text, **logprobs}
        yield {"type": f"{kind}.done", **at, "text": text, **logprobs}
        yield {"type": "response.content_part.done", **at, "part": dict(part)}
