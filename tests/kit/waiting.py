"""Waiting for what happens on other threads, and measuring without what happens by chance."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def wait_until(happened: Callable[[], bool], timeout_s: float = 300.0) -> None:
    """Return once it has; fail if it does not. The limit guards against hanging, not slowness."""
    end = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@contextmanager
def no_collection() -> Iterator[None]:
    """Inside, only what nothing refers to is freed; garbage of earlier tests goes before."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
