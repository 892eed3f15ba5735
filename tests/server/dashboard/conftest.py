"""One browser for all tests of the dashboard, and a server for those of one module."""

import pytest

from tests.server.dashboard.browsers import chromium
from tests.server.dashboard.test_dashboard import LONG, ask


@pytest.fixture(scope="package")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def own(serving):
    """A server of this module's own, with an agent and a miss."""
    with serving() as live:
        ask(live, LONG, "first")
        ask(live, f"It is nine. {LONG}", "clock")
        ask(live, f"It is ten. {LONG}", "clock")
        yield live
