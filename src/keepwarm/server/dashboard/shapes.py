"""The dashboard's JSON."""

from __future__ import annotations

from typing import Annotated, Literal

from typing_extensions import TypedDict

from keepwarm.server.deprecation import renamed_to
from keepwarm.server.http.receipts import ReceiptOut
from keepwarm.server.manage.agent_shapes import AgentOut
from keepwarm.telemetry.ledger import RequestState
from keepwarm.telemetry.misses import MissReason


class ViewerOut(TypedDict):
    """What the caller's key may see."""

    key_needed: bool
    admin: bool
    texts: bool  # the text of its own prompts
    sums: bool  # totals over all keys


class RequestOut(TypedDict):
    number: int
    request_id: str  # as in the log and in the answer's header
    key: str | None  # of another tenant; only the admin key sees those
    agent: str | None
    state: RequestState
    seconds: float
    prompt_tokens: int
    answer_tokens: int
    ttft_ms: float | None
    first_token_ms: Annotated[float | None, renamed_to("ttft_ms")]
    tokens_per_second: float | None
    prefilled: int  # tokens of the prompt that the model was fed
    processed: int  # tokens of the prompt that are in its cache
    phases_ms: dict[str, float]  # until the first token: waiting, restoring, prefilling, first_step
    receipt: ReceiptOut | None
    error: str
    ended: float | None
    log: str | None  # its line in the log, once it has ended


class BudgetOut(TypedDict):
    budget: str
    place: Annotated[str, renamed_to("budget")]
    n_bytes: int
    max_bytes: int | None


class ConditionOut(TypedDict):
    """Red or amber when records were damaged or saves lost, with the reasons."""

    level: Literal["green", "amber", "red"]
    reasons: list[str]


class ServedModelOut(TypedDict):
    name: str
    loaded: bool


class ActivityOut(TypedDict):
    object: Literal["dashboard.now"]
    time: float
    model: str  # the default
    models: list[ServedModelOut]  # that are configured or were asked for, the default first
    viewer: ViewerOut
    you: Annotated[ViewerOut, renamed_to("viewer")]
    running: list[RequestOut]
    ended: list[RequestOut]
    others: dict[str, int]  # requests of other keys, by state
    prefilled_tokens: int | None  # of all keys, like the rest; null if not shown
    generated_tokens: int | None
    prefill_tokens_per_s: float
    memory: list[BudgetOut] | None
    condition: ConditionOut | None
    revision: str  # another one whenever something else than this may have changed


class RequestListOut(TypedDict):
    object: Literal["list"]
    data: list[RequestOut]  # newest first


class CancelledRequestOut(TypedDict):
    object: Literal["dashboard.request"]
    number: int
    cancelled: bool


class HistoryPointOut(TypedDict):
    """One interval: prompt tokens by source, tokens computed, answers by outcome."""

    at: float
    live: int
    memory: int
    disk: int
    shared: int
    computed: int
    prefilled: int
    generated: int
    finished: int
    cancelled: int
    failed: int
    ttft_p50_ms: float | None  # time to the first token, to within 9 %; null without answers
    ttft_p95_ms: float | None


class TotalsOut(TypedDict):
    reused: dict[str, int]  # tokens by tier
    computed: int  # tokens
    saved_s: float


HealthCountsOut = TypedDict(
    "HealthCountsOut",
    {
        "quarantined": int,
        "read_errors": int,
        "dropped_saves": int,
        "failed_saves": int,
        "failed_restores": int,
        "evicted": int,
        "audits": int,
        "drifts": int,
        "set aside as damaged": Annotated[int, renamed_to("quarantined")],
        "could not be read": Annotated[int, renamed_to("read_errors")],
        "saves given up": Annotated[int, renamed_to("dropped_saves")],
        "saves that failed": Annotated[int, renamed_to("failed_saves")],
        "let go for lack of room": Annotated[int, renamed_to("evicted")],
        "audits that differed": Annotated[int, renamed_to("drifts")],
    },
)


class SavingsOut(TypedDict):
    object: Literal["dashboard.saved"]
    hours: int
    points: list[HistoryPointOut]
    today: TotalsOut
    total: TotalsOut
    disk: BudgetOut
    blocks: int
    written_by_day: dict[str, int]
    health: HealthCountsOut
    version: str
    started: float
    ttft_p50_ms: float | None  # of the hours shown
    ttft_p95_ms: float | None
    hit_rate: float | None  # tokens reused ÷ prompt tokens, of all requests to the store
    hit_rate_from_turn_2: float | None  # of those that continue a conversation


class ForestAgentOut(TypedDict):
    """An agent in the forest."""

    id: str
    key: str | None


class BlockRunOut(TypedDict):
    """Consecutive blocks. `parent`, `agents` and `ends` are list indexes."""

    id: str
    parent: int | None
    namespace: str  # one per model and KV options
    first_block: int  # its position in the prompt
    family: Annotated[str, renamed_to("namespace")]
    number: Annotated[int, renamed_to("first_block")]
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
    omitted_blocks: int  # of the viewer, too many to draw
    other_blocks: int  # of other keys
    left_out: Annotated[int, renamed_to("omitted_blocks")]
    others: Annotated[int, renamed_to("other_blocks")]


class ListedAgentOut(AgentOut):
    """An agent, and whose it is."""

    key: str | None  # of another tenant; only the admin key sees those


class ListedAgentsOut(TypedDict):
    object: Literal["list"]
    data: list[ListedAgentOut]


class ClientOut(TypedDict):
    """How to start a client of this server."""

    client: str
    title: str
    lines: list[str]  # for a shell
    notes: list[str]


class ConnectOut(TypedDict):
    object: Literal["dashboard.connect"]
    url: str
    model: str  # that the lines are for
    models: list[str]  # that requests may name, the default first
    key: str | None  # its name; null where no key is needed
    clients: list[ClientOut]


class SettingOut(TypedDict):
    name: str
    value: str  # of a secret only whether it is set
    default: str | None
    changed: bool


class SettingListOut(TypedDict):
    object: Literal["list"]
    data: list[SettingOut]


class MissOut(TypedDict):
    number: int
    key: str | None
    agent: str | None
    when: float
    prompt_tokens: int
    restored: int
    position: int
    wasted: int  # tokens that an earlier prompt had too
    again: Annotated[int, renamed_to("wasted")]
    seconds: float
    reason: MissReason
    has_text: bool
    text: Annotated[bool, renamed_to("has_text")]


class MissListOut(TypedDict):
    object: Literal["list"]
    data: list[MissOut]


class DivergenceOut(TypedDict):
    """Where a prompt diverges from an earlier one of the same key."""

    object: Literal["dashboard.place"]
    before: str
    earlier: str
    now: str
