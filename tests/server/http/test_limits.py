"""API keys, Host and Origin checks, rate, size and concurrency limits."""

import asyncio
import json
import logging
from types import SimpleNamespace

import httpx
import pytest
from fastapi import Request
from fastapi.testclient import TestClient

from keepwarm import config
from keepwarm.errors import BadInput, Busy
from keepwarm.server.app import create_app
from keepwarm.server.http.keys import ApiKeys
from keepwarm.server.http.limits import (
    BodyShare,
    Limits,
    RateLimit,
    body_budget,
    check_binding,
    concurrency_limit,
)
from keepwarm.server.http.request_fields import request_fields
from keepwarm.server.models.host import EngineHost
from keepwarm.server.models.models import Models


async def echo(scope, receive, send):
    """Answers with what the limits have made of the request."""
    state = scope.get("state", {})
    body = (await receive())["body"] if scope["method"] == "POST" else b""
    answer = json.dumps({**state, "n_bytes": len(body)}).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": answer})


def settings(**values):
    return config.load({}, **values)


def ask(given, *, method="POST", path="/v1/chat/completions", app=None, content=b"{}", **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    app = app or Limits(echo, given, ApiKeys(given))

    async def send():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, content=content, headers=headers)

    return asyncio.run(send())


def test_without_keys_everybody_here_is_one_tenant():
    answer = ask(settings(), authorization="Bearer anything")
    nobody = {"tenant": "", "admin": False, "owner": "", "key_name": ""}
    assert answer.json() == {**nobody, "n_bytes": 2}


@pytest.mark.parametrize(
    ("headers", "opens"),
    [
        ({"authorization": "Bearer b"}, True),
        ({"authorization": "bearer b"}, True),
        ({"x_api_key": "b"}, True),
        ({}, False),
        ({"authorization": "Bearer c"}, False),
        ({"x_api_key": ""}, False),
    ],
)
def test_key_opens_in_both_headers_and_no_other_does(headers, opens):
    answer = ask(settings(api_keys="a, b"), **headers)
    assert answer.is_success is opens
    if opens:
        assert answer.json()["tenant"]
    else:
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"


def test_each_key_is_a_tenant_of_its_own_unless_shared():
    given = settings(api_keys="a,b")
    tenants = [ask(given, x_api_key=key).json()["tenant"] for key in "aba"]
    assert tenants[0] == tenants[2] != tenants[1]
    shared = settings(api_keys="a,b", share_cache=True)
    assert {ask(shared, x_api_key=key).json()["tenant"] for key in "ab"} == {""}


@pytest.mark.parametrize("share_cache", [True, False])
def test_keys_alternate_in_the_engine_also_where_they_share_the_cache(share_cache):
    given = settings(api_keys="a,b", share_cache=share_cache)
    state = ask(given, x_api_key="a").json()
    app = SimpleNamespace(state=SimpleNamespace(settings=given))
    scope = {"type": "http", "headers": [], "path_params": {}, "state": state, "app": app}
    fields = request_fields(Request(scope))
    whose = ("", state["owner"]) if share_cache else (state["owner"], "")
    assert (fields.tenant, fields.caller) == whose
    assert state["owner"]


def test_an_admin_alone_is_no_tenant_of_its_own():
    """If there are no other keys, the admin shares the one tenant."""
    answer = ask(settings(admin_key="root"), x_api_key="root").json()
    assert (answer["tenant"], answer["admin"]) == ("", True)
    apart = settings(api_keys="a", admin_key="root")
    assert ask(apart, x_api_key="root").json()["tenant"]


