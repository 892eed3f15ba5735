"""On which threads something runs."""

import threading
from typing import Any

import pytest


def threads_of(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """The names of the threads that call a function from now on; it does what it did."""
    names: list[str] = []
    call = getattr(owner, name)

    def noted(*given: Any) -> Any:
        names.append(threading.current_thread().name)
        return call(*given)

    monkeypatch.setattr(owner, name, noted)
    return names
