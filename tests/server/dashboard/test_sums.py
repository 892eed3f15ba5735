"""The page in Chromium: only the admin key sees totals over all keys."""

import pytest

from tests.server.dashboard.browsers import chromium, watched

WHY = "These totals cover all keys; the admin key is needed to see them."


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


def give(page, key):
    dialog = page.get_by_role("dialog", name="API key")
    if not dialog.is_visible():
        page.get_by_role("button", name="Key…").click()
    dialog.get_by_label("Key").fill(key)
    dialog.get_by_role("button", name="Use key").click()


def test_totals_are_shown_to_the_admin_key_only(browser, serving):
    """The page requests only what its key may see, also after the key is changed."""
    with (
        serving(api_keys="a,b", admin_key="admin") as live,
        watched(browser, live.url, allowed="401") as page,
    ):
        page.goto(live.url)
        page.get_by_role("dialog", name="API key").wait_for()
        for key, opened in (("a", False), ("admin", True), ("b", False)):
            give(page, key)
            page.get_by_text(WHY).first.wait_for(state="hidden" if opened else "visible")
            page.get_by_text("0 queued").wait_for()
            for name in ("Memory and disk by budget", "Prompt tokens by source"):
                assert page.get_by_role("heading", name=name).is_visible() is opened
            if opened:
                page.get_by_text("from the second turn on").wait_for()
