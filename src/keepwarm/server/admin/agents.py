"""The agents API: list, create, change, fork, rewind, export, import and delete.

A key sees only its own agents: stored ids begin with the tenant, which responses omit.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Annotated, Any, BinaryIO, Literal, NotRequired, TypeAlias, TypeVar, cast

from fastapi import Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field, StringConstraints
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict

from keepwarm.agents.agent import MAX_KEY, MAX_LABELS, MAX_VALUE, TITLE, Agent, Branch
from keepwarm.agents.agent_store import AgentStore
from keepwarm.agents.bundle import BundleExport, BundleSource
from keepwarm.agents.reachability import dropped_by_rewind
from keepwarm.agents.signing import BundleKeys
from keepwarm.cache.restore.records import check_record
from keepwarm.cache.store import Store
from keepwarm.config import Settings
from keepwarm.engine.engine import Engine
from keepwarm.errors import BadField, BadInput, Cancelled, TooLarge, UnknownAgent
from keepwarm.server.http.body import JsonInput, api_router
from keepwarm.server.http.keys import Viewer, tenant_agent_id
from keepwarm.server.http.limits import SharedLimit
from keepwarm.server.http.request_fields import AGENT_ID, Config
from keepwarm.server.models.calls import Served
from keepwarm.store.index.forgotten import Forgotten

RAW_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
MAX_TRANSFERS = 8
MAX_OF_ONE_KEY = 4
PAGE, MAX_PAGE = 100, 1000  # agents of a list
CHUNK_BYTES = 1 << 20
TAR = "application/x-tar"
T = TypeVar("T")

router = api_router(prefix="/v1/agents", tags=["Agents"])


AgentId: TypeAlias = Annotated[str, StringConstraints(pattern=f"^{AGENT_ID.pattern}$")]
LabelKey: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=MAX_KEY)]
LabelValue: TypeAlias = Annotated[str, StringConstraints(max_length=MAX_VALUE)]


class AgentOptions(JsonInput):
    """Pin, quota, retention and labels of an agent."""

    pinned: bool = Field(default=False, description="Never evict the blocks of its head.")
    quota_bytes: int | None = Field(
        default=None, ge=1, le=1 << 60, description="Bytes that other agents cannot evict."
    )
    retention_s: float | None = Field(
        default=None, gt=0, le=1e12, description="Delete it when unused for longer."
    )
    metadata: dict[LabelKey, LabelValue] = Field(
        default_factory=dict, max_length=MAX_LABELS, description="Labels and notes."
    )


class NewAgent(AgentOptions):
    id: AgentId = Field(description="Up to 128 letters, digits and . _ @ -")


class ForkBody(JsonInput):
    """One new agent, or several."""

    id: AgentId | None = Field(default=None, description="Id of the new agent.")
    ids: list[AgentId] | None = Field(
        default=None, min_length=1, max_length=1000, description="Ids of several new agents."
    )
    ephemeral: bool = Field(
        default=False,
        description="They live until the server ends, and nothing of them is written to disk.",
    )


class RewindBody(JsonInput):
    turn: int = Field(ge=0, le=1 << 31, description="Last turn to keep; 0 keeps none.")


class BranchOut(TypedDict):
    """One line of an agent's conversation."""

    number: int
    n_tokens: int
    turns: list[int]
    main: bool
    pinned: bool
    model: str
    used: float


class AgentOut(TypedDict):
    """`n_tokens`, `turns`, `n_bytes`, `model` and `branch` are those of its head."""

    id: str
    object: Literal["agent"]
    title: str  # its label `title`, or its client and the first words of its user
    model: str
    branch: int
    n_tokens: int
    turns: list[int]
    n_bytes: int  # of its blocks, on disk or only in memory
    pinned: bool
    quota_bytes: int | None
    retention_s: float | None
    metadata: dict[str, str]
    created: float
    used: float
    forked_from: str | None
    ephemeral: bool  # nothing of it is written
    imported: bool  # its blocks came with a bundle that no trusted key signed
    branches: list[BranchOut]  # the head first


class AgentList(TypedDict):
    object: Literal["list"]
    data: list[AgentOut]
    has_more: bool


class DeletedAgent(TypedDict):
    id: str
    object: Literal["agent"]
    deleted: bool
    removed_blocks: int
    shared_unreached: NotRequired[list[str]]  # tiers that could not be cleared yet


