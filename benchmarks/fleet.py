"""`python -m benchmarks.fleet`: agent traffic over 2, 8 and 64 servers, simulated in tokens.

360 conversations of coding agents (benchmarks/requests/data/README.md), four at a time a server.
A router keeps a conversation on one server, or spreads requests in turn; servers share blocks or
not. Queues are not simulated: a first token comes after loading and computing its own prompt.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import mean, quantiles
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.requests.recorded import RecordedConversation, RecordedRequest, load, requests
from benchmarks.traces import TOKEN_BYTES

SERVERS = (2, 8, 64)
SLOTS = 4  # conversations at a time on each server
LATENCY_S = 0.002  # of a shared tier


class Rates(NamedTuple):
    """What a machine and its network do per second."""

    prefill_tokens: float
    network_bytes: float

    def load_s(self, n_tokens: int) -> float:
        return LATENCY_S + n_tokens * TOKEN_BYTES / self.network_bytes if n_tokens else 0.0

    def compute_s(self, n_tokens: int) -> float:
        return n_tokens / self.prefill_tokens


@dataclass(frozen=True)
class FleetResult:
    n_servers: int
    sticky: bool
    shared: bool
    hit_rate: float
    fetched_gb: float  # from the shared tier
    written_gb: float
    first_token_s: float  # mean
    first_token_p95_s: float


class Held:
    """The prefixes of conversations that one place has, the least recently used evicted first."""

    def __init__(self, max_tokens: int) -> None:
        self._max = max_tokens
        self._sum = 0
        self._tokens: OrderedDict[int, int] = OrderedDict()

    def of(self, conversation: int) -> int:
        return self._tokens.get(conversation, 0)

    def put(self, conversation: int, n_tokens: int) -> None:
        n_tokens = min(n_tokens, self._max)
        self._sum += n_tokens - self._tokens.pop(conversation, 0)
        self._tokens[conversation] = n_tokens
        while self._sum > self._max:
            self._sum -= self._tokens.popitem(last=False)[1]

    def cut(self, conversation: int, n_tokens: int) -> None:
        """The conversation goes on differently from here."""
        if self.of(conversation) > n_tokens:
            self._sum -= self._tokens[conversation] - n_tokens
            self._tokens[conversation] = n_tokens


class Fleet:
    """Servers with caches of their own, and perhaps one place that they share."""

    def __init__(
        self, n_servers: int, sticky: bool, rates: Rates, server_tokens: int, shared_tokens: int
    ) -> None:
        self._servers = [Held(server_tokens) for _ in range(n_servers)]
        self._shared = Held(shared_tokens)
        self._sticky, self._rates = sticky, rates
        self._n_requests = 0
        self._home: dict[int, int] = {}  # the server of each conversation
        self.fetched = self.written = 0  # tokens

    def serve(self, request: RecordedRequest) -> tuple[int, float]:
        """Prompt tokens that are computed, and the seconds to the first token."""
        which, server = request.conversation, self._pick(request.conversation)
        for place in (*self._servers, self._shared):
            place.cut(which, request.n_common)
        limit = request.n_input - 1
        here, there = min(server.of(which), limit), min(self._shared.of(which), limit)
        load_s = self._rates.load_s(max(0, there - here))
        if there <= here or load_s >= self._rates.compute_s(there - here):
            there, load_s = here, 0.0
        self.fetched += there - here
        self._share(which, there)
        server.put(which, request.n_input + request.n_output)
        n_computed = request.n_input - there
        return n_computed, load_s + self._rates.compute_s(n_computed)

    def _share(self, conversation: int, n_tokens: int) -> None:
        """What is used again is shared; the place keeps it if it has room."""
        known = self._shared.of(conversation)
        self._shared.put(conversation, max(known, n_tokens))
        self.written += max(0, self._shared.of(conversation) - known)

    def _pick(self, conversation: int) -> Held:
        self._n_requests += 1
        if not self._sticky:
            return self._servers[self._n_requests % len(self._servers)]
        home = self._home.setdefault(conversation, len(self._home) % len(self._servers))
        return self._servers[home]


def simulate(
    conversations: Sequence[RecordedConversation],
    n_servers: int,
    sticky: bool,
    rates: Rates,
    *,
    server_tokens: int,
    shared_tokens: int,
) -> FleetResult:
    fleet = Fleet(n_servers, sticky, rates, server_tokens, shared_tokens)
    n_input = n_computed = 0
    seconds = []
    for request in requests(conversations, SLOTS * n_servers):
        computed, first_s = fleet.serve(request)
        n_input, n_computed = n_input + request.n_input, n_computed + computed
        seconds.append(first_s)
    return FleetResult(
        n_servers,
        sticky,
        shared_tokens > 0,
        hit_rate=round(1 - n_computed / n_input, 4),
        fetched_gb=round(fleet.fetched * TOKEN_BYTES / 1e9, 1),
        written_gb=round(fleet.written * TOKEN_BYTES / 1e9, 1),
        first_token_s=round(mean(seconds), 3),
        first_token_p95_s=round(quantiles(seconds, n=20)[-1], 3),
    )


def simulate_all(
    rates: Rates, server_tokens: int, shared_tokens: int, n_conversations: int | None = None
) -> Iterator[FleetResult]:
    conversations = load(n_conversations)
    for n_servers, sticky, shared in product(SERVERS, (True, False), (False, True)):
        limit = n_servers * shared_tokens if shared else 0
        yield simulate(
            *(conversations, n_servers, sticky, rates),
            server_tokens=server_tokens,
            shared_tokens=limit,
        )


def table(results: Sequence[FleetResult]) -> Table:
    rows = Table("servers", "router", "shared tier", "hit rate", "GB fetched", "GB written",
                 "first token, s", "p95, s")  # fmt: skip
    for each in results:
        rows.add_row(
            str(each.n_servers), "keeps" if each.sticky else "in turn",
            "yes" if each.shared else "no",
            f"{each.hit_rate:.1%}", f"{each.fetched_gb:,.0f}", f"{each.written_gb:,.0f}",
            f"{each.first_token_s:.2f}", f"{each.first_token_p95_s:.2f}",
        )  # fmt: skip
    return rows


def main(
    prefill: Annotated[float, typer.Option(help="Tokens per second.")] = 8500,
    network: Annotated[float, typer.Option(help="Bytes per second.")] = 2.9e9,
    server_tokens: Annotated[int, typer.Option(help="That one server keeps.")] = 1_024_000,
    shared_tokens: Annotated[int, typer.Option(help="In the shared tier, per server.")] = 4_096_000,
    output: Annotated[Path | None, typer.Option(help="Also write JSON here.")] = None,
) -> None:
    """Simulate fleets of 2, 8 and 64 servers with an 8B model, 131,072 bytes per token."""
    results = list(simulate_all(Rates(prefill, network), server_tokens, shared_tokens))
    Console().print(table(results))
    if output is not None:
        output.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
