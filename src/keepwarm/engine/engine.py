"""The engine: one thread that owns MLX, one batch, every conversation warm.

engine = keepwarm.Engine(keepwarm.load("smollm2"))
for event in engine.submit(Request(messages=[{"role": "user", "content": "Hello"}])): ...
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Self, TypeAlias, TypeVar

import mlx.core as mx

from keepwarm import blas
from keepwarm.cache.restore.live import Live
from keepwarm.cache.store import Store
from keepwarm.config import Settings
from keepwarm.config import load as load_settings
from keepwarm.device.limits import MemoryScopes, scopes_of_process
from keepwarm.device.memory import MemoryConfig, memories
from keepwarm.device.pressure import Watcher, make_guards
from keepwarm.engine.admission import Admission, kv_bytes
from keepwarm.engine.answer import Answer
from keepwarm.engine.chores import Chores
from keepwarm.engine.insight.audit import Auditor
from keepwarm.engine.insight.journal import Journal, JournalEntry, entry_of
from keepwarm.engine.insight.lookup import Lookup, look_up
from keepwarm.engine.insight.misses import Misses
from keepwarm.engine.insight.stats import MemoryUse, Stats, snapshot
from keepwarm.engine.insight.whatif import LookupLog
from keepwarm.engine.jobs import Job, Sequence
from keepwarm.engine.lane import Lane, Lanes, make_options, options_for
from keepwarm.engine.prefill import Pace
from keepwarm.engine.scheduler import Scheduler
from keepwarm.errors import Busy, Cancelled, KeepwarmError, Stopping
from keepwarm.kv import make_caches
from keepwarm.models.load import Model
from keepwarm.prefix.blocks import BLOCK_TOKENS
from keepwarm.prefix.recent import RecentPrompts
from keepwarm.text.prepare import PreparedRequest, Preparer
from keepwarm.text.request import KVOptions, Request

LOG = logging.getLogger(__name__)
T = TypeVar("T")
Command: TypeAlias = Callable[[], None]


@dataclass(frozen=True)
class EngineConfig:
    """What can be set for an engine. Memory that is None is scaled to the machine."""

    memory: MemoryConfig | None = None
    max_queue: int = 256  # requests that wait or run
    kv: KVOptions = field(default_factory=KVOptions)  # for requests that do not say
    audit_share: float = 0.0  # of the answers from a cache, computed again cold and compared


class Engine:
    """Close it, or use `with`: what is computed is on disk only then for certain."""

    def __init__(
        self,
        model: Model,
        store: Store | None = None,
        config: EngineConfig | None = None,
        *,
        settings: Settings | None = None,
        scopes: MemoryScopes | None = None,
    ) -> None:
        """Without a store that of the settings is opened, and closed with the engine."""
        self.model = model
        settings = settings or load_settings()
        blas.start(settings.home)
        self.config = config or EngineConfig(
            max_queue=settings.max_queue, audit_share=settings.audit_share
        )
        memory = self.config.memory or MemoryConfig.automatic(model_bytes=model.n_bytes)
        self._own_store = store is None
        self.store = store or Store(settings=settings)
        self.store.allow_memory(memory.tier_bytes)
        self._memory = memory
        self.live = Live(memory.live_bytes)
        self._recent = RecentPrompts()
        self._journal = Journal()
        self.misses = Misses(self._recent)
        self.lookup_log = LookupLog()
        self._auditor = Auditor(self.config.audit_share)
        self._numbers = count(1)
        self._preparer = Preparer(model, _vocabulary(model), self._recent)
        self._lanes = Lanes(model, self.store, self.live)
        self._admission = Admission(memory.batch_bytes)
        self._chores = Chores(self.store, lambda job: self._post(partial(self._scheduler.end, job)))
        self._scheduler = Scheduler(
            self._lanes,
            self._admission,
            Pace(max_slice=2048 if mx.default_device() == mx.gpu else 512),
            self._kept,
            self._chores.end_durably,
        )
        self._scopes = scopes or scopes_of_process()
        self._joined = self._scopes.join(memory)  # the model has run, so nothing fails after it
        guards = make_guards(memories(), self.live.release, self.store.release)
        self._watcher = Watcher(guards, became_idle=self._scopes.became_idle).start()
        self._commands: deque[Command] = deque()
        self._obeying = False  # a command is being carried out
        self._changed = threading.Condition()
        self._accepting = True
        self._closing = False
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="keepwarm-engine", daemon=True)
        self._thread.start()

    # asking

    def prepare(self, request: Request) -> PreparedRequest:
        """Render and tokenise a request; raises what is wrong with it. Runs nothing."""
        request = self._with_defaults(request)
        make_caches(self.model.module, **make_options(request.kv))  # refuses what means nothing
        if request.agent is not None:
            self.store.check_agent(request.agent)
        lane = self._lane(request.kv, request.tenant)
        return self._preparer.prepare(request, lane.stored)

    def count_tokens(self, request: Request) -> int:
        """How long a prompt is, one that is too long for the model included."""
        request = self._with_defaults(request)
        lane = self._lane(request.kv, request.tenant)
        return len(self._preparer.render(request, lane.stored).tokens)

    def submit(self, request: Request) -> Answer:
        """Ask; the answer comes as events. What cannot be asked is refused here and now."""
        self._check_open()
        prepared = self.prepare(request)
        answer = Answer(self._cancel, prepared)
        job = Job(
            prepared.request,
            prepared,
            answer,
            number=next(self._numbers),
            cuts=self._cuts(prepared),
            on_end=self._note_end,
        )
        with self._changed:  # whoever gets in here comes before the end, and is told of it
            self._check_open()
            self._check_queue()
            self._post(lambda: self._arrive(job))
        return answer

    def warm(self, request: Request) -> Answer:
        """Read a prompt and keep it, without an answer: its next use starts from here."""
        return self.submit(replace(request, sampling=replace(request.sampling, max_tokens=0)))

    def lookup(self, request: Request) -> Lookup:
        """Say how much of a prompt is warm. Nothing is loaded or changed."""
        prepared = self.prepare(request)
        options = options_for(prepared.request.kv, len(prepared.tokens))
        lane = self._lane(options, request.tenant)
        return self.call(lambda: look_up(lane, prepared.tokens)).result()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run something on the engine's thread, between two steps."""
        future: Future[T] = Future()

        def command() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        self._post(command)
        return future

    # state

    def stats(self) -> Stats:
        """What is going on now, and what has happened since the start."""
        return snapshot(self._scheduler, self.live, self.store)

    def requests(self) -> list[JournalEntry]:
        """The latest requests that ended, then those that wait or run."""
        return [*self._journal.entries(), *map(entry_of, self._asked)]

    def memory(self) -> list[MemoryUse]:
        """What takes memory now, and how much of it each may have."""
        tiers = self.store.tier_stats()
        return [
            MemoryUse("live", self.live.stats.n_bytes, self.live.max_bytes),
            MemoryUse("memory", tiers["memory"].n_bytes, tiers["memory"].max_bytes),
            MemoryUse("batch", self._admission.used_bytes, self._admission.limit_bytes),
            MemoryUse("buffers", mx.get_cache_memory(), self._memory.buffer_active_bytes),
        ]

    @property
    def accepting(self) -> bool:
        return self._accepting

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    def clear(self) -> None:
        """Free all that is kept in memory; what is on disk stays."""
        self.call(self.live.clear).result()
        self.store.clear_memory()
        self._scopes.release_if_idle()

    def drain(self, timeout_s: float) -> bool:
        """Take no more, wait for what runs, then end the rest; whether all could finish."""
        self._refuse_more()
        deadline = time.monotonic() + timeout_s
        while (busy := self._is_busy) and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._scheduler.jobs:
            self.call(self._drop_all).result()
        self.settle()
        return not busy

    @property
    def _is_busy(self) -> bool:
        return bool(self._commands or self._obeying or self._asked)

    @property
    def _asked(self) -> list[Job]:
        """What somebody waits for; an audit nobody does."""
        return [job for job in self._scheduler.jobs if not job.audit]

    def settle(self) -> None:
        """Return once all that was answered is on disk and noted with its agent."""
        with suppress(Stopping):  # then it is closed, and all of that is done
            if threading.current_thread() is not self._thread:
                self.call(lambda: None).result()  # an answer is given before it is kept
            self._chores.settle()
            self.store.flush()

    def forget(self, agent: str) -> int:
        """Remove an agent everywhere, with every block no other agent reaches; their number."""
        self.settle()
        self.call(partial(self.live.release_owned, agent)).result()
        return self.store.forget(agent)

    def close(self) -> None:
        """End what runs, write what is queued, let go of everything."""
        with self._ending:  # whoever closes it too waits until it is closed
            if not self._closing:
                self._close()

    def _close(self) -> None:
        self._refuse_more()
        self.call(self._drop_all).result()
        self._chores.close()  # what is promised to be on disk is, before the end
        self.call(lambda: None).result()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._watcher.close()
        self.live.clear()
        self._joined.close()
        self._scopes.release_if_idle()
        if self._own_store:
            self.store.close()
        else:
            self.store.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # the thread

    def _run(self) -> None:
        while not self._closing:
            self._work_until_idle()
            with self._changed:
                self._changed.wait_for(lambda: self._commands or self._closing)
        self._obey()  # what was asked before the end was known

    def _work_until_idle(self) -> None:
        """Everything there is to do, inside one scope of active memory."""
        with self._scopes.active(self._memory):
            while self._obey() or self._step():
                continue

    def _obey(self) -> bool:
        """Carry out what other threads asked for; answers False so that a step follows."""
        while self._commands:
            self._obeying = True  # whoever drains waits for it
            command = self._commands.popleft()
            try:
                command()
            except Exception:
                LOG.exception("a command of the engine failed")
        self._obeying = False
        return False

    def _step(self) -> bool:
        try:
            return self._scheduler.step() or bool(self._commands)
        except Exception as error:
            LOG.exception("the scheduler failed; all running requests end")
            self._scheduler.fail_all(error)
            return True

    def _post(self, command: Command) -> None:
        with self._changed:
            if self._closing:
                raise Stopping("The engine is closed.")
            self._commands.append(command)
            self._changed.notify_all()

    def _with_defaults(self, request: Request) -> Request:
        """With the engine's options where the request names none."""
        return replace(request, kv=self.config.kv) if request.kv == KVOptions() else request

    def _check_open(self) -> None:
        if not self._accepting:
            raise Stopping("The engine is shutting down and takes no more requests.")

    def _check_queue(self) -> None:
        if len(self._asked) + len(self._commands) >= self.config.max_queue:
            raise Busy(f"{self.config.max_queue} requests wait or run already; ask again later.")

    def _refuse_more(self) -> None:
        with self._changed:
            self._accepting = False

    def _cancel(self, answer: Answer) -> None:
        def cancel() -> None:
            for job in self._scheduler.jobs:
                if job.answer is answer:
                    self._scheduler.drop(job, Cancelled("The request was cancelled."))

        with suppress(Stopping):  # then it has ended, or is about to
            self._post(cancel)

    def _drop_all(self) -> None:
        for job in self._scheduler.jobs:
            self._scheduler.drop(job, Stopping("The engine is shutting down."))

    def _kept(self, sequence: Sequence) -> None:
        """A sequence is over and its blocks are findable."""
        if sequence.job.audit:
            return
        is_auditing = any(job.audit for job in self._scheduler.jobs)
        may = self._accepting and sequence.reason and not is_auditing
        if may and self._auditor.wants(sequence):
            self._scheduler.add(self._auditor.job(sequence, self._scheduler.counters.audited))
        self._chores.after(sequence)

    def _remember(self, job: Job) -> None:
        """What was answered, by its text, before anybody can send it back."""
        for sequence in job.sequences if job.request.policy.writes else ():
            made = sequence.tokens[len(job.tokens) :]
            self._recent.remember((job.request.kv, job.request.tenant), sequence.tokens)
            if job.request.messages is not None and made:
                text = job.prepared.prompt.text
                self._preparer.splicer.remember(job.request.tenant, text, job.tokens, made)

    def _lane(self, options: KVOptions, tenant: str) -> Lane:
        """From any thread; made on the engine's if it is new."""
        found = self._lanes.known(options, tenant)
        return found or self.call(lambda: self._lanes.of(options, tenant)).result()

    def _cuts(self, prepared: PreparedRequest) -> list[int]:
        """Found on the caller's thread, for it takes time, and only where they are needed."""
        lane = self._lane(prepared.request.kv, prepared.request.tenant)
        return prepared.cuts if lane.has_places else []

    def _arrive(self, job: Job) -> None:
        self._scheduler.add(job)
        self.misses.arrived(job)

    def _note_end(self, job: Job, error: KeepwarmError | None) -> None:
        self._remember(job)
        self._journal.add(entry_of(job, error))
        self.misses.ended(job)
        if error is None and not job.sequences:
            self._chores.after_reading(job)
        if job.receipt is not None and job.request.policy.to_disk:
            tokens = job.sequences[0].tokens if job.sequences else job.tokens
            manager = job.home.manager
            block_bytes = kv_bytes(manager.layout, BLOCK_TOKENS)
            self.lookup_log.add(manager.namespace, tokens, len(job.tokens), block_bytes)


def _vocabulary(model: Model) -> int:
    """How many logits the model gives: often more than the tokenizer has tokens."""
    logits = model.module(mx.array([[0]]))
    return int(logits.shape[-1])