def test_keys_come_from_a_file_that_only_its_owner_can_read(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    keys.chmod(0o600)
    given = settings(api_keys=f"@{keys}")
    assert given.read_api_keys() == ("one", "two")
    keys.chmod(0o644)
    with pytest.raises(BadInput, match="chmod 600"):
        given.read_api_keys()


def test_api_keys_with_a_file_among_keys_are_refused():
    with pytest.raises(BadInput, match="or one @file"):
        settings(api_keys="one,@/run/keys").read_api_keys()


def test_keys_do_not_belong_into_the_settings_file(tmp_path):
    (tmp_path / "config.toml").write_text('api_keys = "a"')
    with pytest.raises(BadInput, match='api_keys = "@'):
        config.load({"KEEPWARM_HOME": str(tmp_path)})


def test_flags_are_read_as_words():
    assert config.load({"KEEPWARM_SHARE_CACHE": "yes"}).share_cache is True
    assert config.load({"KEEPWARM_SHARE_CACHE": "false"}).share_cache is False
    with pytest.raises(BadInput, match="must be true or false"):
        config.load({"KEEPWARM_SHARE_CACHE": "perhaps"})


def test_admin_calls_need_the_admin_key():
    path = "/v1/admin/load"
    assert ask(settings(), path=path).status_code == 403
    given = settings(api_keys="a", admin_key="root")
    assert ask(given, path=path, x_api_key="a").status_code == 403
    assert ask(given, path=path, x_api_key="root").json()["admin"] is True


def test_health_and_pages_need_no_key():
    given = settings(api_keys="a")
    for path in ("/health", "/health/live", "/docs", "/openapi.json"):
        assert ask(given, path=path, method="GET").status_code == 200
    for path in ("/v1/models", "/metrics"):
        assert ask(given, path=path, method="GET").status_code == 401


HERE = "localhost:8181"


@pytest.mark.parametrize(
    ("headers", "may"),
    [
        ({"host": HERE}, True),
        ({"host": "127.0.0.1"}, True),
        ({"host": "[::1]:8181"}, True),
        ({"host": "box.lan:8181"}, True),  # allowed by name
        ({"host": "BOX.Lan:8181"}, True),
        ({"host": "LocalHost:8181", "origin": "http://LOCALHOST:8181"}, True),
        ({"host": "evil.example:8181"}, False),  # DNS rebinding: a page's own name leads here
        ({"host": "127.0.0.1.evil.example"}, False),
        ({"host": "["}, False),
        ({"host": ""}, False),
        ({"host": HERE, "origin": "http://localhost:8181"}, True),
        ({"host": HERE, "origin": "http://localhost:3000"}, False),
        ({"host": HERE, "origin": "http://evil.example"}, False),
        ({"host": HERE, "origin": "null"}, False),
    ],
)
def test_host_and_origin_must_be_this_machines(headers, may):
    answer = ask(settings(allowed_hosts="Box.lan"), **headers)
    assert answer.status_code == (200 if may else 403)
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("allowed", "origin", "may"),
    [
        ("*", "https://any.example", True),
        ("*", "null", True),
        ("vscode-webview://*", "vscode-webview://0a1b2c", True),
        ("vscode-webview://*", "vscode-file://0a1b2c", False),
        ("app://obsidian.md", "app://obsidian.md", True),
        ("http://localhost:*, app://x", "http://localhost:3000", True),
        ("http://localhost:*, app://x", "app://x", True),
        ("http://localhost:*", "http://localhost", False),
        ("http://localhost:*", "http://localhost:80@evil.example", False),
        ("https://*.lan", "https://ui.lan", True),
        ("https://*.Lan, app://x", "https://ui.LAN", True),
        ("https://*.lan", "https://ui.lan.evil.example", False),
        ("http://ui.lan", "http://uixlan", False),
    ],
)
def test_origins_may_be_patterns(allowed, origin, may):
    """And CORS says the same as the check."""
    answer = ask(settings(allowed_origins=allowed), origin=origin, host="localhost:8181")
    assert answer.is_success is may
    given = settings(allowed_origins=allowed)
    app = create_app(Models(EngineHost(None, "x"), given), given)
    page = TestClient(app, base_url="http://localhost").get(
        "/health/live", headers={"Origin": origin}
    )
    assert page.headers.get("access-control-allow-origin") == (origin if may else None)
    assert "access-control-allow-credentials" not in page.headers  # never with cookies


@pytest.mark.parametrize(
    ("headers", "line"),
    [
        ({"host": "host.docker.internal:8181"}, "KEEPWARM_ALLOWED_HOSTS=host.docker.internal "),
        ({"origin": "app://obsidian.md"}, "KEEPWARM_ALLOWED_ORIGINS=app://obsidian.md,"),
        ({"origin": "vscode-webview://0a1b"}, "KEEPWARM_ALLOWED_ORIGINS='vscode-webview://*',"),
        ({"origin": "http://localhost:3000"}, "KEEPWARM_ALLOWED_ORIGINS=http://localhost:3000,"),
    ],
)
def test_what_is_refused_names_the_line_that_allows_it(headers, line):
    answer = ask(settings(), **{"host": "localhost:8181", **headers})
    assert answer.status_code == 403
    assert line in answer.json()["error"]["message"]


def test_beyond_this_machine_a_key_is_needed():
    for host in ("0.0.0.0", "::", "192.168.1.2", "box.lan"):
        with pytest.raises(BadInput, match="no API key is set"):
            check_binding(settings(host=host))
        check_binding(settings(host=host, api_keys="a"))
    for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        check_binding(settings(host=host))


def test_a_body_over_the_limit_is_refused():
    given = settings(max_body_bytes=100)
    assert ask(given, content=b"x" * 100).json()["n_bytes"] == 100
    answer = ask(given, content=b"x" * 101)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


def test_a_body_that_does_not_say_its_size_is_counted():
    async def parts():
        for _ in range(3):
            yield b"x" * 40

    for max_bytes, status in ((100, 413), (120, 400)):  # 400: it is read, and no JSON
        given = settings(max_body_bytes=max_bytes)
        app = create_app(Models(EngineHost(None, "x"), given), given)
        answer = ask(given, app=app, content=parts(), content_type="application/json")
        assert answer.status_code == status


