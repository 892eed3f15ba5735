"""Servers through a day: started, asked, restarted, killed, watched, by the client's clock."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import psutil

from benchmarks.day.model import Tokens
from benchmarks.day.script import CAP, KILL, DayRequest, Step
from benchmarks.requests.client import BenchRequest, TimedReply
from benchmarks.requests.prompts import user
from benchmarks.requests.run import ask_together
from benchmarks.requests.targets import ServerProcess, disk_bytes, error_line, wait_for_kernels
from keepwarm.errors import KeepwarmError

N_ANSWER = 8  # tokens that are read of an answer
STOP_S = 180.0
PAUSE_S = 1.5  # before memory is measured: nobody asks all day without a pause
CUT = "cut"  # a run ended while this server ran, and another one goes on
LOST = ("dropped", "failed", "over_budget", "disk_full", "orphans")  # of what is to be saved


@dataclass(frozen=True)
class RequestRecord:
    """One request and what came of it; seconds are the client's."""

    step: int
    hour: int
    kind: str
    person: int
    session: str
    n_prompt: int  # by the client's tokenizer
    n_new: int  # beyond what any request before began with
    n_counted: int = 0  # prompt tokens, as the server says
    n_cached: int = 0
    n_answer: int = 0
    first_s: float = 0.0
    total_s: float = 0.0
    repeat_s: float | None = None  # the same turn once more, without a restart before it
    error: str = ""

    @property
    def n_computed(self) -> int:
        return self.n_counted - self.n_cached

    @property
    def n_beyond(self) -> int:
        return self.n_computed - self.n_new


@dataclass(frozen=True)
class HourSample:
    """A server's process and its children at the end of an hour of the day."""

    hour: int
    resident_bytes: int
    cached_bytes: int  # of it keys and values in live caches and in memory, where it says so
    n_threads: int
    n_descriptors: int
    stored_bytes: int  # files of its store
    n_evicted: int  # records, from the disk, since its start
    buffer_bytes: int = 0  # freed ones that MLX keeps, where it says so; a limit holds for them


