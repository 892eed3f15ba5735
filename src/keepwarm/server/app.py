"""The application: routers, limits, errors in the shape of the API spoken, an orderly end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException

from keepwarm import __version__
from keepwarm.config import Settings
from keepwarm.errors import KeepwarmError
from keepwarm.server.anthropic import routes as anthropic
from keepwarm.server.dashboard import page as dashboard_page
from keepwarm.server.dashboard import routes as dashboard
from keepwarm.server.host import EngineHost
from keepwarm.server.http.body import sound_json
from keepwarm.server.http.limits import Limits
from keepwarm.server.http.problems import invalid, of_http, problem_of, respond
from keepwarm.server.http.wire import RECEIPT_HEADER
from keepwarm.server.manage import admin, agents, health, metrics
from keepwarm.server.manage import cache as cache_api
from keepwarm.server.openai import routes as openai
from keepwarm.server.responses import routes as responses
from keepwarm.server.responses.kept import ResponseStore

ROUTERS = (
    health.router,
    openai.router,
    responses.router,
    anthropic.router,
    agents.router,
    cache_api.router,
    admin.router,
    metrics.router,
    dashboard.router,
)
ABOUT = (
    "Local LLM agents that never compute the same prompt twice. Every answer carries a receipt: "
    f"how much of its prompt was warm (header `{RECEIPT_HEADER}`, field `keepwarm`)."
)

log = logging.getLogger(__name__)


def create_app(host: EngineHost, settings: Settings) -> FastAPI:
    """The server around a running engine, which is closed with it."""
    app = FastAPI(
        title="Keepwarm",
        version=__version__,
        description=ABOUT,
        lifespan=_lifespan,
        redoc_url=None,
        dependencies=[Depends(sound_json)],
    )
    app.state.host = host
    app.state.settings = settings
    app.state.responses = ResponseStore()
    app.state.resident = admin.ResidentModel(host, settings)
    app.state.metrics = metrics.Metrics(host)
    app.state.dashboard = dashboard.DashboardState(host, settings)
    for router in ROUTERS:
        app.include_router(router)
    app.include_router(dashboard_page.make_router())
    _say_what_is_wrong(app)
    app.add_middleware(Limits, settings=settings)
    _let_pages_in(app, settings)
    app.add_middleware(metrics.RequestCounter, metrics=app.state.metrics)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    app.state.host.begin()
    with app.state.dashboard.record_history():
        yield
    await asyncio.to_thread(app.state.host.close)


def _let_pages_in(app: FastAPI, settings: Settings) -> None:
    """Cross-origin calls only from pages that were named, and never with cookies."""
    origins = [origin.strip() for origin in settings.allowed_origins.split(",") if origin.strip()]
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[RECEIPT_HEADER],
        )


def _say_what_is_wrong(app: FastAPI) -> None:
    @app.exception_handler(KeepwarmError)
    async def ours(request: Request, error: KeepwarmError) -> Response:
        if error.status == 500:
            log.error("%s failed", request.url.path, exc_info=error)
        return respond(request.url.path, problem_of(error))

    @app.exception_handler(RequestValidationError)
    async def not_valid(request: Request, error: RequestValidationError) -> Response:
        return respond(request.url.path, invalid(error.errors(), error.body))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        problem = of_http(error.status_code, error.detail, request.method, request.url.path)
        answer = respond(request.url.path, problem)
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return respond(request.url.path, problem_of(error))
