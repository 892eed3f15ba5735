"""Anthropic's endpoints: messages, and counting their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import Request, Response

from keepwarm.config import Settings
from keepwarm.server.anthropic import request as messages
from keepwarm.server.anthropic.events import CachedPrefix, MessageMeta, MessageStream, message
from keepwarm.server.anthropic.shapes import (
    AnthropicErrorOut,
    AnthropicTokensOut,
    CountRequest,
    MessageOut,
    MessagesRequest,
)
from keepwarm.server.anthropic.tools import ignored_tools
from keepwarm.server.host import ObservedAnswer
from keepwarm.server.http import scrub
from keepwarm.server.http.body import api_router
from keepwarm.server.http.request_fields import Config, InTurn, Served, request_fields
from keepwarm.server.http.sse import EventStream, WholeAnswer, answer_docs, new_id
from keepwarm.text import request as engine_request

router = api_router(
    prefix="/v1/messages",
    tags=["Anthropic"],
    responses={
        "4XX": {"model": AnthropicErrorOut, "description": "The request is invalid or refused."},
        "5XX": {
            "model": AnthropicErrorOut,
            "description": "The server failed or is shutting down.",
        },
    },
)


@router.post("", responses=answer_docs(MessageOut))
async def create_message(
    body: MessagesRequest, request: Request, models: Served, settings: Config, turn: InTurn
) -> Response:
    """Answer a conversation, as one object or as a stream of events."""
    host = await models.use(body.model, turn)
    asked = await turn.build(lambda: build_request(body, request, settings))
    answer = await host.submit(asked, turn)
    prefixes = await asyncio.to_thread(_cached_prefixes, answer) if asked.breakpoints else ()
    meta = MessageMeta(new_id("msg_"), host.name, prefixes, ignored_tools(body))
    if body.stream:
        return EventStream(answer, MessageStream(meta))
    return WholeAnswer(answer, lambda result: message(meta, result))


@router.post("/count_tokens")
async def count_tokens(
    body: CountRequest, request: Request, models: Served, settings: Config, turn: InTurn
) -> AnthropicTokensOut:
    """Count the prompt tokens of this request."""
    host = await models.use(body.model, turn)
    asked = await turn.build(lambda: build_request(body, request, settings))
    return {"input_tokens": await turn.run(host.engine.count_tokens, asked)}


def build_request(
    body: CountRequest, request: Request, settings: Settings
) -> engine_request.Request:
    """The request for the engine, scrubbed."""
    session = messages.session_of(body.metadata.user_id if body.metadata else None)
    fields = request_fields(request, body.keepwarm, session, body)
    rules = scrub.rules_for(settings.scrub, request.headers)
    return scrub.scrub_request(messages.request_of(body, fields, settings), rules)


def _cached_prefixes(answer: ObservedAnswer) -> Sequence[CachedPrefix]:
    """The prompt up to each breakpoint; none if the policy does not write."""
    prepared = answer.prepared
    if prepared is None or not prepared.request.policy.writes:
        return ()
    return [CachedPrefix(n_tokens, ttl_s or 0.0) for n_tokens, ttl_s in prepared.breakpoints]
