"""OpenAI's responses: answers that the server stores and continues by id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, TypeAlias

from fastapi import Depends, Request, Response

from keepwarm.config import Settings
from keepwarm.engine.engine import Engine
from keepwarm.errors import BadField, ContextTooLong
from keepwarm.server.host import EngineHost, ObservedAnswer
from keepwarm.server.http import scrub
from keepwarm.server.http.body import api_router
from keepwarm.server.http.problems import Problem, problem_of
from keepwarm.server.http.request_fields import Config, Host, InTurn, request_fields
from keepwarm.server.http.sse import STREAM_HEADERS, EventStream, WholeAnswer, answer_docs
from keepwarm.server.http.turns import Turn
from keepwarm.server.openai.shapes import OpenAIErrorOut
from keepwarm.server.openai.tokens import Pieces
from keepwarm.server.responses.events import (
    BuiltAnswer,
    ResponseBuilder,
    ResponseStream,
    answer_options_of,
    failed_stream,
    initial_response,
)
from keepwarm.server.responses.kept_responses import KeptResponses
from keepwarm.server.responses.request import items_of, offered_tools, request_of
from keepwarm.server.responses.response_store import StoredResponse
from keepwarm.server.responses.shapes import (
    DeletedOut,
    InputRequest,
    Item,
    ItemList,
    ResponseOut,
    ResponsesRequest,
    ResponseTokensOut,
)
from keepwarm.server.responses.truncation import truncate
from keepwarm.text import request as engine_request
from keepwarm.text.bounds.deadline import PrepareDeadline

UNSUPPORTED = {
    "background": "background is not supported, because responses are not queued; omit it, and use "
    "stream to follow a long answer.",
    "conversation": "conversation is not supported, because it names items stored at OpenAI; "
    "continue with previous_response_id, or send all items as input.",
    "prompt": "prompt is not supported, because it names a template stored at OpenAI; send its "
    "text as instructions or input.",
}

router = api_router(
    prefix="/v1/responses",
    tags=["OpenAI responses"],
    responses={
        "4XX": {"model": OpenAIErrorOut, "description": "The request is invalid or refused."},
        "5XX": {"model": OpenAIErrorOut, "description": "The server failed or is shutting down."},
    },
)


BuildRequest: TypeAlias = Callable[[Sequence[Item]], engine_request.Request]


class TenantResponses:
    """The stored responses of one tenant."""

    def __init__(self, request: Request) -> None:
        self._kept: KeptResponses = request.app.state.responses
        self._tenant: str = getattr(request.state, "tenant", "")

    async def begin(self) -> int:
        return await self._kept.begin()

    async def get(self, response_id: str) -> StoredResponse:
        return await self._kept.get(self._tenant, response_id)

    async def delete(self, response_id: str) -> None:
        await self._kept.delete(self._tenant, response_id)

    def save(
        self,
        asked: engine_request.Request,
        items: Sequence[Item],
        n_given: int,
        since: int,
        response: ResponseOut,
    ) -> None:
        if response["store"]:
            self._kept.put(
                *(self._tenant, response, items, n_given),
                since=since,
                agent=asked.agent or "",
                to_disk=asked.policy.to_disk,
            )

    async def conversation(self, body: InputRequest) -> list[Item]:
        """All items: those of the previous response, then the request's own."""
        before: Sequence[Item] = ()
        if body.previous_response_id is not None and body.keepwarm and body.keepwarm.continues:
            raise BadField(
                "previous_response_id and keepwarm.continue both name what comes before; send one.",
                "previous_response_id",
            )
        if body.previous_response_id is not None:
            before = (await self.get(body.previous_response_id)).items
        return [*before, *map(self._resolve, items_of(body.input))]

    def _resolve(self, item: Item) -> Item:
        if item.type != "item_reference":
            return item
        found = self._kept.item(self._tenant, item.id or "")
        if found is None:
            raise BadField(f"Item {item.id!r} is not stored; send the item itself.", "input")
        return found


async def _tenant_responses(request: Request) -> TenantResponses:
    return TenantResponses(request)


Answers = Annotated[TenantResponses, Depends(_tenant_responses)]


