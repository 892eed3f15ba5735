"""What happens to streams and to what was computed when the server ends, in any way.

Real processes: a signal reaches no thread alone.
"""

import asyncio
import re
import signal
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import httpx
import pytest

from keepwarm import config
from keepwarm.cache.store import Store
from keepwarm.concurrency import DeviceLock
from keepwarm.errors import Stopping
from keepwarm.server.admin.monitoring import ready
from keepwarm.server.models.host import EngineHost, start_engine
from keepwarm.server.models.models import Models
from keepwarm.store.counts import CountsFile
from keepwarm.telemetry.ledger import History, Ledger
from tests.kit.waiting import wait_until
from tests.server.conftest import serve
from tests.server.processes import SMALL, Breaks, served
from tests.server.talks import (
    DURABLE,
    N_TOKENS,
    QUESTIONS,
    ask,
    begun,
    client_of,
    plain_bias,
    tokenizer_of,
    turns,
)
from tests.server.test_keep_alive import Slowly

N_TALKS = 2
N_LONG = 800  # tokens of an answer that goes on while a client is refused
SLICE = 512  # prompt tokens that are read in one go, at most


@pytest.fixture(scope="module")
def plain(checkpoint):
    return plain_bias(checkpoint)


def days_of(home):
    """What a stopped server has counted by day: the same as in total, and as its store."""
    kept = History(home / "history.json", Ledger()).timeline
    days = sum(map(Counter, kept.days.values()), Counter())
    counts = CountsFile(config.load({"KEEPWARM_HOME": str(home)}).store).total()
    assert days == kept.total
    assert days["prompt"] == counts.prompt_tokens > 0
    assert {tier: days[tier] for tier in counts.reused} == counts.reused
    assert days["prefilled"] == counts.computed > 0
    return days


async def no_longer_ready(client):
    while (ready := await client.get("/health/ready")).is_success:
        await asyncio.sleep(0.01)
    return ready


def accepted(server):
    """Drafted tokens that were right."""
    text = httpx.get(f"{server.url}/metrics").text
    return float(re.search(r"^keepwarm_accepted_tokens_total (\S+)", text, re.MULTILINE)[1])


async def begin_drafts(server, plain):
    """Until the model was tried, in an idle moment."""
    async with client_of(server.url) as client, asyncio.timeout(300):
        while not accepted(server):
            await ask(client, begun(N_TALKS), plain)


async def cut_off(server, talks, plain):
    """Begin an endless answer in all talks, kill the server once some of it was drafted; what each
    client had by then.
    """
    import openai

    texts, before = [""] * len(talks), accepted(server)

    async def read(number, client):
        with suppress(openai.APIConnectionError, httpx.RemoteProtocolError):
            stream = await ask(client, talks[number], plain, 4000, stream=True)
            async for chunk in stream:
                texts[number] += chunk.choices[0].delta.content or ""
            raise AssertionError("an endless answer ended")

    async with client_of(server.url) as client:
        reading = [asyncio.create_task(read(number, client)) for number in range(len(talks))]
        async with asyncio.timeout(300):
            while not all(texts) or accepted(server) == before:
                await asyncio.sleep(0.01)
        server.process.kill()
        await asyncio.gather(*reading)
    return texts


def test_server_killed_in_mid_stream_goes_on_where_it_was(
    checkpoint, serving, live, plain, tmp_path
):
    """After kill -9 in mid-stream every prefix comes from disk, and answers are the same.

    The killed one speculates.
    """
    talks = [begun(number) for number in range(N_TALKS)]
    wanted = [talks]
    for _ in QUESTIONS:
        wanted.append([talk for talk, _ in asyncio.run(turns(live.url, wanted[-1], plain))])

    spelt = [message["content"] for talk in wanted[-1] for message in talk[1::2]]
    n_written = [len(tokenizer_of(checkpoint).encode(text).ids) for text in spelt]
    assert sum(n < N_TOKENS for n in n_written) > len(spelt) / 2  # to be found only in the store

    with served(checkpoint, tmp_path, KEEPWARM_SPECULATION="auto") as server:
        first = asyncio.run(turns(server.url, talks, plain, extra_headers=DURABLE))
        assert [talk for talk, _ in first] == wanted[1]
        asyncio.run(begin_drafts(server, plain))
        heard = asyncio.run(cut_off(server, wanted[1], plain))
        for text, talk in zip(heard, wanted[2], strict=True):
            said = talk[-2]["content"]
            assert text[: len(said)] == said[: len(text)]

    with serving(home=tmp_path) as again:
        second = asyncio.run(turns(again.url, wanted[1], plain))
        third = asyncio.run(turns(again.url, wanted[2], plain))
    assert [talk for talk, _ in second] == wanted[2]
    assert [talk for talk, _ in third] == wanted[3]
    costs = [[usage for _, usage in each] for each in (first, second, third)]
    for before, after in zip(costs[0] + costs[1], costs[1] + costs[2], strict=True):
        known = before.prompt_tokens + before.completion_tokens
        assert known <= after.prompt_tokens_details.cached_tokens < after.prompt_tokens


