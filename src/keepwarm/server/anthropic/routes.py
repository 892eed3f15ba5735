"""Anthropic's endpoints: messages, and counting their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fastapi import Response

from keepwarm.server.anthropic import request as messages
from keepwarm.server.anthropic.events import (
    CachedPrefix,
    Fields,
    MessageMeta,
    MessageStream,
    message,
)
from keepwarm.server.anthropic.shapes import CountRequest, MessagesRequest
from keepwarm.server.http.body import api_router
from keepwarm.server.http.problems import AnthropicErrorOut
from keepwarm.server.http.sse import EventStream, WholeAnswer, answer_docs, new_id
from keepwarm.server.models.calls import ApiCall, Call
from keepwarm.server.models.host import ObservedAnswer
from keepwarm.text import request as engine_request

router = api_router(prefix="/v1/messages", tags=["Anthropic"], errors=AnthropicErrorOut)


@router.post("", responses=answer_docs(Fields))
async def create_message(body: MessagesRequest, call: Call) -> Response:
    """Answer a conversation, as one object or as a stream of events."""
    host, request = await call.prepare(body.model, partial(message_request, body, call))
    answer = await host.submit(request, call.slot)
    prefixes = await call.slot.on_thread(_cached_prefixes, answer) if request.breakpoints else ()
    meta = MessageMeta(new_id("msg_"), host.name, prefixes, messages.ignored_tools(body))
    if body.stream:
        return EventStream(answer, MessageStream(meta))
    return WholeAnswer(answer, lambda result: message(meta, result))


@router.post("/count_tokens")
async def count_tokens(body: CountRequest, call: Call) -> Fields:
    """Count the prompt tokens of this request."""
    host, request = await call.prepare(body.model, partial(message_request, body, call))
    return {"input_tokens": await call.slot.run(host.engine.count_tokens, request)}


def message_request(body: CountRequest, call: ApiCall) -> engine_request.Request:
    session = messages.session_of(body.metadata.user_id if body.metadata else None)
    return messages.request_of(body, call.fields(body, session), call.settings)


def _cached_prefixes(answer: ObservedAnswer) -> Sequence[CachedPrefix]:
    """The prompt up to each breakpoint; none if the policy does not write."""
    prepared = answer.prepared
    if prepared is None or not prepared.request.policy.writes:
        return ()
    return [CachedPrefix(n_tokens, ttl_s or 0.0) for n_tokens, ttl_s in prepared.breakpoints]
