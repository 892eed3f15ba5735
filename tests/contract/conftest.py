"""Empty places for shared tiers."""

import uuid
from itertools import count

import pytest

from tests.contract.shared import SOON
from tests.kit.redis_server import redis_server

DATABASES = count()


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Deadlines that a busy machine keeps too, and an absence that no test outlasts."""
    monkeypatch.setattr("keepwarm.remote.tier.MIN_READ_S", SOON)
    monkeypatch.setattr("keepwarm.remote.lookup.ABSENT_S", 3600.0)


@pytest.fixture(scope="package")
def databases(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis"), "--databases", "10000") as server:
        yield server


@pytest.fixture
def new_address(request, tmp_path_factory):
    """Gives the address of an empty place of a kind."""

    def inside(bucket):
        address, _, options = request.getfixturevalue(bucket).partition("?")
        return f"{address}/{uuid.uuid4().hex}?{options}"

    def opener(kind):
        if kind == "redis":
            return f"{request.getfixturevalue('databases').url}/{next(DATABASES)}"
        if kind == "directory":
            return tmp_path_factory.mktemp("place").as_uri()
        return inside("bucket" if kind == "s3" else "weed_bucket")

    return opener