@dataclass
class Host:
    """One server, its answers, and what was seen of its process."""

    server: ServerProcess
    stop_tokens: Sequence[int]
    pause_s: float = PAUSE_S
    records: list[RequestRecord] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # of the answers, in the same order
    hours: list[HourSample] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    written_bytes: int = 0  # as the system counts; it does not on a file system in memory
    reported_bytes: int = 0  # as the server counts, until it was told to end
    lost_saves: int = 0  # of records: no room or time for them, or still queued at a kill
    cap_bytes: int = 0  # of its store, for the last third
    failure: str = ""  # why it has no further part in the day
    n_steps: int = 0  # of the day that are done
    runs: bool = False

    def compile_kernels(self, prompts: Sequence[str]) -> None:
        """What a machine compiles once is no part of a day: a prompt alone, then all at once.

        A server that fails at it fails again in the day, which says so.
        """
        asks = [
            BenchRequest([user(prompt)], N_ANSWER, "no-store", self.stop_tokens)
            for prompt in prompts
        ]
        with suppress(KeepwarmError), closing(self.server):
            self.server.start()
            self.server.ask(asks[0])
            ask_together([partial(self.server.ask, ask) for ask in asks])
            wait_for_kernels(self.server)

    def start(self) -> None:
        self.starts_s.append(round(self.server.start(), 3))
        self.runs = True

    def go_on(self) -> None:
        """Start where a run was cut in the middle."""
        if self.n_steps:
            self.events.append(CUT)
        self.start()

    def end(self, event: str = "") -> None:
        """What it has written is read when its process has ended, before the system forgets it."""
        process = self.server.process
        writes = self.server.cache_stats().get("writes", {})
        self.reported_bytes += writes.get("written_bytes", 0)
        lost = (*LOST, "queued_blocks") if event == KILL else LOST
        self.lost_saves += sum(writes.get(name, 0) for name in lost)
        process.send_signal(signal.SIGKILL if event == KILL else signal.SIGTERM)
        until = time.monotonic() + STOP_S
        while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < until:
            time.sleep(0.02)
        self.written_bytes += _written(process)
        self.server.kill()
        self.runs = False

    def restart(self, event: str) -> None:
        """At the disk's cap with no room but for what its store has."""
        self.events.append(event)
        if event == CAP and self.server.store is not None:
            self.cap_bytes = disk_bytes(self.server.store)
        self._limit_disk()
        self.start()

    def _limit_disk(self) -> None:
        if self.cap_bytes:
            self.server.environ["KEEPWARM_DISK_BYTES"] = str(self.cap_bytes)

    def ask(self, step: Step, expected: Sequence[RequestRecord]) -> None:
        """All requests of a step at the same moment."""
        pairs = zip(step.requests, expected, strict=True)
        for record, text in ask_together([partial(self._ask, *pair) for pair in pairs]):
            self.records.append(record)
            self.texts.append(text)
        if self.server.process.status() == psutil.STATUS_ZOMBIE:  # it has ended by itself
            self.server.kill()
            self.start()

    def _ask(
        self, request: DayRequest, record: RequestRecord, policy: str | None = None
    ) -> tuple[RequestRecord, str]:
        ask = replace(bench_request(request, self.stop_tokens), policy=policy)
        began = time.perf_counter()
        try:
            reply = self.server.ask(ask)
            return with_reply(record, reply), reply.text
        except (KeepwarmError, OSError) as error:
            waited = time.perf_counter() - began
            line = error_line(error)
            return replace(record, first_s=waited, total_s=waited, error=line), ""

    def repeat(self, step: Step) -> None:
        """Turns after a restart once more, with as many new tokens."""
        if not self.server.is_ours:
            return
        last = self.records[-len(step.requests) :]
        pairs = zip(map(reworded, step.requests), last, strict=True)
        found = ask_together([partial(self._ask, *pair, "read-only") for pair in pairs])
        self.records[-len(last) :] = [
            replace(record, repeat_s=None if again.error else again.first_s)
            for record, (again, _) in zip(last, found, strict=True)
        ]

    def sample(self, hour: int) -> None:
        """What the server has while nobody asks."""
        time.sleep(self.pause_s)
        process = self.server.process
        family = [process, *process.children(recursive=True)]
        held = {k: v for k, v in self.server.held_bytes().items() if not k.startswith("disk")}
        disk = self.server.cache_stats().get("tiers", {}).get("disk", {})
        store = self.server.store
        seen = HourSample(
            hour,
            resident_bytes=sum(each.memory_info().rss for each in family),
            cached_bytes=sum(held.values()),
            n_threads=sum(each.num_threads() for each in family),
            n_descriptors=sum(each.num_fds() for each in family),
            stored_bytes=disk_bytes(store) if store else 0,
            n_evicted=disk.get("evicted", 0),
            buffer_bytes=self.server.buffer_bytes(),
        )
        self.hours.append(seen)

    def as_json(self) -> dict[str, Any]:
        return {
            "about": self.server.about,
            "starts_s": self.starts_s,
            "events": self.events,
            "written_bytes": self.written_bytes,
            "reported_bytes": self.reported_bytes,
            "lost_saves": self.lost_saves,
            "cap_bytes": self.cap_bytes,
            "failure": self.failure,
            "hours": [asdict(hour) for hour in self.hours],
            "requests": [_rounded(asdict(record)) for record in self.records],
        }

    def as_state(self) -> dict[str, Any]:
        """For a run that goes on with this one."""
        return {**self.as_json(), "texts": self.texts, "n_steps": self.n_steps}

    def resume(self, state: Mapping[str, Any]) -> None:
        known = {name: state[name] for name in self.as_state() if name not in ("about", "requests")}
        hours = [HourSample(**hour) for hour in known.pop("hours")]
        for name, value in known.items():
            setattr(self, name, value)
        self.hours = hours
        self.records = [RequestRecord(**each) for each in state["requests"]]
        self._limit_disk()


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}


