"""Responses without a client: in the background, cancelled, followed, replayed, compacted."""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from openai.types.responses import Response

from keepwarm.errors import TimedOut
from keepwarm.server.http.limits import SharedLimit
from keepwarm.server.responses.background import (
    EVENT_BYTES,
    MAX_OWN,
    BackgroundResponses,
    RunningResponse,
)
from keepwarm.server.responses.events import AnswerOptions, ResponseBuilder
from keepwarm.text.request import Delta, Finished, Started
from tests.kit.waiting import wait_until

WORDS = "Tell me about foxes."
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
TEXTS = ("response.output_text.delta", "response.output_text.done")
ENDLESS = 8_000  # tokens: nobody waits for their end
# What the Open Responses schema requires, beside what OpenAI's SDK knows.
OPEN_RESPONSES = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model"),
    *("previous_response_id", "instructions", "output", "error", "tools", "tool_choice"),
    *("truncation", "parallel_tool_calls", "text", "top_p", "presence_penalty"),
    *("frequency_penalty", "top_logprobs", "temperature", "reasoning", "user", "usage"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata"),
    *("safety_identifier", "prompt_cache_key"),
}


@pytest.fixture(scope="module")
def client(live):
    return live.openai()


def ask(client, n_tokens=4, **options):
    asked = {"model": "x", "input": WORDS, "max_output_tokens": n_tokens, **options}
    return client.responses.create(**asked)


def ended(client, response):
    """The response when it has ended; a test that hangs here has failed."""
    for _ in range(600):
        found = client.responses.retrieve(response.id)
        if found.status not in ("queued", "in_progress"):
            return found
        time.sleep(0.1)
    raise AssertionError(found.status)


def test_every_field_of_the_published_schemas_is_there(live):
    body = {"input": WORDS, "max_output_tokens": 1, "tools": [TOOL], "presence_penalty": 0.5}
    body |= {"frequency_penalty": -0.5, "max_tool_calls": 3, "safety_identifier": "me"}
    body |= {"instructions": "Be kind.", "metadata": {"a": "b"}}
    response = live.post("/v1/responses", body).json()
    assert response.keys() >= OPEN_RESPONSES | Response.model_fields.keys()
    assert response["tools"] == [TOOL | {"description": None, "strict": None}]
    assert (response["presence_penalty"], response["frequency_penalty"]) == (0.5, -0.5)
    assert (response["max_tool_calls"], response["safety_identifier"]) == (3, "me")
    assert response["service_tier"] == "default"
    assert (response["instructions"], response["metadata"]) == ("Be kind.", {"a": "b"})


def test_penalties_change_the_answer(client):
    """Without them the tiny model repeats itself."""
    plain = ask(client, 24).output_text
    other = ask(client, 24, extra_body={"presence_penalty": 2, "frequency_penalty": 2}).output_text
    assert plain != other


def test_a_response_in_the_background_is_fetched_when_it_is_done(client):
    begun = ask(client, background=True)
    assert begun.background
    assert begun.status in ("queued", "in_progress")
    done = ended(client, begun)
    assert done.status == "incomplete"  # by its length
    assert done.output_text == ask(client).output_text
    again = ask(client, previous_response_id=begun.id)
    assert again.usage.input_tokens > done.usage.input_tokens


def test_it_is_followed_from_any_event_on(client):
    with ask(client, background=True, stream=True) as stream:
        first = next(iter(stream))  # and the client goes away
    response = first.response
    done = ended(client, response)
    events = list(client.responses.retrieve(response.id, stream=True))
    numbers = [event.sequence_number for event in events]
    assert numbers[:-1] == list(range(len(events) - 1))
    assert numbers[-1] >= len(events) - 1
    assert events[0].type == "response.created"
    assert events[-1].response.output_text == done.output_text
    rest = client.responses.retrieve(response.id, stream=True, starting_after=3)
    assert list(rest) == events[4:]


