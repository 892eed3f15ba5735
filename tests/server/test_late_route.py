"""Routes cost the start of a server little: most are imported when one of them is first needed.

FastAPI analyses each at its own first request.
"""

import asyncio
import subprocess
import sys
import time

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from pydantic import BaseModel

from keepwarm.server.apis import ROUTERS
from keepwarm.server.late_route import LateRoute, LateRoutes


class Sum(BaseModel):
    a: int
    b: int = 1


async def add(body: Sum) -> int:
    return body.a + body.b


@pytest.fixture
def app():
    router = APIRouter(route_class=LateRoute)
    router.add_api_route("/add", add, methods=["POST"])
    router.add_api_route("/add/{name}", add, methods=["POST"])
    app = FastAPI(openapi_url=None)
    app.router.routes.extend(router.routes)
    return app


def ask(app, method, path, body=None):
    async def send():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, json=body)

    return asyncio.run(send())


def analysed(app):
    return [route.path for route in app.routes if "dependant" in vars(route)]


def test_a_route_is_analysed_at_its_first_request(app):
    assert ask(app, "GET", "/add").status_code == 405
    assert analysed(app) == []
    assert ask(app, "POST", "/add", {"a": 2}).json() == 3
    assert analysed(app) == ["/add"]
    assert ask(app, "POST", "/add", {"a": "x"}).status_code == 422


def test_the_schema_has_every_route(app):
    assert set(app.openapi()["paths"]) == {"/add", "/add/{name}"}
    assert analysed(app) == ["/add", "/add/{name}"]


def test_a_route_has_no_other_attributes(app):
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = app.routes[0].nonsense
    assert analysed(app) == []


def test_every_route_of_the_server_is_late():
    assert all(type(route) is LateRoute for router in ROUTERS for route in router.routes)


class Later:
    """Routes that are loaded behind `/add`, and how often they were."""

    def __init__(self, app):
        self.n_loads = 0
        app.router.routes.append(LateRoutes(app.router, self.load))

    def load(self):
        self.n_loads += 1
        time.sleep(0.1)  # others ask meanwhile
        router = APIRouter(route_class=LateRoute)
        router.add_api_route("/subtract", subtract, methods=["POST"])
        router.add_api_route("/add", subtract, methods=["PATCH"])
        return router.routes


async def subtract(body: Sum) -> int:
    return body.a - body.b


def test_later_routes_are_loaded_by_a_request_that_is_for_none_of_the_first(app):
    later = Later(app)
    assert ask(app, "POST", "/add", {"a": 2}).json() == 3
    assert later.n_loads == 0
    assert ask(app, "POST", "/subtract", {"a": 2}).json() == 1
    assert ask(app, "POST", "/subtract", {"a": "x"}).status_code == 422
    assert ask(app, "POST", "/add", {"a": 2}).json() == 3
    assert later.n_loads == 1


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/add", 405), ("PATCH", "/add", 200), ("GET", "/subtract", 405), ("GET", "/no", 404)],
)
def test_later_routes_count_from_the_first_request_on(app, method, path, status):
    Later(app)
    answers = [ask(app, method, path, {"a": 2}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [status, status]
    assert answers[0].content == answers[1].content


def test_later_routes_are_loaded_once_for_all_who_ask_together(app):
    later = Later(app)

    async def together():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            asked = (client.post("/subtract", json={"a": n}) for n in range(9))
            return await asyncio.gather(*asked)

    assert [answer.json() for answer in asyncio.run(together())] == [n - 1 for n in range(9)]
    assert later.n_loads == 1


LOADED = """
import sys
import keepwarm.server.app
apis = ("anthropic", "dashboard", "ollama", "openai", "responses")
print(*(api for api in apis if f"keepwarm.server.{api}.routes" in sys.modules))
"""


def test_a_server_starts_without_most_of_its_apis():
    shown = subprocess.check_output([sys.executable, "-c", LOADED], text=True)
    assert shown.split() == ["openai"]
