"""Simulated devices: the real scheduler, intake and admission on a virtual clock.

The model is a stand-in whose forward pass does nothing but advance the clock by what it would take.
Tokens, caches, blocks and restores are real; only their cost is not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from types import SimpleNamespace
from typing import Any

import mlx.core as mx

from keepwarm import config, kv
from keepwarm.cache.restore.loading import PendingReads, Reader, Use
from keepwarm.cache.restore.rates import Rates
from keepwarm.cache.store import Budgets, Store
from keepwarm.concurrency import CallDeadline
from keepwarm.engine.admission import Admission
from keepwarm.engine.answer import Answer
from keepwarm.engine.jobs import Job
from keepwarm.engine.lane import Lane
from keepwarm.engine.live import Live
from keepwarm.engine.prefill import SliceSizer
from keepwarm.engine.scheduler import Scheduler
from keepwarm.errors import Cancelled
from keepwarm.models.load import Model
from keepwarm.prefix.blocks import BLOCK_TOKENS
from keepwarm.prefix.fingerprint import Identity
from keepwarm.prefix.policy import Policy
from keepwarm.prefix.recent import RecentPrompts
from keepwarm.telemetry.ledger import Ledger
from keepwarm.text.prepare import Preparer
from keepwarm.text.request import Delta, KVOptions, Outcome, Request, Sampling
from tests.kit.models import VOCABULARY


@dataclass(frozen=True, eq=False)
class Device:
    """What a model's work takes on a device, in seconds."""

    name: str
    slice_s: Mapping[int, float]  # by tokens, linear between them
    context_s: float  # for each token of a slice and each before it
    step_s: Mapping[int, float]  # one decode step, by rows
    load_tokens_per_s: float
    max_slice: int = 2048
    gap_s: float = 0.25
    on_grid: bool = False
    new_shape_s: float = 0.0  # more, for a slice where none of this length ended before

    def slice_seconds(self, n_tokens: int, context: int) -> float:
        return _between(self.slice_s, n_tokens) + self.context_s * n_tokens * context

    def step_seconds(self, n_rows: int) -> float:
        return _between(self.step_s, n_rows)


# Llama-8B in 4 bit; `python -m benchmarks.engine`, docs/results/engine-h200.json. Steps: those of
# mlx-lm's batches in docs/results/rows-h200.json.
H200 = Device(
    "H200",
    {1: 0.0153, 16: 0.0234, 128: 0.0342, 256: 0.0423, 512: 0.0651, 1024: 0.1205, 2048: 0.2314},
    9e-10,
    {1: 0.0056, 4: 0.0078, 8: 0.0072, 16: 0.0105, 32: 0.0156, 64: 0.0493},
    56_000,  # from memory
    on_grid=True,
    new_shape_s=0.08,
)
# Not measured. Llama-8B in 4 bit on an M4: 224.8 prompt tokens and 20.9 tokens per second
# (github.com/brand-o/normiebench/issues/3), scaled by arithmetic (4.6 TFLOPS there, 18.4 and 2.6
# here) and by bandwidth (120 GB/s there, 546 and 68 here). Loads: 131 kB a token from SSDs of 5
# and 2.5 GB/s.
M4_MAX = Device(
    "M4 Max",
    {1: 0.0116, 2048: 2.28},
    5e-9,
    {1: 0.0105, 16: 0.025},
    38_000,
)
M1 = Device("M1, 8 GB", {1: 0.092, 2048: 16.1}, 3.5e-8, {1: 0.084, 16: 0.19}, 19_000)
# smollm2; README.md and docs/results/bench.md: 2,048 tokens in 23.4 s, one and two streams at
# 15 tokens per second in all, four at 28.
CPU = Device(
    "2 cores",
    {1: 0.066, 512: 5.8},
    2e-8,
    {1: 0.066, 2: 0.134, 4: 0.142, 16: 0.57},
    9_000,
    max_slice=512,
    gap_s=0.0,
)
DEVICES = (H200, M4_MAX, M1, CPU)