def test_a_client_that_leaves_before_its_request_is_read_is_no_error(caplog):
    """Many do that wait for a thread of management."""
    given, sent = settings(), []
    app = create_app(Models(EngineHost(None, "x"), given), given)
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "GET", "path": "/v1/agents", "headers": headers}

    async def leave():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    asyncio.run(app({**scope, "query_string": b"", "root_path": "", "scheme": "http"}, leave, send))
    assert sent[0]["status"] == 400
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


def test_a_key_may_ask_so_often():
    given = settings(rate_per_minute=2, api_keys="a,b")
    app = Limits(echo, given, ApiKeys(given))
    answers = [ask(given, app=app, x_api_key="a") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
    assert answers[2].json()["error"]["type"] == "rate_limit_error"
    assert ask(given, app=app, x_api_key="b").status_code == 200
    assert ask(given, app=app, x_api_key="a", path="/v1/models", method="GET").is_success


def test_the_bucket_fills_again():
    now = [0.0]
    rates = RateLimit(60, clock=lambda: now[0])
    for _ in range(60):
        rates.take("a")
    with pytest.raises(Busy) as refused:
        rates.take("a")
    assert refused.value.retry_after_s == pytest.approx(1)
    now[0] = 1.0
    rates.take("a")


@pytest.mark.parametrize("limits", [{"max_queue": 2}, {"max_concurrency": 2}])
def test_more_than_fit_are_told_to_come_back(limits):
    """The room is left when the answer ends, however it ends; a cancel needs none."""

    async def run():
        entered, released = [], asyncio.Event()

        async def slow(scope, receive, send):
            entered.append(scope)
            await released.wait()
            await echo(scope, receive, send)

        given = settings(**limits)
        transport = httpx.ASGITransport(Limits(slow, given, ApiKeys(given)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            held = [asyncio.create_task(client.post("/v1/x")) for _ in range(2)]
            while len(entered) < 2:
                await asyncio.sleep(0.001)
            refused = await client.post("/v1/x")
            held.append(asyncio.create_task(client.post("/v1/x/cancel")))
            while len(entered) < 3 and not held[-1].done():
                await asyncio.sleep(0.001)
            released.set()
            answers = await asyncio.gather(*held)
            return refused, answers, await client.post("/v1/x")

    refused, answers, after = asyncio.run(run())
    assert refused.status_code == 429
    assert "retry-after" in refused.headers
    assert all(answer.is_success for answer in [*answers, after])


def test_concurrency_limit_one_key_cannot_use_the_whole():
    limit = concurrency_limit(3, 2)
    with limit.one_more("a"):
        with limit.one_more("a"):
            with pytest.raises(Busy, match="This API key"), limit.one_more("a"):
                pass
            all_used = pytest.raises(Busy, match="in progress, which is the limit")
            with limit.one_more("b"), all_used, limit.one_more("c"):
                pass
        with limit.one_more("b"), limit.one_more("c"):
            pass
    assert limit.n_used == 0


def test_body_budget_one_key_cannot_use_the_whole():
    budget = body_budget(max_body_bytes=100)
    share = {key: [BodyShare(budget, key, 100) for _ in range(5)] for key in "abc"}
    for key in "ab":
        for each in share[key][:4]:
            each.reserve(40)
            each.reserve(100)  # more has come than was announced
    with pytest.raises(Busy, match="all requests"):
        share["c"][0].reserve(1)
    with share["b"][0]:
        pass
    with pytest.raises(Busy, match="this key's"):
        share["a"][4].reserve(1)
    share["c"][0].reserve(100)


@pytest.mark.parametrize(
    ("path", "seconds"),
    [("/v1/x", 90.0), ("/v1/agents/import", None), ("/api/pull", None), ("/v1/cache/verify", None)],
)
def test_limits_what_takes_as_long_as_network_or_disk_is_not_cut_off(path, seconds):
    given = settings(request_timeout_s=60, client_timeout_s=30)
    limits = Limits(echo, given, ApiKeys(given))
    assert limits._answer_s({"method": "POST", "path": path}) == seconds


def test_limits_request_that_never_ends_leaves_its_slot():
    """As of a client that reads a byte now and then: the engine has given up long before."""

    async def run():
        sent = []

        async def send_kept(message):
            sent.append(message)

        async def stuck(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await asyncio.Event().wait()

        given = settings(max_queue=1, request_timeout_s=0.1, client_timeout_s=0.1)
        app = Limits(stuck, given, ApiKeys(given))
        scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": []}
        scope["headers"] = [(b"host", b"localhost")]
        for _ in range(2):
            await asyncio.wait_for(app(scope, None, send_kept), 60)
        assert len(sent) == 2  # the answers have begun, and end with their connections

    asyncio.run(run())
