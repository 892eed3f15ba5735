"""Send the mix, compare all views after each life of the server, and print what differs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.ledger.book import Book
from benchmarks.ledger.client import N_CONTEXT, Client
from benchmarks.ledger.model import write_model
from benchmarks.ledger.views import Views, command_line

KEYS = {"alice": "ledger-alice", "bob": "ledger-bob"}
ADMIN = "ledger-admin"
SETTLE_S = 20.0  # until the last answers are booked everywhere, at most


def settings(home: Path) -> dict[str, str]:
    """With budgets so small that blocks are evicted."""
    keys = home / "keys"
    keys.touch(0o600)
    keys.write_text("".join(f"{name} = {key}\n" for name, key in KEYS.items()))
    return {
        **os.environ,
        "KEEPWARM_HOME": str(home),
        "KEEPWARM_API_KEYS": f"@{keys}",
        "KEEPWARM_ADMIN_KEY": ADMIN,
        "KEEPWARM_CONTEXT": str(N_CONTEXT),
        "KEEPWARM_MEMORY_BYTES": str(1 << 20),
        "KEEPWARM_DISK_BYTES": str(3 << 20),
        "KEEPWARM_LOG_FORMAT": "json",
    }


@contextmanager
def serving(model: Path, log: Path, environ: Mapping[str, str]) -> Iterator[str]:
    """A server process, which ends by a signal as at the end of a day."""
    command = [sys.executable, "-m", "keepwarm", "serve", "--port", "0", "--model", str(model)]
    with log.open("w") as said:
        process = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=said, text=True
        )
    try:
        assert process.stdout is not None
        found = re.search(r"http://[\d.]+:\d+", process.stdout.readline())
        if found is None:
            raise SystemExit(f"the server did not start: {log.read_text()}")
        yield found[0]
        process.send_signal(signal.SIGTERM)
        process.wait(120)
    finally:
        process.kill()
        process.communicate()


def send(clients: list[Client], book: Book, n_requests: int) -> None:
    """All clients at once, until there are so many requests in the book."""

    def work(client: Client) -> None:
        while len(book.all) < n_requests:
            client.ask()

    with ThreadPoolExecutor(len(clients)) as threads:
        list(threads.map(work, clients))


def settled(views: Views) -> list[str]:
    """What differs; the last answers may be booked a moment after they were read."""
    deadline = time.monotonic() + SETTLE_S
    while (found := views.differences()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def run(home: Path, n_requests: int, n_lives: int, n_clients: int) -> Book:
    """The book of all requests, with what differs."""
    model, environ, book = write_model(home), settings(home), Book()
    keys = list(KEYS.items())
    clients = [Client(book, model, n, *keys[n % len(keys)]) for n in range(n_clients)]
    for life in range(n_lives):
        book.begin_life()
        log = home / f"log-{life}"
        with serving(model, log, environ) as url, ExitStack() as connections:
            for client in clients:
                connections.enter_context(client.connected(url))
            views = connections.enter_context(closing(Views(book, url, log, ADMIN, KEYS)))
            send(clients, book, n_requests * (life + 1) // n_lives)
            book.differences += settled(views)
    book.differences += command_line(book, home, environ)
    return book


def main(
    requests: Annotated[int, typer.Option(help="How many, at least.")] = 300,
    lives: Annotated[int, typer.Option(help="Starts of the server.")] = 4,
    clients: Annotated[int, typer.Option(help="That send at once.")] = 4,
) -> None:
    """Compare every figure of a server with what its clients know."""
    with tempfile.TemporaryDirectory(prefix="keepwarm-ledger-") as home:
        book = run(Path(home), requests, lives, clients)
    for difference in book.differences:
        print(difference)
    made = f"{len(book.all)} requests, {lives} starts, {sum(book.evicted.values())} evictions"
    print(f"{made}: {len(book.differences)} differences")
    raise typer.Exit(bool(book.differences))


if __name__ == "__main__":
    typer.run(main)
