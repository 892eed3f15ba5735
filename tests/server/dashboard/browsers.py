"""Chromium, and pages that fail their test on console errors and outside requests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """The installed browser, headless; nothing is downloaded."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("needs `chromium`")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=program)
        yield browser
        browser.close()


@contextmanager
def watched(browser: Any, url: str, allowed: str = "", **options: Any) -> Iterator[Any]:
    """A page of this server. Console errors and requests to other hosts fail the test at the end.

    `allowed` is part of an error message that the test expects.
    """
    options = {"viewport": {"width": 1280, "height": 900}, **options}
    context = browser.new_context(**options)
    page = context.new_page()
    errors: list[str] = []
    asked: list[str] = []
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.set_default_timeout(30_000)
    yield page
    page.unroute_all(behavior="ignoreErrors")  # one that is under way would fail the next test
    context.close()
    unexpected = [error for error in errors if not allowed or allowed not in error]
    assert unexpected == [], unexpected
    assert [one for one in asked if not one.startswith((url, f"blob:{url}"))] == []
    assert asked
