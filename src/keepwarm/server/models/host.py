"""The engine that the server uses, and the name of its model."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from keepwarm.errors import StillLoading, Stopping
from keepwarm.server.http.logs import log_fields
from keepwarm.text.detokenize import Pieces
from keepwarm.text.request import Done, Event, Finished, KVOptions, Result

if TYPE_CHECKING:
    from keepwarm.cache.store import Store
    from keepwarm.config import Settings
    from keepwarm.device.memory import MemoryConfig
    from keepwarm.engine.answer import Answer
    from keepwarm.engine.engine import Engine
    from keepwarm.engine.warm import Warmer
    from keepwarm.models.load import Model
    from keepwarm.server.http.permits import PrepareSlot
    from keepwarm.telemetry.ledger import RequestRecord
    from keepwarm.text.prepare import PreparedRequest
    from keepwarm.text.request import Request
    from keepwarm.text.sandbox.deadline import PrepareDeadline
    from keepwarm.text.sandbox.process import SandboxProcess


LOG = logging.getLogger("keepwarm.server")
BETWEEN_LINES_S = 5.0  # about a model that is being loaded
Report: TypeAlias = Callable[[str], None]


def start_engine(
    model: Model,
    store: Store,
    settings: Settings,
    report: Report = lambda _: None,
    *,
    memory: MemoryConfig | None = None,
    sandbox: SandboxProcess | None = None,
    **shared: Any,
) -> Engine:
    """Start an engine with the server's limits, which compiles kernels while it is idle.

    `shared` is what engines of several models share.
    """
    from keepwarm.device import kernels
    from keepwarm.engine.admission import EngineConfig
    from keepwarm.engine.compilation import TrialRequests
    from keepwarm.engine.engine import Engine  # loads MLX
    from keepwarm.text.sandboxed import new_process

    config = EngineConfig.of(settings)
    config = replace(config, memory=memory or config.memory)
    report("starting the engine")
    engine = Engine(
        *(model, store, config),
        settings=settings,
        sandbox=sandbox or new_process(),
        idle_work=[TrialRequests(model, store, config, settings)] if kernels.are_compiled() else [],
        **shared,
    )
    try:
        if config.kv != KVOptions():
            engine.lane_of()  # refuses options that the model cannot take, before any request
    except BaseException:
        engine.close()
        raise
    return engine


def _submit_all(
    engine: Engine,
    requests: Sequence[Request | PreparedRequest],
    deadline: PrepareDeadline | None = None,
) -> list[Answer]:
    answers: list[Answer] = []
    try:
        for request in requests:
            answers.append(engine.submit(request, deadline))
    except BaseException:
        for answer in answers:
            answer.cancel()
        raise
    return answers


class ObservedAnswer(AsyncIterator[Event]):
    """An engine's answer; a client that asked for no tokens gets `n_empty` empty choices."""

    def __init__(self, answer: Answer, n_empty: int = 0) -> None:
        self._answer = answer
        self._empty = [Finished(choice, "length") for choice in range(n_empty)]
        self._done: Done | None = None  # read, but behind the empty choices

    @property
    def records(self) -> list[RequestRecord | None]:
        return [self._answer.record]

    @property
    def prepared(self) -> PreparedRequest | None:
        return self._answer.prepared

    def cancel(self) -> None:
        self._answer.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        event: Event = await anext(self._answer) if self._done is None else self._done
        if isinstance(event, Done) and self._empty:
            self._done = event
            return self._empty.pop(0)
        self._done = None
        return event

    async def wait(self) -> Result:
        from keepwarm.engine.answer import collect  # loads MLX

        return collect([event async for event in self])


