"""Routes cost the start of a server little: FastAPI analyses each at its first request."""

import pytest
from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel

from keepwarm.server.app import ROUTERS
from keepwarm.server.http.body import LateRoute


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


def analysed(app):
    return [route.path for route in app.routes if "dependant" in vars(route)]


def test_late_route_is_analysed_at_its_first_request(app):
    client = TestClient(app)
    assert client.get("/add").status_code == 405
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = app.routes[0].nonsense
    assert analysed(app) == []
    assert client.post("/add", json={"a": 2}).json() == 3
    assert analysed(app) == ["/add"]
    assert client.post("/add", json={"a": "x"}).status_code == 422


def test_late_routes_are_in_the_schema(app):
    assert set(app.openapi()["paths"]) == {"/add", "/add/{name}"}
    assert analysed(app) == ["/add", "/add/{name}"]


def test_all_routes_of_the_server_are_late():
    assert all(isinstance(route, LateRoute) for router in ROUTERS for route in router.routes)