def test_server_at_sigterm_ends_running_answers_and_refuses_new_ones(
    checkpoint, serving, plain, tmp_path
):
    """Running streams end whole, who comes is told in the shape of his API, all is on disk."""

    async def stop_in_mid_stream(server):
        async with client_of(server.url) as client:
            stream = await ask(client, begun(0), plain, N_LONG, stream=True)
            chunks = [await anext(stream) for _ in range(3)]
            async with httpx.AsyncClient(base_url=server.url) as plain_client:
                server.process.send_signal(signal.SIGTERM)
                told = await refused(plain_client)
            chunks += [chunk async for chunk in stream]
        return chunks, told

    async def refused(client):
        ready = await no_longer_ready(client)
        chat = {"model": "m", "max_tokens": 4, "messages": begun(1)}
        posted = [
            await client.post(f"/v1/{path}", json=chat) for path in ("chat/completions", "messages")
        ]
        return [ready, *posted, await client.get("/health/live")]

    with served(checkpoint, tmp_path, KEEPWARM_DRAIN_S="300") as server:
        chunks, told = asyncio.run(stop_in_mid_stream(server))
        assert server.process.wait(300) == 0
        assert server.process.stderr.read() == ""
    assert [answer.status_code for answer in told] == [503, 503, 503, 200]
    assert told[1].json()["error"]["code"] == "shutting_down"
    assert told[2].json()["error"]["type"] == "overloaded_error"
    assert chunks[-1].choices[0].finish_reason == "length"
    days = days_of(tmp_path)
    assert days["finished"] == 1
    assert days["refused"] == 2, "after the signal"
    assert days["generated"] == N_LONG

    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    talk = [
        *begun(0),
        {"role": "assistant", "content": said},
        {"role": "user", "content": "Go on."},
    ]
    with serving(home=tmp_path) as again:
        ((_, usage),) = asyncio.run(turns(again.url, [talk], plain))
    assert usage.prompt_tokens_details.cached_tokens > N_LONG


def test_server_with_a_running_stream_ends_at_once_with_the_second_signal(
    checkpoint, plain, tmp_path
):
    """By SIGINT; the other test stops with SIGTERM."""

    async def stop_twice(server):
        async with client_of(server.url) as client:
            stream = await ask(client, begun(0), plain, 4000, stream=True)
            await anext(stream)
            async with httpx.AsyncClient(base_url=server.url) as plain_client:
                server.process.send_signal(signal.SIGINT)
                await no_longer_ready(plain_client)
            assert server.process.poll() is None  # it waits for the stream
            server.process.send_signal(signal.SIGINT)
            wait_until(lambda: server.process.poll() is not None)

    with served(checkpoint, tmp_path, KEEPWARM_DRAIN_S="300") as server:
        asyncio.run(stop_twice(server))
        assert server.process.returncode == -signal.SIGINT