def _written(process: psutil.Process) -> int:
    """Bytes that the system has counted; 0 where it does not."""
    try:
        return int(process.io_counters().write_bytes)
    except (AttributeError, psutil.Error):
        return 0


def bench_request(request: DayRequest, stop_tokens: Sequence[int]) -> BenchRequest:
    headers = {"x-session-id": request.session, "x-session-affinity": request.session}
    tools = {"tools": list(request.tools), "tool_choice": "auto"} if request.tools else {}
    return BenchRequest(
        request.messages, N_ANSWER, forbidden=stop_tokens, headers=headers, more=tools
    )


def reworded(request: DayRequest) -> DayRequest:
    """The last answer and what follows it behind other words, so that as much is new."""
    *before, answer, last = request.messages
    other = {**answer, "content": f"Again: {answer['content']}"}
    return replace(request, messages=[*before, other, last])


def with_reply(record: RequestRecord, reply: TimedReply) -> RequestRecord:
    return replace(
        record,
        n_counted=reply.prompt_tokens,
        n_cached=reply.cached_tokens,
        n_answer=reply.completion_tokens,
        first_s=reply.ttft_s,
        total_s=reply.total_s,
    )


def run(
    hosts: Sequence[Host],
    steps: Sequence[Step],
    expected: Sequence[Sequence[RequestRecord]],
    show: Callable[[str], None],
    n_segments: int = 0,
) -> int:
    """Every step to every server in turn; whoever was first is last the next time. Steps that are
    done are left out. Returns how many segments were run, from a start of the servers to their end:
    at most `n_segments`, if that is not 0.
    """
    n_run = 0
    for number, step in enumerate(steps):
        following = steps[number + 1] if number + 1 < len(steps) else None
        due = [host for host in hosts if not host.failure and host.n_steps <= number]
        for host in due if number % 2 == 0 else due[::-1]:
            _try_step(host, step, expected[number], following)
            show(f"{number + 1} of {len(steps)}, {step.hour}:00, {_outcome(host, step)}")
        n_run += bool(due) and (following is None or bool(following.event))
        if n_segments and n_run == n_segments:
            break
    return n_run


def _outcome(host: Host, step: Step) -> str:
    """What came of a step, for whoever watches."""
    if host.failure:
        return f"{host.server.name}: {host.failure}"
    started = f"started in {host.starts_s[-1]:.1f} s, " if step.event else ""
    asked = (
        f"{each.kind} {each.first_s:.2f} s"
        + (f" (again {each.repeat_s:.2f})" if each.repeat_s else "")
        + f", {each.n_computed:,} computed, {each.n_new:,} new of {each.n_prompt:,}"
        + f" {each.error}".rstrip()
        for each in host.records[-len(step.requests) :]
    )
    return f"{host.server.name}: {started}{'; '.join(asked)}"


def _try_step(
    host: Host, step: Step, expected: Sequence[RequestRecord], following: Step | None
) -> None:
    """A server that does not start has no further part in the day."""
    try:
        _run_step(host, step, expected, following)
    except KeepwarmError as error:
        host.failure = error_line(error)
        host.server.kill()
    host.n_steps += 1


def _run_step(
    host: Host, step: Step, expected: Sequence[RequestRecord], following: Step | None
) -> None:
    """One step of one server, which ends at once if something happens before the following one."""
    if step.event:
        host.restart(step.event)
    elif not host.runs:
        host.go_on()
    host.ask(step, expected)
    if step.event:
        host.repeat(step)
    if following is None or following.hour != step.hour:
        host.sample(step.hour)
    if following is None or following.event:
        host.end(following.event if following else "")


def expected_records(steps: Sequence[Step], tokens: Tokens) -> list[list[RequestRecord]]:
    """What is known of all requests before any is sent, by step."""
    return [list(_expected(number, step, tokens)) for number, step in enumerate(steps)]


def _expected(number: int, step: Step, tokens: Tokens) -> Iterator[RequestRecord]:
    for request in step.requests:
        named = (request.kind, request.person, request.session)
        yield RequestRecord(number, step.hour, *named, *tokens.count(request))
