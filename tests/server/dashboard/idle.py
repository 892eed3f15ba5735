"""What an open page costs while nothing runs: python -m tests.server.dashboard.idle [SECONDS]

Processor time of the browser's processes and of the server, as a share of one core, with a blank
page, the dashboard, and the dashboard hidden, one after the other in one run.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from tests.kit.checkpoints import write_checkpoint
from tests.server.dashboard.browsers import chromium
from tests.server.processes import served

SETTLED_S = 75  # until start-up is over; until the page rests and asks every five seconds
HIDE = """() => {
  Object.defineProperty(document, "hidden", { get: () => true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""


def browser_seconds(session: Any) -> float:
    """Processor time so far of all processes of the browser."""
    found = session.send("SystemInfo.getProcessInfo")["processInfo"]
    return float(sum(process["cpuTime"] for process in found))


def server_seconds(pid: int) -> float:
    server = psutil.Process(pid)
    every = [server, *server.children(recursive=True)]
    return float(sum(sum(process.cpu_times()[:2]) for process in every))


def measure(name: str, seconds: float, session: Any, pid: int) -> None:
    begun, browser, server = time.monotonic(), browser_seconds(session), server_seconds(pid)
    time.sleep(seconds)
    passed = time.monotonic() - begun
    shares = [browser_seconds(session) - browser, server_seconds(pid) - server]
    browser, server = (100 * share / passed for share in shares)
    print(f"{name}: browser {browser:.2f} %, server {server:.2f} % of a core", flush=True)  # noqa: T201


def main(seconds: float) -> None:
    with tempfile.TemporaryDirectory() as directory, chromium() as browser:
        checkpoint = write_checkpoint(Path(directory, "tiny"))
        with served(checkpoint, Path(directory, "home")) as live:
            session = browser.new_browser_cdp_session()
            page = browser.new_page()
            time.sleep(SETTLED_S)
            measure("blank page", seconds, session, live.pid)
            page.goto(f"{live.url}/dashboard")
            page.wait_for_timeout(1000 * SETTLED_S)
            measure("dashboard", seconds, session, live.pid)
            page.evaluate(HIDE)
            measure("hidden", seconds, session, live.pid)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 120)