class TenantAgents:
    """The caller's agents. Its methods read and write files; call them in a thread."""

    def __init__(self, request: Request, models: Served) -> None:
        self.tenant: str = getattr(request.state, "tenant", "")
        self._may_read = Viewer.of(request).may_read_texts
        self._models = models
        self._keys: BundleKeys = request.app.state.bundle_keys

    @property
    def _disk_store(self) -> AgentStore:
        return self._models.store.on_disk

    def page(self, limit: int, after: str) -> AgentList:
        """The agents behind this id, in the order of ids."""
        prefix = tenant_agent_id(self.tenant, "")
        agents = self._disk_store.agents.all(prefix, f"{prefix}{after}")
        found = [self._out(each) for each in islice(agents, limit)]
        return {"object": "list", "data": found, "has_more": next(agents, None) is not None}

    def latest(self, limit: int) -> tuple[list[AgentOut], int]:
        """Those that were used last, and how many there are."""
        agents = list(self._disk_store.agents.all(tenant_agent_id(self.tenant, "")))
        agents.sort(key=lambda agent: -agent.used)
        return [self._out(each) for each in agents[:limit]], len(agents)

    def show(self, agent_id: str) -> AgentOut:
        return self._out(self._find(agent_id))

    def create(self, engine: Engine, agent_id: str, **options: Any) -> AgentOut:
        lane = engine.lane_of(self.tenant)
        head = Branch(lane.restorer.namespace, model=lane.model.name)
        agents = self._disk_store.agents
        return self._out(agents.create(self._unused_id(agent_id), head, **options))

    def fork(self, agent_id: str, body: ForkBody, branch: int | None) -> AgentOut | AgentList:
        if (body.id is None) == (body.ids is None):
            raise BadField("Send either id, for one new agent, or ids.", "id")
        old = self._find(agent_id, branch).id
        new_ids = [self._unused_id(new_id) for new_id in body.ids or [str(body.id)]]
        made = self._disk_store.agents.fork_all(old, new_ids, branch, ephemeral=body.ephemeral)
        data = [self._out(agent) for agent in made]
        return data[0] if body.ids is None else {"object": "list", "data": data, "has_more": False}

    def rewind(self, agent_id: str, turn: int, branch: int | None) -> AgentOut:
        agent = self._find(agent_id, branch)
        if turn > len(agent.turns):
            raise BadField(
                f"{agent_id!r} has {len(agent.turns)} turns; choose one of them.", "turn"
            )
        rewound = self._disk_store.agents.rewind(agent.id, turn, branch)
        dropped = Forgotten(agent.id, tuple(dropped_by_rewind(agent, rewound)))
        for engine in self._models.engines:
            engine.call(partial(engine.live.abandon, agent.id, dropped)).result()
        return self._out(rewound)

    def update(self, agent_id: str, branch: int | None = None, **changes: Any) -> AgentOut:
        """Change its options; with `branch` the pin of that branch."""
        agent = self._find(agent_id, branch)
        if branch is not None and "pinned" in changes:
            agent = self._disk_store.agents.pin(agent.id, changes.pop("pinned"), branch)
        return self._out(self._disk_store.agents.update(agent.id, **changes) if changes else agent)

    def delete(self, agent_id: str) -> DeletedAgent:
        agent = self._find(agent_id)
        removed = self._models.store.forget(agent.id)
        deleted: DeletedAgent = {
            "id": agent_id,
            "object": "agent",
            "deleted": True,
            "removed_blocks": removed,
        }
        if unreached := self._models.store.unreached():
            deleted["shared_unreached"] = unreached
        return deleted

    def export(self, agent_id: str, branch: int | None) -> BundleExport:
        return self._disk_store.export(self._find(agent_id, branch), key=self._keys.signing)

    def import_(self, engine: Engine, source: BundleSource, agent_id: str) -> AgentOut:
        new_id = self._unused_id(agent_id)
        lane = engine.lane_of(self.tenant)
        fits = partial(check_record, lane.restorer.layout)
        made = self._disk_store.import_agent(
            source,
            lane.identity,
            new_id,
            model=engine.model.name,
            keys=self._keys,
            check_record=fits,
        )
        return self._out(made)

    def _finish(self) -> None:
        """Finish recording the latest answers."""
        for engine in self._models.engines:
            engine.wait_until_saved()

    def _find(self, agent_id: str, branch: int | None = None) -> Agent:
        """An agent, seen from one of its branches."""
        self._finish()
        try:
            agent = self._disk_store.agents.show(tenant_agent_id(self.tenant, agent_id))
        except UnknownAgent as error:  # without the tenant's prefix: the memory tools quote it
            raise UnknownAgent(
                f"There is no agent {agent_id!r}; list the agents to see their ids."
            ) from error
        numbers = [each.number for each in agent.branches]
        if branch not in (None, *numbers):
            raise BadField(f"{agent_id!r} has the branches {numbers}; choose one.", "branch")
        return agent.on(branch)

    def _unused_id(self, agent_id: str) -> str:
        """The stored form of an id that is not in use yet."""
        stored = tenant_agent_id(self.tenant, agent_id)
        try:
            self._disk_store.agents.show(stored)
        except UnknownAgent:
            return stored
        raise BadField(f"Agent {agent_id!r} already exists; choose another id.", "id")

    def _out(self, agent: Agent) -> AgentOut:
        return agent_out(self._models.store, agent, self.tenant, self._may_read)


