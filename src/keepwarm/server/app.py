"""The FastAPI application: routers, limits, error handlers, orderly shutdown."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from functools import partial

from anyio.to_thread import current_default_thread_limiter
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from keepwarm import __version__
from keepwarm.agents.signing import BundleKeys
from keepwarm.config import Settings
from keepwarm.errors import KeepwarmError
from keepwarm.models.catalog import locate
from keepwarm.server.admin import agent_chat, agents, cache, monitoring
from keepwarm.server.admin import models as admin_models
from keepwarm.server.anthropic import routes as anthropic
from keepwarm.server.dashboard import routes as dashboard
from keepwarm.server.http.keys import ApiKeys, tenant_agent_id
from keepwarm.server.http.limits import Limits, origin_pattern
from keepwarm.server.http.logs import REQUEST_ID_HEADERS, RecentLines, RequestLog
from keepwarm.server.http.permits import MANAGEMENT_THREADS, PrepareLimiter, prepare_threads
from keepwarm.server.http.problems import (
    ProblemResponse,
    http_problem,
    problem_of,
    validation_problem,
)
from keepwarm.server.http.sse import RECEIPT_HEADER
from keepwarm.server.kv_events import EventPublisher, event_publisher
from keepwarm.server.mcp import McpEndpoint, memory_endpoint
from keepwarm.server.models.models import Models
from keepwarm.server.ollama import routes as ollama
from keepwarm.server.ollama.models import Pulls
from keepwarm.server.openai import routes as openai
from keepwarm.server.responses import routes as responses
from keepwarm.server.responses.background import BackgroundResponses
from keepwarm.server.responses.store import ResponseStore

ABOUT = (
    "Serves local LLMs without computing the same prompt twice. Every answer has a receipt: "
    f"how much of its prompt was reused (header `{RECEIPT_HEADER}`, field `keepwarm`)."
)
ROUTERS = (
    monitoring.router,
    openai.router,
    responses.router,
    anthropic.router,
    ollama.router,
    agents.router,
    agent_chat.router,
    cache.router,
    admin_models.router,
    dashboard.router,
)

log = logging.getLogger(__name__)
SHORT_PATHS = re.compile(r"/(chat/completions|completions|responses|models|embeddings)(/.*)?")


def create_app(models: Models, settings: Settings) -> FastAPI:
    """An application around these models; shutdown closes their engines."""
    app = FastAPI(
        title="Keepwarm",
        version=__version__,
        description=ABOUT,
        lifespan=_lifespan,
        docs_url=None,  # FastAPI's page loads scripts from a public CDN
        redoc_url=None,
        openapi_url=None,  # FastAPI makes the schema on the event loop; see `dashboard`
    )
    app.state.models = models
    app.state.settings = settings
    app.state.bundle_keys = BundleKeys.of(settings)
    app.state.transfers = agents.Transfers()
    app.state.pulls = Pulls(partial(locate, settings=settings, refresh=True))
    app.state.metrics = monitoring.Metrics(models)
    app.state.keys = ApiKeys(settings)
    app.state.mcp = memory_endpoint(models, settings)
    app.state.events = event_publisher(models, settings)
    lines = RecentLines()
    app.state.dashboard = dashboard.DashboardState(models, settings, lines)
    app.state.resident = admin_models.ResidentModel(models, settings)
    app.state.responses = ResponseStore(lambda: models.store, settings.response_ttl_s)
    app.state.background = BackgroundResponses()
    for router in (*ROUTERS, dashboard.page_router()):
        app.router.routes.extend(router.routes)  # `include_router` builds each a second time
    if app.state.mcp is not None:
        app.router.routes.append(app.state.mcp.route)
    _add_error_handlers(app)
    app.state.threads = prepare_threads()
    app.add_middleware(PrepareLimiter, settings=settings, threads=app.state.threads)
    app.add_middleware(Limits, settings=settings, keys=app.state.keys)
    _add_cors(app, settings)
    count = app.state.metrics.count_request
    app.add_middleware(RequestLog, recent=lines, count=count, ledger=models.ledger)
    app.add_middleware(ShortPaths)
    return app


class ShortPaths:
    """Takes OpenAI's paths without `/v1` too, as mlx_lm.server does; first of all middlewares."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and SHORT_PATHS.fullmatch(scope["path"]):
            scope = {**scope, "path": f"/v1{scope['path']}"}
        await self._app(scope, receive, send)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    # NOTE: only management runs on Starlette's threads, and there may be so many of them: plain
    # endpoints, and `run_in_threadpool`. Requests for tokens have those of `PrepareLimiter`, and
    # the stop those of the event loop, so neither waits for a check of the store.
    current_default_thread_limiter().total_tokens = MANAGEMENT_THREADS
    models: Models = app.state.models
    models.start_warmers()
    housekeeping = asyncio.create_task(models.keep_house())
    endpoint: McpEndpoint | None = app.state.mcp
    events: EventPublisher | None = app.state.events
    saving = asyncio.create_task(app.state.dashboard.save_regularly())
    with events.running() if events else nullcontext():
        async with endpoint.running() if endpoint else nullcontext():
            yield
    housekeeping.cancel()
    saving.cancel()
    await asyncio.wait({saving})  # two saves at once would count the same minutes twice
    app.state.transfers.close()
    app.state.threads.shutdown(wait=False)
    await app.state.background.close()
    await asyncio.to_thread(app.state.responses.close)
    await asyncio.to_thread(models.close)
    await asyncio.to_thread(app.state.dashboard.history.save)  # with what ended until now


def _add_cors(app: FastAPI, settings: Settings) -> None:
    """Allow cross-origin calls from the configured origins only, and never with cookies."""
    if settings.allowed_origins.strip():
        app.add_middleware(
            CORSMiddleware,
            allow_origin_regex=origin_pattern(settings).pattern,
            allow_methods=["GET", "POST", "PATCH", "DELETE"],
            allow_headers=["*"],
            expose_headers=[RECEIPT_HEADER, *REQUEST_ID_HEADERS],
        )


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(KeepwarmError)
    async def keepwarm_error(request: Request, error: KeepwarmError) -> Response:
        if error.status == 500:
            log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        problem = problem_of(error)
        own = problem.message.replace(tenant_agent_id(getattr(request.state, "tenant", ""), ""), "")
        return ProblemResponse(request.scope, problem._replace(message=own))

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> Response:
        return ProblemResponse(request.scope, validation_problem(error.errors(), error.body))

    @app.exception_handler(ClientDisconnect)
    async def client_left(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=400)  # nobody reads it

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, KeepwarmError):  # FastAPI's way of saying: from the body
            return ProblemResponse(request.scope, problem_of(error.__cause__))
        problem = http_problem(error.status_code, error.detail, request.method, request.url.path)
        answer = ProblemResponse(request.scope, problem)
        answer.headers.update(error.headers or {})
        return answer
