"""Calls of tools in a response: their items and events, also while they are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from keepwarm.server.http.sse import new_id
from keepwarm.server.openai.calls import custom_input
from keepwarm.server.responses.request import QualifiedName
from keepwarm.server.responses.shapes import Status
from keepwarm.text.request import ToolCall, ToolCallDelta, ToolCalled

Frames: TypeAlias = list[dict[str, Any]]


class CallShape(NamedTuple):
    """How a kind of call is written: as an item, and as events."""

    item: str
    prefix: str  # of ids
    field: str  # what it is called with
    event: str


FUNCTION_CALL = CallShape("function_call", "fc_", "arguments", "response.function_call_arguments")
CUSTOM_CALL = CallShape("custom_tool_call", "ctc_", "input", "response.custom_tool_call_input")


class CallItems:
    """Adds calls to the output of a response; at most one is open."""

    def __init__(self, names: Mapping[str, QualifiedName], output: list[dict[str, Any]]) -> None:
        self._names = names
        self._output = output
        self._open: _OpenCall | None = None
        self._begun: set[str] = set()  # ids

    def add(self, event: ToolCallDelta | ToolCalled) -> Frames:
        """A part of a call, or a whole one. The input of a custom tool is known at its end."""
        if isinstance(event, ToolCalled):
            return self._call(event.call)
        if self._name(event.name).custom:
            return []
        begun = [] if self._is_open(event.id) else self._begin(event.id, event.name)
        return begun + self._write(event.arguments)

    def _call(self, call: ToolCall) -> Frames:
        if self._is_open(call.id):
            return self.close("completed")
        if call.id in self._begun:
            return []
        custom = self._name(call.name).custom
        said = custom_input(call.arguments) if custom else call.arguments
        return self._begin(call.id, call.name) + self._write(said) + self.close("completed")

    def close(self, status: Status = "incomplete") -> Frames:
        """End the open call, if any; unless it is completed it was cut off or malformed."""
        if self._open is None:
            return []
        frames = self._open.end(status)
        self._output.append(self._open.item)
        if status == "incomplete":
            self._begun.discard(self._open.item["call_id"])
        self._open = None
        return frames

    def _begin(self, call_id: str, name: str) -> Frames:
        before = self.close("completed")  # another begins only behind a whole one
        self._begun.add(call_id)
        self._open = _OpenCall(call_id, self._name(name), len(self._output))
        return [*before, self._open.item_event("added")]

    def _write(self, said: str) -> Frames:
        return [self._open.add(said)] if self._open else []

    def _is_open(self, call_id: str) -> bool:
        return self._open is not None and self._open.item["call_id"] == call_id

    def _name(self, name: str) -> QualifiedName:
        return self._names.get(name, QualifiedName(name))


class _OpenCall:
    def __init__(self, call_id: str, name: QualifiedName, index: int) -> None:
        self._shape = CUSTOM_CALL if name.custom else FUNCTION_CALL
        self._index = index
        self._said: list[str] = []
        self.item: dict[str, Any] = {
            "type": self._shape.item,
            "id": new_id(self._shape.prefix),
            "call_id": call_id,
            "name": name.name,
            self._shape.field: "",
            "status": "in_progress",
        }
        if name.namespace:
            self.item["namespace"] = name.namespace

    def add(self, said: str) -> dict[str, Any]:
        self._said.append(said)
        return {"type": f"{self._shape.event}.delta", **self._position(), "delta": said}

    def end(self, status: Status) -> Frames:
        said = "".join(self._said)
        self.item |= {self._shape.field: said, "status": status}
        named = {"name": self.item["name"]} if self._shape is FUNCTION_CALL else {}
        whole = {**self._position(), **named, self._shape.field: said}
        return [{"type": f"{self._shape.event}.done", **whole}, self.item_event("done")]

    def item_event(self, what: str) -> dict[str, Any]:
        shown = dict(self.item)
        return {"type": f"response.output_item.{what}", "output_index": self._index, "item": shown}

    def _position(self) -> dict[str, Any]:
        return {"item_id": self.item["id"], "output_index": self._index}
