"""OpenAI's responses: answers that the server can keep and continue by their id."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, TypeAlias

from fastapi import APIRouter, Depends, Request, Response

from keepwarm.config import Settings
from keepwarm.engine.engine import Engine
from keepwarm.errors import BadField, ContextTooLong
from keepwarm.server.host import EngineHost, ObservedAnswer
from keepwarm.server.http import scrub
from keepwarm.server.http.request_fields import Config, Host, request_fields
from keepwarm.server.http.sse import EventStream, WholeAnswer, answer_docs
from keepwarm.server.openai.shapes import OpenAIErrorOut
from keepwarm.server.openai.tokens import Pieces
from keepwarm.server.responses.events import (
    BuiltAnswer,
    ResponseBuilder,
    ResponseStream,
    answer_options_of,
    begun,
)
from keepwarm.server.responses.request import items_of, offered, request_of
from keepwarm.server.responses.response_store import ResponseStore, StoredResponse
from keepwarm.server.responses.shapes import (
    DeletedOut,
    InputRequest,
    Item,
    ItemList,
    ResponseOut,
    ResponsesRequest,
    ResponseTokensOut,
)
from keepwarm.server.responses.truncation import shortened
from keepwarm.text import request as engine_request

REFUSED = {
    "background": "background is not possible here: answers are awaited; leave it out, and use "
    "stream to see an answer while it is made.",
    "conversation": "conversation names items that OpenAI keeps; continue an answer with "
    "previous_response_id, or send all items as input.",
    "prompt": "prompt names a text that OpenAI keeps; send it as instructions or input.",
}

router = APIRouter(
    prefix="/v1/responses",
    tags=["OpenAI responses"],
    responses={
        "4XX": {"model": OpenAIErrorOut, "description": "The request cannot be answered."},
        "5XX": {"model": OpenAIErrorOut, "description": "The server failed, or is stopping."},
    },
)


Ask: TypeAlias = Callable[[Sequence[Item]], engine_request.Request]


class TenantResponses:
    """The answers that one tenant may refer to."""

    def __init__(self, request: Request) -> None:
        self._store: ResponseStore = request.app.state.responses
        self._tenant: str = getattr(request.state, "tenant", "")

    def get(self, response_id: str) -> StoredResponse:
        return self._store.get(self._tenant, response_id)

    def delete(self, response_id: str) -> None:
        self._store.delete(self._tenant, response_id)

    def keep(self, response: ResponseOut, items: Sequence[Item], n_given: int) -> None:
        if response["store"]:
            self._store.put(self._tenant, response, items, n_given)

    def conversation(self, body: InputRequest) -> list[Item]:
        """All items: of the answer that this one follows, and its own."""
        before: Sequence[Item] = ()
        if body.previous_response_id is not None:
            before = self._store.get(self._tenant, body.previous_response_id).items
        return [*before, *map(self._resolved, items_of(body.input))]

    def _resolved(self, item: Item) -> Item:
        if item.type != "item_reference":
            return item
        found = self._store.item(self._tenant, item.id or "")
        if found is None:
            raise BadField(f"No item {item.id!r} is kept here; send it whole.", "input")
        return found


async def _shelf(request: Request) -> TenantResponses:
    return TenantResponses(request)


Answers = Annotated[TenantResponses, Depends(_shelf)]


@router.post("", responses=answer_docs(ResponseOut))
async def create_response(
    body: ResponsesRequest, request: Request, host: Host, settings: Config, answers: Answers
) -> Response:
    """Answer a conversation, whole or as a stream of events."""
    host.check_model(body.model)
    _check_known(body)
    items = answers.conversation(body)
    ask = request_builder(body, request, settings)
    asked = ask(items)
    answer, n_dropped = await _submit(host, ask, items, forget=body.truncation == "auto")
    scored = asked.sampling.top_logprobs is not None
    pieces = Pieces(host.engine.model.tokenizer) if scored else None
    wishes = answer_options_of(body, offered(body.tools or ()), asked, n_dropped, pieces)
    n_given = len(items_of(body.input))
    builder = ResponseBuilder(
        begun(body, host.name, asked), wishes, lambda made: answers.keep(made, items, n_given)
    )
    if body.stream:
        return EventStream(answer, ResponseStream(builder))
    return WholeAnswer(BuiltAnswer(answer, builder), lambda _: builder.response)


def request_builder(body: InputRequest, request: Request, settings: Settings) -> Ask:
    """A function: the request as the engine gets it, with these items."""
    caller = request_fields(request, body.keepwarm, body.prompt_cache_key)
    rules = scrub.rules_for(settings.scrub, request.headers)
    return lambda items: scrub.scrub_request(request_of(body, items, caller, settings), rules)


async def _submit(
    host: EngineHost, ask: Ask, items: Sequence[Item], *, forget: bool
) -> tuple[ObservedAnswer, int]:
    """Begin an answer; where all items are too long and it may forget, say how many it has."""
    try:
        return await host.submit(ask(items)), 0
    except ContextTooLong:
        if not forget:
            raise
    kept = await asyncio.to_thread(_shortened, host.engine, ask, items)
    return await host.submit(ask(kept)), len(items) - len(kept)


def _shortened(engine: Engine, ask: Ask, items: Sequence[Item]) -> list[Item]:
    def count(some: Sequence[Item]) -> int:
        return engine.count_tokens(ask(some))

    return shortened(items, count, engine.model.n_context, ask(items).sampling.max_tokens)


@router.post("/input_tokens")
async def count_input_tokens(
    body: InputRequest, request: Request, host: Host, settings: Config, answers: Answers
) -> ResponseTokensOut:
    """How many tokens the model would read for this request."""
    host.check_model(body.model)
    ask = request_builder(body, request, settings)
    n_tokens = await asyncio.to_thread(host.engine.count_tokens, ask(answers.conversation(body)))
    return {"object": "response.input_tokens", "input_tokens": n_tokens}


@router.get("/{response_id}")
async def show_response(response_id: str, answers: Answers) -> ResponseOut:
    """An answer that is kept."""
    return answers.get(response_id).response


@router.get("/{response_id}/input_items")
async def list_input_items(response_id: str, answers: Answers) -> ItemList:
    """What the request of an answer came with, the last first."""
    given = answers.get(response_id).given
    data = [item.model_dump(exclude_none=True) for item in reversed(given)]
    ids = [item.get("id") for item in data] or [None]
    return {
        "object": "list",
        "data": data,
        "first_id": ids[0],
        "last_id": ids[-1],
        "has_more": False,
    }


@router.delete("/{response_id}")
async def delete_response(response_id: str, answers: Answers) -> DeletedOut:
    """Forget an answer."""
    answers.delete(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


def _check_known(body: ResponsesRequest) -> None:
    """Refuse what would change the prompt or the way to the answer, and is not here."""
    for name, sentence in REFUSED.items():
        if getattr(body, name):
            raise BadField(sentence, name)
