"""The API's documentation in Chromium: from this server alone, and complete."""

import pytest

from tests.server.dashboard.browsers import watched


@pytest.fixture(scope="module")
def page(browser, live):
    """`watched` fails on console errors, which a violated policy is, and on outside requests."""
    with watched(browser, live.url) as found:
        found.goto(f"{live.url}/docs")
        found.get_by_role("heading", name="Objects").wait_for()
        yield found


@pytest.fixture(scope="module")
def document(live):
    return live.get("/openapi.json").json()


def test_it_has_the_policy_of_the_dashboard(live):
    policy = live.get("/docs").headers["content-security-policy"]
    assert policy == live.get("/dashboard").headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_every_endpoint_and_object_is_there(page, document):
    shown = page.locator("details > summary").all_inner_texts()
    endpoints = [
        f"{method.upper()}{path}" for path, each in document["paths"].items() for method in each
    ]
    assert len(endpoints) > 40
    assert sorted(shown) == sorted([*endpoints, *document["components"]["schemas"]])


def test_an_endpoint_shows_fields_answers_and_links_to_objects(page):
    card = page.locator("#post-v1-chat-completions")
    card.locator("summary").click()
    row = card.get_by_role("row", name="messages")
    assert row.inner_text().split() == ["messages", "list", "of", "ChatMessage", "required"]
    assert card.get_by_role("row", name="200").is_visible()
    assert card.get_by_role("row", name="4XX").is_visible()
    linked = page.locator("#object-ChatMessage")
    assert not linked.get_by_role("row", name="role").is_visible()
    card.get_by_role("link", name="ChatMessage").click()
    linked.get_by_role("row", name="role").wait_for()


def test_it_is_narrow_enough_for_a_phone(browser, live):
    with watched(browser, live.url, viewport={"width": 390, "height": 800}) as page:
        page.goto(f"{live.url}/docs#post-v1-messages")
        page.get_by_role("heading", name="Objects").wait_for()
        assert page.locator("#post-v1-messages p").first.is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_server_that_does_not_answer_is_said(browser, live):
    with watched(browser, live.url, allowed="Failed to load resource") as page:
        page.route("**/openapi.json", lambda route: route.abort())
        page.goto(f"{live.url}/docs")
        page.get_by_text("The server is not responding.").wait_for()
