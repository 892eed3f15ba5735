"""What the dashboard is told, as JSON."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from keepwarm.engine.insight.journal import RequestState
from keepwarm.engine.insight.misses import MissReason
from keepwarm.server.http.receipts import ReceiptOut


class ViewerOut(TypedDict):
    """What the caller's key is good for."""

    key_needed: bool
    admin: bool
    texts: bool  # whether the texts of one's own prompts are shown
    sums: bool  # whether what is counted over all keys is shown


class RequestOut(TypedDict):
    number: int
    key: str | None  # whose, where it is not one's own; only an admin is told
    agent: str | None
    state: RequestState
    seconds: float
    prompt_tokens: int
    answer_tokens: int
    first_token_ms: float | None
    tokens_per_second: float | None
    receipt: ReceiptOut | None
    error: str
    ended: float | None


class BudgetOut(TypedDict):
    place: str
    n_bytes: int
    max_bytes: int | None


class ActivityOut(TypedDict):
    object: Literal["dashboard.now"]
    time: float
    model: str
    you: ViewerOut
    running: list[RequestOut]
    ended: list[RequestOut]
    others: dict[str, int]  # requests of other keys, by state
    prefilled_tokens: int | None  # of all keys, as is the rest; null where that is not shown
    generated_tokens: int | None
    prefill_tokens_per_s: float
    memory: list[BudgetOut] | None


class HistoryPointOut(TypedDict):
    """Prompt tokens in a stretch of time, by where they came from."""

    at: float
    live: int
    memory: int
    disk: int
    computed: int


class TotalsOut(TypedDict):
    reused: dict[str, int]  # tokens by place
    computed: int  # tokens
    saved_s: float
    written_bytes: int


class SavingsOut(TypedDict):
    object: Literal["dashboard.saved"]
    hours: int
    points: list[HistoryPointOut]
    today: TotalsOut
    total: TotalsOut
    disk: BudgetOut
    blocks: int
    written_by_day: dict[str, int]
    health: dict[str, int]


class ForestAgentOut(TypedDict):
    """An agent, as the forest names it."""

    id: str
    key: str | None


class BlockRunOut(TypedDict):
    """Blocks in a row. `parent`, `agents` and `ends` are places in lists."""

    id: str
    parent: int | None
    family: str  # of which model and KV options
    number: int
    blocks: int
    tokens: int
    bytes: int
    oldest: float
    used: float
    memory: bool
    disk: bool
    pinned: bool
    agents: list[int]
    ends: list[int]


class ForestOut(TypedDict):
    object: Literal["dashboard.forest"]
    agents: list[ForestAgentOut]
    runs: list[BlockRunOut]
    blocks: int
    left_out: int  # of one's own, too many to draw
    others: int  # blocks of other keys


class MissOut(TypedDict):
    number: int
    key: str | None
    agent: str | None
    when: float
    prompt_tokens: int
    restored: int
    position: int
    again: int
    seconds: float
    reason: MissReason
    text: bool  # whether its text can be asked for


class MissListOut(TypedDict):
    object: Literal["list"]
    data: list[MissOut]


class DivergenceOut(TypedDict):
    """Where a prompt parts from an earlier one of the same key."""

    object: Literal["dashboard.place"]
    before: str
    earlier: str
    now: str


class BudgetOutcomeOut(TypedDict):
    max_bytes: int | None
    found_tokens: int
    more_tokens: int  # than under the budget of now; fewer are negative
    more_seconds: float


class WhatIfOut(TypedDict):
    object: Literal["dashboard.what_if"]
    looks: int
    since: float | None
    asked_tokens: int
    max_bytes: int | None
    outcomes: list[BudgetOutcomeOut]