@router.post("", responses=answer_docs(ResponseOut))
async def create_response(
    body: ResponsesRequest,
    request: Request,
    host: Host,
    settings: Config,
    *,
    answers: Answers,
    turn: InTurn,
) -> Response:
    """Answer a conversation, as one object or as a stream of events."""
    host.check_model(body.model)
    _reject_unsupported(body)
    since = await answers.begin()
    items = await answers.conversation(body)
    build = request_builder(body, request, settings)
    asked = await turn.build(lambda: build(items))
    response = initial_response(body, host.name, asked, host.engine.sampling)
    try:
        answer, n_dropped = await _submit(
            host, turn, asked, build, items if body.truncation == "auto" else ()
        )
    except ContextTooLong as error:
        if not body.stream:
            raise
        return _failed_stream(response, problem_of(error))
    wants_logprobs = asked.sampling.top_logprobs is not None
    pieces = Pieces(host.engine.model.tokenizer) if wants_logprobs else None
    options = answer_options_of(body, offered_tools(body.tools or ()), asked, n_dropped, pieces)
    n_given = len(items_of(body.input))
    save = partial(answers.save, asked, items, n_given, since)
    builder = ResponseBuilder(response, options, save)
    if body.stream:
        return EventStream(answer, ResponseStream(builder))
    return WholeAnswer(BuiltAnswer(answer, builder), lambda _: builder.response)


async def _submit(
    host: EngineHost,
    turn: Turn,
    asked: engine_request.Request,
    build: BuildRequest,
    droppable: Sequence[Item],
) -> tuple[ObservedAnswer, int]:
    """The answer, and how many items were dropped because the context is too short for them."""
    try:
        return await host.submit(asked, turn), 0
    except ContextTooLong:
        if not droppable:
            raise
    kept = await turn.run(_truncate, host.engine, build, droppable)
    return await host.submit(build(kept), turn), len(droppable) - len(kept)


def _failed_stream(response: ResponseOut, problem: Problem) -> Response:
    """Clients that stream learn from its event that they must shorten the conversation."""
    events = failed_stream(response, problem)
    return Response(events, headers=STREAM_HEADERS, media_type=EventStream.media_type)


def request_builder(body: InputRequest, request: Request, settings: Settings) -> BuildRequest:
    """A function from items to the engine request, scrubbed."""
    fields = request_fields(request, body.keepwarm, body.prompt_cache_key)
    rules = scrub.rules_for(settings.scrub, request.headers)
    return lambda items: scrub.scrub_request(request_of(body, items, fields, settings), rules)


def _truncate(
    engine: Engine, build: BuildRequest, items: Sequence[Item], deadline: PrepareDeadline
) -> list[Item]:
    def count(some: Sequence[Item]) -> int:
        return engine.count_tokens(build(some), deadline)

    return truncate(items, count, engine.model.n_context, build(items).sampling.max_tokens)


@router.post("/input_tokens")
async def count_input_tokens(
    body: InputRequest,
    request: Request,
    host: Host,
    settings: Config,
    *,
    answers: Answers,
    turn: InTurn,
) -> ResponseTokensOut:
    """Count the prompt tokens of this request."""
    host.check_model(body.model)
    build = request_builder(body, request, settings)
    items = await answers.conversation(body)
    asked = await turn.build(lambda: build(items))
    n_tokens = await turn.run(host.engine.count_tokens, asked)
    return {"object": "response.input_tokens", "input_tokens": n_tokens}


@router.get("/{response_id}")
async def show_response(response_id: str, answers: Answers) -> ResponseOut:
    """A stored response."""
    return (await answers.get(response_id)).response


@router.get("/{response_id}/input_items")
async def list_input_items(response_id: str, answers: Answers) -> ItemList:
    """The input items of a response's request, last first."""
    given = (await answers.get(response_id)).given
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
    """Delete a stored response."""
    await answers.delete(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


def _reject_unsupported(body: ResponsesRequest) -> None:
    """Reject unsupported fields that would change the prompt or how it is answered."""
    for name, sentence in UNSUPPORTED.items():
        if getattr(body, name):
            raise BadField(sentence, name)
