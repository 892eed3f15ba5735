"""Requests that cost a server the most, as one client may send them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, Literal, NamedTuple, TypeAlias

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
PATTERN = {"type": "string"}
N_AGENTS = 4_000
N_FORKS = 50  # in one request
N_TURNS = 4_000  # of a stored conversation, of which a model of 4,096 tokens has room for few
OWN_MODEL, OTHER_MODEL = "own", "other"
PREPARED = "what-was-prepared"  # stands in a path or body for what `prepare` returned

_numbers = count(1)


Send: TypeAlias = Callable[[str, bytes], Any]  # posts a body to a path; the JSON of the answer
Cost: TypeAlias = Literal["no prefill", "prefill", "models"]
"""What the victim may have to wait for: nothing, a slice of a prompt, another model."""


def _nothing() -> bytes:
    return b""


class Attack(NamedTuple):
    """One kind of request; `make` gives a new one each time, so that nothing is cached."""

    path: str
    make: Callable[[], bytes] = _nothing
    method: str = "POST"
    cost: Cost = "no prefill"
    hangs_up: bool = False  # the client goes as soon as it has sent the request
    prepare: Callable[[Send], str] | None = None  # what must be there first


Schema: TypeAlias = Callable[[int], Mapping[str, Any]]


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _chat(*messages: Mapping[str, Any], **more: Any) -> bytes:
    return _json({"messages": messages, "max_tokens": 1, "temperature": 0, **more})


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": f"{next(_numbers)} {text}"}


def _text(n_bytes: int) -> str:
    sentence = "The quick brown fox jumps over the lazy dog. "
    return sentence * (n_bytes // len(sentence))


def _schema(make: Schema) -> Callable[[], bytes]:
    def body() -> bytes:
        wanted = {"name": "x", "schema": make(next(_numbers))}
        form = {"type": "json_schema", "json_schema": wanted}
        return _chat(_user("hi"), response_format=form)

    return body


def _properties(number: int) -> Mapping[str, Any]:
    return {"type": "object", "properties": {f"p{number}_{i}": PATTERN for i in range(5_000)}}


def _multiple(number: int) -> Mapping[str, Any]:
    return {"type": "integer", "multipleOf": 999_000 + number % 997, "maximum": 1e300}


def _tools() -> bytes:
    parameters = {"type": "object", "properties": {f"p{i}": PATTERN for i in range(20)}}
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": parameters}}
        for i in range(2_000)
    ]
    return _chat(_user("hi"), tools=tools)


def _messages(n: int, **more: Any) -> bytes:
    turn = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"})
    return _chat(_user("hi"), *(turn * (n // 2)), _user("hi"), **more)


def _create_agents(send: Send) -> str:
    send("/v1/agents", _json({"id": "agent"}))
    for first in range(0, N_AGENTS, N_FORKS):
        ids = [f"agent-{number}" for number in range(first, first + N_FORKS)]
        send("/v1/agents/agent/fork", _json({"ids": ids}))
    return ""


def _store_response(send: Send) -> str:
    """A long conversation, which the answer's id brings back."""
    turn = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"})
    items = [*(turn * (N_TURNS // 2)), _user("hi")]
    body = {"input": items, "max_output_tokens": 1, "truncation": "auto"}
    return str(send(RESPONSES, _json(body))["id"])


def _pinned() -> bytes:
    """Refused beyond the key's share; within it, one more agent."""
    return _json({"id": f"pin-{next(_numbers)}", "pinned": True, "quota_bytes": 1 << 20})


def _kept_for_an_hour() -> bytes:
    part = {"type": "text", "text": f"{next(_numbers)} {_text(1_500)}"}
    cached = part | {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    return _json({"messages": [{"role": "user", "content": [cached]}], "max_tokens": 1})


def _by_id() -> bytes:
    body = {"previous_response_id": PREPARED, "input": f"{next(_numbers)}", "truncation": "auto"}
    return _json({**body, "max_output_tokens": 1})


def _with_logprobs(**more: Any) -> bytes:
    body = {"input": f"{next(_numbers)} hi", "max_output_tokens": 512, "top_logprobs": 20}
    return _json({**body, "include": ["message.output_text.logprobs"], **more})


def _store_logprobs(send: Send) -> str:
    """An answer of a megabyte."""
    return str(send(RESPONSES, _with_logprobs())["id"])


ATTACKS: Mapping[str, Attack] = {
    "long text": Attack(CHAT, lambda: _chat(_user(_text(5_000_000)))),
    "long text, hanging up": Attack(CHAT, lambda: _chat(_user(_text(600_000))), hangs_up=True),
    "text near the limit": Attack(CHAT, lambda: _chat(_user(_text(600_000)))),
    "counting": Attack("/v1/messages/count_tokens", lambda: _chat(_user(_text(1_000_000)))),
    "newlines": Attack(
        CHAT, lambda: _chat({"role": "system", "content": "\n" * 1_000_000}, _user("hi"))
    ),
    "messages": Attack(CHAT, lambda: _messages(20_000)),
    "messages, explained": Attack(
        CHAT, lambda: _messages(400, keepwarm={"explain": True}), cost="prefill"
    ),
    "wrong messages": Attack(CHAT, lambda: _json({"messages": [1] * 500_000})),
    "empty lists": Attack(CHAT, lambda: _chat(_user("hi"), metadata=[[]] * 500_000)),
    "whole bodies": Attack(CHAT, lambda: _chat(_user("hi"), user="x" * (31 << 20))),
    "tools": Attack(CHAT, _tools),
    "properties": Attack(CHAT, _schema(_properties)),
    "multiples": Attack(CHAT, _schema(_multiple)),
    "token ids": Attack("/v1/completions", lambda: _json({"prompt": [7] * 1_000_000})),
    "biases": Attack(
        CHAT, lambda: _chat(_user("hi"), logit_bias={str(i): 1 for i in range(40_000)})
    ),
    "full context": Attack(CHAT, lambda: _chat(_user(_text(6_500))), cost="prefill"),
    "agents, listed": Attack("/v1/agents?limit=1000", method="GET", prepare=_create_agents),
    "the cache, shown": Attack("/v1/cache", method="GET"),
    "the forest, shown": Attack("/v1/dashboard/forest", method="GET"),
    "models, listed": Attack("/v1/models", method="GET"),
    "responses, read": Attack(
        f"/v1/responses/{PREPARED}/input_items", method="GET", prepare=_store_response
    ),
    "pins": Attack("/v1/agents", _pinned),
    "pins for an hour": Attack("/v1/messages", _kept_for_an_hour, cost="prefill"),
    "truncation by id": Attack(RESPONSES, _by_id, cost="prefill", prepare=_store_response),
    "truncation": Attack(
        "/api/chat",
        lambda: _messages(8_000, model=OWN_MODEL, stream=False, options={"num_predict": 1}),
        cost="prefill",
    ),
    "in the background": Attack(RESPONSES, lambda: _with_logprobs(background=True), cost="prefill"),
    "log-probabilities": Attack(RESPONSES, lambda: _with_logprobs(stream=True), cost="prefill"),
    "log-probabilities, read": Attack(
        f"{RESPONSES}/{PREPARED}?stream=true", method="GET", prepare=_store_logprobs
    ),
    "two models": Attack(CHAT, lambda: _chat(_user("hi"), model=OTHER_MODEL), cost="models"),
}
