"""Streams: headers, keep-alives, clients that disconnect, errors in mid-stream.

The answers here are scripted: a real engine neither stalls nor fails on demand.
"""

import asyncio
import json

import pytest

from keepwarm.engine.answer import Answer, collect
from keepwarm.errors import Busy, Cancelled, EngineFailed, TimedOut
from keepwarm.server.http.sse import EventStream, WholeAnswer
from keepwarm.server.openai.chat import ChatStream
from keepwarm.server.openai.common import CompletionMeta
from keepwarm.server.openai.completions import CombinedAnswer
from keepwarm.text.request import (
    Delta,
    Done,
    Finished,
    Progress,
    Receipt,
    Started,
    Usage,
)

RECEIPT = Receipt(7, {"memory": 5}, 2, 12.3)
USAGE = Usage(7, 5, 2, 0, 10.0, 20.0)
ANSWER = [Started(RECEIPT), Delta(0, "Hel"), Delta(0, "lo"), Finished(0, "stop")]
END = Done(USAGE, RECEIPT)


class Client:
    """The far end of an ASGI connection."""

    def __init__(self):
        self.sent = []
        self.gone = asyncio.Event()

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)

    @property
    def headers(self):
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self):
        return b"".join(message.get("body", b"") for message in self.sent[1:]).decode()


async def until(holds):
    async with asyncio.timeout(300):
        while not holds():
            await asyncio.sleep(0.001)


def scripted(events):
    """A real answer whose events are put in by hand; cancelling is noted and ends it."""
    cancelled = []

    def cancel(answer):
        cancelled.append(answer)
        answer.put(Cancelled("gone"))

    answer = Answer(cancel)
    for event in events:
        answer.put(event)
    return answer, cancelled


def stream(answer, **options):
    made = EventStream(answer, ChatStream(CompletionMeta("id", 1, "m"), 1, True, None))
    vars(made).update(options)
    return made


def run_stream(events):
    async def run():
        client = Client()
        answer, _ = scripted(events)
        await stream(answer)({"type": "http"}, client.receive, client.send)
        return client

    return asyncio.run(run())


def data(body):
    return [line[6:] for line in body.splitlines() if line.startswith("data: ")]


def test_headers_carry_the_receipt():
    client = run_stream([*ANSWER, END])
    assert client.sent[0]["status"] == 200
    assert client.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in client.headers
    receipt = json.loads(client.headers["x-keepwarm-receipt"])
    assert receipt["reused"] == {"memory": 5}
    assert receipt["saved_ms"] == 12.3
    assert client.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


def test_chunks_come_one_by_one_and_in_order():
    client = run_stream([*ANSWER, END])
    *chunks, end = data(client.body)
    assert end == "[DONE]"
    chunks = [json.loads(chunk) for chunk in chunks]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert len([message for message in client.sent if b"content" in message.get("body", b"")]) == 3
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}
    assert chunks[-1]["keepwarm"]["recomputed"] == 2


def test_an_error_before_the_plan_is_not_a_stream():
    async def run():
        client = Client()
        answer, _ = scripted([Busy("full")])
        with pytest.raises(Busy):
            await stream(answer)({"type": "http"}, client.receive, client.send)
        assert client.sent == []

    asyncio.run(run())


@pytest.mark.parametrize(
    "error",
    [EngineFailed("It broke; ask again."), Busy("No room."), Cancelled("By its operator.")],
)
def test_an_error_in_the_stream_is_said_in_the_stream(error):
    client = run_stream([*ANSWER[:2], error])
    *_, said, end = data(client.body)
    assert json.loads(said)["error"]["message"] == str(error)
    assert end == "[DONE]"
    assert client.sent[-1]["more_body"] is False


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("n_before", [0, 2])
def test_a_client_that_leaves_cancels(whole, n_before):
    async def run():
        client = Client()
        answer, cancelled = scripted(ANSWER[:n_before])
        response = WholeAnswer(answer, lambda result: {}) if whole else stream(answer)
        task = asyncio.create_task(response({"type": "http"}, client.receive, client.send))
        await asyncio.sleep(0.01)
        assert not cancelled
        client.gone.set()
        async with asyncio.timeout(300):
            await asyncio.gather(task, return_exceptions=True)
        return cancelled

    assert asyncio.run(run())