def test_one_that_was_followed_is_followed_to_its_end_by_any_number(client):
    """It has fewer events than while it ran: its texts are in one piece."""
    with ask(client, 40, background=True, stream=True) as stream:
        last = list(stream)[-1]
    stored = list(client.responses.retrieve(last.response.id, stream=True))
    assert len(stored) < last.sequence_number
    rest = client.responses.retrieve(
        last.response.id, stream=True, starting_after=last.sequence_number - 3
    )
    (again,) = list(rest)
    assert again == stored[-1]
    assert again.type == last.type
    assert again.sequence_number >= last.sequence_number
    resumed = client.responses.stream(response_id=last.response.id, starting_after=10)
    with resumed as events:  # the client asks for all, and shows those that are behind
        assert [event.type for event in events][-1] == last.type


RECEIPT = None  # of what was restored; these answers do not look at it


class Words:
    """An answer in pieces that the test sends."""

    def __init__(self):
        self.pieces = asyncio.Queue()
        self.is_cancelled = False

    def __aiter__(self):
        return self

    async def __anext__(self):
        piece = await self.pieces.get()
        if isinstance(piece, Exception):
            raise piece
        if piece is None:
            raise StopAsyncIteration
        return piece

    def cancel(self):
        self.is_cancelled = True


def running(answer, budget, tenant, saved, **options):
    response = {"id": f"resp_of_{tenant}", "status": "queued", "completed_at": None, "output": []}
    builder = ResponseBuilder(response, AnswerOptions(**options), saved.append)
    return RunningResponse(answer, builder, saved.append, budget, tenant)


async def until(happened):
    async with asyncio.timeout(60):
        while not happened():
            await asyncio.sleep(0.001)


def test_who_follows_late_sees_every_event_as_it_was():
    async def scenario():
        words = Words()
        late = running(words, BackgroundResponses().budget, "mine", [])
        for event in (Started(RECEIPT), Delta(0, "fox"), Finished(0, "stop")):
            words.pieces.put_nowait(event)
        await until(lambda: late.response["output"])
        followed = late.follow()
        created, begun, added = [
            json.loads((await anext(followed)).split(b"data: ")[1]) for _ in range(3)
        ]
        assert created["response"]["output"] == begun["response"]["output"] == []
        assert added["item"]["content"] == []
        await followed.aclose()
        late.task.cancel()

    asyncio.run(scenario())


def test_it_is_created_before_it_waits():
    """So its client knows the id, and takes what comes next, whatever it is."""

    async def scenario():
        words = Words()
        waiting = running(words, BackgroundResponses().budget, "mine", [])
        followed = waiting.follow()
        created = json.loads((await anext(followed)).split(b"data: ")[1])
        assert (created["type"], created["response"]["status"]) == ("response.created", "queued")
        words.pieces.put_nowait(TimedOut("It waited for too long."))
        (failed,) = [json.loads(each.split(b"data: ")[1]) async for each in followed]
        assert (failed["type"], failed["sequence_number"]) == ("response.failed", 1)

    asyncio.run(scenario())


def test_it_is_cancelled(client):
    begun = ask(client, ENDLESS, background=True)
    running = client.responses.input_items.list(begun.id).data
    cancelled = client.responses.cancel(begun.id)
    assert cancelled.status == "cancelled"
    assert client.responses.cancel(begun.id).status == "cancelled"
    assert client.responses.retrieve(begun.id).status == "cancelled"
    assert running == client.responses.input_items.list(begun.id).data != []
    *_, last = client.responses.retrieve(begun.id, stream=True)
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    plain = ask(client)
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(plain.id)


