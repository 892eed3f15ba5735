"""One function for each attack; what it returns is counted, and a 500 is never right.

A status, or a word: `closed` where the server has hung up, `left` where the client has.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import httpx
from benchmarks.attacks import OTHER_MODEL, OWN_MODEL

from tests.hostile.soak.servers import MAX_BODY
from tests.hostile.soak.talks import CHAT, MESSAGES, NEXT, RESPONSES, RULES, SPELLED, WAIT_S

Outcome: TypeAlias = int | str
KEY = "stranger"
WORDS = ("the", "fox", "dog", "tree", "question", "answer", "document", "lazy", "quick", "brown")
HELD_S = 1.0  # how long a connection is kept for nothing


@dataclass(frozen=True)
class Target:
    """A server, as an attacker sees it."""

    url: str
    client: httpx.AsyncClient
    chance: random.Random
    bundle: bytes  # as it was exported
    forged: bytes  # with other rows, and digests that fit them

    async def post(self, path: str, body: Any, **headers: str) -> Outcome:
        return (await self.answer(path, body, **headers)).status_code

    async def answer(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return await self.client.post(self.url + path, json=body, headers=self.headers(**headers))

    async def get(self, path: str) -> int:
        return (await self.client.get(self.url + path, headers=self.headers())).status_code

    def name(self) -> str:
        return f"stranger-{self.chance.randrange(1_000_000)}"

    def headers(self, **more: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {KEY}", **more}

    @asynccontextmanager
    async def connected(self, receive_buffer: int = 0) -> AsyncIterator[Streams]:
        place = urlsplit(self.url)
        made = socket.socket()
        made.setblocking(False)
        if receive_buffer:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(made, (place.hostname, place.port))
        reader, writer = await asyncio.open_connection(sock=made)
        try:
            yield reader, writer
        finally:
            writer.close()


Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def status(reader: asyncio.StreamReader) -> Outcome:
    with suppress(ConnectionError):
        line = await reader.readline()
        if line.startswith(b"HTTP/1.1 "):
            return int(line.split()[1])
    return "closed"


def head(path: str, *headers: str, key: str | None = KEY) -> bytes:
    keys = [f"Authorization: Bearer {key}"] if key else []
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", *keys, "Content-Type: application/json"]
    return "\r\n".join([*lines, *headers, "", ""]).encode()


async def push(writer: asyncio.StreamWriter, data: bytes, times: int = 1) -> None:
    """Send as long as the server takes it."""
    with suppress(ConnectionError):
        for _ in range(times):
            writer.write(data)
            await writer.drain()


def asked(text: str = "the fox", **more: Any) -> dict[str, Any]:
    return {
        "model": OWN_MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 4,
        **more,
    }


# Bundles


async def forged_bundle(target: Target) -> Outcome:
    return await _import(target, target.forged, target.name())


async def malformed_bundle(target: Target) -> Outcome:
    data = bytearray(target.bundle)
    for _ in range(target.chance.randrange(1, 6)):
        data[target.chance.randrange(len(data))] = target.chance.randrange(256)
    return await _import(target, bytes(data[: target.chance.randrange(1, len(data))]), "malformed")


async def long_name_in_a_bundle(target: Target) -> Outcome:
    header = b"x".ljust(124, b"\0") + b"77777777777\0".ljust(32, b"\0") + b"L"
    return await _import(target, header.ljust(512, b"\0") + b"y" * 100_000, "long")


async def _import(target: Target, data: bytes, name: str) -> Outcome:
    url = f"{target.url}/v1/agents/import"
    answer = await target.client.post(
        url, params={"id": name}, content=data, headers=target.headers()
    )
    return answer.status_code


async def broken_off_import(target: Target) -> Outcome:
    async with target.connected() as (_, writer):
        length = f"Content-Length: {len(target.bundle)}"
        await push(writer, head("/v1/agents/import?id=broken", length))
        await push(writer, target.bundle[: target.chance.randrange(len(target.bundle))])
    return "left"


async def abandoned_export(target: Target) -> Outcome:
    await _import(target, target.bundle, "exported")
    url = f"{target.url}/v1/agents/exported/export"
    async with target.client.stream("GET", url, headers=target.headers()) as answer:
        async for _ in answer.aiter_bytes(1024):
            break
        return answer.status_code


# Bodies and connections


async def big_body_without_a_key(target: Target) -> Outcome:
    async with target.connected() as (reader, writer):
        await push(writer, head(CHAT, f"Content-Length: {MAX_BODY - 1}", key=None))
        await push(writer, b" " * 65536, times=8)
        return await status(reader)


async def chunks_beyond_the_limit(target: Target) -> Outcome:
    async with target.connected() as (reader, writer):
        await push(writer, head(CHAT, "Transfer-Encoding: chunked"))
        await push(writer, b"10000\r\n" + b" " * 65536 + b"\r\n", times=MAX_BODY // 65536 + 2)
        return await status(reader)


async def length_and_chunks(target: Target) -> Outcome:
    async with target.connected() as (reader, writer):
        await push(writer, head(CHAT, "Content-Length: 5", "Transfer-Encoding: chunked"))
        await push(writer, b"0\r\n\r\n")
        return await status(reader)


async def slow_reader(target: Target) -> Outcome:
    body = json.dumps(asked(RULES, stream=True, max_tokens=400)).encode()
    async with target.connected(receive_buffer=4096) as (_, writer):
        await push(writer, head(CHAT, f"Content-Length: {len(body)}") + body)
        await asyncio.sleep(HELD_S)
    return "left"


async def slow_sender(target: Target) -> Outcome:
    async with target.connected() as (_, writer):
        for byte in head(CHAT, "Content-Length: 100")[:40]:
            await push(writer, bytes([byte]))
            await asyncio.sleep(HELD_S / 40)
    return "left"


async def idle_connections(target: Target) -> Outcome:
    held = [target.connected() for _ in range(60)]
    for each in held:
        await each.__aenter__()
    await asyncio.sleep(HELD_S)
    for each in held:
        await each.__aexit__(None, None, None)
    return "left"


async def leaves_in_mid_stream(target: Target) -> Outcome:
    path = target.chance.choice([CHAT, MESSAGES])
    body = asked(RULES, stream=True, max_tokens=200)
    request = target.client.stream("POST", target.url + path, json=body, headers=target.headers())
    async with request as answer:
        async for _ in answer.aiter_lines():
            if target.chance.random() < 0.2:
                break
    return "left"


# Work


async def heavy_schema(target: Target) -> Outcome:
    wide = {f"key{n}": {"type": "string"} for n in range(3000)}
    schema = target.chance.choice(
        [
            {"type": "integer", "multipleOf": 9_999_991, "maximum": 1e300},
            {"type": "object", "properties": wide, "required": list(wide)},
        ]
    )
    wrapped = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return await target.post(CHAT, asked(response_format=wrapped))


async def too_long(target: Target) -> Outcome:
    return await target.post(CHAT, asked("a word " * 500_000))


async def newlines(target: Target) -> Outcome:
    system = {"role": "system", "content": "\n" * 1_000_000}
    return await target.post(CHAT, {**asked(), "messages": [system, NEXT]})


async def many_messages(target: Target) -> Outcome:
    return await target.post(CHAT, {**asked(), "messages": [NEXT] * 20_000})


async def flood(target: Target) -> Outcome:
    """Prompts that nobody asks again fill the disk, and something has to go."""
    text = " ".join(target.chance.choices(WORDS, k=400))
    return await target.post(CHAT, asked(text, max_tokens=1))


async def heavy_tools(target: Target) -> Outcome:
    function = {"name": "f", "description": SPELLED, "parameters": {"properties": {SPELLED: {}}}}
    tools = [{"type": "function", "function": {**function, "name": f"f{n}"}} for n in range(4)]
    return await target.post(CHAT, asked(SPELLED, tools=tools))


async def stored_responses(target: Target) -> Outcome:
    body = {
        "model": OWN_MODEL,
        "input": SPELLED,
        "max_output_tokens": 4,
        "metadata": {"a": "b" * 500},
    }
    return await target.post(RESPONSES, body)


# Shares: threads, agents, the disk, memory


async def lists(target: Target) -> Outcome:
    """Many at once; the worst of their answers."""
    paths = [target.chance.choice(LISTS) for _ in range(8)]
    return max(await asyncio.gather(*map(target.get, paths)))


async def many_agents(target: Target) -> Outcome:
    made = [await target.post("/v1/agents", {"id": target.name()}) for _ in range(30)]
    return max(made, key=str)


async def pins(target: Target) -> Outcome:
    quota = target.chance.choice([1 << 16, 1 << 30, 1 << 60])
    body = {"id": target.name(), "pinned": True, "quota_bytes": quota}
    return await target.post("/v1/agents", body)


async def pins_for_an_hour(target: Target) -> Outcome:
    text = " ".join(target.chance.choices(WORDS, k=300))
    part = {"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    return await target.post(MESSAGES, body)


async def truncation_by_id(target: Target) -> Outcome:
    """A conversation that is much too long, brought back by a short body."""
    turn = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"})
    body = {"input": [*turn] * 500, "max_output_tokens": 1, "truncation": "auto"}
    first = await target.answer(RESPONSES, body)
    if first.status_code != 200:
        return first.status_code
    return await target.post(
        RESPONSES, {**body, "input": "hi", "previous_response_id": first.json()["id"]}
    )


async def in_the_background(target: Target) -> Outcome:
    include = ["message.output_text.logprobs"]
    body = {"input": RULES, "background": True, "max_output_tokens": 200, "include": include}
    begun = await target.answer(RESPONSES, {**body, "top_logprobs": 20})
    if begun.status_code == 200 and target.chance.random() < 0.5:
        return await target.post(f"{RESPONSES}/{begun.json()['id']}/cancel", {})
    return begun.status_code


async def keeps_the_model(target: Target) -> Outcome:
    body = {**asked(), "stream": False, "keep_alive": -1}
    return await target.post("/api/chat", {**body, "options": {"num_predict": 2}})


async def two_models(target: Target) -> Outcome:
    """The other model is loaded in place of the one that all others ask."""
    return await target.post(CHAT, {**asked(), "model": OTHER_MODEL})


async def endless_schema(target: Target) -> Outcome:
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    schema = target.chance.choice([{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}, endless])
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return await target.post(CHAT, asked(tools=[tool], tool_choice="required"))


LISTS = (
    *("/v1/agents?limit=1000", "/v1/models", "/v1/cache", "/v1/dashboard/forest"),
    *("/v1/dashboard/requests", "/v1/responses/none", "/v1/agents/none"),
)


# Bad input


BAD: tuple[tuple[str, Any], ...] = (
    (CHAT, {"messages": []}),
    (CHAT, {"messages": "text"}),
    (CHAT, asked(temperature=-1)),
    (CHAT, asked(seed=10**400)),
    (CHAT, asked(chat_template_kwargs={"self": 1})),
    (CHAT, asked(chat_template_kwargs={"tokenizer": 1})),
    (CHAT, asked(keepwarm={"kv": {"max_kv_size": 1e30}})),
    (CHAT, asked(keepwarm={"agent": "../../etc/passwd"})),
    (CHAT, asked(logit_bias={"99999999": 1})),
    (CHAT, asked(response_format={"type": "json_schema", "json_schema": {"schema": 5}})),
    ("/v1/completions", {"prompt": [10**9], "max_tokens": 1}),
    ("/v1/completions", {"prompt": [-1], "max_tokens": 1}),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 1}),
    (RESPONSES, {"input": [{"type": "function_call_output", "call_id": 5}]}),
    (RESPONSES, {"input": "a", "previous_response_id": "resp_" + "0" * 5000}),
    ("/v1/agents/none/fork", {"id": "other"}),
)


async def bad_input(target: Target) -> Outcome:
    path, body = target.chance.choice(BAD)
    answer = await target.post(path, body)
    return answer if answer != 200 else "accepted"


async def deep_body(target: Target) -> Outcome:
    content = b"[" * 100_000 + b"]" * 100_000
    answer = await target.client.post(target.url + CHAT, content=content, headers=target.headers())
    return answer.status_code


async def wrong_key(target: Target) -> Outcome:
    return await target.post(CHAT, asked(), Authorization="Bearer nobody")


Attack: TypeAlias = Callable[[Target], Awaitable[Outcome]]
LIGHT: tuple[Attack, ...] = (
    *(forged_bundle, malformed_bundle, long_name_in_a_bundle, broken_off_import, abandoned_export),
    *(big_body_without_a_key, chunks_beyond_the_limit, length_and_chunks),
    *(slow_reader, slow_sender, idle_connections, leaves_in_mid_stream),
    *(flood, heavy_tools, stored_responses, bad_input, deep_body, wrong_key),
    *(lists, many_agents, pins, pins_for_an_hour, in_the_background),
    *(keeps_the_model, two_models, endless_schema, truncation_by_id),
)
HEAVY: tuple[Attack, ...] = (heavy_schema, too_long, newlines, many_messages)
ATTACKS: Mapping[str, Attack] = {each.__name__: each for each in (*LIGHT, *HEAVY)}


async def attack(target: Target, name: str) -> Outcome:
    async with asyncio.timeout(WAIT_S):
        return await ATTACKS[name](target)
