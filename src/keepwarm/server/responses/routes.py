"""OpenAI's responses: answers that the server stores and continues by id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, TypeAlias

from fastapi import Depends, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from keepwarm.config import Settings
from keepwarm.errors import BadField, ContextTooLong
from keepwarm.server.host import ObservedAnswer
from keepwarm.server.http import scrub
from keepwarm.server.http.body import api_router
from keepwarm.server.http.problems import Problem, problem_of
from keepwarm.server.http.request_fields import Config, InTurn, Served, request_fields
from keepwarm.server.http.sse import STREAM_HEADERS, EventStream, WholeAnswer, answer_docs
from keepwarm.server.openai.shapes import OpenAIErrorOut
from keepwarm.server.openai.tokens import Pieces
from keepwarm.server.responses.background import BackgroundResponses, RunningResponse
from keepwarm.server.responses.compacting import compacted
from keepwarm.server.responses.events import (
    BuiltAnswer,
    ResponseBuilder,
    ResponseStream,
    answer_options_of,
    failed_stream,
    initial_response,
    numbered_frames,
)
from keepwarm.server.responses.kept_responses import KeptResponses
from keepwarm.server.responses.replay import replayed
from keepwarm.server.responses.request import items_of, offered_tools, request_of
from keepwarm.server.responses.response_store import StoredResponse
from keepwarm.server.responses.shapes import (
    CompactedOut,
    CompactRequest,
    DeletedOut,
    InputRequest,
    Item,
    ItemList,
    ResponseOut,
    ResponsesRequest,
    ResponseTokensOut,
)
from keepwarm.server.responses.truncation import submit_shortened
from keepwarm.session.compaction import Compaction
from keepwarm.text import request as engine_request

METHODS = ["GET", "POST", "DELETE"]
UNSUPPORTED = {
    "conversation": "conversation is not supported, because this server stores responses, not "
    "conversations; continue with previous_response_id, or send all items as input.",
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


conversations = api_router("/v1/conversations", tags=["OpenAI responses"])
BuildRequest: TypeAlias = Callable[[Sequence[Item]], engine_request.Request]


class TenantResponses:
    """The stored responses of one tenant."""

    def __init__(self, request: Request) -> None:
        self._kept: KeptResponses = request.app.state.responses
        self.background: BackgroundResponses = request.app.state.background
        self._tenant: str = getattr(request.state, "tenant", "")

    def run(
        self,
        answer: ObservedAnswer,
        builder: ResponseBuilder,
        save: Callable[[ResponseOut], None],
    ) -> RunningResponse:
        """Go on with an answer in the background."""
        running = RunningResponse(answer, builder, save)
        self.background.add(self._tenant, running)
        return running

    def check_background(self, store: bool | None) -> None:
        self.background.check(self._tenant, store)

    async def cancel(self, response_id: str) -> None:
        await self.background.cancel(self._tenant, response_id)

    async def shown(self, response_id: str) -> ResponseOut:
        """The response as it is now."""
        running = self.background.running(self._tenant, response_id)
        return running.response if running else (await self.get(response_id)).response

    async def stream(self, response_id: str, after: int) -> Response:
        """The events behind this number; of one that runs also those that are to come."""
        if running := self.background.running(self._tenant, response_id):
            return _followed(running, after)
        response = (await self.get(response_id)).response
        if ended := self.background.ended(self._tenant, response_id):
            return _followed(ended, after)
        frames = numbered_frames(replayed(response))[after + 1 :]
        return _event_stream(b"".join(frames))

    async def begin(self) -> int:
        return await self._kept.begin()

    async def get(self, response_id: str) -> StoredResponse:
        return await self._kept.get(self._tenant, response_id)

    async def delete(self, response_id: str) -> None:
        await self.cancel(response_id)
        self.background.forget(self._tenant, response_id)
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
    models: Served,
    settings: Config,
    *,
    answers: Answers,
    turn: InTurn,
) -> Response:
    """Answer a conversation, as one object or as a stream of events."""
    host = await models.use(body.model, turn)
    _reject_unsupported(body)
    if body.background:
        answers.check_background(body.store)
    since = await answers.begin()
    items = await answers.conversation(body)
    build = request_builder(body, request, settings)
    asked = await turn.build(lambda: build(items))
    response = initial_response(body, host.name, asked, host.engine.sampling)
    try:
        answer, n_dropped = await submit_shortened(
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
    if body.background:
        running = answers.run(answer, builder, save)
        held = turn.held.pop_all()  # its model stays loaded
        running.task.add_done_callback(lambda _: held.close())
        return _followed(running) if body.stream else JSONResponse(running.response)
    if body.stream:
        return EventStream(answer, ResponseStream(builder))
    return WholeAnswer(BuiltAnswer(answer, builder), lambda _: builder.response)


def _followed(running: RunningResponse, after: int = -1) -> Response:
    """What goes on in the background, as a stream; if the client goes away, it still does."""
    media_type = EventStream.media_type
    return StreamingResponse(running.follow(after), headers=STREAM_HEADERS, media_type=media_type)


def _failed_stream(response: ResponseOut, problem: Problem) -> Response:
    """Clients that stream learn from its event that they must shorten the conversation."""
    return _event_stream(failed_stream(response, problem))


def _event_stream(events: bytes) -> Response:
    return Response(events, headers=STREAM_HEADERS, media_type=EventStream.media_type)


def request_builder(body: InputRequest, request: Request, settings: Settings) -> BuildRequest:
    """A function from items to the engine request, scrubbed."""
    fields = request_fields(request, body.keepwarm, body.prompt_cache_key, body)
    rules = scrub.rules_for(settings.scrub, request.headers)
    return lambda items: scrub.scrub_request(request_of(body, items, fields, settings), rules)


@router.post("/input_tokens")
async def count_input_tokens(
    body: InputRequest,
    request: Request,
    models: Served,
    settings: Config,
    *,
    answers: Answers,
    turn: InTurn,
) -> ResponseTokensOut:
    """Count the prompt tokens of this request."""
    host = await models.use(body.model, turn)
    build = request_builder(body, request, settings)
    items = await answers.conversation(body)
    asked = await turn.build(lambda: build(items))
    n_tokens = await turn.run(host.engine.count_tokens, asked)
    return {"object": "response.input_tokens", "input_tokens": n_tokens}


@router.post("/compact", responses={200: {"model": CompactedOut}})
async def compact(
    body: CompactRequest,
    request: Request,
    models: Served,
    settings: Config,
    *,
    answers: Answers,
    turn: InTurn,
) -> Response:
    """Replace a conversation by its user's messages and the model's summary of it."""
    host = await models.use(body.model, turn)
    items = await answers.conversation(body)
    build = request_builder(body, request, settings)
    asked = replace(await turn.build(lambda: build(items)), format=None)
    summary = Compaction(
        host.engine, asked, asked.messages or (), max_tokens=body.max_output_tokens
    )
    answer = await host.submit(summary.request, turn)
    return WholeAnswer(answer, lambda result: compacted(items, result, asked.policy.writes))


@router.get("/{response_id}", response_model=None, responses=answer_docs(ResponseOut))
async def show_response(
    response_id: str, answers: Answers, stream: bool = False, starting_after: int = -1
) -> Response | ResponseOut:
    """A stored response, or one in the background as it is now; with `stream`, its events."""
    if stream:
        return await answers.stream(response_id, max(-1, starting_after))
    return await answers.shown(response_id)


@router.post("/{response_id}/cancel")
async def cancel_response(response_id: str, answers: Answers) -> ResponseOut:
    """End a response in the background; one that has ended stays as it is."""
    await answers.cancel(response_id)
    shown = await answers.shown(response_id)
    if not shown["background"]:
        raise BadField(
            "Cannot cancel a synchronous response; close its connection instead.",
            "response_id",
        )
    return shown


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


@conversations.api_route("", methods=METHODS, include_in_schema=False)
@conversations.api_route("/{path:path}", methods=METHODS, include_in_schema=False)
async def refuse_conversations() -> None:
    """OpenAI's conversations are refused by name."""
    raise BadField(
        "Conversations are not supported, because this server stores responses; continue with "
        "previous_response_id, or with an agent of /v1/agents.",
        "conversation",
    )


def _reject_unsupported(body: ResponsesRequest) -> None:
    """Reject unsupported fields that would change the prompt or how it is answered."""
    for name, sentence in UNSUPPORTED.items():
        if getattr(body, name):
            raise BadField(sentence, name)
