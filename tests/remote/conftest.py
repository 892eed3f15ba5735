"""The clock of breakers, of what is remembered and of what is measured; machines with one place."""

import uuid
from contextlib import closing
from itertools import count

import pytest

from keepwarm.concurrency import CallError
from keepwarm.remote.addresses import open_backend
from keepwarm.remote.tier import RemoteTier
from tests.kit.redis_server import redis_server

SOON = 30.0  # nothing here may hang
CLASS = "cpu-mlx-0.1"
DATABASES = count()


class Clock:
    """It stands still unless a test moves it."""

    now = 100.0

    def __call__(self):
        return self.now

    def fail_after(self, seconds):
        self.now += seconds
        raise CallError("late")


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Deadlines that a busy machine keeps too."""
    monkeypatch.setattr("keepwarm.remote.tier.MIN_READ_S", SOON)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(scope="package")
def redis(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis"), "--databases", "1000") as server:
        yield server


BUCKETS = {"moto": "bucket", "SeaweedFS": "weed_bucket"}  # by the server
REAL = [pytest.param(server, marks=pytest.mark.soak) for server in BUCKETS]


@pytest.fixture(params=["redis", "directory", *REAL])
def address(request, tmp_path):
    """An empty place."""
    if request.param == "redis":
        return f"{request.getfixturevalue('redis').url}/{next(DATABASES)}"
    if request.param in BUCKETS:
        bucket, _, options = request.getfixturevalue(BUCKETS[request.param]).partition("?")
        return f"{bucket}/{uuid.uuid4().hex}?{options}"
    (tmp_path / "place").mkdir()
    return (tmp_path / "place").as_uri()


@pytest.fixture
def place(address):
    """The place itself, as anybody sees it who can write there."""
    with closing(open_backend(address)) as backend:
        yield backend


@pytest.fixture
def machine(address, clock):
    """A tier over the place, as every machine has one."""
    opened = []

    def opener(compute_class=CLASS, **options):
        tier = RemoteTier(open_backend(address), compute_class, clock=clock, **options)
        opened.append(tier)
        assert tier.health.wait_until_tried(SOON) or tier.health.refused
        return tier

    yield opener
    for tier in opened:
        tier.close()
