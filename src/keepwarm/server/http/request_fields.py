"""What every API reads from a request: the agent, the cache policy, KV options, the time limit."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Literal

from fastapi import Depends, Request
from pydantic import Field

from keepwarm.config import Settings
from keepwarm.errors import BadField
from keepwarm.prefix.policy import Policy
from keepwarm.server.http.body import JsonInput, given_body, ignored_fields
from keepwarm.server.http.clients import AGENT_HEADER
from keepwarm.server.http.keys import tenant_agent_id
from keepwarm.text import request as engine_request
from keepwarm.text.request import KVOptions

CACHE_HEADER = "x-keepwarm-cache"
AGENT_IN_PATH = "agent_id"  # of routes that continue an agent
# How coding agents name their conversation; the first one present counts.
SESSION_HEADERS = ("x-claude-code-session-id", "session-id", "session_id", "x-session-id")
LIBRARIES = "python|node|axios|curl|go-|mozilla|(?:async)?(?:openai|anthropic|ollama)"
CLIENT = re.compile(rf"(?!{LIBRARIES})[A-Za-z][\w-]{{0,23}}", re.IGNORECASE)
AGENT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}")

PolicyName = Literal["read-write", "read-only", "ephemeral", "no-store", "durable"]


class KVOptionsIn(JsonInput):
    """How keys and values are stored."""

    max_kv_size: int | None = Field(default=None, ge=1, description="Keep only the last N tokens.")
    kv_bits: Literal[2, 4, 8] | None = Field(
        default=None, description="Quantise to this many bits."
    )
    kv_group_size: Literal[32, 64, 128] = 64
    quantized_kv_start: int = Field(
        default=0, ge=0, description="Tokens before this position are not quantised."
    )
    at_rest: Literal["exact", "q8", "q4"] = Field(
        default="exact", description="How blocks are kept: rounded or not."
    )


class KeepwarmOptions(JsonInput):
    """The `keepwarm` field of a request body."""

    agent: str | None = Field(default=None, description="Agent id of this conversation.")
    cache: PolicyName | None = Field(
        default=None, description="What the request may do with the cache."
    )
    continues: bool = Field(
        default=False,
        alias="continue",
        description="The messages are only what is new in the agent's conversation.",
    )
    explain: bool = Field(
        default=False,
        description="Report in the receipt why tokens were computed, and where the time went.",
    )
    kv: KVOptionsIn | None = Field(
        default=None, description="Null, or null in a field, turns the server's options off."
    )
    speculation: Literal["auto", "off"] = Field(
        default="auto", description="`off`: a token a step. It changes no answer."
    )
    exact: bool = Field(
        default=False, description="Keys and values as the model computes them: no KV options."
    )


class PromptBody(JsonInput):
    """The body of a request to a model, of any API."""

    model: str | None = Field(
        default=None,
        description="One of `/v1/models`. Any other is the first, or refused with strict_model.",
    )
    keepwarm: KeepwarmOptions | None = None


def settings_of(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


async def _config(request: Request) -> Settings:
    return settings_of(request)


Config = Annotated[Settings, Depends(_config)]


def request_fields(
    request: Request,
    options: KeepwarmOptions | None = None,
    hint: str | None = None,
    body: JsonInput | None = None,
) -> engine_request.Request:
    """A request without a prompt. The path names an agent that is continued; else headers override
    the body.

    `hint` is the API's own name for the conversation; `body` is what was understood of the request.
    """
    options, settings = options or KeepwarmOptions(), settings_of(request)
    continued: str | None = request.path_params.get(AGENT_IN_PATH)
    tenant: str = getattr(request.state, "tenant", "")
    agent = continued or _agent(request.headers, options, hint)
    return engine_request.Request(
        tenant=tenant,
        caller=getattr(request.state, "owner", "") if settings.share_cache else "",
        agent=tenant_agent_id(tenant, agent) if agent else None,
        continues=bool(continued) or options.continues,
        policy=_policy(request.headers, options),
        explain=options.explain,
        speculation=options.speculation == "auto",
        kv=_kv(options),
        exact=_is_exact(options),
        timeout_s=settings.request_timeout_s or None,
        request_id=getattr(request.state, "request_id", ""),
        client=_client(request.headers),
        arrival=getattr(request.state, "arrival", None),
        ignored_fields=ignored_fields(body, given_body(request)) if body else (),
    )


def _client(headers: Mapping[str, str]) -> str:
    """The name of the program, without its version; libraries are no programs."""
    found = CLIENT.match(headers.get("user-agent", ""))
    return found[0] if found else ""


def _kv(options: KeepwarmOptions) -> KVOptions:
    return KVOptions(**(options.kv or KVOptionsIn()).model_dump())


def _is_exact(options: KeepwarmOptions) -> bool:
    """Whether the server's own KV options are turned off."""
    names_defaults = _kv(options) == KVOptions()
    if options.exact and not names_defaults:
        raise BadField("exact and kv cannot be combined; choose one.", "keepwarm.exact")
    is_null = "kv" in options.model_fields_set and options.kv is None
    has_null = options.kv is not None and bool(options.kv.model_fields_set) and names_defaults
    return options.exact or is_null or has_null


def _agent(headers: Mapping[str, str], options: KeepwarmOptions, hint: str | None) -> str | None:
    named = headers.get(AGENT_HEADER) or options.agent
    if named:
        return checked_agent_id(named)
    sessions = (headers.get(name) for name in SESSION_HEADERS)
    return agent_id(hint or next(filter(None, sessions), None))


def checked_agent_id(named: str) -> str:
    if not AGENT_ID.fullmatch(named):
        raise BadField(
            "An agent id has up to 128 letters, digits and . _ @ -, "
            "and begins with a letter or digit.",
            "keepwarm.agent",
        )
    return named


def agent_id(hint: str | None) -> str | None:
    """An agent id from a client's name for its conversation; a name that is no id is hashed."""
    if not hint or AGENT_ID.fullmatch(hint):
        return hint or None
    return f"key-{hashlib.blake2s(hint.encode(errors='replace')).hexdigest()[:32]}"


def _policy(headers: Mapping[str, str], options: KeepwarmOptions) -> Policy:
    name = headers.get(CACHE_HEADER) or options.cache or Policy.READ_WRITE
    try:
        return Policy(name)
    except ValueError as error:
        known = ", ".join(Policy)
        raise BadField(
            f"{name!r} is not a cache policy; use one of {known}.", CACHE_HEADER
        ) from error
