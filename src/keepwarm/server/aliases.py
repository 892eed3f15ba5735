"""Paths and headers as other servers take them, made those that all checks here know."""

from __future__ import annotations

import re

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send

OPENAI = re.compile(
    r"/(chat/completions|completions|responses|conversations|models|embeddings)(/.*)?"
)
JSON_ALWAYS = re.compile(r"/api/.*")  # curl says that a body is a form


class Aliases:
    """OpenAI's paths without `/v1`; JSON that is not called so, where Ollama takes it.

    It stands before all that looks at a path. That a web page can send such a body without asking
    first is harmless: its origin is checked.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = _named(scope)
        await self._app(scope, receive, send)


def _named(scope: Scope) -> Scope:
    path: str = scope["path"]
    if OPENAI.fullmatch(path):
        return {**scope, "path": f"/v1{path}"}
    if scope["method"] == "POST" and JSON_ALWAYS.fullmatch(path):
        scope = {**scope, "headers": list(scope["headers"])}
        MutableHeaders(scope=scope)["content-type"] = "application/json"
    return scope
