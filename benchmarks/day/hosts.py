"""Servers through a day: started, asked, restarted, killed, watched, by the client's clock."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tests.kit.agent_model import TOOLS_CHATML

from benchmarks.day.script import CAP, KILL, DayRequest, Step
from benchmarks.requests.client import BenchRequest, Message, ReplyToken, TimedReply
from benchmarks.requests.run import ask_together
from benchmarks.requests.targets import ServerProcess, disk_bytes, error_line
from keepwarm.errors import KeepwarmError
from keepwarm.models.catalog import read_config

N_ANSWER = 8  # tokens that are read of an answer
STOP_S = 180.0
TOP = 5  # logprobs of a cold run, by which ties are seen


@dataclass(frozen=True)
class Noted:
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
    again_s: float | None = None  # the same turn once more, without a restart before it
    error: str = ""

    @property
    def n_computed(self) -> int:
        return self.n_counted - self.n_cached

    @property
    def n_beyond(self) -> int:
        return self.n_computed - self.n_new


@dataclass(frozen=True)
class Hour:
    """A server's process and its children at the end of an hour of the day."""

    hour: int
    resident_bytes: int
    cached_bytes: int  # of it keys and values in live caches and in memory, where it says so
    n_threads: int
    n_descriptors: int
    stored_bytes: int  # files of its store
    n_evicted: int  # records, from the disk, since its start


class Tokens:
    """Counts prompts as the servers do, and what each has in common with those before."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = load_tokenizer(model)
        self._sent: list[Any] = []

    def count(self, request: DayRequest) -> tuple[int, int]:
        """Tokens of its prompt, and how many no prompt before began with."""
        messages = [_with_parsed_calls(message) for message in request.messages]
        options = {"tools": list(request.tools) or None, "add_generation_prompt": True}
        ids = np.array(self._tokenizer.apply_chat_template(messages, **options), np.int32)
        n_known = max((_n_common(ids, before) for before in self._sent), default=0)
        self._sent.append(ids)
        return len(ids), max(1, len(ids) - n_known)


def _n_common(one: Any, other: Any) -> int:
    n = min(len(one), len(other))
    differs = one[:n] != other[:n]
    return int(differs.argmax()) if differs.any() else n


def _with_parsed_calls(message: Message) -> dict[str, Any]:
    """Servers parse the arguments of calls before a template writes them."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    parsed = [{"function": {**call, "arguments": json.loads(call["arguments"])}} for call in calls]
    return {**message, **({"tool_calls": parsed} if parsed else {})}


def with_tools(source: Path, folder: Path, n_context: int) -> Path:
    """The model with a template that writes tools, if its own does not, and with a long context."""
    folder.mkdir()
    for file in source.iterdir():
        if file.name not in ("config.json", "tokenizer_config.json"):
            (folder / file.name).symlink_to(file.resolve())
    known = read_config(source)
    longer = max(n_context, known.get("max_position_embeddings", 0))
    _write(folder / "config.json", {**known, "max_position_embeddings": longer})
    described = json.loads((source / "tokenizer_config.json").read_text())
    template = described.get("chat_template") or ""
    if (own := source / "chat_template.jinja").is_file():
        template = own.read_text()
    if "tools" not in template:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        template = TOOLS_CHATML
    described |= {"chat_template": template, "model_max_length": longer}
    _write(folder / "tokenizer_config.json", described)
    return folder


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value))


@dataclass
class Host:
    """One server, its answers, and what was seen of its process."""

    server: ServerProcess
    stop_tokens: Sequence[int]
    noted: list[Noted] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # of the answers, in the same order
    hours: list[Hour] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    written_bytes: int = 0  # as the system counts; it does not on a file system in memory
    reported_bytes: int = 0  # as the server counts, until it was told to end
    cap_bytes: int = 0  # of its store, for the last third
    gone: str = ""  # why it has no further part in the day

    def start(self) -> None:
        """Start it; one that does not start has no further part in the day."""
        try:
            self.starts_s.append(round(self.server.start(), 3))
        except KeepwarmError as error:
            self.gone = error_line(error)
            self.server.kill()

    def end(self, event: str = "") -> None:
        """What it has written is read when its process has ended, before the system forgets it."""
        process = self.server.process
        self.reported_bytes += self.server.cache_stats().get("writes", {}).get("written_bytes", 0)
        process.send_signal(signal.SIGKILL if event == KILL else signal.SIGTERM)
        until = time.monotonic() + STOP_S
        while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < until:
            time.sleep(0.02)
        self.written_bytes += _written(process)
        self.server.kill()

    def begin_again(self, event: str) -> None:
        """At the disk's cap with no room but for what its store has."""
        self.events.append(event)
        if event == CAP and self.server.store is not None:
            self.cap_bytes = disk_bytes(self.server.store)
            self.server.environ["KEEPWARM_DISK_BYTES"] = str(self.cap_bytes)
        self.start()

    def ask(self, step: Step, notes: Sequence[Noted]) -> None:
        """All requests of a step at the same moment."""
        pairs = list(zip(step.requests, notes, strict=True))
        for note, text in ask_together([partial(self._ask, *pair) for pair in pairs]):
            self.noted.append(note)
            self.texts.append(text)
        if self.server.process.status() == psutil.STATUS_ZOMBIE:  # it has ended by itself
            self.server.kill()
            self.start()

    def _ask(self, request: DayRequest, note: Noted) -> tuple[Noted, str]:
        began = time.perf_counter()
        try:
            reply = self.server.ask(bench_request(request, self.stop_tokens))
            return filled(note, reply), reply.text
        except (KeepwarmError, OSError) as error:
            waited = time.perf_counter() - began
            line = error_line(error)
            return replace(note, first_s=waited, total_s=waited, error=line), ""

    def ask_again(self, step: Step) -> None:
        """Turns after a restart once more, with other last words of the same length."""
        if not self.server.is_ours:
            return
        asks = [bench_request(reworded(request), self.stop_tokens) for request in step.requests]
        askers = [partial(self.server.ask, replace(ask, policy="read-only")) for ask in asks]
        for place, reply in enumerate(ask_together(askers), start=-len(asks)):
            self.noted[place] = replace(self.noted[place], again_s=reply.ttft_s)

    def look(self, hour: int) -> None:
        process = self.server.process
        family = [process, *process.children(recursive=True)]
        held = {k: v for k, v in self.server.held_bytes().items() if not k.startswith("disk")}
        disk = self.server.cache_stats().get("tiers", {}).get("disk", {})
        store = self.server.store
        seen = Hour(
            hour,
            resident_bytes=sum(each.memory_info().rss for each in family),
            cached_bytes=sum(held.values()),
            n_threads=sum(each.num_threads() for each in family),
            n_descriptors=sum(each.num_fds() for each in family),
            stored_bytes=disk_bytes(store) if store else 0,
            n_evicted=disk.get("evicted", 0),
        )
        self.hours.append(seen)

    def as_json(self) -> dict[str, Any]:
        return {
            "about": self.server.about,
            "starts_s": self.starts_s,
            "events": self.events,
            "written_bytes": self.written_bytes,
            "reported_bytes": self.reported_bytes,
            "cap_bytes": self.cap_bytes,
            "gone": self.gone,
            "hours": [asdict(hour) for hour in self.hours],
            "requests": [_rounded(asdict(note)) for note in self.noted],
        }


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
    """The last message with its words in another order."""
    *before, last = request.messages
    words = " ".join(reversed(last["content"].split(" ")))
    return replace(request, messages=[*before, {**last, "content": words}])


