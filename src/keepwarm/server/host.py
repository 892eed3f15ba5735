"""The engine that the server speaks with, and the name of its model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Self

from keepwarm.errors import Stopping, UnknownModel
from keepwarm.text.request import Done, Event, Result, Usage

if TYPE_CHECKING:
    from keepwarm.cache.store import Store
    from keepwarm.config import Settings
    from keepwarm.engine.answer import Answer
    from keepwarm.engine.engine import Engine
    from keepwarm.engine.warm import Warmer
    from keepwarm.models.load import Model
    from keepwarm.text.prepare import PreparedRequest
    from keepwarm.text.request import Request


def start_engine(model: Model, store: Store, settings: Settings) -> Engine:
    """A running engine with the server's limits."""
    from keepwarm.engine.engine import Engine  # loads MLX

    return Engine(model, store, settings=settings)


def _warming(engine: Engine) -> Warmer:
    """Conversations that will likely go on are read from disk while nobody asks for anything."""
    from keepwarm.engine.warm import Warmer

    return Warmer(engine).run_in_background()


class Noted(AsyncIterator[Event]):
    """An engine's answer; what it took is told when its end is read."""

    def __init__(self, answer: Answer, note: Callable[[Usage], None]) -> None:
        self._answer = answer
        self._note = note

    @property
    def prepared(self) -> PreparedRequest | None:
        return self._answer.prepared

    def cancel(self) -> None:
        self._answer.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        event = await anext(self._answer)
        if isinstance(event, Done):
            self._note(event.usage)
        return event

    async def wait(self) -> Result:
        result = await self._answer.wait()
        self._note(result.usage)
        return result


class EngineHost:
    """Owns one running engine; whoever answers requests asks here for it."""

    def __init__(self, engine: Engine, name: str, strict_model: bool = False) -> None:
        self._engine: Engine | None = engine
        self._strict = strict_model
        self._draining = False
        self.name = name
        self.created = int(time.time())
        self._warmer: Warmer | None = None
        self._listeners: list[Callable[[Usage], None]] = []

    def begin(self) -> None:
        """Serving begins: while nobody asks, what will likely go on is read from disk."""
        if self._engine is not None:
            self._warmer = _warming(self._engine)

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise Stopping("No model is loaded just now; ask again in a moment.")
        return self._engine

    @property
    def ready(self) -> bool:
        """Whether the engine's thread runs and takes requests."""
        return self._engine is not None and self._engine.alive and not self._draining

    async def submit(self, request: Request) -> Noted:
        """Begin an answer. Rendering and tokenising happen off the event loop."""
        return Noted(await asyncio.to_thread(self.engine.submit, request), self._answered)

    def on_answer(self, listener: Callable[[Usage], None]) -> None:
        """Tell this listener what each answer took, once it has ended; whichever engine gave it."""
        self._listeners.append(listener)

    def _answered(self, usage: Usage) -> None:
        for listener in self._listeners:
            listener(usage)

    def check_model(self, name: str | None) -> None:
        """One model is here. It answers to any name unless the server was told to be strict."""
        if self._strict and name is not None and name != self.name:
            raise UnknownModel(f"There is no model {name!r} here; the one loaded is {self.name!r}.")

    def drain(self, timeout_s: float) -> None:
        """Take no new requests; running ones end by themselves, or with an error at the end."""
        self._draining = True
        if self._engine is not None and self._engine.alive:
            self._engine.drain(timeout_s)

    def take(self) -> Engine | None:
        """Give the engine away; until another is put here, requests are told to ask again."""
        engine, self._engine = self._engine, None
        if self._warmer is not None:
            self._warmer.close()
        self._warmer = None  # it knows the engine, whose memory is wanted back
        return engine

    def put(self, engine: Engine, name: str) -> None:
        """Answer with this engine from now on."""
        self.name = name
        self.created = int(time.time())
        self._engine = engine
        self.begin()

    def close(self) -> None:
        """Stop the engine; everything it computed is flushed first."""
        if engine := self.take():
            engine.close()