def test_silence_is_filled_with_progress():
    async def run():
        client = Client()
        answer, _ = scripted([ANSWER[0], Progress(3, 7)])
        response = stream(answer, keep_alive_s=0.02)
        task = asyncio.create_task(response({"type": "http"}, client.receive, client.send))
        await until(lambda: "prompt_tokens_done" in client.body)
        for event in [*ANSWER[1:], END]:
            answer.put(event)
        await task
        return client.body

    body = asyncio.run(run())
    assert ': {"prompt_tokens_done":3,"prompt_tokens":7}\n\n' in body
    assert data(body)[-1] == "[DONE]"


def test_a_task_that_is_cancelled_cancels_its_answer():
    async def run():
        client = Client()
        answer, cancelled = scripted(ANSWER[:2])
        task = asyncio.create_task(stream(answer)({"type": "http"}, client.receive, client.send))
        await until(lambda: client.sent)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return cancelled

    assert asyncio.run(run())


def test_a_whole_answer_has_body_and_receipt():
    async def run():
        client = Client()
        answer, _ = scripted([*ANSWER, END])
        whole = WholeAnswer(answer, lambda result: {"text": result.choices[0].text})
        await whole({"type": "http"}, client.receive, client.send)
        return client

    client = asyncio.run(run())
    assert json.loads(client.body) == {"text": "Hello"}
    assert "x-keepwarm-receipt" in client.headers


def test_several_answers_are_one():
    async def run(second):
        answers = [scripted([*ANSWER, END])[0], scripted(second)[0]]
        return collect([event async for event in CombinedAnswer(answers, 1)])

    result = asyncio.run(run([*ANSWER, END]))
    assert [choice.text for choice in result.choices] == ["Hello", "Hello"]
    assert result.usage.prompt_tokens == 14
    assert result.receipt.reused == {"memory": 10}
    with pytest.raises(EngineFailed):
        asyncio.run(run([*ANSWER[:2], EngineFailed("It broke.")]))


def test_cancelling_several_cancels_each():
    pairs = [scripted(ANSWER[:1]) for _ in range(3)]
    CombinedAnswer([answer for answer, _ in pairs], 1).cancel()
    assert all(cancelled for _, cancelled in pairs)


def wait_for_a_plan(events, n_before, then=(), **options):
    """A stream whose plan, or error, comes late; the client and what it had before that."""

    async def run():
        client = Client()
        answer, _ = scripted(events)
        response = stream(answer, keep_alive_s=0.01, **options)
        task = asyncio.create_task(response({"type": "http"}, client.receive, client.send))
        await asyncio.sleep(0.1)
        await until(lambda: len(client.sent) >= n_before)
        before = list(client.sent)
        for event in then:
            answer.put(event)
        await asyncio.gather(task, return_exceptions=True)
        return client, before, task

    return asyncio.run(run())


def test_who_waits_long_for_a_plan_hears_of_it():
    """Headers without a receipt, comments until the plan; the receipt is in the last event."""
    client, before, _ = wait_for_a_plan([Progress(0, 7)], 2, then=[*ANSWER, END], plan_s=0.02)
    assert before[0]["status"] == 200
    assert "x-keepwarm-receipt" not in client.headers
    waited = b"".join(message["body"] for message in before[1:]).decode()
    assert set(waited.split("\n\n")) == {': {"prompt_tokens_done":0,"prompt_tokens":7}', ""}
    *chunks, _ = data(client.body)
    assert json.loads(chunks[0])["choices"][0]["delta"]["role"] == "assistant"
    assert json.loads(chunks[-1])["keepwarm"]["reused"] == {"memory": 5}
    assert len([m for m in client.sent if m["type"] == "http.response.start"]) == 1


def test_who_waits_a_little_gets_the_receipt():
    client, before, _ = wait_for_a_plan([Progress(0, 7)], 0, then=[*ANSWER, END], plan_s=300)
    assert before == []
    assert "x-keepwarm-receipt" in client.headers


def test_what_fails_after_a_long_wait_is_said_in_the_stream():
    """A status cannot be given any more, so the stream says it."""
    client, _, task = wait_for_a_plan([], 1, then=[TimedOut("Too late; ask again.")], plan_s=0.02)
    assert task.exception() is None
    *_, said, end = data(client.body)
    assert json.loads(said)["error"]["code"] == "timeout"
    assert end == "[DONE]"
    client, before, task = wait_for_a_plan([], 0, then=[TimedOut("Too late.")], plan_s=300)
    assert isinstance(task.exception(), TimedOut)
    assert client.sent == before == []