def test_a_deleted_one_ends(live, client):
    begun = ask(client, ENDLESS, background=True)
    client.responses.delete(begun.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(begun.id)
    wait_until(lambda: not live.host.engine.stats().decoding)


def test_it_is_forgotten_with_its_agent(live, client):
    begun = ask(client, background=True, prompt_cache_key="fox")
    ended(client, begun)
    wait_until(lambda: live.get("/v1/agents/fox").status_code == 200)
    assert httpx.delete(f"{live.url}/v1/agents/fox").status_code == 200
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(begun.id, stream=True)


def test_keys_do_not_see_each_others(serving):
    with serving(api_keys="a-key-of-one,a-key-of-two") as live:
        one, two = (live.openai(api_key=key) for key in ("a-key-of-one", "a-key-of-two"))
        begun = ask(one, ENDLESS, background=True)
        for look in (two.responses.retrieve, two.responses.cancel, two.responses.delete):
            with pytest.raises(openai.NotFoundError):
                look(begun.id)
        assert one.responses.retrieve(begun.id).status in ("queued", "in_progress")
    # the server has ended though it still ran


def test_events_are_counted_by_key_also_where_keys_share_the_cache(serving, monkeypatch):
    taken, take = [], SharedLimit.take

    def note(limit, owner, n=1):
        taken.append((owner, n))
        take(limit, owner, n)

    monkeypatch.setattr(SharedLimit, "take", note)
    with serving(api_keys="a-key-of-one,a-key-of-two", share_cache=True) as live:
        for key in ("a-key-of-one", "a-key-of-two"):
            one = live.openai(api_key=key)
            ended(one, ask(one, background=True))
    owners = {owner for owner, n in taken if n > EVENT_BYTES}
    assert len(owners) == 2
    assert "" not in owners


def test_a_stored_response_is_replayed(client):
    forced = {"tools": [TOOL], "tool_choice": "required"}
    for made in (ask(client, top_logprobs=2), ask(client, 200, **forced)):
        events = list(client.responses.retrieve(made.id, stream=True))
        assert client.responses.retrieve(made.id).output == made.output
        probable = [event.to_dict()["logprobs"] for event in events if event.type in TEXTS]
        assert all(found == probable[0] for found in probable)
        assert events[-1].response == client.responses.retrieve(made.id)
        live_kinds = {event.type for event in _streamed(client, made, forced)}
        assert {event.type for event in events} == live_kinds


def _streamed(client, made, forced):
    options = {"n_tokens": 200, **forced} if made.tools else {}
    return ask(client, stream=True, **options)


def test_a_conversation_is_compacted_and_goes_on(client):
    first = ask(client)
    compact = client.responses.compact(model="x", previous_response_id=first.id, input="And?")
    assert compact.object == "response.compaction"
    *said, summary = compact.output
    assert [item.content[0].text for item in said] == [WORDS, "And?"]
    assert summary.type == "compaction"
    assert compact.usage.input_tokens_details.cached_tokens > 0
    question = {"role": "user", "content": "Go on."}
    items = [item.model_dump(exclude_none=True, warnings=False) for item in compact.output]
    with_summary = ask(client, input=[*items, question])
    without = ask(client, input=[*items[:-1], question])
    assert with_summary.usage.input_tokens > without.usage.input_tokens


def test_background_responses_sent_at_once_are_no_more_than_the_limit_of_a_key(live, client):
    """Counted before the first `await` of a request, and given back when one fails or ends."""
    body = {"input": WORDS, "max_output_tokens": ENDLESS, "background": True}
    failing = live.post("/v1/responses", body | {"previous_response_id": "resp_gone"})
    assert failing.status_code == 404
    with ThreadPoolExecutor(MAX_OWN + 8) as threads:
        made = list(threads.map(lambda _: live.post("/v1/responses", body), range(MAX_OWN + 8)))
    accepted = [answer.json()["id"] for answer in made if answer.status_code == 200]
    refused = [answer for answer in made if answer.status_code != 200]
    try:
        assert len(accepted) == MAX_OWN
        assert {answer.status_code for answer in refused} == {429}
        assert "Retry when one has ended" in refused[0].json()["error"]["message"]
    finally:
        for response_id in accepted:
            client.responses.cancel(response_id)
    assert ended(client, ask(client, background=True)).status == "incomplete"  # of 4 tokens