def filled(note: Noted, reply: TimedReply) -> Noted:
    return replace(
        note,
        n_counted=reply.prompt_tokens,
        n_cached=reply.cached_tokens,
        n_answer=reply.completion_tokens,
        first_s=reply.ttft_s,
        total_s=reply.total_s,
    )


def run(hosts: Sequence[Host], steps: Sequence[Step], tokens: Tokens) -> None:
    """Every step to every server in turn; whoever was first is last the next time."""
    for host in hosts:
        host.start()
    for number, (step, following) in enumerate(pairwise([*steps, None])):
        assert step is not None
        notes = list(_notes(number, step, tokens))
        for host in hosts if number % 2 == 0 else hosts[::-1]:
            _take(host, step, notes, following)


def _take(host: Host, step: Step, notes: Sequence[Noted], following: Step | None) -> None:
    """One step of one server, which ends at once if something happens before the following one."""
    if step.event and not host.gone:
        host.begin_again(step.event)
    if not host.gone:
        host.ask(step, notes)
    if step.event and not host.gone:
        host.ask_again(step)
    if (following is None or following.hour != step.hour) and not host.gone:
        host.look(step.hour)
    if (following is None or following.event) and not host.gone:
        host.end(following.event if following else "")


def _notes(number: int, step: Step, tokens: Tokens) -> Iterator[Noted]:
    for request in step.requests:
        named = (request.kind, request.person, request.session)
        yield Noted(number, step.hour, *named, *tokens.count(request))


@dataclass(frozen=True)
class Compared:
    """An answer of the day beside the same request to a server that has stored nothing."""

    step: int
    kind: str
    warm: str
    cold: str
    verdict: str  # same, tie, differs, or not cold


def compare_with_cold(
    host: Host, cold: ServerProcess, steps: Sequence[Step], n_samples: int, tie: float
) -> list[Compared]:
    """Some answers of the day beside those to the same requests with nothing reused."""
    requests = [request for step in steps for request in step.requests]
    places = sampled(host.noted, host.texts, n_samples)
    logprobs = {"logprobs": True, "top_logprobs": TOP}
    found = []
    cold.start()
    try:
        for place in places:
            ask = bench_request(requests[place], host.stop_tokens)
            ask = replace(ask, policy="no-store", more={**ask.more, **logprobs})
            reply, note = cold.ask(ask), host.noted[place]
            warm = host.texts[place]
            verdict = judge(warm, reply.text, reply.tokens, tie)
            verdict = "not cold" if reply.cached_tokens else verdict
            found.append(Compared(note.step, note.kind, warm, reply.text, verdict))
    finally:
        cold.close()
        if cold.store is not None:
            shutil.rmtree(cold.store, ignore_errors=True)
    return found


def sampled(noted: Sequence[Noted], texts: Sequence[str], n_samples: int) -> list[int]:
    """Places of answers that reused something, one of each kind, then evenly over the day."""
    usable = [place for place, note in enumerate(noted) if note.n_cached and texts[place]]
    kinds = {noted[place].kind: place for place in usable}  # the last of each, the longest
    every = max(1, len(usable) // max(1, n_samples))
    return sorted(list(dict.fromkeys([*kinds.values(), *usable[::every]]))[:n_samples])


def judge(warm: str, cold: str, tokens: Sequence[ReplyToken], tie: float) -> str:
    """Up to the first token at which the cold run had two that were as likely."""
    if warm == cold:
        return "same"
    n_common = next(
        (n for n, pair in enumerate(zip(warm, cold, strict=False)) if pair[0] != pair[1]),
        min(len(warm), len(cold)),
    )
    n_read = 0
    for token in tokens:
        n_read += len(token.text)
        if n_read > n_common:
            return "tie" if token.gap < tie else "differs"
        if token.gap < tie:
            return "tie"
    return "differs"