def agent_out(store: Store, agent: Agent, tenant: str, may_read: bool) -> AgentOut:
    """An agent of this tenant; who may not read its prompts sees the title that it was given."""
    prefix = tenant_agent_id(tenant, "")
    return {
        "id": agent.id.removeprefix(prefix),
        "object": "agent",
        "title": agent.title if may_read else agent.metadata.get(TITLE, ""),
        "model": agent.head.model,
        "branch": agent.head.number,
        "n_tokens": agent.n_tokens,
        "turns": list(agent.turns),
        "n_bytes": store.n_bytes(agent.blocks),
        "pinned": agent.pinned,
        "quota_bytes": agent.quota_bytes,
        "retention_s": agent.retention_s,
        "metadata": dict(agent.metadata),
        "created": agent.created,
        "used": agent.used,
        "forked_from": agent.forked_from.removeprefix(prefix) or None,
        "ephemeral": agent.ephemeral,
        "imported": bool(store.on_disk.origin_of(agent)),
        "branches": [_branch_out(branch) for branch in agent.branches],
    }


def _branch_out(branch: Branch) -> BranchOut:
    return {
        "number": branch.number,
        "n_tokens": branch.n_tokens,
        "turns": list(branch.turns),
        "main": branch.main,
        "pinned": branch.pinned,
        "model": branch.model,
        "used": branch.used,
    }


# Bundles on their way in and out: a few at once, and never in a file. An export is made while the
# client reads it. An import is verified while it arrives; its records are staged by the store, so
# they are encrypted and counted like all others. Whoever leaves takes all of it along.


