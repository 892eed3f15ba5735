"""Talking to an agent: OpenAI's and Anthropic's requests with only what is new.

An official client works with `/v1/agents/{id}` as its base URL. What it sends is rendered behind
the tokens that the agent has; the receipt says how many (`continued`).
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import Response
from pydantic import Field
from typing_extensions import TypedDict

from keepwarm.engine.answer import Answer
from keepwarm.server.admin.agents import AgentId
from keepwarm.server.anthropic.request import MessagesRequest
from keepwarm.server.anthropic.routes import create_message
from keepwarm.server.http.body import JsonInput, api_router
from keepwarm.server.http.problems import AnthropicErrorOut, error_docs
from keepwarm.server.http.request_fields import request_fields
from keepwarm.server.http.sse import ReceiptOut, answer_docs, cancel_on_disconnect, receipt_dict
from keepwarm.server.models.calls import ApiCall, Call
from keepwarm.server.models.host import ObservedAnswer
from keepwarm.server.openai.routes import create_chat_completion, create_completion
from keepwarm.server.openai.shapes import ChatRequest, CompletionRequest
from keepwarm.session.compaction import MAX_TOKENS, Compaction
from keepwarm.text import request as engine_request

router = api_router(prefix="/v1/agents/{agent_id}", tags=["Agents"])


@router.post("/chat/completions", responses=answer_docs(dict[str, Any]))
async def continue_chat(
    agent_id: AgentId,  # noqa: ARG001  # `request_fields` reads it from the path
    body: ChatRequest,
    call: Call,
) -> Response:
    """Continue an agent with new messages, in OpenAI's format."""
    return await create_chat_completion(body, call)


@router.post("/completions", responses=answer_docs(dict[str, Any]))
async def continue_text(
    agent_id: AgentId,  # noqa: ARG001
    body: CompletionRequest,
    call: Call,
) -> Response:
    """Continue an agent with new text, without a chat template, in OpenAI's format."""
    return await create_completion(body, call)


ANTHROPIC = {**error_docs(AnthropicErrorOut), **answer_docs(dict[str, Any])}


@router.post("/v1/messages", responses=ANTHROPIC)
async def continue_messages(
    agent_id: AgentId,  # noqa: ARG001
    body: MessagesRequest,
    call: Call,
) -> Response:
    """Continue an agent with new messages, in Anthropic's format.

    Anthropic's clients append `/v1/messages` to their base URL.
    """
    return await create_message(body, call)


class CompactBody(JsonInput):
    model: str | None = Field(default=None, description="The model to use.")
    instruction: str | None = Field(
        default=None, min_length=1, description="What to ask for instead of a plain summary."
    )
    max_tokens: int | None = Field(
        default=None, ge=1, description=f"Of the summary; {MAX_TOKENS:,} by default."
    )


class CompactionOut(TypedDict):
    id: str
    object: Literal["agent.compaction"]
    summary: str
    n_before: int  # tokens of the conversation until now, with the instruction
    n_tokens: int  # tokens that the next turn begins with; they are warm
    keepwarm: ReceiptOut  # of the summary


@router.post("/compact")
async def compact_agent(agent_id: AgentId, body: CompactBody, call: Call) -> CompactionOut:
    """Replace an agent's conversation by the model's summary of it.

    The instruction is read behind what is warm, so the summary costs only its own tokens. Then
    system prompt, tools and summary are prefilled, after all that other clients wait for.
    """
    host, turn = await call.host(body.model), call.slot
    arguments = (host.engine, request_fields(call.request), body.instruction, body.max_tokens)
    work = await turn.run(lambda _: Compaction.of_agent(*arguments))
    result = await _result(await host.submit(work.request, turn), call)
    await _result(await turn.resume(work.warm, result), call)
    made = await turn.manage(work.finish, result)
    return {
        "id": agent_id,
        "object": "agent.compaction",
        "summary": made.summary,
        "n_before": made.n_before,
        "n_tokens": made.n_tokens,
        "keepwarm": receipt_dict(made.receipt),
    }


async def _result(answer: Answer | ObservedAnswer, call: ApiCall) -> engine_request.Result:
    """The whole answer, unless the client leaves before it."""
    async with cancel_on_disconnect(answer, call.request.receive):
        return await answer.wait()