def _between(points: Mapping[int, float], n: int) -> float:
    known = sorted(points.items())
    i = min(max(1, bisect_left(known, (n, 0.0))), len(known) - 1)
    (fewer, below), (more, above) = known[i - 1], known[i]
    return below + (above - below) * (n - fewer) / (more - fewer)


class VirtualClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ChargedModel:
    """A model with one layer of one number, whose work takes the device's time."""

    layers = (None,)

    def __init__(self, device: Device, clock: VirtualClock) -> None:
        self._device = device
        self._clock = clock
        self._logits = mx.zeros(VOCABULARY).at[VOCABULARY // 2].add(1.0)
        self.fed: list[int] = []  # tokens of every slice
        self._shapes: set[tuple[int, int]] = set()

    def __call__(self, inputs: mx.array, cache: Any) -> mx.array:
        n_rows, n_tokens = inputs.shape
        if n_tokens == 1:
            self._clock.now += self._device.step_seconds(n_rows)
        else:
            self.fed.append(n_tokens)
            self._clock.now += self._device.slice_seconds(n_tokens, cache[0].offset)
            shape = n_tokens, cache[0].offset
            self._clock.now += 0.0 if shape in self._shapes else self._device.new_shape_s
            self._shapes.add(shape)
        rows = mx.zeros((n_rows, 1, n_tokens, 1))
        cache[0].update_and_fetch(rows, rows)
        return mx.broadcast_to(self._logits, (n_rows, n_tokens, VOCABULARY))


class ChargedReader:
    """Reads records at once, and has the clock say how long that took."""

    slabs = None

    def __init__(self, reader: Reader, device: Device, clock: VirtualClock) -> None:
        self._reader = reader
        self._device = device
        self._clock = clock

    def start(
        self,
        reads: Sequence[Any],
        prepare: Callable[[], Use],
        in_background: bool = False,
        meanwhile: Callable[[], object] = lambda: None,
        deadline: CallDeadline | None = None,
    ) -> PendingReads:
        pending = self._reader.start(reads, prepare, False, meanwhile, deadline)
        pending.outcome()
        seconds = len(reads) * BLOCK_TOKENS / self._device.load_tokens_per_s
        if not in_background:
            self._clock.now += seconds
            return pending
        return _Until(self._clock, self._clock.now + seconds, pending)  # type: ignore[return-value]


@dataclass
class _Until:
    """Reads that are done when the clock says so."""

    clock: VirtualClock
    done_at: float
    reads: PendingReads

    @property
    def is_done(self) -> bool:
        return self.clock.now >= self.done_at

    def outcome(self, meanwhile: Callable[[], object]) -> Any:
        self.clock.now = max(self.clock.now, self.done_at)
        return self.reads.outcome(meanwhile)

    def stop(self) -> None:
        self.reads.stop()


# Rows share a batch.
ALWAYS: Any = SimpleNamespace(can_batch=True, is_decided=True, allowed=True, own_ends=False)


class KnownLoads(Rates):
    """Loading is as fast as the device says; prefilling is learned."""

    def saw_load(self, n_bytes: int, seconds: float) -> None:
        return


class StampedAnswer(Answer):
    """Notes when its events were put."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(lambda answer: None)
        self._clock = clock
        self.events: list[tuple[float, Outcome]] = []

    def put(self, outcome: Outcome) -> None:
        self.events.append((self._clock.now, outcome))

    @property
    def tokens(self) -> list[float]:
        """When each token came."""
        return [when for when, event in self.events if isinstance(event, Delta)]


@dataclass
class Sent:
    """A request that was sent to a simulated device."""

    job: Job
    answer: StampedAnswer

    @property
    def has_begun(self) -> bool:
        return bool(self.answer.tokens)

    @property
    def first_s(self) -> float:
        return self.answer.tokens[0] - self.job.arrived

    def gaps(self, since: float, until: float) -> list[float]:
        pairs = pairwise(self.answer.tokens)
        return [b - a for a, b in pairs if since <= a and b <= until]


@dataclass
class Simulation:
    device: Device
    clock: VirtualClock
    module: ChargedModel
    lane: Lane
    scheduler: Scheduler
    preparer: Preparer
    arrivals: list[tuple[float, Callable[[], Any]]] = field(default_factory=list)
    _n_prompts: int = 0

    def prompt(self, n_tokens: int) -> list[int]:
        """Always another one."""
        self._n_prompts += 1
        mixed = range(self._n_prompts * 7919, self._n_prompts * 7919 + n_tokens)
        return [i * i % 8191 % VOCABULARY for i in mixed]

    def send(
        self,
        prompt: int | Sequence[int],
        n_answer: int = 1,
        policy: Policy = Policy.READ_WRITE,
        tenant: str = "",
        **fields: Any,
    ) -> Sent:
        """A request for so many tokens after a prompt, or after a new one of this length."""
        tokens = self.prompt(prompt) if isinstance(prompt, int) else list(prompt)
        sampling = Sampling(max_tokens=n_answer, temperature=0)
        prepared = self.preparer.prepare(
            Request(prompt=tokens, sampling=sampling, policy=policy, tenant=tenant, **fields)
        )
        answer = StampedAnswer(self.clock)
        job = Job(prepared.request, prepared, self.lane, answer, clock=self.clock)
        self.scheduler.add(job)
        return Sent(job, answer)

    def running(self, n: int) -> list[Sent]:
        """Answers that are being decoded, of requests that nothing is kept of."""
        sent = [self.send(16, 100_000, Policy.NO_STORE) for _ in range(n)]
        self.run_until(lambda: all(len(one.answer.tokens) >= 8 for one in sent))
        return sent

    def run_until(self, is_done: Callable[[], bool]) -> None:
        for _ in range(200_000):
            if is_done():
                return
            while self.arrivals and self.arrivals[0][0] <= self.clock.now:
                self.arrivals.pop(0)[1]()
            if not self.scheduler.step():
                self.clock.now += 0.001  # waits for a load, or for an arrival
        raise AssertionError("it never ends")

    def first_s(self, prompt: int | Sequence[int]) -> float:
        """Seconds to the first token of a request that is sent now."""
        sent = self.send(prompt)
        self.run_until(lambda: sent.job.ended)
        return sent.first_s

    def learn(self) -> None:
        """What a server that has run for a while knows."""
        for n_tokens in (8192, 8192, 40, 200):
            self.first_s(n_tokens)
        self.abort_all(self.running(1))
        for n_rows in (1, 4, 4) if self.device.new_shape_s else ():
            running = self.running(n_rows)
            self.first_s(8192)
            self.abort_all(running)

    def abort_all(self, sent: Sequence[Sent]) -> None:
        for one in sent:
            self.scheduler.abort(one.job, Cancelled("Enough."))


def p95(values: Sequence[float]) -> float:
    return quantiles([*values, *values], n=20, method="inclusive")[-1]


@contextmanager
def simulated(device: Device, model: Model, home: Path) -> Iterator[Simulation]:
    """A device with the tokenizer of `model`, and a store in memory."""
    clock = VirtualClock()
    module = ChargedModel(device, clock)
    settings = config.load({"KEEPWARM_HOME": str(home)})
    budgets = Budgets(memory_bytes=1 << 28, disk=False)
    with Store(budgets=budgets, settings=settings) as store:
        layout = kv.probe(module, kv.make_caches(module))
        identity = Identity({}, device.name, "", str(layout))
        restorer = store.make_restorer(identity, layout)
        restorer.reader = ChargedReader(restorer.reader, device, clock)  # type: ignore[assignment]
        restorer.rates = KnownLoads()
        stand_in = replace(model, module=module, n_context=1 << 20)
        lane = Lane(stand_in, KVOptions(), identity, restorer, Live(1 << 28), ALWAYS)
        sizer = SliceSizer(device.max_slice, gap_s=device.gap_s, on_grid=device.on_grid)
        scheduler = Scheduler(
            Admission(1 << 30), sizer, lambda row: None, lambda job: None, Ledger(), clock=clock
        )
        preparer = Preparer(stand_in, VOCABULARY, RecentPrompts())
        yield Simulation(device, clock, module, lane, scheduler, preparer)
