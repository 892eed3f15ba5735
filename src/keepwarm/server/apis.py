"""All APIs. Importing them takes a tenth of a second, so the server does it at their first request.

`app` imports two of them itself: what a server is asked at first, and mostly.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.routing import BaseRoute

from keepwarm.server.admin import agent_chat, agents, cache, models, monitoring, prompts
from keepwarm.server.anthropic import routes as anthropic
from keepwarm.server.dashboard import page as dashboard_page
from keepwarm.server.dashboard import routes as dashboard
from keepwarm.server.ollama import routes as ollama
from keepwarm.server.openai import routes as openai
from keepwarm.server.responses import routes as responses
from keepwarm.server.responses.background import BackgroundResponses
from keepwarm.server.responses.store import ResponseStore

FIRST = (monitoring.router, openai.router)
LATER = (
    responses.router,
    responses.conversations,
    anthropic.router,
    ollama.router,
    agents.router,
    agents.admin_router,
    agent_chat.router,
    cache.router,
    prompts.router,
    models.router,
    dashboard.router,
)
ROUTERS = (*FIRST, *LATER)


def later_routes(app: FastAPI) -> list[BaseRoute]:
    """The routes of all but the first APIs, with what they keep in the application."""
    state = app.state
    state.resident = models.ResidentModel(state.models, state.settings)
    state.responses = ResponseStore(lambda: state.models.store, state.settings.response_ttl_s)
    state.background = BackgroundResponses(state.responses)
    state.closing.push_async_callback(run_in_threadpool, state.responses.close)
    state.closing.push_async_callback(state.background.close)
    routers = (*LATER, dashboard_page.make_router())
    return [route for router in routers for route in router.routes]
