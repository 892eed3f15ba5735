"""The pages of the server: the dashboard and the API's documentation.

Their files hold no data and need no key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse

from keepwarm.server.http.body import LateRoute

PATH = "/dashboard"
DOCS_PATH = "/docs"
SCHEMA_PATH = "/openapi.json"
METHODS = ["GET", "HEAD"]  # Claude Code probes the server with HEAD /
FILES = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing from other origins, no inline scripts or styles, no framing.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def make_router() -> APIRouter:
    """A route for both pages, the API's schema and every file; `/` leads browsers there."""
    router = APIRouter(include_in_schema=False, route_class=LateRoute)
    router.add_api_route("/", _root, methods=METHODS)
    router.add_api_route(PATH, _serve(FILES / "index.html"), methods=METHODS)
    router.add_api_route(DOCS_PATH, _serve(FILES / "docs.html"), methods=METHODS)
    router.add_api_route(SCHEMA_PATH, _schema)
    for file in sorted(FILES.iterdir()):
        router.add_api_route(f"{PATH}/{file.name}", _serve(file), methods=METHODS)
    return router


async def _root(request: Request) -> Response:
    """Browsers see the dashboard; Ollama's clients look whether there is a server."""
    if "text/html" in request.headers.get("accept", ""):
        return RedirectResponse(PATH)
    return PlainTextResponse("Ollama is running")


async def _schema(request: Request) -> Response:
    """Made when it is first asked for, which takes a quarter of a second."""
    return JSONResponse(await asyncio.to_thread(request.app.openapi))


def _serve(file: Path) -> Callable[[], Awaitable[Response]]:
    content = file.read_bytes()

    async def answer() -> Response:
        return Response(content, headers=HEADERS, media_type=TYPES[file.suffix])

    return answer
