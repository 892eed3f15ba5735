"""What the APIs have in common: who asks, what of the cache is wanted, plain text, receipts."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypeAlias

from fastapi import Depends, Request
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from keepwarm.cache.policy import Policy
from keepwarm.config import Settings
from keepwarm.errors import BadField
from keepwarm.server.host import EngineHost
from keepwarm.text.request import KVOptions, Receipt

AGENT_HEADER = "x-keepwarm-agent"
CACHE_HEADER = "x-keepwarm-cache"
RECEIPT_HEADER = "x-keepwarm-receipt"
# What the coding agents call their conversation by; the first that is there counts.
SESSION_HEADERS = ("x-claude-code-session-id", "session-id", "session_id", "x-session-id")
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
AGENT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}")  # the tenant has to fit in front

EVENT = {  # of a stream, as the OpenAPI document describes each
    "type": "object",
    "properties": {
        "event": {"type": "string", "description": "Its name, where the API has them."},
        "data": {"type": "string", "description": "JSON; OpenAI's completions end with `[DONE]`."},
    },
    "required": ["data"],
}

PolicyName = Literal["read-write", "read-only", "ephemeral", "no-store", "durable"]


class Shape(BaseModel):
    """A JSON object that came in: types are kept to, fields nobody knows are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class KVShape(Shape):
    """How keys and values are held."""

    max_kv_size: int | None = Field(
        default=None, ge=1, description="Keep only so many last tokens."
    )
    kv_bits: Literal[2, 4, 8] | None = Field(default=None, description="Round them to bits.")
    kv_group_size: Literal[32, 64, 128] = 64
    quantized_kv_start: int = Field(default=0, ge=0, description="Tokens before it stay exact.")


class Options(Shape):
    """The field `keepwarm` of a body."""

    agent: str | None = Field(default=None, description="Whose conversation this is.")
    cache: PolicyName | None = Field(
        default=None, description="What the request may do with the cache."
    )
    explain: bool = Field(default=False, description="Say in the receipt why tokens were computed.")
    kv: KVShape | None = None


class ContentPart(Shape):
    """A part of a message. Text only: media are refused."""

    type: str = Field(description="`text`; everything else is refused.")
    text: str | None = None
    refusal: str | None = None


Content: TypeAlias = str | Sequence[ContentPart] | None


class MissShape(TypedDict):
    position: int
    message: int | None
    reason: str
    nearest: int


class ReceiptShape(TypedDict):
    """What the prompt cost and what it was spared."""

    prompt_tokens: int
    reused: dict[str, int]
    recomputed: int
    saved_ms: float
    exact: bool
    spliced: int
    scrubbed: list[str]
    miss: NotRequired[MissShape]
    durable: NotRequired[bool]  # of a durable request, at its end


class Caller(NamedTuple):
    """Who asks and what they want of the cache; the fields are those of `engine.Request`."""

    tenant: str
    agent: str | None
    policy: Policy
    explain: bool
    kv: KVOptions
    timeout_s: float | None


async def host_of(request: Request) -> EngineHost:
    """A coroutine: what is none is sent through a thread, for each request."""
    host: EngineHost = request.app.state.host
    return host


def settings_of(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


async def _config(request: Request) -> Settings:
    return settings_of(request)


Host = Annotated[EngineHost, Depends(host_of)]
Config = Annotated[Settings, Depends(_config)]


def caller_of(request: Request, options: Options | None = None, hint: str | None = None) -> Caller:
    """Headers go before the body; `hint` is the API's own field for a conversation."""
    options = options or Options()
    kv = options.kv or KVShape()
    tenant: str = getattr(request.state, "tenant", "")
    agent = _agent(request.headers, options, hint)
    return Caller(
        tenant=tenant,
        agent=owned(tenant, agent) if agent else None,
        policy=_policy(request.headers, options),
        explain=options.explain,
        kv=KVOptions(**kv.model_dump()),
        timeout_s=settings_of(request).request_timeout_s or None,
    )


def _agent(headers: Mapping[str, str], options: Options, hint: str | None) -> str | None:
    named = headers.get(AGENT_HEADER) or options.agent
    if named:
        if not AGENT_ID.fullmatch(named):
            raise BadField(
                "An agent's id is up to 100 letters, digits and . _ @ -, "
                "beginning with a letter or digit.",
                "keepwarm.agent",
            )
        return named
    sessions = (headers.get(name) for name in SESSION_HEADERS)
    return agent_id(hint or next(filter(None, sessions), None))


def agent_id(hint: str | None) -> str | None:
    """A client's own name for a conversation as an agent's id; one that cannot be is digested."""
    if not hint or AGENT_ID.fullmatch(hint):
        return hint or None
    return f"key-{hashlib.blake2s(hint.encode(errors='replace')).hexdigest()[:32]}"


def owned(tenant: str, agent: str) -> str:
    """The id under which a tenant's agent is kept: two keys may use the same name."""
    return f"{tenant}.{agent}" if tenant else agent


def _policy(headers: Mapping[str, str], options: Options) -> Policy:
    name = headers.get(CACHE_HEADER) or options.cache or Policy.READ_WRITE
    try:
        return Policy(name)
    except ValueError as error:
        known = ", ".join(Policy)
        raise BadField(f"{name!r} is no cache policy; use one of {known}.", CACHE_HEADER) from error


def text_of(content: Content, where: str) -> str:
    """The text of a message; parts stand on lines of their own."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_texts(content, where))


def content_of(content: Content, where: str) -> str | list[dict[str, str]]:
    """The content of a message, as it was sent. Parts stay apart: whoever scrubs must know them."""
    if content is None or isinstance(content, str):
        return content or ""
    return [{"type": "text", "text": text} for text in _texts(content, where)]


def _texts(parts: Sequence[ContentPart], where: str) -> list[str]:
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(parts)]


def _part(part: ContentPart, where: str) -> str:
    if part.type not in TEXT_PARTS:
        raise media_refused(part.type, where)
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise BadField(f"{where} has no text; send it with one, or leave it out.", where)
    return text


def media_refused(kind: str, where: str) -> BadField:
    return BadField(f"{where} is of type {kind!r}; this model reads text only.", where)


def receipt_dict(receipt: Receipt) -> ReceiptShape:
    fields = asdict(receipt)
    fields["reused"] = dict(receipt.reused)
    fields["scrubbed"] = list(receipt.scrubbed)
    fields["saved_ms"] = round(receipt.saved_ms, 3)
    for name in ("miss", "durable"):
        if fields[name] is None:
            del fields[name]
    return fields  # type: ignore[return-value]


def receipt_headers(receipt: Receipt) -> dict[str, str]:
    return {RECEIPT_HEADER: json.dumps(receipt_dict(receipt), separators=(",", ":"))}


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def documented(whole: type) -> dict[int | str, dict[str, Any]]:
    """What a generating endpoint answers, for the OpenAPI document."""
    stream = {"text/event-stream": {"schema": EVENT}}
    return {
        200: {"model": whole, "description": "The answer, whole or as events.", "content": stream}
    }