def test_stream_whose_model_fails_has_an_error_event_and_others_go_on(
    served_model, live, plain, tmp_path
):
    """The model breaks under one of three streams, which are one batch."""
    import openai

    token = 50
    others = {**plain, str(token): -100}
    poisoned = {**plain, str(token): 100}

    async def all_at_once(server):
        async with client_of(server.url) as client:
            whole = [ask(client, begun(number), others, 40, stream=True) for number in (1, 2)]
            streams = await asyncio.gather(*whole)
            first = [await anext(stream) for stream in streams]
            with pytest.raises(openai.APIError, match="the model broke") as failed:
                async for _ in await ask(client, begun(3), poisoned, 40, stream=True):
                    pass
            chunks = [[head, *[c async for c in s]] for head, s in zip(first, streams, strict=True)]
            texts = ["".join(c.choices[0].delta.content or "" for c in some) for some in chunks]
            return failed.value, texts

    wanted = asyncio.run(turns(live.url, [begun(1), begun(2)], others, n_tokens=40))
    breaks = Breaks(served_model.module, token, served_model.tokenizer)
    settings = config.load({"KEEPWARM_HOME": str(tmp_path)})
    with serve(replace(served_model, module=breaks), settings) as broken:
        error, texts = asyncio.run(all_at_once(broken))
        after = broken.get("/health/ready")
    assert not isinstance(error, openai.APIStatusError)  # said in the stream, not as a status
    assert texts == [talk[1]["content"] for talk, _ in wanted]
    assert after.is_success


def test_server_whose_device_is_lost_says_so_and_ends(checkpoint, tmp_path):
    """So that its supervisor starts it again; nothing could be computed in this process."""
    message = {"role": "user", "content": "The lazy dog."}
    tokens = tokenizer_of(checkpoint).encode(message["content"]).ids
    fails = {"KEEPWARM_BREAKS_AT": str(tokens[-1]), "KEEPWARM_LOSES_DEVICE": "1"}
    with served(checkpoint, tmp_path, command=SMALL, **fails) as server:
        body = {"model": "m", "messages": [message], "max_tokens": 2}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300)
        assert server.process.wait(300) == 1
        logged = server.process.stderr.read()
    assert answer.status_code == 503
    reason = answer.json()["error"]["message"]
    assert "illegal memory access" in reason
    assert logged.count("CRITICAL") == 1


def test_health_says_why_there_is_no_device(served_model, tmp_path):
    settings, device = config.load({"KEEPWARM_HOME": str(tmp_path)}), DeviceLock()
    with Store(settings=settings) as store:
        engine = start_engine(served_model, store, settings, device=device)
        models = Models(EngineHost(engine, "m"), settings)
        assert asyncio.run(ready(models)) == {"status": "ok"}
        device.lost = "An illegal access."
        with pytest.raises(Stopping, match="An illegal access"):
            asyncio.run(ready(models))
        models.close()


def test_client_that_leaves_costs_no_more_than_a_step(served_model, plain, tmp_path):
    """While its prompt is read, and while it is answered; what was done by then is used again."""
    long = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 250}]
    body = {"model": "m", "max_tokens": 8000, "logit_bias": plain, "stream": True}
    slow = Slowly(served_model.module, 0.001)  # a step takes longer than the news of a leave
    settings = config.load({"KEEPWARM_HOME": str(tmp_path)})
    with serve(replace(served_model, module=slow), settings) as live:
        path = "/v1/chat/completions"

        def done():
            return live.host.engine.stats().counters

        def leave(messages, when):
            """Ask, go away once something has been done; how much was done by that moment."""
            asked = {**body, "messages": messages}
            with httpx.stream("POST", f"{live.url}{path}", json=asked, timeout=300):
                wait_until(when)
                return done()

        def ask_again(messages):
            asked = {**body, "messages": messages, "stream": False, "max_tokens": 1}
            usage = live.post(path, asked).json()["usage"]
            return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

        left = leave(long, lambda: done()["prefilled_tokens"])
        wait_until(lambda: done()["cancelled"] == 1)
        read = done()["prefilled_tokens"]
        assert done()["generated_tokens"] == 0
        assert read - left["prefilled_tokens"] <= 2 * SLICE  # the one under way, and one more
        slow.token_s = 0
        n_prompt, cached = ask_again(long)
        assert cached == read < n_prompt

        before = done()["generated_tokens"]
        left = leave(begun(0), lambda: done()["generated_tokens"] > before + 40)
        wait_until(lambda: done()["cancelled"] == 2)
        made = done()["generated_tokens"]
        assert made - left["generated_tokens"] < 200  # of 8000; how long the news takes is chance
        wait_until(lambda: live.host.engine.stats().decoding == 0)  # it is counted before it leaves
        n_prompt, cached = ask_again(begun(0))
        assert cached == n_prompt - 1
