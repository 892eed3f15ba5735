"""`/mcp`, with the official SDK: streamable HTTP without sessions, each POST on its own.

It stands behind the same checks of key, Host and Origin, and the same limits, as every endpoint.
"""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from fastapi import Request
from pydantic import ValidationError
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from keepwarm import __version__
from keepwarm.config import Settings
from keepwarm.errors import BadInput, KeepwarmError
from keepwarm.server.models.models import Models

if TYPE_CHECKING:
    from mcp import types
    from mcp.server import ServerRequestContext
    from mcp.server.lowlevel import Server

    from keepwarm.server.mcp.tools import MemoryTool

PATH = "/mcp"
ABOUT = (
    "Keepwarm keeps what a model has computed of your conversations, so that they continue "
    "without being read again. These tools show what is kept of yours, and manage it."
)


class McpEndpoint:
    """The ASGI application of the endpoint; it answers while `running` is entered."""

    def __init__(self, models: Models, setting: str) -> None:
        from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

        from keepwarm.server.mcp.tools import tools_for  # imports most of the APIs

        self._models = models
        self._tools = tools_for(setting)
        self._manager = StreamableHTTPSessionManager(self._server(), None, True, True)

    @property
    def route(self) -> Route:
        return Route(PATH, self, methods=["POST"])

    def running(self) -> AbstractAsyncContextManager[None]:
        return self._manager.run()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._manager.handle_request(scope, receive, send)

    def _server(self) -> Server[Any]:
        from mcp.server.lowlevel import Server

        return Server(
            "keepwarm",
            version=__version__,
            instructions=ABOUT,
            on_list_tools=self._list,
            on_call_tool=self._call,
        )

    async def _list(
        self, context: ServerRequestContext[Any], given: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        del context, given  # the same for everyone, on one page
        from mcp import types

        return types.ListToolsResult(tools=[_listed(name, t) for name, t in self._tools.items()])

    async def _call(
        self, context: ServerRequestContext[Any], asked: types.CallToolRequestParams
    ) -> types.CallToolResult:
        try:
            said, is_error = await self._answer(context.request, asked), False
        except ValidationError as error:
            said, is_error = _first_problem(error), True
        except KeepwarmError as error:
            said, is_error = str(error), True
        from mcp import types

        text = types.TextContent(type="text", text=said)
        return types.CallToolResult(content=[text], is_error=is_error)

    async def _answer(self, request: Any, asked: types.CallToolRequestParams) -> str:
        from keepwarm.server.mcp.tools import ToolCaller

        tool = self._tools.get(asked.name)
        if tool is None:
            raise BadInput(f"There is no tool {asked.name!r} here; there are {_all(self._tools)}.")
        given = tool.arguments.model_validate(asked.arguments or {})
        caller = ToolCaller(Request(request.scope), self._models)
        return json.dumps(await tool.call(caller, given))


def memory_endpoint(models: Models, settings: Settings) -> McpEndpoint | None:
    """None unless the setting `mcp` turns it on."""
    if settings.mcp == "off":
        return None
    try:
        return McpEndpoint(models, settings.mcp)
    except ImportError as error:
        raise BadInput(
            "The setting mcp is on, and the package mcp is not installed; install keepwarm[mcp], "
            "or turn it off."
        ) from error


def _listed(name: str, tool: MemoryTool) -> types.Tool:
    from mcp import types

    hints = types.ToolAnnotations(read_only_hint=tool.reads, destructive_hint=tool.destroys)
    schema = tool.arguments.model_json_schema()
    return types.Tool(name=name, description=tool.about, input_schema=schema, annotations=hints)


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"])) or "arguments"
    return f"{where}: {first['msg']}."


def _all(names: dict[str, MemoryTool]) -> str:
    return ", ".join(names)