class Transfers:
    """The exports and imports of a server, with threads of their own: a slow client keeps one."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(MAX_TRANSFERS, "bundle")
        self.limit = SharedLimit(
            MAX_TRANSFERS,
            MAX_OF_ONE_KEY,
            f"{MAX_TRANSFERS} bundles are being exported or imported, which is the limit; "
            "retry when one is done.",
            f"This API key has {MAX_OF_ONE_KEY} bundles under way, its limit; wait for one.",
        )

    async def run(self, work: Callable[..., T], *given: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *given)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class ExportResponse(StreamingResponse):
    """Sends a bundle piece by piece; `release` is called when it ends, however it does."""

    media_type = TAR

    def __init__(
        self,
        pieces: Iterator[bytes | memoryview],
        name: str,
        transfers: Transfers,
        release: Callable[[], None],
    ) -> None:
        headers = {"Content-Disposition": f'attachment; filename="{name}.tar"'}
        super().__init__(_chunks(pieces, transfers), headers=headers)
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._release()


async def _chunks(
    pieces: Iterator[bytes | memoryview], transfers: Transfers
) -> AsyncIterator[bytes]:
    while (piece := await transfers.run(next, pieces, None)) is not None:
        view = memoryview(piece).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            yield bytes(view[start : start + CHUNK_BYTES])


class UploadedFile(io.RawIOBase):
    """A body that a thread reads as a file while it arrives."""

    def __init__(self, chunks: AsyncIterator[bytes], max_bytes: int) -> None:
        self._chunks = chunks
        self._max_bytes = max_bytes
        self._loop = asyncio.get_running_loop()
        self._n_bytes = 0
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            self._rest = memoryview(self._next_chunk())
        n_read = min(len(buffer), len(self._rest))
        buffer[:n_read], self._rest = self._rest[:n_read], self._rest[n_read:]
        return n_read

    def _next_chunk(self) -> bytes:
        """The next bytes of the body; none at its end."""
        chunk = asyncio.run_coroutine_threadsafe(self._received(), self._loop).result()
        self._n_bytes += len(chunk)
        if not self._n_bytes:
            raise BadInput("The body is empty; send the bundle as the body.")
        if self._n_bytes > self._max_bytes:
            raise TooLarge(f"The bundle is larger than the store, {self._max_bytes} bytes.")
        return chunk

    async def _received(self) -> bytes:
        try:
            async for chunk in self._chunks:
                if chunk:
                    return chunk
        except ClientDisconnect as error:
            raise Cancelled("The client left in the middle of a bundle.") from error
        return b""


# Routes

Agents = Annotated[TenantAgents, Depends(TenantAgents)]
BranchNumber: TypeAlias = Annotated[
    int | None, Query(ge=1, le=1 << 31, description="The number of a branch, instead of the head.")
]


@router.get("")
def list_agents(
    agents: Agents,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="Agents at most.")] = PAGE,
    after: Annotated[str, Query(description="The id of the last agent of the page before.")] = "",
) -> AgentList:
    """List the agents of this key in the order of their ids, a page at a time."""
    return agents.page(limit, after)


@router.post("")
async def create_agent(
    body: NewAgent, request: Request, agents: Agents, models: Served
) -> AgentOut:
    """Create an agent before its first turn, to set its pin, quota or retention."""
    options = body.model_dump(exclude={"id"}, exclude_unset=True)
    model = next(iter(models.loaded), models.first).name  # if none is loaded, the default
    async with models.using(model, request.state.owner) as host:
        return await run_in_threadpool(agents.create, host.engine, body.id, **options)


@router.post("/import", openapi_extra=RAW_BODY)
async def import_agent(
    request: Request,
    agents: Agents,
    models: Served,
    settings: Config,
    *,
    agent_id: Annotated[AgentId, Query(alias="id", description="Id for the imported agent.")],
    model: Annotated[str | None, Query(description="The model it was made with.")] = None,
) -> AgentOut:
    """Import a bundle after verifying it; a bundle of another model is refused.

    Unless a trusted key signed it, only this agent and its forks are served from it.
    """
    transfers: Transfers = request.app.state.transfers
    body = UploadedFile(request.stream(), settings.disk_bytes)
    source = BundleSource("The bundle", cast("BinaryIO", body), _length(request, settings))
    async with models.using(model, request.state.owner) as host:
        with transfers.limit.one_more(request.state.owner):
            return await transfers.run(agents.import_, host.engine, source, agent_id)


def _length(request: Request, settings: Settings) -> int:
    """Bytes of a body, at most."""
    length = request.headers.get("content-length", "")
    return min(int(length), settings.disk_bytes) if length.isdecimal() else settings.disk_bytes


@router.get("/{agent_id}")
def show_agent(agent_id: AgentId, agents: Agents) -> AgentOut:
    """Show one agent: turns, branches, size, pin, quota, retention, labels."""
    return agents.show(agent_id)


@router.patch("/{agent_id}")
def change_agent(
    agent_id: AgentId, body: AgentOptions, agents: Agents, branch: BranchNumber = None
) -> AgentOut:
    """Change pin, quota, retention or labels; fields that are not sent stay as they are.

    With `branch` the pin is that of the branch.
    """
    return agents.update(agent_id, branch, **body.model_dump(exclude_unset=True))


@router.delete("/{agent_id}")
def delete_agent(agent_id: AgentId, agents: Agents) -> DeletedAgent:
    """Delete an agent, its stored responses, and every block that no other agent uses."""
    return agents.delete(agent_id)


@router.post("/{agent_id}/fork")
def fork_agent(
    agent_id: AgentId, body: ForkBody, agents: Agents, branch: BranchNumber = None
) -> AgentOut | AgentList:
    """Create an agent with the same history, or several (`ids`); no block is copied."""
    return agents.fork(agent_id, body, branch)


@router.post("/{agent_id}/rewind")
def rewind_agent(
    agent_id: AgentId, body: RewindBody, agents: Agents, branch: BranchNumber = None
) -> AgentOut:
    """Drop the turns after this one; with `branch`, that branch becomes the head."""
    return agents.rewind(agent_id, body.turn, branch)


@router.get(
    "/{agent_id}/export",
    response_class=StreamingResponse,
    responses={200: {"content": {TAR: {"schema": {"type": "string", "format": "binary"}}}}},
)
async def export_agent(
    request: Request, agent_id: AgentId, agents: Agents, branch: BranchNumber = None
) -> Response:
    """Download an agent as a bundle for a server with the same model. It is not encrypted."""
    transfers: Transfers = request.app.state.transfers
    with ExitStack() as held:
        held.enter_context(transfers.limit.one_more(request.state.owner))
        export = await transfers.run(agents.export, agent_id, branch)
        release = held.pop_all().close
    return ExportResponse(export.pieces, agent_id, transfers, release)
