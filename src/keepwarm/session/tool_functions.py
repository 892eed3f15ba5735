"""Python functions as tools: schemas from signature and docstring, and running them.

An error in a tool is reported to the model, which can then correct its call.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from pydantic import TypeAdapter, ValidationError, validate_call
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from keepwarm.errors import BadInput
from keepwarm.session.gate import acting_for_task
from keepwarm.text.request import Tool, ToolCall
from keepwarm.text.tools import canonical_tools

Function: TypeAlias = Callable[..., Any]

_ARGS = re.compile(r"^(?:Args|Arguments|Parameters):\s*\n((?:[ \t]+.*\n?|\n)*)", re.MULTILINE)
_ARG = re.compile(r"^(\s+)\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*(?:\n\1\s+.*)*)", re.MULTILINE)


class ToolResult(NamedTuple):
    """A call that was run, and its result as the model sees it."""

    call: ToolCall
    result: str  # the error, if it failed
    failed: bool = False


class Toolbox:
    """A session's tools. Functions are run here; tools given as schemas are left to the caller."""

    def __init__(self, tools: Iterable[Tool | Function] = ()) -> None:
        self.tools = tuple(tools)  # as given
        self.schemas = canonical_tools(map(_schema, self.tools))
        self._functions = {_name(tool): tool for tool in self.tools if callable(tool)}
        if len({schema["function"]["name"] for schema in self.schemas}) < len(self.tools):
            raise BadInput("Two tools have the same name; give each a name of its own.")

    def runs(self, call: ToolCall) -> bool:
        return call.name in self._functions

    def run(self, call: ToolCall) -> ToolResult:
        """Run a function in this thread."""
        function = self._functions[call.name]
        if inspect.iscoroutinefunction(function):
            raise BadInput(f"The tool {call.name!r} is async; use `arespond`, or `async for`.")
        try:
            result = validate_call(function)(**json.loads(call.arguments))
        except Exception as error:  # a tool may raise anything
            return _failed(call, error)
        return ToolResult(call, _text(result))

    async def arun(self, call: ToolCall) -> ToolResult:
        """Await a coroutine function; run a plain function in a thread of its own."""
        function = self._functions[call.name]
        if not inspect.iscoroutinefunction(function):
            with acting_for_task():
                return await asyncio.to_thread(self.run, call)
        try:
            result = await validate_call(function)(**json.loads(call.arguments))
        except Exception as error:
            return _failed(call, error)
        return ToolResult(call, _text(result))


def schema_of(function: Function) -> Tool:
    """A function's tool schema."""
    name = _name(function)
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(function)  # type: ignore[arg-type]
        parameters = adapter.json_schema(schema_generator=_Untitled)
    except PydanticUserError as error:
        reason = str(error).partition(".")[0]
        raise BadInput(f"The tool {name!r} cannot be described as JSON: {reason}.") from error
    if parameters.get("type") != "object":
        raise BadInput(f"The tool {name!r} takes arguments without names; give each a name.")
    doc = inspect.cleandoc(function.__doc__ or "")
    _describe(parameters.get("properties", {}), doc)
    described = {"description": text} if (text := _ARGS.sub("", doc).strip()) else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


def _schema(tool: Tool | Function) -> Tool:
    return schema_of(tool) if callable(tool) else tool


def _name(function: Function) -> str:
    name: str = getattr(function, "__name__", type(function).__name__)
    return name


class _Untitled(GenerateJsonSchema):
    """Without titles: they repeat the names of arguments, and cost prompt tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False


def _describe(properties: Mapping[str, dict[str, Any]], doc: str) -> None:
    """Add descriptions from the docstring's `Args:`; those of annotations take precedence."""
    found = _ARGS.search(doc)
    for _, name, text in _ARG.findall(found[1]) if found else ():
        if name in properties and text.strip():
            properties[name].setdefault("description", " ".join(text.split()))


def _failed(call: ToolCall, error: Exception) -> ToolResult:
    if isinstance(error, ValidationError):
        wrong = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        return ToolResult(call, f"Error: {'; '.join(wrong)}", failed=True)
    return ToolResult(call, f"Error: {type(error).__name__}: {error}", failed=True)


def _text(result: Any) -> str:
    return (
        result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    )