class EngineHost:
    """Owns the running engine of one model; None while it is not loaded."""

    def __init__(self, engine: Engine | None, name: str) -> None:
        self._engine: Engine | None = engine
        self._draining = False
        self._closed = False
        self._loading = ""  # what is being done, while a model is loaded
        self._next_line = 0.0
        self.name = name
        self.created = int(time.time())
        self._warmer: Warmer | None = None
        self._pieces: Pieces | None = None

    def start_warmer(self) -> None:
        """While the engine is idle, load conversations from disk that will likely continue."""
        from keepwarm.engine.warm import Warmer

        if self._engine is not None and self._warmer is None:
            self._warmer = Warmer(self._engine).run_in_background()

    @property
    def engine(self) -> Engine:
        if self._engine is not None:
            return self._engine
        if self._loading:
            raise StillLoading(
                f"The model is being loaded ({self._loading}); retry in a few seconds."
            )
        raise Stopping("No model is loaded at the moment; retry in a few seconds.")

    @property
    def pieces(self) -> Pieces:
        """The texts of its tokens, for log-probabilities."""
        if self._pieces is None:
            self._pieces = Pieces(self.engine.model.tokenizer)
        return self._pieces

    @property
    def loaded(self) -> Engine | None:
        return self._engine

    @property
    def progress(self) -> str:
        """What is being done while it is loaded."""
        return self._loading or "waiting for its turn"

    @property
    def is_loading(self) -> bool:
        return bool(self._loading)

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def ready(self) -> bool:
        """Whether the engine's thread runs and accepts requests."""
        return self._engine is not None and self._engine.alive and not self._draining

    async def submit(self, request: Request, slot: PrepareSlot) -> ObservedAnswer:
        """Start an answer, which ends the slot. Nothing is prepared on the event loop."""
        (answer,) = await self.submit_all([request], slot)
        return answer

    async def submit_all(
        self, requests: Sequence[Request], slot: PrepareSlot
    ) -> list[ObservedAnswer]:
        """Start several answers; if one is refused, the others are cancelled."""
        slot.agent = requests[0].agent if requests else None
        answers = await slot.run(_submit_all, self.engine, requests)
        is_empty = requests[0].sampling.max_tokens == 0 if requests else False
        return self._observed(answers, slot, requests[0].n if is_empty else 0)

    async def run(
        self, prepared: Sequence[PreparedRequest], slot: PrepareSlot
    ) -> list[ObservedAnswer]:
        """Start answers to requests that were prepared before, after their slot has ended."""
        answers = await slot.resume(_submit_all, self.engine, prepared)
        return [ObservedAnswer(answer) for answer in answers]

    async def warm(self, request: Request, slot: PrepareSlot) -> ObservedAnswer:
        """Start to prefill a prompt that needs no answer."""
        slot.agent = request.agent
        (answer,) = self._observed([await slot.run(self.engine.warm, request)], slot)
        return answer

    def _observed(
        self, answers: Sequence[Answer], slot: PrepareSlot, n_empty: int = 0
    ) -> list[ObservedAnswer]:
        slot.end()
        observed = [ObservedAnswer(answer, n_empty) for answer in answers]
        slot.answers = observed
        for answer in observed:
            slot.held.callback(answer.cancel)  # also if an error comes before the response
        return observed

    def drain(self, timeout_s: float) -> None:
        """Refuse new requests; running ones finish, or fail after `timeout_s`."""
        self._draining = True
        if self._engine is not None:
            self._engine.drain(timeout_s)

    @property
    def n_unfinished(self) -> int:
        """Requests that a drain waits for."""
        return 0 if self._engine is None else len(self._engine.running())

    def take(self) -> Engine | None:
        """Remove the engine and return it; the caller closes it."""
        engine, self._engine = self._engine, None
        if self._warmer is not None:
            self._warmer.close()
        self._pieces = None
        self._warmer = None  # it holds a reference to the engine, whose memory must be freed
        return engine

    def load(self, start: Callable[[Report], Engine], *, in_full: bool) -> None:
        """Start an engine and use it from now on; requests are told how far it is.

        `in_full`: only once long prompts can be prepared too.
        """
        self._next_line = 0.0
        self._report("starting")
        try:
            engine = start(self._report)
            if in_full:
                engine.preparer.wait_until_ready()
            self._put(engine)
        finally:
            self._loading = ""

    def _report(self, what: str) -> None:
        self._loading = what
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + BETWEEN_LINES_S
            log_fields(LOG, logging.INFO, {"event": "loading", "model": self.name, "phase": what})

    def _put(self, engine: Engine) -> None:
        self.created = int(time.time())
        self._engine = engine
        if self._draining:  # since before, or just now
            engine.drain(0)
        if self._closed:  # before, or just now: then both may close it
            self.close()
        self.start_warmer()

    def close(self) -> None:
        """Stop the engine after flushing everything it computed."""
        self._closed = True
        if engine := self.take():
            engine.close()
