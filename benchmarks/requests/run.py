"""What every workload gets: a target, prompts, sizes, and makers of records."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.requests.client import BenchRequest, Message, TimedReply
from benchmarks.requests.prompts import PromptGenerator, system, user
from benchmarks.requests.report.results import Better, Claim, Series
from benchmarks.requests.targets import DROPS_PAGES, Target, drop_pages
from keepwarm.errors import Unreachable

T = TypeVar("T")


@dataclass(frozen=True)
class Sizes:
    """Sizes of all workloads; token counts unless a comment says otherwise."""

    samples: int = 5
    lengths: tuple[int, ...] = (256, 1024, 2048)  # of prompts
    answer: int = 8
    turns: int = 6  # of a conversation
    first_turn: int = 600
    next_turn: int = 150
    restarted: int = 72 << 10  # characters of a conversation: more than a server prepares itself
    later_s: float = 60.0  # seconds after a restart
    n_agents: int = 10
    shared: int = 1024  # system prompt shared by all agents
    own: int = 32
    late: int = 128
    long: int = 2048
    pieces_before: int = 32  # pieces of text a stream sends before another request
    stream: int = 96
    streams: tuple[int, ...] = (1, 2, 4, 8)
    persisted: int = 288  # longer than a block
    chat: int = 644
    chat_shared: int = 628
    conversations: int = 4  # of the trace
    divisor: int = 128  # of its lengths
    n_requests: int = 24  # of the trace, a conversation
    stress_requests: int = 64
    clients: int = 8
    is_judged: bool = True  # whether ratios are checked against their goals


QUICK = Sizes(
    samples=2,
    lengths=(64, 256),
    answer=4,
    turns=3,
    first_turn=120,
    next_turn=40,
    restarted=1500,
    later_s=0.0,
    n_agents=3,
    shared=192,
    own=16,
    late=48,
    long=256,
    pieces_before=8,
    stream=24,
    streams=(1, 4),
    persisted=48,
    chat=160,
    chat_shared=144,
    conversations=2,
    divisor=512,
    n_requests=6,
    stress_requests=12,
    clients=4,
    is_judged=False,
)


@dataclass(frozen=True)
class WorkloadRun:
    """One workload on one target."""

    workload: str
    target: Target
    prompts: PromptGenerator
    sizes: Sizes
    model: Path
    folder: Path
    stop_tokens: Sequence[int]
    kv_bytes: int | None  # of one token
    seeds: count[int]  # every prompt of a run begins differently
    show_status: Callable[[str], None] = lambda _: None
    drops_pages: bool = DROPS_PAGES

    def ask(
        self, messages: Sequence[Message], n_answer: int | None = None, **more: Any
    ) -> TimedReply:
        """The answer, always of full length: stop tokens are forbidden."""
        n_tokens = n_answer or self.sizes.answer
        return self.target.ask(BenchRequest(messages, n_tokens, forbidden=self.stop_tokens, **more))

    @cached_property
    def template_tokens(self) -> int:
        """Tokens that the target's chat template adds to a system prompt and a question."""
        asked = self.prompts.text(1, 0)
        reply = self.ask([system(asked), user(asked)], 1, policy="no-store")
        if not reply.prompt_tokens:
            raise Unreachable(
                f"{self.target.name} sends no usage in its streams, so it cannot be compared."
            )
        return reply.prompt_tokens - 2 * self.prompts.count(asked)

    def fresh(self, n_tokens: int) -> list[Message]:
        """A cold prompt of that length."""
        return self.prompts.chat(n_tokens, self.template_tokens, next(self.seeds))

    def text(self, n_tokens: int) -> str:
        return self.prompts.text(n_tokens, next(self.seeds))

    def restart(self, *, cold_files: bool = False) -> float:
        """Kill and start the target, keeping its disk; seconds until it answers."""
        self.show_status("restarting")
        self.target.settle()
        self.target.kill()
        if cold_files and self.target.store is not None:
            drop_pages(self.target.store)
        return self.target.start()

    def samples(self, what: str) -> Iterator[int]:
        for number in range(self.sizes.samples):
            self.show_status(f"{what}, {number + 1} of {self.sizes.samples}")
            yield number

    def series(
        self,
        what: str,
        unit: str,
        samples: Sequence[float],
        *,
        x: float | None = None,
        how: str = "",
        better: Better = "lower",
    ) -> Series:
        values = tuple(float(sample) for sample in samples)
        return Series(self.workload, self.target.name, what, unit, values, x, how, better)

    def claim(
        self,
        what: str,
        samples: Sequence[float],
        wanted: float | None = None,
        *,
        at_least: bool = True,
        value: float | None = None,
    ) -> Claim:
        """A ratio from samples; goals apply to Keepwarm only."""
        name, taken = self.target.name, tuple(float(sample) for sample in samples)
        value = statistics.median(taken) if value is None else value
        wanted = wanted if self.target.is_ours and self.sizes.is_judged else None
        return Claim(self.workload, name, what, value, taken, wanted, at_least)

    def ratio(
        self,
        what: str,
        above: Series,
        below: Series,
        wanted: float | None = None,
        *,
        at_least: bool = True,
    ) -> Claim:
        """The median of one series over that of another."""
        pairs = [a / b for a, b in zip(above.samples, below.samples, strict=True) if b]
        value = above.median / below.median
        return self.claim(what, pairs, wanted, at_least=at_least, value=value)


def ask_together(asks: Sequence[Callable[[], T]]) -> list[T]:
    """Send all requests at the same moment, each from its own thread."""
    gate = threading.Barrier(max(1, len(asks)))

    def begin(ask: Callable[[], T]) -> T:
        gate.wait()
        return ask()

    asked = [in_thread(partial(begin, ask)) for ask in asks]
    wait(asked)
    return [each.result() for each in asked]


def in_thread(work: Callable[[], T]) -> Future[T]:
    """In a daemon thread: a bench that is told to end does not wait for a request that hangs."""
    found: Future[T] = Future()

    def do() -> None:
        try:
            found.set_result(work())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=do, daemon=True).start()
    return found
