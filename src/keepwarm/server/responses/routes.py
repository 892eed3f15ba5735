"""OpenAI's responses: answers that the server stores and continues by id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

from fastapi import Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic_core import to_json

from keepwarm.errors import BadField, ContextTooLong, UnknownResponse
from keepwarm.server.http.body import Fields, api_router
from keepwarm.server.http.problems import problem_of
from keepwarm.server.http.sse import (
    STREAM_HEADERS,
    EventStream,
    WholeAnswer,
    answer_docs,
    json_response,
)
from keepwarm.server.models.calls import ApiCall, Call
from keepwarm.server.models.host import EngineHost
from keepwarm.server.models.truncation import submit_shortened
from keepwarm.server.responses.background import BackgroundResponses, RunningResponse
from keepwarm.server.responses.events import (
    AnswerOptions,
    ResponseBuilder,
    ResponseStream,
    compacted,
    failed_stream,
    initial_response,
    listed_item,
    replay,
    response_of_item,
    with_ids,
)
from keepwarm.server.responses.request import (
    ENCRYPTED_REASONING,
    CompactRequest,
    InputRequest,
    Item,
    ResponsesRequest,
    items_of,
    offered_tools,
    request_of,
)
from keepwarm.server.responses.store import ResponseStore, StoredResponse
from keepwarm.session.compaction import Compaction
from keepwarm.text import request as engine_request

MAX_READ = 32  # stored responses that the item references of one request may need
UNSUPPORTED = {
    "conversation": "conversation is not supported, because this server stores responses, not "
    "conversations; continue with previous_response_id, or send all items as input.",
    "prompt": "prompt is not supported, because it names a template stored at OpenAI; send its "
    "text as instructions or input.",
}

router = api_router(prefix="/v1/responses", tags=["OpenAI responses"])


class TenantResponses:
    """The stored responses of one tenant, and those that run in the background."""

    def __init__(self, request: Request) -> None:
        self.store: ResponseStore = request.app.state.responses
        self.background: BackgroundResponses = request.app.state.background
        self.tenant: str = getattr(request.state, "tenant", "")
        self.caller: str = getattr(request.state, "owner", "")

    async def get(self, response_id: str) -> StoredResponse:
        return await self.store.get(self.tenant, response_id)

    async def shown(self, response_id: str) -> StoredResponse:
        """The response as it is now."""
        running = self.background.running(self.tenant, response_id)
        if running:
            return StoredResponse(running.response, input=running.input)
        return await self.get(response_id)

    async def stream(self, response_id: str, after: int) -> Response:
        """The events behind this number; of one that runs also those that are to come."""
        if running := self.background.running(self.tenant, response_id):
            return _followed(running, after)
        stored = await self.get(response_id)
        return _event_stream(stored.filled(replay(stored.response, after)))

    async def delete(self, response_id: str) -> None:
        await self.background.cancel(self.tenant, response_id)
        await self.store.delete(self.tenant, response_id)

    def save(
        self,
        request: engine_request.Request,
        items: Sequence[Item],
        n_input: int,
        since: int,
        response: Fields,
    ) -> None:
        if response["store"]:
            before, own = items[: len(items) - n_input], items[len(items) - n_input :]
            items = [*before, *with_ids(own, response["id"])]
            self.store.put(
                *(self.tenant, response, items, n_input),
                since=since,
                agent=request.agent or "",
                to_disk=request.policy.to_disk,
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
        return [*before, *await self._resolved(items_of(body.input), before)]

    async def _resolved(self, items: list[Item], before: Sequence[Item]) -> list[Item]:
        """The items, with those that they refer to in the place of references."""
        ids = [item.id or "" for item in items if item.is_reference]
        known = {item.id: item for item in before if item.id}
        n_read = 0
        # NOTE: the last first, because a response has all items of its conversation.
        for wanted in reversed(ids):
            if wanted not in known and n_read < MAX_READ:
                n_read += 1
                known |= {item.id: item for item in await self._near(wanted) if item.id}
            if wanted not in known:
                raise BadField(f"Item {wanted!r} is not stored; send the item itself.", "input")
        return [known[item.id or ""] if item.is_reference else item for item in items]

    async def _near(self, item_id: str) -> Sequence[Item]:
        """The conversation that an item was generated in; empty if it is not stored."""
        response_id = response_of_item(item_id)
        try:
            return (await self.get(response_id)).items if response_id else ()
        except UnknownResponse:
            return ()


async def _tenant_responses(request: Request) -> TenantResponses:
    return TenantResponses(request)


Answers = Annotated[TenantResponses, Depends(_tenant_responses)]


@router.post("", responses=answer_docs(Fields))
async def create_response(body: ResponsesRequest, call: Call, answers: Answers) -> Response:
    """Answer a conversation, as one object or as a stream of events."""
    host, slot = await call.host(body.model), call.slot
    _reject_unsupported(body)
    if body.background:
        slot.held.enter_context(answers.background.slot(answers.caller))
    since = await slot.run(lambda _: answers.store.generation())
    items = await answers.conversation(body)
    build = partial(response_request, body, call)
    request = await slot.on_thread(build, items)  # however short the body, they may be many
    response = initial_response(body, host.name, request, host.engine.sampling)
    pieces = None if request.sampling.top_logprobs is None else host.pieces
    try:
        answer, n_dropped = await submit_shortened(
            host, slot, request, build, items if body.truncation == "auto" else ()
        )
    except ContextTooLong as error:
        if not body.stream:
            raise
        # Clients that stream learn from its event that they must shorten the conversation.
        return _event_stream(failed_stream(response, problem_of(error)))
    options = options_of(body, request)._replace(n_dropped=n_dropped, pieces=pieces)
    policy = call.models.store.policy_for(request.agent, request.policy)
    stored = replace(request, policy=policy)
    n_input = len(items_of(body.input))
    save = partial(answers.save, stored, items, n_input, since)
    builder = ResponseBuilder(response, options, save)
    if body.background:
        budget = answers.background.budget
        running = RunningResponse(answer, builder, save, budget, answers.caller)
        running.input = with_ids(items[len(items) - n_input :], response["id"])
        answers.background.add(answers.tenant, running)
        held = slot.held.pop_all()  # its model stays loaded, and it counts as running
        running.task.add_done_callback(lambda _: held.close())
        return _followed(running) if body.stream else json_response(running.response)
    if body.stream:
        return EventStream(answer, ResponseStream(builder))
    return WholeAnswer(answer, lambda _: builder.response, builder.add_whole)


def options_of(body: ResponsesRequest, request: engine_request.Request) -> AnswerOptions:
    _, names, ignored = offered_tools(body.tools or ())
    encrypted = ENCRYPTED_REASONING in (body.include or ())
    return AnswerOptions(names, ignored, encrypted, request.policy.writes)


def _followed(running: RunningResponse, after: int = -1) -> Response:
    """What goes on in the background, as a stream; if the client goes away, it still does."""
    media_type = EventStream.media_type
    return StreamingResponse(running.follow(after), headers=STREAM_HEADERS, media_type=media_type)


def _shown(found: StoredResponse) -> Response:
    return Response(found.filled(to_json(found.response)), media_type="application/json")


def _event_stream(events: bytes) -> Response:
    return Response(events, headers=STREAM_HEADERS, media_type=EventStream.media_type)


def response_request(
    body: InputRequest, call: ApiCall, items: Sequence[Item]
) -> engine_request.Request:
    """The request for the engine, scrubbed; `items` are the body's, or some of them."""
    fields = call.fields(body, body.prompt_cache_key)
    return call.scrubbed(request_of(body, items, fields, call.settings))


