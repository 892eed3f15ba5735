"""Prefill elsewhere: compute a prompt here and share it at once, for another machine to restore."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from fastapi import Response
from typing_extensions import TypedDict

from keepwarm.cache.restore.restorer import Restorer
from keepwarm.errors import BadInput
from keepwarm.server.host import ObservedAnswer
from keepwarm.server.http.body import api_router
from keepwarm.server.http.receipts import ReceiptOut, receipt_dict
from keepwarm.server.http.request_fields import InTurn
from keepwarm.server.http.sse import WholeAnswer
from keepwarm.server.http.turns import Turn
from keepwarm.server.manage.cache import (
    ByChat,
    ByCompletion,
    ByMessages,
    ByResponses,
    PromptTo,
)
from keepwarm.server.openai.shapes import OpenAIErrorOut
from keepwarm.text.request import Event, Result


class PrefillOut(TypedDict):
    """What was done with a prompt, in tokens."""

    object: Literal["cache.prefill"]
    prompt_tokens: int
    computed: int
    kept: int  # what this machine would restore after a restart: all but the last, at best
    shared: int  # what another machine would
    keepwarm: ReceiptOut


router = api_router(
    prefix="/v1/cache/prefill",
    tags=["Cache"],
    responses={
        "4XX": {"model": OpenAIErrorOut, "description": "The request is invalid."},
        "5XX": {"model": OpenAIErrorOut, "description": "The server failed or is stopping."},
    },
)
PREFILLED: Mapping[int | str, dict[str, Any]] = {200: {"model": PrefillOut}}


@router.post("", responses=dict(PREFILLED))
async def prefill(asked: ByChat, turn: InTurn) -> Response:
    """Prefill a chat completion's prompt and share it, so that its first use on another machine is
    warm.
    """
    return await _prefill(asked, turn)


@router.post("/completions", responses=dict(PREFILLED))
async def prefill_completion(asked: ByCompletion, turn: InTurn) -> Response:
    """The same for a text completion with a single prompt, text or token ids."""
    return await _prefill(asked, turn)


@router.post("/messages", responses=dict(PREFILLED))
async def prefill_messages(asked: ByMessages, turn: InTurn) -> Response:
    """The same for the body of Anthropic's `/v1/messages`."""
    return await _prefill(asked, turn)


@router.post("/responses", responses=dict(PREFILLED))
async def prefill_responses(asked: ByResponses, turn: InTurn) -> Response:
    """The same for the body of OpenAI's `/v1/responses`."""
    return await _prefill(asked, turn)


async def _prefill(asked: PromptTo, turn: Turn) -> Response:
    engine = asked.host.engine
    request, lane = await turn.run(lambda _: engine.resolve(asked.request))
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
    answer = await asked.host.warm(asked.request, turn)
    assert answer.prepared is not None
    tokens = answer.prepared.tokens
    shared = SharedPrompt(answer, lane.for_prompt(len(tokens)).restorer, tokens)
    return WholeAnswer(shared, shared.shape)


class RestorableTokens(NamedTuple):
    """Where tokens can be restored from."""

    kept: int
    shared: int


class SharedPrompt:
    """A prompt without an answer, which ends when the prompt is shared, or cannot be."""

    def __init__(self, answer: ObservedAnswer, restorer: Restorer, tokens: list[int]) -> None:
        self._answer, self._restorer, self._tokens = answer, restorer, tokens
        self._places = RestorableTokens(0, 0)

    def cancel(self) -> None:
        self._answer.cancel()

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for event in self._answer:
            yield event
        # The last token is always computed, so this is the place that will be restored.
        if (tried := self._restorer.share(self._tokens[:-1])) is not None:
            await asyncio.wrap_future(tried)
        self._places = await asyncio.to_thread(self._look)

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
