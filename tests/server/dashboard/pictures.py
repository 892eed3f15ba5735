"""Screenshots for docs/dashboard.md: python -m tests.server.dashboard.pictures [MINUTES [FOLDER]]

With a folder, all views at both sizes too, to look at.

A tiny model serves agents that read the pages of the manual for some minutes; half-way the server
is started again. Numbers in the pictures are those of that run.
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

from keepwarm import config
from keepwarm.models.load import load
from tests.kit.checkpoints import write_checkpoint
from tests.server.conftest import N_CONTEXT, Live, serve
from tests.server.dashboard.browsers import chromium, watched

ROOT = Path(__file__).parents[3]
IMAGES = ROOT / "docs" / "images"
PAGES = [page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))]
AGENT = "X-Keepwarm-Agent"
ROLES = ("planner", "coder", "reviewer", "tester", "writer")
SYSTEM = "You are one of several agents who work on one repository. These are its rules.\n"
MOST_TOKENS = N_CONTEXT - 4000  # the next message has about 1,500, its answer may have 600


def excerpt(pick: random.Random, n_chars: int) -> str:
    page = pick.choice(PAGES)
    start = pick.randrange(max(1, len(page) - n_chars))
    return page[start : start + n_chars]


class Team:
    """Conversations with a common system prompt."""

    def __init__(self, seed: int = 0) -> None:
        self._pick = random.Random(seed)
        system = {"role": "system", "content": SYSTEM + PAGES[0][:4000]}
        self._said = {role: [system, self._user(f"You are the {role}.\n")] for role in ROLES}
        self._n_tokens = dict.fromkeys(ROLES, 0)

    def turn(self, live: Live, role: str, max_tokens: int = 80) -> None:
        body = self.asked(role) | {"max_tokens": max_tokens}
        answer = live.post("/v1/chat/completions", body, **{AGENT: role})
        whole = answer.raise_for_status().json()
        self._n_tokens[role] = whole["usage"]["total_tokens"]
        self._said[role] += [whole["choices"][0]["message"], self._user("Go on.\n")]

    def asked(self, role: str) -> dict[str, Any]:
        """The next request of one of them; a conversation that is too long begins anew."""
        said = self._said[role]
        if self._n_tokens[role] > MOST_TOKENS:
            del said[2:]
        return {"messages": list(said)}

    def another(self, role: str) -> dict[str, Any]:
        """A request that ends otherwise than the latest one."""
        return {"messages": [*self.asked(role)["messages"][:-1], self._user("Or rather:\n")]}

    def what_time(self, live: Live, minute: int) -> None:
        """An agent whose first line is the time, so that every request is a miss."""
        system = f"It is 14:{minute % 60:02}. {SYSTEM}{PAGES[0][:5000]}"
        body = {"messages": [{"role": "system", "content": system}], "max_tokens": 8}
        live.post("/v1/chat/completions", body, **{AGENT: "clock"}).raise_for_status()

    def _user(self, opening: str) -> dict[str, str]:
        return {"role": "user", "content": opening + excerpt(self._pick, 1500)}


def work(live: Live, team: Team, until: float) -> None:
    pick = random.Random(1)
    while time.monotonic() < until:
        team.turn(live, pick.choice(ROLES))
        if pick.random() < 0.2:
            team.what_time(live, int(time.monotonic() / 60))
        if pick.random() < 0.2:  # so that some come from the memory tier
            live.host.engine.call(live.host.engine.live.clear).result()
        time.sleep(1)


@contextmanager
def streaming(live: Live, body: dict[str, Any], agent: str) -> Iterator[threading.Event]:
    """While inside, the agent's request is active: its answer has no end of its own.

    The event is set when its first token has come.
    """
    ends = live.host.engine.model.tokenizer.eos_token_ids
    endless = {**body, "model": "any", "max_tokens": 8000, "extra_headers": {AGENT: agent}}
    endless["logit_bias"] = {str(end): -100 for end in ends}
    begun, over = threading.Event(), threading.Event()

    def read() -> None:
        with live.openai().chat.completions.create(stream=True, **endless) as stream:
            for chunk in stream:
                if any(choice.delta.content for choice in chunk.choices):
                    begun.set()
                if over.is_set():
                    return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield begun
    finally:
        over.set()
        thread.join()


@contextmanager
def busy(live: Live, team: Team) -> Iterator[None]:
    """Two answers that are streamed while a picture is taken."""
    with ExitStack() as both:
        streams = [streaming(live, team.another(role), role) for role in ROLES[:2]]
        for begun in [both.enter_context(stream) for stream in streams]:
            begun.wait(MOST_MS / 1000)
        yield


@contextmanager
def prefilling(live: Live) -> Iterator[None]:
    """A request whose prompt nobody has sent before, so that its bar is seen growing."""
    text = excerpt(random.Random(), 20) + "".join(PAGES)[:MOST_TOKENS]
    with streaming(live, {"messages": [{"role": "user", "content": text}]}, "librarian"):
        yield


KEPT = ("overview", "requests", "forest", "misses", "agents")  # that the page of docs shows
VIEWS = (*KEPT, "models", "health", "connect")
ACTIVE = ("overview", "requests")  # that are taken while answers are streamed
MOST_MS = 120_000
SIZES = {"wide": (1280, 640), "narrow": (390, 844)}


def take(live: Live, team: Team, browser: Any, folder: Path | None) -> None:
    for scheme in ("light", "dark"):
        with watched(browser, live.url, color_scheme=scheme) as page:
            for size, view in product(SIZES if folder else ["wide"], VIEWS if folder else KEPT):
                with busy(live, team) if view in ACTIVE else nullcontext():
                    shot = show(page, live, view, *SIZES[size])
                if folder:
                    (folder / f"{view}-{size}-{scheme}.png").write_bytes(shot)
                if size == "wide" and view in KEPT:
                    (IMAGES / f"dashboard-{view}-{scheme}.png").write_bytes(shot)


def show(page: Any, live: Live, view: str, width: int, height: int) -> bytes:
    page.set_viewport_size({"width": width, "height": height})
    page.goto(f"{live.url}/dashboard#{view}")
    page.wait_for_timeout(8000 if view == "overview" else 2500)
    if view == "requests":
        with prefilling(live):
            row = page.locator("#running tr", has_text="librarian")
            row.get_by_text(re.compile(r"computed\s\d")).wait_for(timeout=MOST_MS)
            page.wait_for_timeout(2000)
            return bytes(page.screenshot(full_page=True))
    if view == "misses":
        changed = page.locator("#missed li", has_text="clock").first
        changed.get_by_text("Show the difference").click()
        page.wait_for_timeout(500)
    return bytes(page.screenshot(full_page=True))


def main(minutes: float, folder: Path | None) -> None:
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        settings = config.load({"KEEPWARM_HOME": str(home / "home")})
        model = load(str(write_checkpoint(home / "tiny", n_context=N_CONTEXT)), settings)
        team = Team()
        with serve(model, settings) as live:
            work(live, team, time.monotonic() + 30 * minutes)
        with serve(model, settings) as live:
            work(live, team, time.monotonic() + 30 * minutes)
            for minute in (1, 2):
                team.what_time(live, minute)
            live.post("/v1/agents/coder/fork", {"id": "coder-try"}).raise_for_status()
            live.patch("/v1/agents/planner", {"pinned": True}).raise_for_status()
            with chromium() as browser:
                take(live, team, browser, folder)


if __name__ == "__main__":
    given = dict(enumerate(sys.argv))
    main(float(given.get(1, 10)), Path(given[2]) if 2 in given else None)
