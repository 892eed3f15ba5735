"""Prompts without answers: how warm one is (`lookup`), prefill it (`warm`), share it (`prefill`).

Each takes the body of a chat completion, or under `/completions`, `/messages` and `/responses` the
body of that API.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Literal, NamedTuple, TypeAlias

from fastapi import APIRouter, Depends, Response
from fastapi.responses import JSONResponse
from typing_extensions import TypedDict

from keepwarm.cache.restore.restorer import Restorer
from keepwarm.errors import BadField, BadInput
from keepwarm.server.anthropic.routes import message_request
from keepwarm.server.anthropic.shapes import CountRequest
from keepwarm.server.http.body import api_router
from keepwarm.server.http.permits import PrepareSlot
from keepwarm.server.http.sse import ReceiptOut, WholeAnswer, receipt_dict
from keepwarm.server.models.calls import Call
from keepwarm.server.models.host import EngineHost, ObservedAnswer
from keepwarm.server.openai.routes import chat_request, completion_requests
from keepwarm.server.openai.shapes import ChatRequest, CompletionRequest
from keepwarm.server.responses.routes import Answers, prepare_response
from keepwarm.server.responses.shapes import InputRequest
from keepwarm.text.request import Event, Request, Result


class LookupOut(TypedDict):
    """How warm a prompt is: tokens by the tier that holds them."""

    object: Literal["cache.lookup"]
    prompt_tokens: int
    warm: dict[str, int]
    ttft_ms: float
    scrubbed: list[str]


class WarmOut(TypedDict):
    object: Literal["cache.warm"]
    keepwarm: ReceiptOut


class PrefillOut(TypedDict):
    """What was done with a prompt, in tokens."""

    object: Literal["cache.prefill"]
    prompt_tokens: int
    computed: int
    kept: int  # what this machine would restore after a restart: all but the last, at best
    shared: int  # what another machine would
    keepwarm: ReceiptOut


# Prompts, by the API of their body


class PromptTo(NamedTuple):
    """A prompt, and the model that it is for."""

    host: EngineHost
    request: Request
    slot: PrepareSlot


async def _of_chat(body: ChatRequest, call: Call) -> PromptTo:
    return PromptTo(*await call.prepare(body.model, lambda: chat_request(body, call)), call.slot)


async def _of_completion(body: CompletionRequest, call: Call) -> PromptTo:
    host = await call.host(body.model)
    requests = await call.slot.build(lambda: completion_requests(body, call, host))
    if len(requests) > 1:
        raise BadField("The body has several prompts; send one at a time.", "prompt")
    return PromptTo(host, requests[0], call.slot)


async def _of_message(body: CountRequest, call: Call) -> PromptTo:
    return PromptTo(*await call.prepare(body.model, lambda: message_request(body, call)), call.slot)


async def _of_response(body: InputRequest, call: Call, answers: Answers) -> PromptTo:
    host, request, _ = await prepare_response(body, call, answers)
    return PromptTo(host, request, call.slot)


# What is done with them


async def look_up(prompt: PromptTo) -> Response:
    """Report how much of a prompt is cached; computes nothing."""
    found = await prompt.slot.run(prompt.host.engine.lookup, prompt.request)
    fields: LookupOut = {
        "object": "cache.lookup",
        "prompt_tokens": found.prompt_tokens,
        "warm": dict(found.warm),
        "ttft_ms": found.first_token_ms,
        "scrubbed": list(prompt.request.scrubbed),
    }
    return JSONResponse(fields)


async def warm(prompt: PromptTo) -> Response:
    """Prefill a prompt and store it, so that its first use is warm."""
    return WholeAnswer(await prompt.host.warm(prompt.request, prompt.slot), _warmed)


def _warmed(result: Result) -> WarmOut:
    return {"object": "cache.warm", "keepwarm": receipt_dict(result.receipt)}


async def prefill(prompt: PromptTo) -> Response:
    """Prefill a prompt and share it, so that its first use on another machine is warm."""
    engine = prompt.host.engine
    request, lane = await prompt.slot.run(lambda _: engine.resolve(prompt.request))
    if not lane.restorer.shares:
        raise BadInput(
            "This server shares nothing; set `remote` to a place that the other machine uses too, "
            "or call /v1/cache/warm."
        )
    if not request.policy.to_disk:
        raise BadInput(
            f"With the policy {request.policy.value} nothing is written, so nothing can be shared; "
            "use read-write or durable."
        )
    answer = await prompt.host.warm(prompt.request, prompt.slot)
    assert answer.prepared is not None
    tokens = answer.prepared.tokens
    restorer = lane.for_prompt(len(tokens)).restorer
    shared = SharedPrompt(answer, restorer, tokens, prompt.slot)
    return WholeAnswer(shared, shared.shape)


class RestorableTokens(NamedTuple):
    """Where tokens can be restored from."""

    kept: int
    shared: int


class SharedPrompt:
    """A prompt without an answer, which ends when the prompt is shared, or cannot be."""

    def __init__(
        self, answer: ObservedAnswer, restorer: Restorer, tokens: list[int], slot: PrepareSlot
    ) -> None:
        self._answer, self._restorer, self._tokens, self._slot = answer, restorer, tokens, slot
        self._places = RestorableTokens(0, 0)

    def cancel(self) -> None:
        self._answer.cancel()

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for event in self._answer:
            yield event
        # The last token is always computed, so this is the place that will be restored.
        if (tried := self._restorer.share(self._tokens[:-1])) is not None:
            await asyncio.wrap_future(tried)
        self._places = await self._slot.on_thread(self._look)

    def _look(self) -> RestorableTokens:
        self._restorer.writer.flush()
        n_shared = self._restorer.n_shared(self._tokens)
        return RestorableTokens(self._restorer.n_on_disk(self._tokens), n_shared or 0)

    def shape(self, result: Result) -> PrefillOut:
        receipt = replace(result.receipt, shared=self._places.shared)
        return {
            "object": "cache.prefill",
            "prompt_tokens": receipt.prompt_tokens,
            "computed": receipt.recomputed,
            "kept": self._places.kept,
            "shared": self._places.shared,
            "keepwarm": receipt_dict(receipt),
        }


PromptOf: TypeAlias = Callable[..., Awaitable[PromptTo]]
Action: TypeAlias = Callable[[PromptTo], Awaitable[Response]]
BODIES: Mapping[str, tuple[PromptOf, str]] = {
    "": (_of_chat, "a chat completion"),
    "/completions": (_of_completion, "a text completion with a single prompt, text or token ids"),
    "/messages": (_of_message, "Anthropic's `/v1/messages`"),
    "/responses": (_of_response, "OpenAI's `/v1/responses`"),
}
ACTIONS: Mapping[str, tuple[Action, type]] = {
    "lookup": (look_up, LookupOut),
    "warm": (warm, WarmOut),
    "prefill": (prefill, PrefillOut),
}


def _make_router() -> APIRouter:
    """Every action for every body."""
    made = api_router(prefix="/v1/cache", tags=["Cache"])
    for verb, (act, model) in ACTIONS.items():
        for path, (prompt_of, body) in BODIES.items():
            made.add_api_route(
                f"/{verb}{path}",
                _endpoint(prompt_of, act),
                methods=["POST"],
                name=f"{verb}{path.replace('/', '_')}",
                description=f"{act.__doc__} Takes the body of {body}.",
                responses={200: {"model": model}},
            )
    return made


def _endpoint(prompt_of: PromptOf, act: Action) -> Callable[..., Awaitable[Response]]:
    async def endpoint(prompt: PromptTo = Depends(prompt_of)) -> Response:  # noqa: B008
        return await act(prompt)

    return endpoint


router = _make_router()
