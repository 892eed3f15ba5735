"""Routes cost the start of a server nothing: FastAPI analyses each when it is first needed."""

import asyncio

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from pydantic import BaseModel

from keepwarm.server.app import ROUTERS
from keepwarm.server.late_route import LateRoute


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
