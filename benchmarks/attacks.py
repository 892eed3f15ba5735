"""Requests that cost a server the most to prepare, as one client may send them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, NamedTuple, TypeAlias

CHAT = "/v1/chat/completions"
PATTERN = {"type": "string"}

_numbers = count(1)


class Attack(NamedTuple):
    """One kind of request; `make` gives a new one each time, so that nothing is cached."""

    path: str
    make: Callable[[], bytes]
    hangs_up: bool = False  # the client goes as soon as it has sent the request


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


ATTACKS: Mapping[str, Attack] = {
    "long text": Attack(CHAT, lambda: _chat(_user(_text(5_000_000)))),
    "long text, hanging up": Attack(CHAT, lambda: _chat(_user(_text(600_000))), hangs_up=True),
    "text near the limit": Attack(CHAT, lambda: _chat(_user(_text(600_000)))),
    "counting": Attack("/v1/messages/count_tokens", lambda: _chat(_user(_text(1_000_000)))),
    "newlines": Attack(
        CHAT, lambda: _chat({"role": "system", "content": "\n" * 1_000_000}, _user("hi"))
    ),
    "messages": Attack(CHAT, lambda: _messages(20_000)),
    "messages, explained": Attack(CHAT, lambda: _messages(800, keepwarm={"explain": True})),
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
    "full context": Attack(CHAT, lambda: _chat(_user(_text(34_000)))),
}
