"""Waiting for what happens on other threads."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(happened: Callable[[], bool], timeout_s: float = 300.0) -> None:
    """Return once it has; fail if it does not. The limit guards against hanging, not slowness."""
    end = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