async def prepare_response(
    body: InputRequest, call: ApiCall, answers: TenantResponses
) -> tuple[EngineHost, engine_request.Request, list[Item]]:
    """The model, the request for it, and the items of the whole conversation."""
    host = await call.host(body.model)
    _reject_unsupported(body)
    items = await answers.conversation(body)
    return host, await call.slot.on_thread(response_request, body, call, items), items


@router.post("/input_tokens")
async def count_input_tokens(body: InputRequest, call: Call, answers: Answers) -> Fields:
    """Count the prompt tokens of this request."""
    host, request, _ = await prepare_response(body, call, answers)
    n_tokens = await call.slot.run(host.engine.count_tokens, request)
    return {"object": "response.input_tokens", "input_tokens": n_tokens}


@router.post("/compact")
async def compact(body: CompactRequest, call: Call, answers: Answers) -> Response:
    """Replace a conversation by its user's messages and the model's summary of it."""
    host, prepared, items = await prepare_response(body, call, answers)
    request = replace(prepared, format=None)
    summary = Compaction(
        host.engine, request, request.messages or (), max_tokens=body.max_output_tokens
    )
    answer = await host.submit(summary.request, call.slot)
    return WholeAnswer(answer, lambda result: compacted(items, result, request.policy.writes))


@router.get("/{response_id}", responses=answer_docs(Fields))
async def show_response(
    response_id: str, answers: Answers, stream: bool = False, starting_after: int = -1
) -> Response:
    """A stored response, or one in the background as it is now; with `stream`, its events."""
    if stream:
        return await answers.stream(response_id, max(-1, starting_after))
    return _shown(await answers.shown(response_id))


@router.post("/{response_id}/cancel", responses=answer_docs(Fields))
async def cancel_response(response_id: str, answers: Answers) -> Response:
    """End a response in the background; one that has ended stays as it is."""
    await answers.background.cancel(answers.tenant, response_id)
    shown = await answers.shown(response_id)
    if not shown.response["background"]:
        raise BadField(
            "Cannot cancel a synchronous response; close its connection instead.",
            "response_id",
        )
    return _shown(shown)


@router.get("/{response_id}/input_items")
async def list_input_items(
    response_id: str,
    answers: Answers,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str, Query(description="The id of the last item of the page before.")] = "",
    order: Literal["asc", "desc"] = "desc",
) -> Fields:
    """The input items of a response's request, a page at a time, last first."""
    own = list((await answers.shown(response_id)).input)
    listed = own if order == "asc" else own[::-1]
    ids = [item.id for item in listed]
    if after and after not in ids:
        raise BadField(f"This response has no input item {after!r}.", "after")
    # The last of several: ids are the client's, and a page begins behind the one before it.
    first = len(ids) - ids[::-1].index(after) if after else 0
    shown = listed[first : first + limit]
    return {
        "object": "list",
        "data": [listed_item(item) for item in shown],
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": first + limit < len(listed),
    }


@router.delete("/{response_id}")
async def delete_response(response_id: str, answers: Answers) -> Fields:
    """Delete a stored response."""
    await answers.delete(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


def _reject_unsupported(body: InputRequest) -> None:
    """Reject unsupported fields that would change the prompt or how it is answered."""
    for name, sentence in UNSUPPORTED.items():
        if getattr(body, name):
            raise BadField(sentence, name)
    if isinstance(body, ResponsesRequest) and body.background and body.store is False:
        raise BadField(
            "background can only be used when `store` is true, because the response is "
            "fetched by its id; omit store.",
            "background",
        )
