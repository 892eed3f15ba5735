"""Bodies and answers of the agents API."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired, TypeAlias

from pydantic import Field, StringConstraints
from typing_extensions import TypedDict

from keepwarm.agents.agent import MAX_KEY, MAX_LABELS, MAX_VALUE
from keepwarm.server.http.body import JsonInput
from keepwarm.server.http.request_fields import AGENT_ID

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
    id: AgentId = Field(description="Up to 100 letters, digits and . _ @ -")


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


class QuotaBody(JsonInput):
    quota_bytes: int | None = Field(ge=1, le=1 << 60, description="null removes the quota.")


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
    model: str
    branch: int
    n_tokens: int
    turns: list[int]
    n_bytes: int
    pinned: bool
    quota_bytes: int | None
    retention_s: float | None
    metadata: dict[str, str]
    created: float
    used: float
    forked_from: str | None
    ephemeral: bool  # nothing of it is written
    imported: bool  # its blocks came with a bundle that nobody here vouches for
    branches: list[BranchOut]  # the head first


class AgentList(TypedDict):
    object: Literal["list"]
    data: list[AgentOut]


class DeletedAgent(TypedDict):
    id: str
    object: Literal["agent"]
    deleted: bool
    removed_blocks: int
    shared_unreached: NotRequired[list[str]]  # tiers that could not be cleared yet
