"""`/mcp`, with the official SDK: streamable HTTP without sessions, each POST on its own.

It stands behind the same checks of key, Host and Origin, and the same limits, as every endpoint.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

from fastapi import Request
from pydantic import Field, ValidationError
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from keepwarm import __version__
from keepwarm.config import Settings
from keepwarm.errors import BadInput, KeepwarmError
from keepwarm.server.admin.agent_chat import CompactBody, compact_agent
from keepwarm.server.admin.agents import AgentId, ForkBody, TenantAgents
from keepwarm.server.dashboard.routes import miss_out
from keepwarm.server.http.body import JsonInput
from keepwarm.server.http.keys import Viewer
from keepwarm.server.http.permits import PrepareSlot
from keepwarm.server.http.request_fields import AGENT_IN_PATH
from keepwarm.server.models.calls import ApiCall
from keepwarm.server.models.models import Models

if TYPE_CHECKING:
    from mcp import types
    from mcp.server import ServerRequestContext
    from mcp.server.lowlevel import Server


MAX_BRANCH = 1 << 31


class ListArguments(JsonInput):
    limit: int = Field(default=20, ge=1, le=1000, description="Most recently used first.")


class AgentArguments(JsonInput):
    agent: AgentId = Field(description="Id of the agent, as list_agents has it.")


class BranchArguments(AgentArguments):
    branch: int | None = Field(
        default=None, ge=1, le=MAX_BRANCH, description="A branch by its number; else the head."
    )


class PinArguments(BranchArguments):
    pinned: bool = Field(default=True, description="False: allow eviction again.")


class ForkArguments(BranchArguments):
    new_agent: AgentId = Field(description="Id of the new agent.")


class RewindArguments(BranchArguments):
    turn: int = Field(ge=0, le=MAX_BRANCH, description="The last turn to keep; 0 keeps none.")


class MissArguments(JsonInput):
    agent: AgentId | None = Field(default=None, description="Only of this agent.")


class CompactArguments(AgentArguments):
    instruction: str | None = Field(
        default=None, min_length=1, description="What to ask for instead of a plain summary."
    )


class ToolCaller:
    """Who calls a tool: the request it came with has the tenant."""

    def __init__(self, request: Request, models: Models) -> None:
        self.request = request
        self.models = models
        self.agents = TenantAgents(request, models)


@dataclass(frozen=True)
class MemoryTool:
    about: str
    arguments: type[JsonInput]
    call: Callable[[ToolCaller, Any], Mapping[str, Any] | Awaitable[Mapping[str, Any]]]
    reads: bool = False  # it changes nothing
    destroys: bool = False  # what it removes does not come back; only with `mcp = all`


def _list(caller: ToolCaller, given: ListArguments) -> Mapping[str, Any]:
    latest, n_agents = caller.agents.latest(given.limit)
    return {"n_agents": n_agents, "agents": latest}


def _explain(caller: ToolCaller, given: MissArguments) -> Mapping[str, Any]:
    viewer = Viewer.of(caller.request)
    for miss in caller.models.ledger.misses():
        name = viewer.agent_name(miss.agent, miss.tenant)
        if miss.tenant == viewer.tenant and given.agent in (None, name):
            return {"miss": miss_out(miss, viewer, caller.models)}
    return {"miss": None}


async def _compact(caller: ToolCaller, given: CompactArguments) -> Mapping[str, Any]:
    scope = {**caller.request.scope, "path_params": {AGENT_IN_PATH: given.agent}}
    request = Request(scope, _receive_nothing)
    slot: PrepareSlot = request.state.slot
    async with slot.paused():
        name = (await slot.manage(caller.agents.show, given.agent))["model"]
        is_served = await slot.manage(caller.models.serves, name)
    model = name if is_served else None  # one of long ago perhaps: the default may have its state
    body = CompactBody(model=model, instruction=given.instruction)
    return await compact_agent(given.agent, body, ApiCall(request))


async def _receive_nothing() -> Message:
    """The SDK itself reads what the client sends."""
    message: Message = await asyncio.get_running_loop().create_future()
    return message


TOOLS: Mapping[str, MemoryTool] = {
    "list_agents": MemoryTool(
        "List your agents: conversations whose computed state is kept, with turns, tokens, bytes "
        "on disk, pins and branches.",
        ListArguments,
        _list,
        reads=True,
    ),
    "show_agent": MemoryTool(
        "Show one of your agents: turns (tokens up to the end of each), branches, size, pin, "
        "quota, retention, labels.",
        AgentArguments,
        lambda caller, given: caller.agents.show(given.agent),
        reads=True,
    ),
    "pin_agent": MemoryTool(
        "Protect what is kept of an agent from eviction, or allow eviction again.",
        PinArguments,
        lambda caller, given: caller.agents.update(given.agent, given.branch, pinned=given.pinned),
    ),
    "fork_agent": MemoryTool(
        "Make a new agent with the same history, to try something without losing the way back. "
        "Nothing is copied, and the new one starts warm.",
        ForkArguments,
        lambda caller, given: caller.agents.fork(
            given.agent, ForkBody(id=given.new_agent), given.branch
        ),
    ),
    "rewind_agent": MemoryTool(
        "Drop the turns of an agent after this one, so that it continues from there. Fork it "
        "first if they may be wanted again.",
        RewindArguments,
        lambda caller, given: caller.agents.rewind(given.agent, given.turn, given.branch),
    ),
    "explain_last_miss": MemoryTool(
        "Why the latest request that computed known text again did so: at which token it differs "
        "from an earlier prompt, what it cost, and both texts there. Null if none did.",
        MissArguments,
        _explain,
        reads=True,
    ),
    "delete_agent": MemoryTool(
        "Delete an agent and all that only it uses, for good.",
        AgentArguments,
        lambda caller, given: caller.agents.delete(given.agent),
        destroys=True,
    ),
    "compact_agent": MemoryTool(
        "Replace the conversation of an agent by a summary that the model writes.",
        CompactArguments,
        _compact,
        destroys=True,
    ),
}


def tools_for(setting: str) -> dict[str, MemoryTool]:
    """Those that the setting `mcp` allows."""
    return {name: tool for name, tool in TOOLS.items() if setting == "all" or not tool.destroys}


PATH = "/mcp"
ABOUT = (
    "Keepwarm keeps what a model has computed of your conversations, so that they continue "
    "without being read again. These tools show what is kept of yours, and manage it."
)


class McpEndpoint:
    """The ASGI application of the endpoint; it answers while `running` is entered."""

    def __init__(self, models: Models, setting: str) -> None:
        from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

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
            result, is_error = await self._answer(context.request, asked), False
        except ValidationError as error:
            result, is_error = _first_problem(error), True
        except KeepwarmError as error:
            result, is_error = str(error), True
        from mcp import types

        text = types.TextContent(type="text", text=result)
        return types.CallToolResult(content=[text], is_error=is_error)

    async def _answer(self, request: Any, asked: types.CallToolRequestParams) -> str:
        tool = self._tools.get(asked.name)
        if tool is None:
            raise BadInput(f"There is no tool {asked.name!r} here; there are {_all(self._tools)}.")
        given = tool.arguments.model_validate(asked.arguments or {})
        caller = ToolCaller(Request(request.scope), self._models)
        if iscoroutinefunction(tool.call):
            return json.dumps(await tool.call(caller, given))
        slot: PrepareSlot = request.state.slot
        slot.end()
        return json.dumps(await slot.manage(tool.call, caller, given))


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
