"""What a client may do with its own agents, as tools. Each is a call of the API, for models.

Only the caller's tenant is seen, whatever the key: the admin key's own agents here, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from keepwarm.server.admin.agent_chat import CompactBody, compact_agent
from keepwarm.server.admin.agents import AgentId, ForkBody, TenantAgents
from keepwarm.server.dashboard.routes import miss_out
from keepwarm.server.http.body import JsonInput
from keepwarm.server.http.request_fields import AGENT_IN_PATH, ApiCall
from keepwarm.server.http.viewer import Viewer
from keepwarm.server.models.models import Models

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
    call: Callable[[ToolCaller, Any], Awaitable[Mapping[str, Any]]]
    reads: bool = False  # it changes nothing
    destroys: bool = False  # what it removes does not come back; only with `mcp = all`


async def _list(caller: ToolCaller, given: ListArguments) -> Mapping[str, Any]:
    found = await run_in_threadpool(caller.agents.all)
    latest = sorted(found, key=lambda agent: -agent["used"])
    return {"n_agents": len(found), "agents": latest[: given.limit]}


async def _show(caller: ToolCaller, given: AgentArguments) -> Mapping[str, Any]:
    return await run_in_threadpool(caller.agents.show, given.agent)


async def _pin(caller: ToolCaller, given: PinArguments) -> Mapping[str, Any]:
    change = partial(caller.agents.update, given.agent, given.branch, pinned=given.pinned)
    return await run_in_threadpool(change)


async def _fork(caller: ToolCaller, given: ForkArguments) -> Mapping[str, Any]:
    new = ForkBody(id=given.new_agent)
    return await run_in_threadpool(caller.agents.fork, given.agent, new, given.branch)


async def _rewind(caller: ToolCaller, given: RewindArguments) -> Mapping[str, Any]:
    return await run_in_threadpool(caller.agents.rewind, given.agent, given.turn, given.branch)


async def _explain(caller: ToolCaller, given: MissArguments) -> Mapping[str, Any]:
    viewer = Viewer.of(caller.request)
    for miss in await run_in_threadpool(caller.models.ledger.misses):
        name = viewer.agent_name(miss.agent, miss.tenant)
        if miss.tenant == viewer.tenant and given.agent in (None, name):
            return {"miss": await run_in_threadpool(miss_out, miss, viewer, caller.models)}
    return {"miss": None}


async def _delete(caller: ToolCaller, given: AgentArguments) -> Mapping[str, Any]:
    return await run_in_threadpool(caller.agents.delete, given.agent)


async def _compact(caller: ToolCaller, given: CompactArguments) -> Mapping[str, Any]:
    request = Request({**caller.request.scope, "path_params": {AGENT_IN_PATH: given.agent}})
    body = CompactBody(instruction=given.instruction)
    return await compact_agent(given.agent, body, ApiCall(request))


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
        _show,
        reads=True,
    ),
    "pin_agent": MemoryTool(
        "Protect what is kept of an agent from eviction, or allow eviction again.",
        PinArguments,
        _pin,
    ),
    "fork_agent": MemoryTool(
        "Make a new agent with the same history, to try something without losing the way back. "
        "Nothing is copied, and the new one starts warm.",
        ForkArguments,
        _fork,
    ),
    "rewind_agent": MemoryTool(
        "Drop the turns of an agent after this one, so that it continues from there. Fork it "
        "first if they may be wanted again.",
        RewindArguments,
        _rewind,
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
        _delete,
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
