"""The engine: one thread that owns MLX and runs all requests in one batch.

engine = keepwarm.Engine(keepwarm.load("smollm2"))
for event in engine.submit(Request(messages=[{"role": "user", "content": "Hello"}])): ...
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import mlx.core as mx

from keepwarm import blas
from keepwarm.agents.agent import Branch
from keepwarm.cache.store import Store
from keepwarm.concurrency import DeviceLock
from keepwarm.config import Settings
from keepwarm.config import load as load_settings
from keepwarm.device.memory import (
    MemoryConfig,
    MemoryScopes,
    Watcher,
    make_guards,
    memories,
    scopes_of_process,
)
from keepwarm.engine.admission import OWN_SHARE, Admission, EngineConfig
from keepwarm.engine.answer import Answer
from keepwarm.engine.jobs import Job, RunningSequence
from keepwarm.engine.lane import Lane, Lanes, Lookup, look_up, make_options
from keepwarm.engine.live import Live
from keepwarm.engine.padding import VerdictsFile
from keepwarm.engine.prefill import SliceSizer
from keepwarm.engine.preparation import AnyRequest, Preparation
from keepwarm.engine.recorder import Auditor, AuditResult, RecentTexts, Recorder
from keepwarm.engine.scheduler import Scheduler
from keepwarm.engine.stats import MemoryUse, Stats, memory_uses, record_of, snapshot
from keepwarm.errors import Busy, Cancelled, KeepwarmError, Stopping, StoreFailed
from keepwarm.kv import make_caches, run_probe
from keepwarm.models.load import Model
from keepwarm.prefix.recent import RecentPrompts
from keepwarm.telemetry.ledger import Ledger, RequestRecord
from keepwarm.text.prepare import PreparedRequest, Preparer
from keepwarm.text.request import Arrival, KVOptions, Request
from keepwarm.text.sampling_rules import default_rules
from keepwarm.text.sandbox.deadline import PrepareDeadline
from keepwarm.text.sandbox.process import SandboxProcess

LOG = logging.getLogger(__name__)
T = TypeVar("T")
IDLE_S = 2.0  # without a request, before work that no request waits for
FIRST_IDLE_S = 30.0  # from the start, while none has come: the first compiles what it needs itself


class Submit(NamedTuple):
    """Run a request."""

    job: Job


class Cancel(NamedTuple):
    """The client no longer wants this answer."""

    answer: Answer


class EndSaved(NamedTuple):
    """A durable job is on disk: send its end."""

    job: Job


class Call(NamedTuple):
    """Run `work` between two steps; its result goes to `future`."""

    work: Callable[[], Any]
    future: Future[Any]


Command: TypeAlias = Submit | Cancel | EndSaved | Call


class IdleWork(Protocol):
    """What is done while nobody waits."""

    n_all: int

    @property
    def n_left(self) -> int: ...

    def run(self) -> Generator[object, None, None]:
        """Until nothing is left; yields where it can be given up, to be run again later."""

    def save(self) -> None:
        """Keep what was done; it waits for files."""


class Engine:
    """Runs one model on a thread of its own, all requests in one batch.

    Close it, or use `with`: only then is everything computed certain to be on disk.
    """

    def __init__(
        self,
        model: Model,
        store: Store | None = None,
        config: EngineConfig | None = None,
        *,
        settings: Settings | None = None,
        scopes: MemoryScopes | None = None,
        device: DeviceLock | None = None,  # shared by the engines of several models
        ledger: Ledger | None = None,  # this too
        sandbox: SandboxProcess | None = None,
        idle_work: Sequence[IdleWork] = (),  # before that of the model
    ) -> None:
        """Without `store` the store of the settings is opened, and closed with the engine.

        Long prompts are prepared in `sandbox`, which is closed with the engine too.
        """
        self.model = model
        self.idle_work = [*idle_work, *([model.trials] if model.trials else [])]
        settings = settings or load_settings()
        blas.start(settings.home)
        self.config = config or EngineConfig.of(settings)
        make_caches(model.module, **make_options(self.config.kv))  # refuses bad options
        self.sampling = default_rules(model.generation_config, settings)
        memory = self.config.memory or MemoryConfig.automatic(model_bytes=model.n_bytes)
        self._memory = memory
        self.live = Live(memory.live_bytes)
        self.ledger = ledger or Ledger()
        self._auditor = Auditor(self.config.audit_share)
        self._device = device or DeviceLock()
        self._scopes = scopes or scopes_of_process()
        self._owns_store = store is None
        with ExitStack() as opened:  # closed if the rest fails
            self.store = store or opened.enter_context(Store(settings=settings))
            self.store.allow_memory(memory.tier_bytes)
            self._build(settings, sandbox, opened)
            opened.pop_all()
        self._start(memory)

    def _build(self, settings: Settings, sandbox: SandboxProcess | None, opened: ExitStack) -> None:
        """Probe the model, and make what requests pass through."""
        model, recent = self.model, RecentPrompts()
        probe = run_probe(model.module, make_caches(model.module))
        self.preparer = Preparer(
            *(model, probe.n_logits, recent, settings.raw_special_tokens, sandbox),
            stable_first=settings.stable_first,
        )
        opened.callback(self.preparer.close)
        self._texts = RecentTexts(recent, self.ledger, self.preparer, self.run_later)
        verdicts = VerdictsFile(settings.home)
        self._lanes = Lanes(
            *(model, self.store, self.live, probe.layout, verdicts, self.call),
            recent=recent if settings.speculation == "auto" else None,
        )
        self._admission = Admission(self._memory.batch_bytes)
        self._recorder = Recorder(
            self.store,
            lambda job: self._post(EndSaved(job)),
            [self.store.counts.save, verdicts.save],
        )
        self._preparation = Preparation(
            self.config, self.sampling, self._lanes, self.preparer, self._recorder
        )
        self._scheduler = Scheduler(
            *(self._admission, SliceSizer.for_this_device(), self._on_kept),
            end_durably=self._recorder.end_durably,
            ledger=self.ledger,
            others_wait=self._device.others_wait,
            others_ran=self._device.others_ran,
            examine=self._device.examine,
        )

    def _start(self, memory: MemoryConfig) -> None:
        """Join the process's memory and start the threads. Nothing here fails."""
        self._joined = self._scopes.join(memory)
        here = memories(on_host=lambda: self.store.slab_bytes)
        guards = make_guards(here, self.live.release, self.store.release)
        self._watcher = Watcher(guards, became_idle=self._scopes.became_idle).start()
        self._commands: deque[Command] = deque()
        self._is_running_command = False
        self._changed = threading.Condition()
        self._n_preparing = 0  # requests, which will be posted soon
        self._was_asked = False
        self._began = time.monotonic()
        self._accepting, self._closing = True, False
        self._close_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="keepwarm-engine", daemon=True)
        self._thread.start()
        self.store.add_forget(self.live.forget)
        self.store.add_forget(self._texts.forget)

    # requests

    def lane_of(
        self, tenant: str = "", agent: str | None = None, kv: KVOptions | None = None
    ) -> Lane:
        """The lane of a tenant's or an agent's requests, with these KV options or without any."""
        request = Request(tenant=tenant, agent=agent, kv=kv or self.config.kv)
        return self._preparation.lane_for(request)

    def prepare(self, request: Request, deadline: PrepareDeadline | None = None) -> PreparedRequest:
        """Render, tokenise and check a request. Runs nothing."""
        return self._preparation.prepare(request, deadline)[0]

    def resolve(self, request: Request) -> tuple[Request, Lane]:
        """A request with all its options and the conversation that it continues; its lane."""
        return self._preparation.resolve(request)

    def count_tokens(self, request: Request, deadline: PrepareDeadline | None = None) -> int:
        """Tokens of a prompt, also of one that is too long for the model."""
        return self._preparation.count_tokens(request, deadline)

    def submit(self, request: AnyRequest, deadline: PrepareDeadline | None = None) -> Answer:
        """Run a request; a bad one is refused here."""
        called = time.perf_counter()
        self.check_open()
        with self._preparing():
            prepared, lane, since = self._preparation.make_ready(request, deadline)
            job = Job(
                *(prepared.request, prepared, lane, Answer(self._cancel, prepared)),
                number=next(self.ledger.numbers),
                cuts=prepared.prompt.cuts if lane.needs_cuts else [],  # finding them takes time
                on_start=self._recorder.touch,
                on_end=self._on_end,
                since=since,
                arrival=prepared.request.arrival or Arrival(called, called),
            )
            with self._changed:  # a job posted here is seen by `close`, which ends it
                self.check_open()
                self._check_queue(job)
                self._post(Submit(job))
        return job.answer

    @contextmanager
    def _preparing(self) -> Iterator[None]:
        """Inside, a request is not there yet, but idle work would keep it waiting."""
        with self._changed:
            self._n_preparing += 1
            self._was_asked = True
        try:
            yield
        finally:
            with self._changed:
                self._n_preparing -= 1

    def warm(self, request: Request, deadline: PrepareDeadline | None = None) -> Answer:
        """Prefill and keep a prompt without an answer; later requests start from it."""
        unanswered = replace(request, sampling=replace(request.sampling, max_tokens=0))
        return self.submit(unanswered, deadline)

    def lookup(self, request: Request, deadline: PrepareDeadline | None = None) -> Lookup:
        """How much of a prompt is warm. Nothing is loaded or changed."""
        prepared, lane = self._preparation.prepare(request, deadline)
        lane = lane.look_up(prepared.tokens, prepared.request.policy)
        return self.call(lambda: look_up(lane, prepared.tokens)).result()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on the engine's thread, between two steps. Raises if called on that thread: it
        would deadlock."""
        if self._is_on_thread:
            raise RuntimeError("Engine.call was called on the engine's thread; run the work there.")
        future: Future[T] = Future()
        self._post(Call(work, future))
        return future

    def run_later(self, work: Callable[[], object]) -> None:
        """The same, from any thread, for work that nobody waits for."""
        self._post(Call(work, Future()))

    @property
    def _is_on_thread(self) -> bool:
        return threading.current_thread() is self._thread

    # state

    def stats(self) -> Stats:
        """Current load, and counts since the start."""
        return snapshot(self._scheduler, self.live, self.store, self._lanes)

    def requests(self) -> list[RequestRecord]:
        """Recent requests of the ledger, then those that wait or run here."""
        return [*self.ledger.records(), *self.running()]

    def running(self) -> list[RequestRecord]:
        """Requests that wait or run."""
        return [record_of(job) for job in self._client_jobs]

    def prompts(self, may_see: Callable[[str], bool]) -> dict[int, Branch]:
        """The prompts of those requests, by their numbers, of tenants that the caller may see."""
        return {
            job.number: Branch.of(
                job.lane.restorer.namespace, job.tokens, model=job.lane.model.name
            )
            for job in self._client_jobs
            if may_see(job.request.tenant)
        }

    def cancel(self, number: int) -> bool:
        """Stop a request, by its number among `requests`; whether it was waiting or running."""
        found = [job for job in self._client_jobs if job.number == number]
        for job in found:
            job.answer.cancel()
        return bool(found)

    def memory(self) -> list[MemoryUse]:
        """Memory in use, and its limits."""
        return memory_uses(self.live, self.store, self._admission, self._memory)

    @property
    def alive(self) -> bool:
        """Whether it runs: neither closing nor lost."""
        return self._thread.is_alive() and not (self._closing or self.lost)

    @property
    def lost(self) -> str:
        """Why nothing can be computed any more until the process ends, in a sentence."""
        return self._device.lost

    def divide_memory(self, memory: MemoryConfig) -> None:
        """Apply these budgets; running requests keep theirs."""
        self.store.allow_memory(memory.tier_bytes)
        self.live.resize(memory.live_bytes)
        self._admission.limit_bytes = memory.batch_bytes

    def clear(self) -> None:
        """Free all cached state in memory; the disk is not touched."""
        self.call(self.live.clear).result()
        self.store.clear_memory()
        self._scopes.release_if_idle()

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, wait, then abort the rest; whether all could finish."""
        self._refuse_more()
        deadline = time.monotonic() + timeout_s
        while (busy := self._is_busy) and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._scheduler.jobs:
            self.call(self._abort_all).result()
        with suppress(StoreFailed):  # it is counted
            self.wait_until_saved()
        return not busy

    @property
    def _is_busy(self) -> bool:
        return bool(self._commands or self._is_running_command or self._client_jobs)

    @property
    def _client_jobs(self) -> list[Job]:
        """All but audits, which no client waits for."""
        return [job for job in self._scheduler.jobs if not job.audit]

    def wait_until_saved(self) -> None:
        """Return once all answers are on disk and recorded with their agents."""
        with suppress(Stopping):  # a closed engine has settled
            if not self._is_on_thread:
                self.call(lambda: None).result()  # answers are sent before they are kept
            self._recorder.wait_until_done()
            self.store.flush()

    def knows_agent(self, agent: str) -> bool:
        """Whether there is an agent with this id that has turns, its latest one included."""
        with suppress(Stopping):  # a closed engine has recorded all
            self.call(lambda: None).result()  # answers are sent before they are kept
            if self._recorder.has_unrecorded(agent):
                self._recorder.wait_until_done()
        return self.store.knows_agent(agent)

    def forget(self, agent: str) -> int:
        """Delete an agent and every block that only it uses; the number of blocks."""
        self.wait_until_saved()
        return self.store.forget(agent)

    def close(self) -> None:
        """Abort running requests, write what is queued, free everything."""
        with self._close_lock:  # a second caller waits until it is closed
            if not self._closing:
                self._close()

    def _close(self) -> None:
        self._refuse_more()
        self.call(self._abort_all).result()
        self._recorder.close()  # ends durable jobs
        self.call(lambda: None).result()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        with self._device.take():  # other engines compile nothing meanwhile
            for work in self.idle_work:
                work.save()
        self._watcher.close()
        self.preparer.close()
        self.live.clear()
        self._joined.close()
        self._scopes.release_if_idle()
        if self._owns_store:
            self.store.close()
        else:
            with suppress(StoreFailed):  # it is counted
                self.store.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # the thread

    def _run(self) -> None:
        while not self._closing:
            self._work_until_idle()
            work = next((each for each in self.idle_work if each.n_left), None)
            with self._changed:
                self._changed.wait_for(self._is_called, self._idle_s if work else None)
            if work and not self._is_awaited:
                self._run_idle(work)
        self._run_commands()  # posted before `_closing` was set
        # What MLX keeps for a thread holds Python objects. Left to the end of the thread, which is
        # after `join`, they are freed without the interpreter's lock, or abort one that ends.
        with suppress(RuntimeError):  # of a device that is lost
            mx.clear_streams()

    def _run_idle(self, work: IdleWork) -> None:
        """Other engines must be idle too. A request that comes now waits until it can be given up:
        for one step, or while files are written, or while the trials' engine is opened or closed.
        """
        try:
            with (
                self._scopes.active(self._memory),
                self._device.take_if_idle() as is_idle,
                closing(work.run()) as steps,
            ):
                if not is_idle or not self._accepting:
                    return
                for _ in steps:
                    if self._is_awaited or self._device.others_wait():
                        return
                work.save()
        except Exception:
            LOG.exception("what is done while the engine is idle failed, and is left")
            self.idle_work.remove(work)

    @property
    def _idle_s(self) -> float:
        """Without a command, before idle work."""
        if self._was_asked:
            return IDLE_S
        return max(IDLE_S, self._began + FIRST_IDLE_S - time.monotonic())

    def _is_called(self) -> bool:
        return bool(self._commands or self._closing)

    @property
    def _is_awaited(self) -> bool:
        return self._is_called() or self._n_preparing > 0

    def _work_until_idle(self) -> None:
        with self._scopes.active(self._memory):
            self._run_commands()
            while self._step():
                self._run_commands()

    def _run_commands(self) -> None:
        """Run what other threads have posted."""
        while self._commands:
            self._is_running_command = True  # before the pop: `drain` waits for it
            command = self._commands.popleft()
            try:
                self._run_command(command)
            except Exception:
                LOG.exception("a command of the engine failed")
        self._is_running_command = False

    def _run_command(self, command: Command) -> None:
        match command:
            case Submit(job):
                self._scheduler.add(job)
                self._texts.add_request(job)
            case Cancel(answer):
                for job in self._scheduler.jobs:
                    if job.answer is answer:
                        self._scheduler.abort(job, Cancelled("The request was cancelled."))
            case EndSaved(job):
                self._scheduler.end(job)
            case Call(work, future):
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)

    def _step(self) -> bool:
        if self._closing or not self._scheduler.has_work:
            return False  # a turn without work would keep other engines from idle work
        try:
            with self._device.take():
                if self.lost:
                    self._scheduler.fail_all(Stopping(self.lost))
                    return bool(self._commands)
                return self._scheduler.step() or bool(self._commands)
        except Exception as error:
            LOG.exception("the scheduler failed; all requests end")
            self._scheduler.fail_all(error)
            return True

    def _post(self, command: Command) -> None:
        with self._changed:
            if self._closing:
                raise Stopping("The engine is closed; create another.")
            self._check_thread()
            self._commands.append(command)
            self._changed.notify_all()

    def check_open(self) -> None:
        """Raise, with the reason, if no request is accepted."""
        if self.lost:
            raise Stopping(self.lost)
        if not self._accepting:
            raise Stopping("The engine is shutting down and takes no more requests.")
        self._check_thread()

    def _check_thread(self) -> None:
        """A forked process has none of its parent's threads."""
        if not self._thread.is_alive():
            raise Stopping("The engine does not run in this process; make one in each process.")

    def _check_queue(self, job: Job) -> None:
        """One API key leaves places to others."""
        most, jobs = self.config.max_queue, self._client_jobs
        sent = [command.job for command in list(self._commands) if isinstance(command, Submit)]
        if len(jobs) + len(sent) >= most:
            raise Busy(f"{most} requests already wait or run; retry later.")
        n_own = sum(other.caller == job.caller != "" for other in (*jobs, *sent))
        if n_own >= OWN_SHARE * most:
            raise Busy(f"{n_own} requests of this API key already wait or run; retry later.")

    def _refuse_more(self) -> None:
        with self._changed:
            self._accepting = False

    def _cancel(self, answer: Answer) -> None:
        with suppress(Stopping):  # a closed engine has ended it
            self._post(Cancel(answer))

    def _abort_all(self) -> None:
        for job in self._scheduler.jobs:
            self._scheduler.abort(job, Stopping("The engine is shutting down."))

    def _on_kept(self, sequence: RunningSequence) -> None:
        """Called when a sequence has ended and its blocks can be found."""
        if sequence.job.audit:
            return
        is_auditing = any(job.audit for job in self._scheduler.jobs)
        may_audit = self._accepting and sequence.reason and not is_auditing
        if may_audit and self._auditor.wants(sequence):
            self._auditor.audit(sequence, self._scheduler.add, self._count_audit)
        self._recorder.record_sequence(sequence)

    def _count_audit(self, result: AuditResult) -> None:
        self.ledger.count(audits=1, drifts=result.is_drift, audit_nats=result.nats)

    def _on_end(self, job: Job, error: KeepwarmError | None) -> None:
        self._texts.remember(job)
        record = job.answer.record = record_of(job, error)
        self.ledger.append(record, self._texts.candidate(job))
        self._recorder.count(record)
        if error is None and not job.sequences:
            self._recorder.record_prompt(job)
